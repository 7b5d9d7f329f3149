"""The softmax losses of labels that lie in several layers: their sums, and steps by the sums of all."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import oracles
import pytest
import torch
from oracles import BFLOAT16, FLOAT32, SHAPES, Problem, Shape
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.errors import NativeError
from xmlc.ops import (
    LabelSums,
    LogitOffsets,
    Normaliser,
    OptimizerState,
    fused_step,
    log_normaliser,
    quantise,
    widen,
)

every_loss = pytest.mark.parametrize("loss", oracles.NORMALISED)


def sums_of(problem: Problem, loss: str, **others: Any) -> LabelSums:
    return log_normaliser(*problem.of_step, loss=loss, group_size=problem.group_size, **others)


def step(problem: Problem, loss: str, **others: Any) -> tuple[Tensor, Tensor]:
    """Take a step of plain SGD on the problem's own tensors."""
    return fused_step(
        *problem.of_step,
        loss=loss,
        group_size=problem.group_size,
        **{
            "optimizer": OptimizerConfig(kind="sgd"),
            "learning_rate": 0.5,
            "state": OptimizerState(),
            "step": 1,
            **others,
        },
    )


def part_of(problem: Problem, first: int, last: int) -> Problem:
    """Return the layer of some labels, of whole groups, with the same batch; it shares no memory."""
    size, lows = problem.group_size, problem.offsets.tolist()
    rows = [problem.labels[low:high] for low, high in pairwise(lows)]
    offsets, labels = oracles.pairs(
        [[label - first for label in row.tolist() if first <= label < last] for row in rows]
    )
    return replace(
        problem,
        features=problem.features.clone(),
        weight=problem.weight[first:last].clone(),
        bias=problem.bias[first:last].clone(),
        indices=problem.indices[first // size : -(-last // size)].clone(),
        offsets=offsets,
        labels=labels,
    )


def normalisers(
    parts: list[LabelSums], loss: str, share_positives: bool, weights: list[Tensor | None]
) -> list[Normaliser]:
    """Return what each layer needs of all, by the formulas of `Normaliser`."""
    log_sum = torch.stack([part.log_sum for part in parts]).logsumexp(0)
    count, factor = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
    for part in parts:
        count += torch.bincount(part.instance.long(), minlength=len(count))
    share = 1.0 / count.clamp_min(1.0) if share_positives else torch.ones_like(count)
    values = []
    for part, weight in zip(parts, weights, strict=True):
        pull = share[part.instance.long()]
        if weight is not None:
            pull = pull * weight[part.label.long()]
        above = log_sum[part.instance.long()] - part.logit.double()
        if loss == "softmax":
            values.append((pull * above).sum())
        else:
            values.append((pull * torch.logaddexp(above, torch.zeros(()))).sum())
            pull = pull * above.sigmoid()
        factor.index_add_(0, part.instance.long(), pull)
    return [Normaliser(log_sum, factor, share, value) for value in values]


@every_loss
def test_the_sums_have_their_hand_values(backend: str, loss: str) -> None:
    # exp(z) = 1, 2, 4, 8 and labels 1 and 2 are positive; a second instance has no positive
    problem = Problem(
        features=torch.ones(1, 2),
        weight=torch.tensor([[1.0], [0.0], [0.0], [0.0]]),
        indices=torch.zeros(4, 1, dtype=torch.int32),
        bias=torch.tensor([-1.0, math.log(2.0), math.log(4.0), math.log(8.0)]),
        offsets=torch.tensor([0, 3, 3]),
        labels=torch.tensor([2, 1, 2]),
    )
    sums = sums_of(problem, loss)
    assert sums.label.tolist() == [1, 2] and sums.instance.tolist() == [0, 0]
    torch.testing.assert_close(sums.logit, torch.tensor([2.0, 4.0]).log())
    first = 15.0 if loss == "softmax" else 9.0
    expected = torch.tensor([first, 15.0], dtype=torch.float64).log()
    torch.testing.assert_close(sums.log_sum, expected, rtol=1e-6, atol=0.0)


@every_loss
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_the_sums_are_within_the_budget_of_the_exact_ones(backend: str, loss: str, shape: Shape) -> None:
    problem = oracles.shape_problem(shape)
    before = problem.copy()
    sums = sums_of(problem, loss)
    features, weight, bias = (value.double() for value in (problem.features, problem.weight, problem.bias))
    logit = oracles.logits(features, weight, problem.indices, bias, shape.group_size)
    target, off = oracles.targets(problem), oracles.logits_bound(problem)
    exact = oracles.log_sum(loss, logit, target)
    moved = oracles.log_sum(loss, logit + off, target) - exact
    bound = moved + oracles.gamma(oracles.ELEMENTARY + oracles.FAR + oracles.RUN)
    summed = exact > -torch.inf
    assert torch.equal(sums.log_sum[~summed], exact[~summed])
    oracles.assert_within(sums.log_sum[summed], exact[summed], bound[summed], "log_sum")
    pairs = (sums.label.long(), sums.instance.long())
    assert int((target > 0).sum()) == len(sums.label) and bool((target[pairs] > 0).all())
    oracles.assert_within(sums.logit, logit[pairs], off[pairs], "logit")
    for name in ("features", "weight", "indices", "bias"):
        assert torch.equal(getattr(problem, name), getattr(before, name)), name


PARTS = {
    "uneven": ({}, (0, 1, 40, 65)),
    "groups": ({"group_size": 16}, (0, 16, 64, 65)),
    "bfloat16": ({"group_size": 16, "weight_dtype": BFLOAT16}, (0, 48, 65)),
    "wide tiles": ({"batch": 130, "label": 70, "fan_in": 5, "input": 20}, (0, 33, 70)),
    "by_strips": ({"batch": 70, "label": 90, "fan_in": 8, "input": 17_000}, (0, 64, 90)),
    "one instance": ({"batch": 1, "label": 7, "fan_in": 3, "input": 9}, (0, 2, 7)),
}


@every_loss
@pytest.mark.parametrize("share_positives", [False, True])
@pytest.mark.parametrize("case", PARTS)
def test_steps_of_parts_are_within_the_budget_of_the_exact_step_of_all(
    backend: str, case: str, share_positives: bool, loss: str
) -> None:
    shape, bounds = PARTS[case]
    problem = oracles.make_problem(**shape)
    label = len(problem.weight)
    weight = torch.linspace(0.25, 4.0, label) if share_positives else None
    of_loss = {"loss": loss, "scale": 0.25, "positive_weight": weight, "share_positives": share_positives}
    exact = oracles.gradients(problem, **of_loss, dtype=torch.float64)
    budget = oracles.gradient_bounds(problem, **of_loss)
    ranges = list(pairwise(bounds))
    parts = [part_of(problem, *each) for each in ranges]
    weights = [None if weight is None else weight[first:last] for first, last in ranges]
    made = normalisers([sums_of(part, loss) for part in parts], loss, share_positives, weights)
    loss_sum, gradient, velocities = 0.0, 0.0, []
    for part, normaliser, own in zip(parts, made, weights, strict=True):
        state = OptimizerState.zeros("momentum", *part.weight.shape)  # whose velocity is then the gradient
        found = step(
            part,
            loss,
            normaliser=normaliser,
            optimizer=OptimizerConfig(kind="momentum"),
            state=state,
            scale=0.25,
            positive_weight=own,
        )
        loss_sum, gradient = loss_sum + found[0], gradient + found[1].double()
        velocities.append(state)
    oracles.assert_within(loss_sum, exact.loss, budget.loss, "loss")
    oracles.assert_within(gradient, exact.features, budget.features, "feature gradient")
    for name in ("weight", "bias"):
        found = torch.cat([getattr(each, f"{name}_first") for each in velocities])
        oracles.assert_within(found, getattr(exact, name), getattr(budget, name), name)


@every_loss
@pytest.mark.parametrize("group_size", [1, 16])
def test_offsets_count_in_the_sums_and_get_their_gradients(backend: str, loss: str, group_size: int) -> None:
    problem = oracles.make_problem(50, 4, 30, 20, group_size=group_size)
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, 50, (70,), generator=generator).sort().values.int()
    instance = torch.randint(0, 20, (70,), generator=generator).int()
    value = torch.randn(70, generator=generator)
    value[::9] = -1e9  # of pairs that are skipped
    whole = problem.copy()
    of_whole = LogitOffsets.of(label, instance, value)
    exact_loss, exact_gradient = step(whole, loss, offsets=of_whole)
    bounds = [(0, 32), (32, 50)]
    parts = [part_of(problem, *each) for each in bounds]
    offsets = []
    for first, last in bounds:
        own = (label >= first) & (label < last)
        offsets.append(LogitOffsets.of(label[own] - first, instance[own], value[own]))
    sums = [sums_of(part, loss, offsets=each) for part, each in zip(parts, offsets, strict=True)]
    found = [
        step(part, loss, normaliser=normaliser, offsets=each)
        for part, normaliser, each in zip(
            parts, normalisers(sums, loss, False, [None, None]), offsets, strict=True
        )
    ]
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[0][0] + found[1][0], exact_loss, **close)
    torch.testing.assert_close(found[0][1] + found[1][1], exact_gradient, **close)
    torch.testing.assert_close(torch.cat([each.gradient for each in offsets]), of_whole.gradient, **close)
    torch.testing.assert_close(torch.cat([part.weight for part in parts]), whole.weight, **close)
    torch.testing.assert_close(torch.cat([part.bias for part in parts]), whole.bias, **close)


