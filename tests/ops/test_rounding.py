"""Stochastic rounding of bfloat16 weights, seen through fused_step: unbiased, exact where it can be, safe."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import oracles
import pytest
import torch
from oracles import BFLOAT16, Problem
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.ops import OptimizerState, fused_step

Z_BOUND = 5.5
"""Standard deviations that a fair draw exceeds once in 26 million tests; seeds fix the draws."""
SUBNORMAL = 2.0**-130
"""A scale at which bfloat16 has but three bits; its smallest value is 2^-133."""


def step_in_place(problem: Problem, rate: float, scale: float = 1.0, **options) -> None:
    optimizer = options.pop("optimizer", OptimizerConfig(kind="sgd"))
    state = options.pop("state", OptimizerState())
    fused_step(
        *problem.of_step,
        loss="squared_hinge",
        optimizer=optimizer,
        learning_rate=rate,
        state=state,
        scale=scale,
        group_size=problem.group_size,
        **{"step": 1, "seed": 0, **options},
    )


def constant_inputs(
    features: Sequence[float], label: int, weight: float | Tensor = 0.0, batch: int = 1
) -> Problem:
    """Return equal instances without positives, whose inputs every label has in this order; bias 0."""
    fan_in = len(features)
    weights = torch.empty(label, fan_in, dtype=BFLOAT16)
    weights[:] = weight
    return Problem(
        features=torch.tensor(features)[:, None].repeat(1, batch),
        weight=weights,
        indices=torch.arange(fan_in, dtype=torch.int32).repeat(label, 1),
        bias=torch.zeros(label),
        offsets=torch.zeros(batch + 1, dtype=torch.int64),
        labels=torch.zeros(0, dtype=torch.int64),
    )


def roundings(values: Sequence[float], label: int, size: float = 1.0, **options) -> Tensor:
    """Round each value times size once for every label, [label, value], as float64.

    From weights 0 and bias 0 a negative's gradient is 2 x, so that a rate of 1/2 makes each weight -x.
    """
    problem = constant_inputs([-value for value in values], label)
    step_in_place(problem, rate=0.5 * size**0.5, scale=size**0.5, **options)
    return problem.weight.double()


FRACTIONS = (1 / 2, 1 / 4, 3 / 4, 1 / 3, 2 / 3, 1 / 128, 127 / 128, 1 / 1024, 1023 / 1024)
"""Where a value lies between its neighbours, as a share of their distance."""


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("size", "spacing"),
    [(1.0, 2.0**-7), (2.0**-100, 2.0**-7), (SUBNORMAL, 2.0**-3)],
    ids=["ones", "small", "subnormal"],
)
def test_the_mean_of_many_roundings_is_the_value(
    backend: str, size: float, spacing: float, sign: float
) -> None:
    values = [sign * float(torch.tensor(1.0 + (3 + fraction) * spacing)) for fraction in FRACTIONS]
    exact = torch.tensor(values, dtype=torch.float64)
    low, high = oracles.bfloat16_neighbours(exact * size)
    found = torch.cat(
        [roundings(values, 4096, size, step=step, seed=seed) for step in range(1, 9) for seed in (0, 9)]
    )
    assert bool(((found == low) | (found == high)).all())
    ups = (found == high).double()
    share = (exact * size - low) / (high - low)
    z = (ups.mean(0) - share) / (share * (1.0 - share) / len(found)).sqrt()
    assert float(z.abs().max()) < Z_BOUND


def test_values_below_the_smallest_subnormal_become_it_or_zero_with_the_right_frequency(backend: str) -> None:
    found = torch.cat([roundings([1.0], 4096, 2.0**-136, seed=seed) for seed in range(16)])
    assert set(found.unique().tolist()) == {0.0, 2.0**-133}
    ups = float((found > 0).double().mean())
    assert abs(ups - 1 / 8) < Z_BOUND * (1 / 8 * 7 / 8 / len(found)) ** 0.5


def test_a_long_run_of_updates_too_small_to_round_to_nearest_is_unbiased(backend: str) -> None:
    # Each step moves a weight of about 1 by a tenth of its spacing: rounding to nearest would never move it.
    # As long as all slack is positive the step is linear, so the mean weight follows the exact recursion.
    label, steps, rate, decay = 4096, 50, 1.0 / 1024, 0.25
    problem = constant_inputs([0.25, -0.25, 0.125, 0.0], label, weight=1.0)
    exact_weight = torch.ones(4, dtype=torch.float64)
    exact_bias = 0.0
    features = problem.features[:, 0].double()
    optimizer = OptimizerConfig(kind="sgd", weight_decay=decay)
    for step in range(1, steps + 1):
        slack = 1.0 + exact_bias + float(exact_weight @ features)
        exact_weight = exact_weight * (1.0 - rate * decay) - rate * 2.0 * slack * features
        exact_bias -= rate * 2.0 * slack
        step_in_place(problem, rate, optimizer=optimizer, step=step, seed=1)
    found = problem.weight.double()
    z = (found.mean(0) - exact_weight) / (found.std(0) / label**0.5)
    assert float(z.abs().max()) < Z_BOUND
    assert float((1.0 - exact_weight).abs().min()) > 2.0**-7  # the run has moved every weight


def correlation(first: Tensor, second: Tensor) -> float:
    """Return the correlation of two samples in standard deviations of that of independent ones."""
    sample = torch.stack([first.flatten(), second.flatten()])
    return float(torch.corrcoef(sample)[0, 1]) * sample.shape[1] ** 0.5


NEIGHBOURS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "steps": lambda drawn: (drawn[:-1], drawn[1:]),
    "seeds": lambda drawn: (drawn[:, :-1], drawn[:, 1:]),
    "step and seed": lambda drawn: (drawn[:-1, 1:], drawn[1:, :-1]),
    "labels": lambda drawn: (drawn[:, :, :-1], drawn[:, :, 1:]),
    "connections": lambda drawn: (drawn[..., :-1], drawn[..., 1:]),
    "label and connection": lambda drawn: (drawn[:, :, 1:, :-1], drawn[:, :, :-1, 1:]),
    "16 labels apart": lambda drawn: (drawn[:, :, :-16], drawn[:, :, 16:]),
    "16 connections apart": lambda drawn: (drawn[..., :-16], drawn[..., 16:]),
}


@pytest.fixture(scope="module")
def half_way_roundings() -> Tensor:
    """0 or 1 with probability 1/2, [step, seed, label, connection]."""
    value = [1.0 + 2.0**-8] * 33
    drawn = [[roundings(value, 257, step=step, seed=seed) for seed in range(6)] for step in range(1, 7)]
    return (torch.stack([torch.stack(row) for row in drawn]) > 1.0).double()


@pytest.mark.parametrize("neighbours", NEIGHBOURS)
def test_roundings_of_neighbours_are_independent(half_way_roundings: Tensor, neighbours: str) -> None:
    assert abs(correlation(*NEIGHBOURS[neighbours](half_way_roundings))) < Z_BOUND


def test_another_step_or_seed_rounds_otherwise_and_the_same_one_alike(backend: str) -> None:
    value = [1.0 + 2.0**-8] * 16
    first = roundings(value, 64, step=1, seed=0)
    assert torch.equal(first, roundings(value, 64, step=1, seed=0))
    for other in (
        {"step": 2, "seed": 0},
        {"step": 1, "seed": 1},
        {"step": 1, "seed": 2**62},
        {"step": 2**31},
    ):
        share_alike = float((first == roundings(value, 64, **other)).double().mean())
        assert 0.4 < share_alike < 0.6, other  # 1024 fair coins: six standard deviations


def test_a_label_s_rounding_does_not_depend_on_the_labels_before_it_in_the_batch(backend: str) -> None:
    value = [1.0 + 2.0**-8] * 16
    assert torch.equal(roundings(value, 64), roundings(value, 1000)[:64])


def test_every_finite_bfloat16_stays_itself_where_nothing_changes_it(backend: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    every = every[every.isfinite()].reshape(-1, 32)
    problem = constant_inputs([0.0] * 32, len(every), weight=every)
    for seed in range(4):
        step_in_place(problem, rate=0.5, step=1 + seed, seed=seed)
        assert torch.equal(problem.weight, every)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_finite_weights_beyond_the_largest_bfloat16_stay_finite(backend: str, sign: float) -> None:
    largest = sign * float(torch.finfo(BFLOAT16).max)
    problem = constant_inputs([2.0**-70], 1000, weight=largest)
    problem.bias.fill_(2.0**60)  # so that there is slack, though w x = -2^58 where w < 0
    slack = 1.0 + 2.0**60 + largest * 2.0**-70
    eighth = sign * 2.0**117 / (2.0 * slack * 2.0**-70)  # of the spacing of 2^120, away from 0
    for step in range(1, 9):
        step_in_place(problem, rate=-eighth, step=step)
        problem.bias.fill_(2.0**60)
        assert bool((problem.weight == largest).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_infinite_weights_stay_infinite(backend: str, sign: float) -> None:
    # A positive of logit +inf has no slack, nor has a negative of logit -inf. The batch fills its tile, for
    # an infinite weight times the zeros of padding is NaN.
    problem = constant_inputs([1.0], 33, weight=sign * math.inf, batch=64)
    if sign > 0:
        offsets, labels = oracles.pairs([list(range(33))] * 64)
        problem = replace(problem, offsets=offsets, labels=labels)
    optimizer = OptimizerConfig(kind="sgd", weight_decay=0.5)
    for step in range(1, 9):
        step_in_place(problem, rate=0.5, optimizer=optimizer, step=step)
        assert bool((problem.weight == sign * math.inf).all())


def test_nan_weights_stay_nan_whatever_their_bits(backend: str) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(BFLOAT16)
    every = every[every.isnan()].reshape(-1, 2)
    problem = constant_inputs([1.0, 1.0], len(every), weight=every)
    for step in range(1, 9):
        step_in_place(problem, rate=0.5, step=step)
        assert bool(problem.weight.isnan().all())


def test_a_step_that_overflows_gives_infinity_and_not_nan(backend: str) -> None:
    problem = constant_inputs([1.0, -1.0], 100)
    step_in_place(problem, rate=3e38, scale=100.0)
    assert problem.weight.tolist() == [[-math.inf, math.inf]] * 100
