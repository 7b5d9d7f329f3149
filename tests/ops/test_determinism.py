"""The same bits for any number of threads, on layers big enough that the threads are used."""

from collections.abc import Callable

import oracles
import pytest
import torch
from oracles import BFLOAT16, FLOAT32, INT32, UINT16, Problem
from torch import Tensor

from xmlc import native
from xmlc.config import OptimizerConfig
from xmlc.ops import OptimizerState, fused_step, redistribute, sparse_linear, top_labels

THREADS = (1, 2, 3, 5, 5)  # twice the most: a race need not show at once

FORMS = {
    "float32": (1, FLOAT32, INT32),
    "bfloat16-uint16": (1, BFLOAT16, UINT16),
    "group16-bfloat16": (16, BFLOAT16, INT32),
    "group64-float32-uint16": (64, FLOAT32, UINT16),
    "wide": (1, FLOAT32, UINT16),  # by strips of inputs
}
INPUTS = {form: 17_000 if form == "wide" else 500 for form in FORMS}
every_form = pytest.mark.parametrize("form", FORMS)


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    return {
        form: oracles.make_problem(
            label=20_011,
            fan_in=32,
            input=INPUTS[form],
            batch=100,
            group_size=group_size,
            weight_dtype=weight_dtype,
            index_dtype=index_dtype,
        )
        for form, (group_size, weight_dtype, index_dtype) in FORMS.items()
    }


def assert_same_bits(results: Callable[[], list[Tensor]]) -> None:
    """Require the same results of every number of threads."""
    expected = None
    for count in THREADS:
        with oracles.threads(count):
            assert native.threads_for(20_011 * 32 * 8) == count
            found = [oracles.bits(value) for value in results()]
        expected = found if expected is None else expected
        for position, (value, first) in enumerate(zip(found, expected, strict=True)):
            assert value == first, f"result {position} with {count} threads"


@every_form
def test_logits_and_gradients_do_not_depend_on_the_threads(
    backend: str, problems: dict[str, Problem], form: str
) -> None:
    problem = problems[form]
    incoming = torch.randn(20_011, 100, generator=torch.Generator().manual_seed(1))

    def results() -> list[Tensor]:
        copy = problem.copy()
        leaves = [value.requires_grad_() for value in (copy.features, copy.weight, copy.bias)]
        logits = sparse_linear(*copy.layer)
        return [logits, *torch.autograd.grad(logits, leaves, incoming)]

    assert_same_bits(results)


@every_form
def test_the_gradients_of_few_labels_and_a_large_batch_do_not_depend_on_the_threads(
    backend: str, form: str
) -> None:
    group_size, weight_dtype, index_dtype = FORMS[form]
    problem = oracles.make_problem(
        3, 30, 40, 40_000, group_size=group_size, weight_dtype=weight_dtype, index_dtype=index_dtype
    )
    incoming = torch.randn(3, 40_000, generator=torch.Generator().manual_seed(1))

    def results() -> list[Tensor]:
        copy = problem.copy()
        leaves = [value.requires_grad_() for value in (copy.features, copy.weight, copy.bias)]
        logits = sparse_linear(*copy.layer)
        return [logits, *torch.autograd.grad(logits, leaves, incoming)]

    assert_same_bits(results)


@every_form
@pytest.mark.parametrize("normalised", [False, True], ids=["pointwise", "normalised"])
def test_a_fused_step_does_not_depend_on_the_threads(
    backend: str, problems: dict[str, Problem], form: str, normalised: bool
) -> None:
    losses = ("softmax", "decoupled_softmax") if normalised else ("squared_hinge", "bce")
    number, kind = {
        "float32": (0, "sgd"),
        "bfloat16-uint16": (1, "adam"),
        "group16-bfloat16": (0, "label_adam"),
        "group64-float32-uint16": (1, "momentum"),
        "wide": (1, "sgd"),
    }[form]

    def results() -> list[Tensor]:
        copy = problems[form].copy()
        state = OptimizerState.zeros(kind, 20_011, 32)
        outcome = fused_step(
            copy.features,
            copy.offsets,
            copy.labels,
            copy.weight,
            copy.indices,
            copy.bias,
            loss=losses[number],
            optimizer=OptimizerConfig(kind=kind, weight_decay=0.1),
            learning_rate=0.05,
            state=state,
            step=1,
            seed=5,
            scale=0.01,
            share_positives=True,
            group_size=copy.group_size,
        )
        return [*outcome, copy.weight, copy.bias, *state.tensors().values()]

    assert_same_bits(results)


@every_form
def test_the_top_labels_do_not_depend_on_the_threads(
    backend: str, problems: dict[str, Problem], form: str
) -> None:
    features, weight, indices, bias, group_size = problems[form].layer
    assert_same_bits(lambda: list(top_labels(features, weight, indices, bias, 10, group_size)))


@every_form
@pytest.mark.parametrize("scope", ["layer", "group"])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_a_redistribution_does_not_depend_on_the_threads(
    backend: str, problems: dict[str, Problem], form: str, scope: str, ties: bool
) -> None:
    def results() -> list[Tensor]:
        copy = problems[form].copy()
        if ties:
            copy.weight.fill_(0.5)
        states = [torch.ones(20_011, 32)]
        count = redistribute(
            copy.weight,
            copy.indices,
            INPUTS[form],
            fraction=0.3,
            scope=scope,
            new_value="random",
            new_value_bound=0.1,
            states=states,
            group_size=copy.group_size,
            step=3,
            seed=5,
        )
        return [torch.tensor(count), copy.weight, copy.indices, *states]

    assert_same_bits(results)
