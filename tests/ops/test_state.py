"""The optimizer's state in bfloat16 and float8: what is kept, stochastic rounding, steps that stay small."""

from dataclasses import replace
from typing import Any

import oracles
import pytest
import torch
from oracles import Problem, finite_values, neighbours
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.errors import NativeError
from xmlc.ops import OptimizerState, fused_step, quantise, redistribute

BFLOAT16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT8], ids=["bfloat16", "float8"])
KINDS = pytest.mark.parametrize("kind", ["momentum", "adam"])
LARGEST = 448.0
Z_BOUND = 5.5
"""Standard deviations that a fair draw exceeds once in 26 million tests; seeds fix the draws."""


def step(problem: Problem, state: OptimizerState, rate: float, **options: Any) -> tuple[Tensor, Tensor]:
    """Take a step in place; a negative's gradient is 2 (1 + logit) x."""
    return fused_step(
        *problem.of_step,
        learning_rate=rate,
        group_size=problem.group_size,
        state=state,
        **{"loss": "squared_hinge", "step": 1, "seed": 0, **options},
    )


def units(scale: Tensor) -> Tensor:
    """Return what the codes of each label are multiples of, float64 [label, 1]."""
    return torch.ldexp(torch.ones(len(scale), dtype=torch.float64), scale.int() - 127)[:, None]


def scales_for(largest: Tensor) -> Tensor:
    """Return exponents uint8 of the smallest units in which a label's largest, float64, is at most 448."""
    candidates = torch.ldexp(torch.ones(253, dtype=torch.float64), torch.arange(1, 254) - 127)
    fits = largest[:, None] <= LARGEST * candidates
    return (fits.int().argmax(1) + 1).to(torch.uint8)


def earlier_state(kind: str, label: int, fan_in: int, dtype: torch.dtype) -> OptimizerState:
    """Return a state as earlier steps may have left it; its values have many sizes."""
    generator = torch.Generator().manual_seed(5)
    state = OptimizerState.zeros(kind, label, fan_in, dtype)
    sizes = 10.0 ** torch.empty(label, fan_in).uniform_(-4.0, 0.0, generator=generator)
    first = torch.randn(label, fan_in, generator=generator) * sizes
    root = torch.randn(label, fan_in, generator=generator).abs() * sizes
    if state.scale is not None:
        largest = torch.maximum(first.abs(), root).amax(1) if kind == "adam" else first.abs().amax(1)
        state.scale.copy_(scales_for(largest.double()))
        first, root = first / units(state.scale).float(), root / units(state.scale).float()
    state.weight_first.copy_(first)
    state.bias_first.normal_(generator=generator)
    if kind == "adam":
        state.weight_second.copy_(root if dtype == FLOAT8 else root.square())
        state.bias_second.normal_(generator=generator).square_()
    return state


def kept_between(state: OptimizerState, name: str, low: Tensor, high: Tensor) -> bool:
    """Return whether every value of a moment is what something between two others may be rounded to."""
    value = getattr(state, name)
    if state.dtype == BFLOAT16:
        below, above = oracles.bfloat16_neighbours(low)[0], oracles.bfloat16_neighbours(high)[1]
    else:
        unit = units(state.scale)
        value = value.double() * unit
        if name == "weight_second":
            low, high = low.clamp_min(0.0).sqrt(), high.sqrt()
        below, above = neighbours(low, FLOAT8, unit)[0], neighbours(high, FLOAT8, unit)[1]
        if name == "weight_second":  # no root that is not zero is kept as zero
            least = unit * finite_values(FLOAT8)[finite_values(FLOAT8) > 0.0][0]
            above = torch.where(high > 0.0, torch.maximum(above, least), above)
            assert bool((value[low > 0.0] > 0.0).all())
    return bool(((below <= value.double()) & (value.double() <= above)).all())


SMALL = [
    shape
    for number, shape in enumerate(oracles.SHAPES)
    if shape.label * shape.fan_in * shape.batch < 1 << 21 and (number % 3 == 1 or shape.input > 8000)
]


