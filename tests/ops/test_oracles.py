"""The oracles themselves: the float64 reference against finite differences, the rest against hand values."""

import math

import oracles
import pytest
import torch

from xmlc.config import OptimizerConfig
from xmlc.ops import OptimizerState

LOSSES = ("squared_hinge", "bce", *oracles.NORMALISED)


@pytest.mark.parametrize("share_positives", [False, True])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("group_size", [1, 16])
def test_float64_reference_passes_gradcheck(loss: str, group_size: int, share_positives: bool) -> None:
    problem = oracles.make_problem(label=18, fan_in=3, input=7, batch=4, group_size=group_size)
    leaves = [value.double().requires_grad_() for value in (problem.features, problem.weight, problem.bias)]
    positive_weight = torch.linspace(0.5, 3.0, 18)

    def value(*inputs: torch.Tensor) -> torch.Tensor:
        return oracles.batch_loss(
            problem,
            *inputs,
            loss=loss,
            scale=0.25,
            positive_weight=positive_weight,
            share_positives=share_positives,
        )

    assert torch.autograd.gradcheck(value, leaves)


def test_duplicate_inputs_of_a_label_add_in_the_dense_weight() -> None:
    indices = torch.tensor([[2, 0, 2]], dtype=torch.int32)
    weight = torch.tensor([[1.0, 10.0, 100.0]])
    assert oracles.dense(weight, indices, 1, 4).tolist() == [[10.0, 0.0, 101.0, 0.0]]


def test_losses_have_their_hand_values() -> None:
    logit = torch.tensor([0.0, 0.5, -2.0, 1.0, 80.0], dtype=torch.float64)
    target = torch.tensor([-1.0, 1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    assert oracles.losses("squared_hinge", logit, target).tolist() == [1.0, 0.25, 9.0, 0.0, 81.0**2]
    expected = [math.log1p(math.exp(-t * z)) for t, z in zip(target.tolist(), logit.tolist(), strict=True)]
    assert oracles.losses("bce", logit, target).tolist() == pytest.approx(expected, rel=1e-15)


def test_softmax_losses_have_their_hand_values() -> None:
    # exp(z) = 1, 2, 4, 8 of every instance: two positives, one, none, all
    logit = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64).log()[:, None].expand(4, 4)
    positive = [[0, 0, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1], [0, 0, 0, 1]]
    target = 2.0 * torch.tensor(positive, dtype=torch.float64) - 1.0
    ratios = {
        "softmax": [[1, 1, 1, 15], [15 / 2, 1, 1, 15 / 2], [15 / 4, 15 / 4, 1, 15 / 4], [1, 1, 1, 15 / 8]],
        "decoupled_softmax": [[1, 1, 1, 1], [11 / 2, 1, 1, 1], [13 / 4, 15 / 4, 1, 1], [1, 1, 1, 1]],
    }
    for loss, ratio in ratios.items():
        expected = torch.tensor(ratio, dtype=torch.float64).log()
        torch.testing.assert_close(oracles.losses(loss, logit, target), expected, rtol=1e-14, atol=0.0)
    weight = torch.tensor([1.0, 3.0, 8.0, 2.0])
    shared = oracles.factors("softmax", target, weight, share_positives=True)
    assert shared.tolist() == [[1, 1, 1, 0.25], [1.5, 1, 1, 0.75], [4, 8, 1, 2], [1, 1, 1, 0.5]]
    for loss in ("softmax", "bce"):
        plain = oracles.factors(loss, target, weight, share_positives=loss == "bce")
        assert plain.tolist() == [[1, 1, 1, 1], [3, 1, 1, 3], [8, 8, 1, 8], [1, 1, 1, 2]]


def test_label_adam_is_adam_without_first_moment_where_all_gradients_of_a_label_are_equal() -> None:
    problem = oracles.make_problem(label=5, fan_in=3)
    size = torch.linspace(-2.0, 2.0, 5, dtype=torch.float64)
    gradient = oracles.Gradients(torch.zeros(()), torch.zeros(0), size[:, None].expand(5, 3).clone(), size)
    label_adam, adam = (
        oracles.exact_update(
            problem,
            gradient,
            OptimizerConfig(kind=kind, beta1=0.0, weight_decay=0.1),
            0.01,
            OptimizerState(**{name: value + 0.5 for name, value in zeros.tensors().items()}),
            step=3,
        )
        for kind in ("label_adam", "adam")
        for zeros in [OptimizerState.zeros(kind, 5, 3)]
    )
    torch.testing.assert_close(label_adam.weight, adam.weight, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(label_adam.bias, adam.bias, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(
        label_adam.state["weight_second"], adam.state["bias_second"], rtol=1e-14, atol=0.0
    )


def test_top_takes_ties_in_label_order_and_nothing_that_is_nan_or_minus_infinity() -> None:
    column = torch.tensor([[1.0, math.nan, 2.0, -math.inf, 2.0, math.inf]]).T
    scores, labels = oracles.top(column, 5)
    assert scores.tolist() == [[math.inf, 2.0, 2.0, 1.0, -math.inf]]
    assert labels.tolist() == [[5, 2, 4, 0, -1]]


def test_bfloat16_neighbours_enclose_every_value() -> None:
    value = torch.tensor(
        [1.0, 1.0 + 2**-8, -1.0 - 2**-9, 0.0, 2.0**-134, -(2.0**-134), 3.389e38, 3.392e38],
        dtype=torch.float64,
    )
    low, high = oracles.bfloat16_neighbours(value)
    largest = float(torch.finfo(torch.bfloat16).max)
    assert low.tolist() == [
        1.0,
        1.0,
        -1.0 - 2**-7,
        0.0,
        0.0,
        -(2.0**-133),
        255 * 2.0**120 - 2.0**120,
        largest,
    ]
    assert high.tolist() == [1.0, 1.0 + 2**-7, -1.0, 0.0, 2.0**-133, 0.0, largest, math.inf]


def test_a_budget_refuses_an_error_above_it() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    with pytest.raises(AssertionError, match=r"logits: 2 times the bound"):
        oracles.assert_within(exact + 2e-3, exact, torch.full_like(exact, 1e-3), "logits")
    with pytest.raises(AssertionError, match="plain float32"):
        oracles.assert_no_worse_than_plain(exact + 3e-3, exact, exact + 1e-3, torch.zeros(2))