@pytest.mark.parametrize("group_size", [1, 16])
def test_where_all_own_labels_are_positive_the_sum_is_that_of_the_others(
    backend: str, group_size: int
) -> None:
    """Instance 0 has all labels, 1 all of the first part, 2 none; no logarithm of 0 may spoil any."""
    loss = "decoupled_softmax"
    problem = oracles.make_problem(48, 4, 30, 3, group_size=group_size)
    offsets, labels = oracles.pairs([list(range(48)), list(range(16)), []])
    problem = replace(problem, offsets=offsets, labels=labels)
    problem.bias[-1] = 100.0  # exp overflows in float32, also where a tile has no instance
    parts = [part_of(problem, 0, 16), part_of(problem, 16, 48)]
    sums = [sums_of(part, loss) for part in parts]
    assert (sums[0].log_sum == -torch.inf).tolist() == [True, True, False]
    assert (sums[1].log_sum == -torch.inf).tolist() == [True, False, False]
    whole = problem.copy()
    exact = step(whole, loss)
    made = normalisers(sums, loss, False, [None, None])
    found = [step(part, loss, normaliser=each) for part, each in zip(parts, made, strict=True)]
    torch.testing.assert_close(found[0][0] + found[1][0], exact[0])
    torch.testing.assert_close(found[0][1] + found[1][1], exact[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([part.bias for part in parts]), whole.bias, rtol=1e-4, atol=1e-5)
    assert not exact[1][:, 0].any() and not any(each[1][:, [0, 2]].any() for each in found)


@every_loss
def test_the_sums_of_float8_weights_are_those_of_the_widened_ones(backend: str, loss: str) -> None:
    problem = oracles.make_problem(200, 33, 100, 40, group_size=16)
    codes, scale = quantise(problem.weight, torch.float8_e4m3fn)
    found = sums_of(replace(problem, weight=codes), loss, weight_scale=scale)
    exact = sums_of(replace(problem, weight=widen(codes, scale)), loss)
    assert torch.equal(found.log_sum, exact.log_sum) and torch.equal(found.logit, exact.logit)


@every_loss
@pytest.mark.parametrize("group_size", [1, 16])
def test_features_in_bfloat16_give_the_sums_of_their_values(backend: str, loss: str, group_size: int) -> None:
    problem = oracles.make_problem(50, 33, 100, 40, group_size=group_size, weight_dtype=BFLOAT16)
    narrow = problem.features.bfloat16()
    found = sums_of(replace(problem, features=narrow), loss)
    exact = sums_of(replace(problem, features=narrow.float()), loss)
    torch.testing.assert_close(found.log_sum, exact.log_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.logit, exact.logit, rtol=1e-5, atol=1e-5)


@every_loss
@pytest.mark.parametrize("input", [500, 17_000], ids=["tiles", "strips"])
def test_the_sums_do_not_depend_on_the_number_of_threads(backend: str, loss: str, input: int) -> None:
    problem = oracles.make_problem(20_011, 32, input, 100)
    found = []
    for count in (1, 2, 3, 5):
        with oracles.threads(count):
            sums = sums_of(problem, loss)
        found.append((oracles.bits(sums.log_sum), oracles.bits(sums.logit)))
    assert len(set(found)) == 1


def small() -> Problem:
    return oracles.make_problem(label=18, fan_in=4, input=10, batch=5)


def zeros(**changes: Tensor) -> Normaliser:
    each = {name: torch.zeros(5, dtype=torch.float64) for name in ("log_sum", "factor", "share")}
    return Normaliser(**{**each, "loss": torch.zeros((), dtype=torch.float64), **changes})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        (
            {"log_sum": torch.zeros(4, dtype=torch.float64)},
            "normaliser.log_sum must be float64 [batch] = [5]",
        ),
        ({"share": torch.zeros(5)}, "normaliser.share must be float64 [batch] = [5], got float32 [5]"),
        ({"loss": torch.zeros(5, dtype=torch.float64)}, "normaliser.loss must be float64 [] = []"),
        ({"factor": [0.0] * 5}, "factor must be a torch tensor, got list"),
    ],
)
def test_a_step_refuses_sums_that_do_not_fit(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(NativeError, match=re.escape(found)):
        step(small(), "softmax", normaliser=zeros(**changes))


def test_sums_are_for_the_softmax_losses_only() -> None:
    message = "normaliser must have log_sum, factor, share, for the losses softmax, decoupled_softmax only"
    with pytest.raises(NativeError, match=message):
        step(small(), "bce", normaliser=zeros())
    with pytest.raises(NativeError, match="log_normaliser: loss must be one of softmax, decoupled_softmax"):
        sums_of(small(), "bce")
    with pytest.raises(NativeError, match="log_normaliser: positive_labels must lie in"):
        sums_of(replace(small(), labels=small().labels + 18), "softmax")


@every_loss
@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_the_ops_pass_opcheck(loss: str, weight_dtype: torch.dtype) -> None:
    problem = oracles.make_problem(18, 3, 10, 5, group_size=16, weight_dtype=weight_dtype)
    pairs = (
        torch.tensor([0, 3, 3, 17], dtype=torch.int32),
        torch.tensor([4, 0, 1, 2], dtype=torch.int32),
    )
    layer = (problem.features, *pairs, problem.weight, problem.indices, problem.bias)
    torch.library.opcheck(torch.ops.xmlc.log_normaliser.default, (*layer, 16, loss))
    of_step = (1.0, False, 0.0, "sgd", 0.1, 0.0, 0.9, 0.9, 0.999, 1e-8, 1, 0)
    sums = {name: torch.ones(5, dtype=torch.float64) for name in ("log_sum", "factor", "share")}
    torch.library.opcheck(
        torch.ops.xmlc.fused_step.default,
        (*layer, None, None, None, None, None, 16, loss, *of_step),
        sums,
    )