@KINDS
@pytest.mark.parametrize("shape", SMALL, ids=str)
@DTYPES
def test_a_step_is_the_exact_one_of_the_widened_state(
    backend: str, shape: oracles.Shape, dtype: torch.dtype, kind: str
) -> None:
    problem, number = oracles.shape_problem(shape), 3
    optimizer = OptimizerConfig(kind=kind, weight_decay=0.125, eps=1e-3)
    state = earlier_state(kind, shape.label, shape.fan_in, dtype)
    wide = state.widened()
    of_loss = {"loss": "bce", "scale": 1.0 / shape.batch, "positive_weight": None}
    exact = oracles.gradients(problem, dtype=torch.float64, **of_loss)
    bounds = oracles.gradient_bounds(problem, **of_loss)
    rule = (optimizer, 0.25, wide, number)
    update = oracles.exact_update(problem, exact, *rule)
    allowed = oracles.update_bounds(problem, exact, bounds, *rule)

    after = problem.copy()
    options = {"optimizer": optimizer, "loss": "bce", "scale": 1.0 / shape.batch, "step": number}
    loss, gradient = step(after, state, 0.25, **options)

    oracles.assert_within(loss, exact.loss, bounds.loss, "loss")
    oracles.assert_within(gradient, exact.features, bounds.features, "feature gradient")
    assert_weight = (
        oracles.assert_within if shape.weight_dtype == torch.float32 else oracles.assert_within_rounded
    )
    assert_weight(after.weight, update.weight, allowed.weight, "weight")
    oracles.assert_within(after.bias, update.bias, allowed.bias, "bias")
    for name, value in state.tensors().items():
        if name.startswith("bias"):
            oracles.assert_within(value, update.state[name], allowed.state[name], name)
        elif name != "scale":
            centre, off = update.state[name], allowed.state[name]
            assert kept_between(state, name, centre - off, centre + off), name
    if state.scale is not None:
        moments = [update.state["weight_first"].abs()]
        off = [allowed.state["weight_first"]]
        if kind == "adam":
            moments.append(update.state["weight_second"].sqrt())
            off.append((update.state["weight_second"] + allowed.state["weight_second"]).sqrt() - moments[1])
        low = torch.stack([m - o for m, o in zip(moments, off, strict=True)]).amax((0, 2))
        high = torch.stack([m + o for m, o in zip(moments, off, strict=True)]).amax((0, 2))
        assert bool((scales_for(low) <= state.scale).all())
        assert bool((state.scale <= scales_for(high)).all())


@KINDS
@pytest.mark.parametrize("weights", [torch.float32, BFLOAT16, FLOAT8], ids=str)
@DTYPES
def test_weights_move_as_by_the_widened_state_bit_by_bit(
    backend: str, weights: torch.dtype, dtype: torch.dtype, kind: str
) -> None:
    problem = oracles.make_problem(200, 33, 100, 20, group_size=16)
    scale = None
    if weights == FLOAT8:
        codes, scale = quantise(problem.weight, weights)
        problem = replace(problem, weight=codes)
    else:
        problem = replace(problem, weight=problem.weight.to(weights))
    state = earlier_state(kind, 200, 33, dtype)
    narrow, wide = problem.copy(), problem.copy()
    wide_state, wide_scale = state.widened(), None if scale is None else scale.clone()
    options = {"optimizer": OptimizerConfig(kind=kind), "loss": "bce", "step": 7}
    found = step(narrow, state, 0.1, weight_scale=scale, **options)
    exact = step(wide, wide_state, 0.1, weight_scale=wide_scale, **options)
    for one, other in zip(found, exact, strict=True):
        assert torch.equal(one, other)
    assert oracles.bits(narrow.weight) == oracles.bits(wide.weight)
    assert torch.equal(narrow.bias, wide.bias)
    assert scale is None or torch.equal(scale, wide_scale)


