"""Float8 weights: what a code means, exact stochastic rounding, scales, and the ops against float32's."""

import math
from dataclasses import replace
from typing import Any

import oracles
import pytest
import torch
from oracles import Problem, finite_values, neighbours, values_of_codes
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.errors import NativeError
from xmlc.ops import (
    OptimizerState,
    dense_weight,
    fused_step,
    quantise,
    redistribute,
    sparse_linear,
    top_labels,
    widen,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3fn", "e5m2"])
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MOST_SCALE = {E4M3: 2.0**119, E5M2: 2.0**112}
Z_BOUND = 5.5
"""Standard deviations that a fair draw exceeds once in 26 million tests; seeds fix the draws."""
SCALE = 2.0**-5


def of_labels(scale: Tensor, label: int) -> Tensor:
    return scale.double().repeat_interleave(64)[:label, None]


def every_code(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def step(problem: Problem, weight_scale: Tensor | None, rate: float, **options: Any) -> tuple[Tensor, Tensor]:
    """Take a step in place; a negative's gradient is 2 (1 + logit) x."""
    return fused_step(
        *problem.of_step,
        learning_rate=rate,
        group_size=problem.group_size,
        weight_scale=weight_scale,
        **{
            "loss": "squared_hinge",
            "optimizer": OptimizerConfig(kind="sgd"),
            "state": OptimizerState(),
            "step": 1,
            "seed": 0,
            **options,
        },
    )


def constant_inputs(features: Tensor, weight: Tensor) -> Problem:
    """Return one instance without positives, whose inputs every label has in this order; bias 0."""
    label, fan_in = weight.shape
    return Problem(
        features=features.float()[:, None].contiguous(),
        weight=weight,
        indices=torch.arange(fan_in, dtype=torch.int32).repeat(label, 1),
        bias=torch.zeros(label),
        offsets=torch.zeros(2, dtype=torch.int64),
        labels=torch.zeros(0, dtype=torch.int64),
    )


def roundings(values: Tensor, dtype: torch.dtype, label: int, **options: Any) -> Tensor:
    """Round each value, in units of the scale, once for every label; [label, value] as float64.

    One more value, exact and large enough, keeps the scale where it is.
    """
    values = torch.cat([values, torch.tensor([LARGEST[dtype] / 2], dtype=values.dtype)])
    problem = constant_inputs(-values * SCALE, torch.zeros(label, len(values)).to(dtype))
    scale = torch.full((-(-label // 64),), SCALE)
    step(problem, scale, rate=0.5, **options)
    assert bool((scale == SCALE).all())
    assert bool((problem.weight[:, -1].double() == LARGEST[dtype] / 2).all())
    return problem.weight[:, :-1].double()


@DTYPES
def test_every_code_has_the_value_of_its_format(backend: str, dtype: torch.dtype) -> None:
    scale = torch.tensor([2.0**-64, 2.0**-3, 1.0, 2.0**20])
    exact = values_of_codes(dtype)
    for fan_in in (1, 17):  # a lane, and vectors with a rest
        weight = every_code(dtype)[:, None].repeat(1, fan_in)
        problem = constant_inputs(torch.ones(fan_in), weight)
        problem.features[1:] = 0.0
        finite = exact.isfinite() if fan_in > 1 else torch.ones(256, dtype=torch.bool)
        found = sparse_linear(*problem.layer, scale)[:, 0].double()
        assert torch.allclose(found[finite], (exact * of_labels(scale, 256)[:, 0])[finite], 0, 0, True)
    assert torch.allclose(
        widen(weight, scale)[:, 0].double(), exact * of_labels(scale, 256)[:, 0], 0, 0, True
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fraction", [1 / 2, 1 / 3, 1 / 64, 127 / 128])
@DTYPES
def test_the_mean_of_many_roundings_is_the_value_between_any_two_codes(
    backend: str, dtype: torch.dtype, fraction: float, sign: float
) -> None:
    every = finite_values(dtype)
    every = every[every >= 0.0]
    values = sign * (every[:-1] + fraction * every.diff()).float()  # subnormals among them
    found = torch.cat([roundings(values, dtype, 1024, step=1 + n, seed=n % 2) for n in range(4)])
    low, high = neighbours(values, dtype, 1.0)
    assert bool(((found == low) | (found == high)).all())
    share = (values.double() - low) / (high - low)
    z = ((found == high).double().mean(0) - share) / (share * (1.0 - share) / len(found)).sqrt()
    assert float(z.abs().max()) < Z_BOUND
    total = (found - values.double()) / (high - low)  # all together, in spacings
    assert abs(float(total.mean())) < Z_BOUND * float(total.std()) / total.numel() ** 0.5


@DTYPES
def test_values_far_below_the_smallest_subnormal_vanish_with_the_right_frequency(
    backend: str, dtype: torch.dtype
) -> None:
    smallest = float(finite_values(dtype)[finite_values(dtype) > 0][0])
    shares = torch.tensor([1 / 2, 1 / 16, 1 / 256, 1 / 1024])
    found = torch.cat([roundings(shares * smallest, dtype, 4096, seed=seed) for seed in range(4)])
    assert set(found.unique().tolist()) <= {0.0, smallest}
    z = ((found > 0).double().mean(0) - shares) / (shares * (1 - shares) / len(found)).sqrt()
    assert float(z.abs().max()) < Z_BOUND


@DTYPES
def test_every_finite_code_stays_itself_where_nothing_changes_it(backend: str, dtype: torch.dtype) -> None:
    codes = every_code(dtype)[values_of_codes(dtype).isfinite()]
    weight = codes.repeat(70, 1)
    problem, scale = constant_inputs(torch.zeros(len(codes)), weight.clone()), torch.tensor([0.5, 4.0])
    decaying_by_nothing = OptimizerConfig(kind="momentum", momentum=0.5)  # writes every weight
    zeros = OptimizerState.zeros("momentum", *weight.shape)
    for seed in range(4):
        step(problem, scale, 0.5, seed=seed, optimizer=decaying_by_nothing, state=zeros)
        assert torch.equal(problem.weight.float(), weight.float())
        assert scale.tolist() == [0.5, 4.0]


@DTYPES
def test_nan_weights_stay_nan_and_leave_the_scale_alone(backend: str, dtype: torch.dtype) -> None:
    weight = torch.full((3, 5), LARGEST[dtype] / 2).to(dtype)
    weight[1] = math.nan
    problem, scale = constant_inputs(torch.ones(5), weight), torch.tensor([1.0])
    step(problem, scale, 2.0**-30)
    assert problem.weight.float().isnan().all(1).tolist() == [False, True, False]
    assert scale.tolist() == [1.0]


@DTYPES
def test_the_scale_rises_as_far_as_the_largest_weight_needs(backend: str, dtype: torch.dtype) -> None:
    features = torch.full((3,), -2.0 * LARGEST[dtype])
    features[1] = -1.9 * 2.0 * LARGEST[dtype]
    problem = constant_inputs(features, torch.zeros(130, 3).to(dtype))
    scale = torch.full((3,), 2.0**-64)
    step(problem, scale, 0.5)
    assert scale.tolist() == [4.0] * 3
    assert bool((problem.weight[:, 0].float() == LARGEST[dtype] / 2).all())


@DTYPES
def test_the_scale_falls_by_half_where_little_of_the_range_is_used(backend: str, dtype: torch.dtype) -> None:
    weight = torch.zeros(128, 2).to(dtype)
    weight[:64] = LARGEST[dtype] / 16
    weight[64:] = LARGEST[dtype] / 8  # as much as it must be
    problem = constant_inputs(torch.tensor([0.0, 0.0]), weight)
    scale = torch.tensor([1.0, 1.0])
    before = widen(weight, scale).clone()
    step(
        problem,
        scale,
        0.5,
        optimizer=OptimizerConfig(kind="momentum"),
        state=OptimizerState.zeros("momentum", 128, 2),
    )
    assert scale.tolist() == [0.5, 1.0]
    assert torch.equal(widen(problem.weight, scale), before)


@DTYPES
def test_a_step_of_rate_zero_changes_neither_codes_nor_scales(backend: str, dtype: torch.dtype) -> None:
    weight = torch.full((70, 2), LARGEST[dtype] / 64).to(dtype)
    problem, scale = constant_inputs(torch.ones(2), weight), torch.tensor([1.0, 4.0])
    before = oracles.bits(weight)
    loss, gradient = step(problem, scale, 0.0)
    assert float(loss) > 0.0 and bool((gradient != 0.0).all())
    assert oracles.bits(problem.weight) == before and scale.tolist() == [1.0, 4.0]


@DTYPES
def test_labels_in_blocks_without_a_gradient_keep_their_scale(backend: str, dtype: torch.dtype) -> None:
    weight = torch.full((200, 2), LARGEST[dtype] / 64).to(dtype)
    problem, scale = constant_inputs(torch.zeros(2), weight), torch.ones(4)
    problem.bias[:] = -2.0  # beyond the margin
    problem.bias[70] = 0.0
    before = widen(weight, scale)
    step(problem, scale, 0.5)
    assert scale.tolist() == [1.0, 0.5, 1.0, 1.0]
    assert torch.equal(widen(problem.weight, scale), before)


@DTYPES
def test_labels_that_keep_their_weights_follow_a_scale_that_rises(backend: str, dtype: torch.dtype) -> None:
    # Only label 0 has a gradient: all others are beyond the margin. Their codes are halved, exactly but for
    # subnormals, which become neighbours.
    codes = every_code(dtype)[:100]
    problem = constant_inputs(-torch.ones(100), codes.repeat(64, 1))
    problem.features[:] = 0.0
    problem.features[0] = -1.5 * LARGEST[dtype]
    problem.weight[0] = 0.0
    problem.bias[1:] = -2.0
    scale = torch.tensor([1.0])
    before = widen(problem.weight, scale)
    step(problem, scale, 0.5)
    assert scale.tolist() == [2.0]
    after = widen(problem.weight, scale)[1:].double()
    low, high = neighbours(before[1:], dtype, 2.0)
    assert bool(((after == low) | (after == high)).all())
    assert bool((low != high).any()) and bool((after[:, 99] == before[1:, 99]).all())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@DTYPES
def test_finite_weights_stay_finite_beyond_the_largest(backend: str, dtype: torch.dtype, sign: float) -> None:
    problem = constant_inputs(torch.tensor([-sign]), torch.zeros(70, 1).to(dtype))
    scale = torch.full((2,), MOST_SCALE[dtype])
    step(problem, scale, rate=1.7e38)
    assert widen(problem.weight, scale).unique().tolist() == [sign * LARGEST[dtype] * MOST_SCALE[dtype]]


@DTYPES
def test_what_overflows_float32_does_not_become_finite(backend: str, dtype: torch.dtype) -> None:
    problem = constant_inputs(torch.tensor([-1.0]), torch.zeros(3, 1).to(dtype))
    step(problem, torch.tensor([1.0]), rate=3e38)
    found = problem.weight.float()
    assert bool((found.isinf() if dtype == E5M2 else found.isnan()).all())


def test_roundings_differ_by_seed_step_label_and_connection(backend: str) -> None:
    value = torch.full((32,), 1.0 + 2.0**-4)
    first = roundings(value, E4M3, 64)
    assert torch.equal(first, roundings(value, E4M3, 64))
    for other in (
        roundings(value, E4M3, 64, step=2),
        roundings(value, E4M3, 64, seed=1),
        first.roll(1, 0),
        first.roll(1, 1),
    ):
        assert 0.4 < float((first == other).double().mean()) < 0.6  # 2048 fair coins: nine deviations


SMALL = [
    shape
    for number, shape in enumerate(oracles.SHAPES)
    if shape.label * shape.fan_in * shape.batch < 1 << 21 and (number % 3 == 0 or shape.input > 8000)
]


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "label_adam"])
@pytest.mark.parametrize("shape", SMALL, ids=str)
@DTYPES
def test_a_step_is_float32_s_but_for_the_rounding(
    backend: str, shape: oracles.Shape, dtype: torch.dtype, kind: str
) -> None:
    problem = oracles.shape_problem(shape).copy()
    codes, scale = quantise(problem.weight.float(), dtype)
    wide = replace(problem.copy(), weight=widen(codes, scale))
    narrow = replace(problem, weight=codes)
    optimizer = OptimizerConfig(kind=kind, weight_decay=0.125)
    states = [OptimizerState.zeros(kind, *codes.shape) for _ in range(2)]
    options = {"optimizer": optimizer, "loss": "bce", "scale": 1.0 / shape.batch}
    exact_loss, exact_gradient = step(wide, None, 0.25, state=states[0], **options)
    loss, gradient = step(narrow, scale, 0.25, state=states[1], **options)
    assert torch.equal(loss, exact_loss) and torch.equal(gradient, exact_gradient)
    assert torch.equal(narrow.bias, wide.bias)
    for name, value in states[0].tensors().items():
        assert torch.equal(states[1].tensors()[name], value), name
    found = widen(narrow.weight, scale).double()
    low, high = neighbours(wide.weight, dtype, of_labels(scale, shape.label))
    assert bool(((found == low) | (found == high)).all())
    sizes = torch.stack([block.abs().max() for block in wide.weight.split(64)])
    assert bool((sizes <= LARGEST[dtype] * scale).all())


@pytest.mark.parametrize("loss", ["squared_hinge", "softmax", "decoupled_softmax"])
def test_a_step_of_each_loss_is_float32_s_but_for_the_rounding(backend: str, loss: str) -> None:
    problem = oracles.make_problem(200, 33, 100, 40, group_size=16)
    codes, scale = quantise(problem.weight, E4M3)
    wide, narrow = replace(problem.copy(), weight=widen(codes, scale)), replace(problem, weight=codes)
    exact, found = step(wide, None, 0.01, loss=loss), step(narrow, scale, 0.01, loss=loss)
    assert torch.equal(found[0], exact[0]) and torch.equal(found[1], exact[1])
    low, high = neighbours(wide.weight, E4M3, of_labels(scale, 200))
    value = widen(narrow.weight, scale).double()
    assert bool(((value == low) | (value == high)).all())


@pytest.mark.parametrize("shape", SMALL, ids=str)
@DTYPES
def test_logits_gradients_and_best_labels_are_those_of_the_widened_weights(
    backend: str, shape: oracles.Shape, dtype: torch.dtype
) -> None:
    problem = oracles.shape_problem(shape)
    codes, scale = quantise(problem.weight.float(), dtype)
    wide = widen(codes, scale)
    features = [problem.features.clone().requires_grad_() for _ in range(2)]
    rest = (problem.indices, problem.bias, problem.group_size)
    found, exact = sparse_linear(features[0], codes, *rest, scale), sparse_linear(features[1], wide, *rest)
    assert torch.equal(found, exact)
    found.square().sum().backward()
    exact.square().sum().backward()
    assert torch.equal(features[0].grad, features[1].grad)
    k = min(5, shape.label)
    layer = (problem.indices, problem.bias, k, problem.group_size)
    best = top_labels(problem.features, codes, *layer, weight_scale=scale)
    for one, other in zip(best, top_labels(problem.features, wide, *layer), strict=True):
        assert torch.equal(one, other)
    dense = dense_weight(codes, problem.indices, problem.group_size, shape.input, scale)
    assert torch.equal(dense, dense_weight(wide, problem.indices, problem.group_size, shape.input))


@pytest.mark.parametrize("how", [{"fraction": 0.3}, {"fraction": 0.3, "scope": "group"}, {"threshold": 0.1}])
@pytest.mark.parametrize("group_size", [1, 16])
@DTYPES
def test_a_redistribution_chooses_by_the_size_with_the_scale(
    backend: str, dtype: torch.dtype, group_size: int, how: dict[str, Any]
) -> None:
    problem = oracles.make_problem(200, 12, 40, 3, group_size=group_size)
    factor = torch.tensor([1.0, 16.0, 0.25, 2.0]).repeat_interleave(64)[:200, None]
    codes, scale = quantise(problem.weight * factor, dtype)
    wide, indices = widen(codes, scale), [problem.indices.clone(), problem.indices.clone()]
    before = wide.clone()
    options = {"group_size": group_size, "step": 3, "new_value": "random", "new_value_bound": 0.5, **how}
    moved = redistribute(codes, indices[0], 40, weight_scale=scale, **options)
    assert moved == redistribute(wide, indices[1], 40, **options) and moved > 0
    assert torch.equal(indices[0], indices[1])
    found = widen(codes, scale)
    assert torch.equal(found[wide == before], before[wide == before])
    low, high = neighbours(wide, dtype, of_labels(scale, 200))
    nearest = torch.where((wide - low).abs() < (wide - high).abs(), low, high)
    even = (wide - low).abs() == (wide - high).abs()  # a tie, or exact
    assert bool(((found == nearest) | (even & (found == low))).all())


@DTYPES
def test_new_values_raise_scales_that_are_too_small_for_them(backend: str, dtype: torch.dtype) -> None:
    codes = every_code(dtype)[:100].repeat(70, 1)
    scale, indices = torch.tensor([2.0**-40, 4.0]), torch.arange(100, dtype=torch.int32).repeat(70, 1)
    before = widen(codes, scale)
    redistribute(
        codes, indices, 150, fraction=0.5, new_value="random", new_value_bound=3.0, weight_scale=scale
    )
    assert scale[1] == 4.0
    assert 3.0 <= float(scale[0]) * LARGEST[dtype] < 6.0
    fresh = widen(codes, scale)[:64]
    assert 2.5 < float(fresh.max()) <= 3.0 and -3.0 <= float(fresh.min()) < -2.5
    assert torch.equal(widen(codes, scale)[64:][:, 90:], before[64:][:, 90:])  # the largest are not pruned


def test_zeroed_connections_are_zero_and_the_others_keep_their_codes(backend: str) -> None:
    problem = oracles.make_problem(65, 16, 100, 3)
    codes, scale = quantise(problem.weight, E4M3)
    before, scale_before = codes.clone(), scale.clone()
    indices = problem.indices.clone()
    redistribute(codes, indices, 100, fraction=0.4, weight_scale=scale)
    moved = indices != problem.indices
    assert bool((codes.float()[moved] == 0.0).all())
    kept = codes.float() == before.float()  # or the connection was pruned, and drawn again
    assert bool((kept | (codes.float() == 0.0)).all()) and float(kept.double().mean()) > 0.55
    assert torch.equal(scale, scale_before)


@pytest.mark.parametrize("group_size", [1, 16, 64])
def test_bits_do_not_depend_on_the_number_of_threads(group_size: int) -> None:
    problem = oracles.make_problem(1009, 33, 200, 130, group_size=group_size)
    results = []
    for count in (1, 2, 3, 7):
        with oracles.threads(count):
            codes, scale = quantise(problem.weight, E4M3)
            one = replace(problem.copy(), weight=codes)
            state = OptimizerState.zeros("label_adam", *codes.shape)
            options = {"optimizer": OptimizerConfig(kind="label_adam"), "state": state}
            for number in range(1, 4):
                step(one, scale, 0.3, step=number, **options)
            redistribute(
                codes,
                one.indices,
                200,
                fraction=0.3,
                new_value="random",
                new_value_bound=100.0,
                group_size=group_size,
                weight_scale=scale,
            )
            best = top_labels(one.features, codes, one.indices, one.bias, 5, group_size, weight_scale=scale)
            results.append([oracles.bits(value) for value in (codes, scale, one.indices, one.bias, *best)])
    assert all(result == results[0] for result in results)


@DTYPES
def test_quantising_rounds_to_the_nearest_with_the_smallest_scale(dtype: torch.dtype) -> None:
    values = torch.randn(130, 7, generator=torch.Generator().manual_seed(0))
    values[64:128] *= 1e-3
    values[128:] = 0.0
    values[0, 0] = 2.0 * LARGEST[dtype]  # exactly the largest of a scale
    codes, scale = quantise(values, dtype)
    assert codes.dtype == dtype and scale[0] == 2.0 and scale[2] == 2.0**-64
    largest = values.split(64)[1].abs().max()
    assert LARGEST[dtype] / 2 < float(largest / scale[1]) <= LARGEST[dtype]
    low, high = neighbours(values, dtype, of_labels(scale, 130))
    found = widen(codes, scale).double()
    assert bool(((found - values).abs() <= torch.minimum(values - low, high - values)).all())


def layer(label: int = 65) -> dict[str, Tensor]:
    problem = oracles.make_problem(label)
    weight, scale = quantise(problem.weight, E4M3)
    return {"weight": weight, "indices": problem.indices, "bias": problem.bias, "weight_scale": scale}


WRONG: dict[str, tuple[Any, str]] = {
    "absent": (None, "for float8_e4m3fn weights, got None"),
    "of another shape": (torch.ones(3), r"\[ceil\(label / 64\)\] = \[2\], got float32 \[3\]"),
    "of another dtype": (torch.ones(2, dtype=torch.float64), r"must be float32 .* got float64 \[2\]"),
    "no power of two": (torch.tensor([1.0, 3.0]), "powers of two .* got 3;"),
    "negative": (torch.tensor([-1.0, 1.0]), "powers of two .* got -1;"),
    "zero": (torch.tensor([1.0, 0.0]), "powers of two .* got 0;"),
    "NaN": (torch.tensor([1.0, math.nan]), "powers of two .* got nan;"),
    "too large": (torch.tensor([2.0**120, 1.0]), "powers of two"),
    "not contiguous": (torch.ones(4)[::2], "must be contiguous"),
    "no tensor": ([1.0, 1.0], "must be a torch tensor, got list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_scale_is_refused_by_every_op(backend: str, wrong: str) -> None:
    scale, message = WRONG[wrong]
    problem = oracles.make_problem()
    weight = quantise(problem.weight, E4M3)[0]
    rest = (problem.indices, problem.bias)
    calls = (
        lambda: sparse_linear(problem.features, weight, *rest, weight_scale=scale),
        lambda: top_labels(problem.features, weight, *rest, 3, weight_scale=scale),
        lambda: redistribute(weight, problem.indices, 100, fraction=0.1, weight_scale=scale),
        lambda: step(replace(problem, weight=weight), scale, 0.1),
    )
    before = weight.clone()
    for call in calls:
        with pytest.raises(NativeError, match=message):
            call()
    assert torch.equal(weight.float(), before.float())


def test_a_scale_without_float8_weights_is_refused(backend: str) -> None:
    problem = oracles.make_problem()
    with pytest.raises(NativeError, match="must be None for float32 weights, got a tensor"):
        sparse_linear(*problem.layer, weight_scale=torch.ones(2))


def test_float8_weights_take_no_gradient() -> None:
    problem = oracles.make_problem()
    weight, scale = quantise(problem.weight, E4M3)
    weight.requires_grad_()
    with pytest.raises(NativeError, match=r"must not require a gradient.* train them by"):
        sparse_linear(problem.features, weight, problem.indices, problem.bias, 1, scale)