# ---- rounding --------------------------------------------------------------------------------------------


def constant_inputs(gradient: Tensor, label: int) -> Problem:
    """Return a problem in which the gradient of every label's weights is this, [fan_in]."""
    fan_in = len(gradient)
    return Problem(
        features=0.5 * gradient.float()[:, None],
        weight=torch.zeros(label, fan_in),
        indices=torch.arange(fan_in, dtype=torch.int32).repeat(label, 1),
        bias=torch.zeros(label),
        offsets=torch.zeros(2, dtype=torch.int64),
        labels=torch.zeros(0, dtype=torch.int64),
    )


FORGETFUL = {
    "momentum": OptimizerConfig(kind="momentum", momentum=0.0),
    "adam": OptimizerConfig(kind="adam", beta1=0.0, beta2=0.0),
}
"""Optimizers whose first moment is the gradient, and whose second is its square."""


def roundings(values: Tensor, dtype: torch.dtype, kind: str, label: int, **options: Any) -> OptimizerState:
    """Round each value once for every label, as velocity or first moment and, of Adam, as root."""
    state = OptimizerState.zeros(kind, label, len(values), dtype)
    step(constant_inputs(values, label), state, 0.0, optimizer=FORGETFUL[kind], **options)
    return state


def assert_unbiased(found: Tensor, value: Tensor, low: Tensor, high: Tensor) -> None:
    """Require draws [draw, value] to be neighbours, as often as the value says."""
    assert bool(((found == low) | (found == high)).all())
    share = (value - low) / (high - low)
    z = ((found == high).double().mean(0) - share) / (share * (1.0 - share) / len(found)).sqrt()
    assert float(z.abs().max()) < Z_BOUND
    total = (found - value) / (high - low)  # all together, in spacings
    assert abs(float(total.mean())) < Z_BOUND * float(total.std()) / total.numel() ** 0.5


@KINDS
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("fraction", [1 / 2, 1 / 3, 1 / 64, 127 / 128])
def test_the_mean_of_many_float8_roundings_is_the_value_between_any_two_codes(
    backend: str, kind: str, fraction: float, sign: float
) -> None:
    every = finite_values(FLOAT8)
    every = every[every >= 0.0]
    values = sign * (every[:-1] + fraction * every.diff()).float()  # subnormals among them
    unit = 2.0**-20
    values = torch.cat([values, torch.tensor([sign * LARGEST])]) * unit
    drawn = [roundings(values, FLOAT8, kind, 1024, step=1 + n, seed=n % 2) for n in range(4)]
    for state in drawn:
        assert bool((units(state.scale) == unit).all())
    exact = values[:-1].double()
    low, high = neighbours(exact, FLOAT8, unit)
    assert_unbiased(torch.cat([s.weight_first[:, :-1].double() * unit for s in drawn]), exact, low, high)
    if kind != "adam":
        return
    root = torch.cat([state.weight_second[:, :-1].double() * unit for state in drawn])
    assert bool((root[:, 0] == high.abs().maximum(low.abs())[0]).all())  # not zero
    low, high = neighbours(exact.abs(), FLOAT8, unit)
    assert_unbiased(root[:, 1:], exact.abs()[1:], low[1:], high[1:])


@KINDS
@pytest.mark.parametrize("size", [1.0, 2.0**-40])
def test_the_mean_of_many_bfloat16_roundings_is_the_value(backend: str, kind: str, size: float) -> None:
    fractions = torch.tensor([1 / 2, 1 / 4, 1 / 3, 1 / 128, 127 / 128, 1 / 1024])
    values = -size * (1.0 + (3 + fractions) * 2.0**-7)
    drawn = [roundings(values, BFLOAT16, kind, 4096, step=1 + n, seed=n % 2) for n in range(4)]
    exact = values.double()
    first = torch.cat([state.weight_first.double() for state in drawn])
    assert_unbiased(first, exact, *oracles.bfloat16_neighbours(exact))
    if kind == "adam":
        exact = values.square().double()
        second = torch.cat([state.weight_second.double() for state in drawn])
        assert_unbiased(second, exact, *oracles.bfloat16_neighbours(exact))


def test_roundings_differ_by_seed_step_label_connection_and_moment(backend: str) -> None:
    value = torch.full((32,), 1.0 + 2.0**-4)  # half-way
    state = roundings(value, FLOAT8, "adam", 64)
    first = state.weight_first.float()
    assert torch.equal(first, roundings(value, FLOAT8, "adam", 64).weight_first.float())
    assert torch.equal(first, roundings(value, FLOAT8, "momentum", 64).weight_first.float())
    problem = constant_inputs(-value * 2.0, 64)  # weights half-way as well
    problem = replace(problem, weight=problem.weight.to(BFLOAT16))
    for other in (
        roundings(value, FLOAT8, "adam", 64, step=2).weight_first,
        roundings(value, FLOAT8, "adam", 64, seed=1).weight_first,
        state.weight_second,
        first.roll(1, 0),
        first.roll(1, 1),
    ):
        assert 0.4 < float((first == other.float()).double().mean()) < 0.6  # 2048 fair coins: nine deviations


def test_moments_are_rounded_by_other_numbers_than_bfloat16_weights(backend: str) -> None:
    value = torch.full((32,), 1.0 + 2.0**-8)  # half-way between two bfloat16
    state = OptimizerState.zeros("momentum", 64, 32, BFLOAT16)
    problem = constant_inputs(value, 64)
    problem = replace(problem, weight=problem.weight.to(BFLOAT16))
    step(problem, state, 1.0, optimizer=FORGETFUL["momentum"])
    up = (state.weight_first > 1.0) == (problem.weight < -1.0)
    assert 0.4 < float(up.double().mean()) < 0.6


# ---- steps stay small ------------------------------------------------------------------------------------


def most_of_adam(optimizer: OptimizerConfig) -> float:
    """Return the bound of |first| / root that no gradients can exceed (Cauchy and Schwarz)."""
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    return (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16, FLOAT8], ids=str)
def test_no_step_is_much_larger_than_adam_s_can_be(backend: str, dtype: torch.dtype) -> None:
    # Now and then gradients of all sizes from 1 to 10^-12 within a label: most roots are far below the unit.
    label, fan_in, steps = 64, 33, 120
    optimizer = OptimizerConfig(kind="adam", eps=1e-30)
    state = OptimizerState.zeros("adam", label, fan_in, dtype)
    generator = torch.Generator().manual_seed(2)
    problem = constant_inputs(torch.zeros(fan_in), label)
    sizes = 10.0 ** torch.empty(fan_in).uniform_(-12.0, 0.0, generator=generator)
    worst, rate = 0.0, 1e-6
    for number in range(1, steps + 1):
        now_and_then = torch.rand(fan_in, generator=generator) < 0.2
        drawn = torch.randn(fan_in, generator=generator) * sizes * now_and_then
        problem.features[:, 0] = drawn
        before = problem.weight.clone()
        step(problem, state, rate, optimizer=optimizer, step=number)
        corrected = rate / (1 - 0.9**number) * (1 - 0.999**number) ** 0.5
        worst = max(worst, float((problem.weight - before).abs().max()) / corrected)
    assert 0.5 < worst < (1.0 if dtype == torch.float32 else 1.5) * most_of_adam(optimizer)


def test_a_root_far_below_the_unit_is_kept_as_one_unit_until_it_is_zero(backend: str) -> None:
    values = torch.tensor([1.0, 1e-3, 1e-9, 1e-15, 0.0])
    state = roundings(values, FLOAT8, "adam", 70)
    unit = units(state.scale)[0, 0]
    assert float(unit) == 2.0**-8
    root = state.weight_second.double()
    least = finite_values(FLOAT8)[finite_values(FLOAT8) > 0.0][0]
    assert bool((root[:, 2:4] == least).all()) and bool((root[:, 4] == 0.0).all())
    for number in range(2, 40):  # without gradients it stays there, and no step follows from it
        problem = constant_inputs(torch.zeros(5), 70)
        step(problem, state, 1.0, optimizer=OptimizerConfig(kind="adam"), step=number)
        assert bool((state.weight_second.float()[:, 2:4] > 0.0).all())
        assert float(problem.weight.abs().max()) < most_of_adam(OptimizerConfig(kind="adam"))


def test_a_long_run_of_changes_too_small_to_round_to_nearest_is_unbiased(backend: str) -> None:
    # beta2 = 0.999 changes a root by a thousandth of itself, a hundredth of the distance between codes.
    label, steps = 2048, 100
    state = OptimizerState.zeros("adam", label, 2, FLOAT8)
    state.weight_second.copy_(torch.tensor([1.0, 256.0]).repeat(label, 1))
    state.scale.fill_(127)
    optimizer = OptimizerConfig(kind="adam")
    problem = constant_inputs(torch.zeros(2), label)
    for number in range(1, steps + 1):
        step(problem, state, 0.0, optimizer=optimizer, step=number)
    root = state.weight_second.double() * units(state.scale)
    exact = torch.tensor([1.0, 256.0], dtype=torch.float64) * 0.999 ** (steps / 2)
    z = (root.mean(0) - exact) / (root.std(0) / label**0.5)
    assert float(z.abs().max()) < Z_BOUND
    assert float((exact - torch.tensor([1.0, 256.0])).abs().min()) > 0.04  # the run has moved them


@KINDS
def test_the_scale_follows_the_largest_of_each_label_up_and_down(backend: str, kind: str) -> None:
    label = 70
    state = OptimizerState.zeros(kind, label, 3, FLOAT8)
    for size in (1.0, 2.0**60, 2.0**-60):
        problem = constant_inputs(torch.tensor([1.0, -0.5, 0.25]), label)
        problem.bias.copy_(torch.linspace(1.0, 2.0, label))  # a gradient of its own for each label
        step(problem, state, 0.0, optimizer=FORGETFUL[kind], scale=size)
        largest = (1.0 + torch.linspace(1.0, 2.0, label)).double() * size
        assert torch.equal(state.scale, scales_for(largest))


def test_no_gradient_leaves_a_state_of_zeros(backend: str) -> None:
    state = OptimizerState.zeros("adam", 70, 5, FLOAT8)
    problem = constant_inputs(torch.zeros(5), 70)
    step(problem, state, 0.1, optimizer=OptimizerConfig(kind="adam"))
    assert all(bool((value.float() == 0.0).all()) for value in state.by_connection())
    assert bool((problem.weight == 0.0).all())


@KINDS
def test_what_overflows_does_not_become_finite(backend: str, kind: str) -> None:
    state = roundings(torch.tensor([1e30, 1.0]), FLOAT8, kind, 5, scale=1e20)
    assert bool(state.weight_first.float()[:, 0].isnan().all())
    assert bool(state.weight_first.float()[:, 1].isfinite().all())


# ---- redistribution, threads, checks ---------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [1, 16])
@DTYPES
def test_a_redistribution_resets_the_state_of_what_it_moves_and_nothing_else(
    backend: str, dtype: torch.dtype, group_size: int
) -> None:
    problem = oracles.make_problem(200, 12, 400, 3, group_size=group_size)
    state = OptimizerState.zeros("adam", 200, 12, dtype)
    for value in state.by_connection():
        value.fill_(1.5)
    redistribute(
        problem.weight,
        problem.indices,
        400,
        fraction=0.3,
        states=state.by_connection(),
        group_size=group_size,
    )
    moved = problem.weight == 0.0
    assert 0.25 < float(moved.double().mean()) < 0.35
    for value in state.by_connection():
        assert torch.equal(value.float(), torch.where(moved, 0.0, 1.5))


@DTYPES
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    problem = oracles.make_problem(1009, 33, 200, 130)
    results = []
    for count in (1, 2, 3, 7):
        with oracles.threads(count):
            one, state = problem.copy(), OptimizerState.zeros("adam", 1009, 33, dtype)
            for number in range(1, 4):
                step(one, state, 0.3, optimizer=OptimizerConfig(kind="adam"), step=number)
            redistribute(one.weight, one.indices, 200, fraction=0.3, states=state.by_connection())
            tensors = (one.weight, one.bias, one.indices, *state.tensors().values())
            results.append([oracles.bits(value) for value in tensors])
    assert all(result == results[0] for result in results)


def test_a_state_widens_to_what_its_codes_and_exponents_say() -> None:
    state = OptimizerState.zeros("adam", 2, 3, FLOAT8)
    state.weight_first.copy_(torch.tensor([[1.0, -448.0, 0.0], [2.0**-9, 3.5, -1.0]]))
    state.weight_second.copy_(torch.tensor([[2.0, 0.5, 0.0], [2.0**-9, 10.0, 448.0]]))
    state.scale.copy_(torch.tensor([127, 117], dtype=torch.uint8))
    wide = state.widened()
    assert wide.scale is None and wide.dtype == torch.float32
    assert wide.weight_first.tolist() == [[1.0, -448.0, 0.0], [2.0**-19, 3.5 / 1024, -1.0 / 1024]]
    assert wide.weight_second.tolist() == [[4.0, 0.25, 0.0], [2.0**-38, 100 / 2**20, 448.0**2 / 2**20]]
    for kind in ("sgd", "label_adam"):  # nothing for each connection
        narrow = OptimizerState.zeros(kind, 5, 3, FLOAT8)
        assert list(narrow.tensors()) == list(OptimizerState.zeros(kind, 5, 3).tensors())
        assert all(value.dtype == torch.float32 for value in narrow.tensors().values())


def float8_state(**changes: Tensor | None) -> OptimizerState:
    return replace(OptimizerState.zeros("adam", 65, 16, FLOAT8), **changes)


WRONG: dict[str, tuple[OptimizerState, str]] = {
    "no scale": (float8_state(scale=None), "scale absent"),
    "a scale too many": (
        replace(OptimizerState.zeros("adam", 65, 16), scale=torch.zeros(65, dtype=torch.uint8)),
        "scale too many",
    ),
    "a scale of another shape": (
        float8_state(scale=torch.zeros(64, dtype=torch.uint8)),
        r"state.scale must be uint8 \[label\] = \[65\], got uint8 \[64\]",
    ),
    "a scale in float32": (float8_state(scale=torch.zeros(65)), r"state.scale must be uint8 .* got float32"),
    "a scale beyond the largest": (
        float8_state(scale=torch.full((65,), 248, dtype=torch.uint8)),
        "state.scale must be at most 247, got 248",
    ),
    "moments of two dtypes": (
        float8_state(weight_second=torch.zeros(65, 16)),
        r"state.weight_second must be float8_e4m3fn .* got float32",
    ),
    "another float8": (
        float8_state(weight_first=torch.zeros(65, 16).to(torch.float8_e5m2)),
        "state must be one of float32, bfloat16, float8_e4m3fn, got float8_e5m2",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_state_is_refused(backend: str, wrong: str) -> None:
    state, message = WRONG[wrong]
    problem = oracles.make_problem()
    before = problem.weight.clone()
    with pytest.raises(NativeError, match=message):
        step(problem, state, 0.1, optimizer=OptimizerConfig(kind="adam"))
    assert torch.equal(problem.weight, before)


def test_states_of_two_dtypes_are_not_redistributed(backend: str) -> None:
    problem = oracles.make_problem()
    states = [torch.zeros(65, 16).to(FLOAT8), torch.zeros(65, 16)]
    with pytest.raises(NativeError, match=r"state 1 must be float8_e4m3fn .* got float32"):
        redistribute(problem.weight, problem.indices, 100, fraction=0.1, states=states)
