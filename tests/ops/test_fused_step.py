"""fused_step against hand values, one exact step at a time, and the unfused path over several steps."""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import oracles
import pytest
import torch
from oracles import BFLOAT16, FLOAT32, SHAPES, UNIT, Problem, Shape
from torch import Tensor

from xmlc.config import OptimizerConfig
from xmlc.ops import LOSSES, OptimizerState, fused_step, pairs_by_label, sparse_linear

KINDS = ("sgd", "momentum", "adam", "label_adam")
FAMILIES = {"pointwise": ("squared_hinge", "bce"), "normalised": oracles.NORMALISED}
every_normalised = pytest.mark.parametrize("loss", oracles.NORMALISED)


@dataclass(frozen=True)
class Settings:
    """What a step does."""

    loss: str
    optimizer: OptimizerConfig
    rate: float = 0.05
    scale: float = 0.25
    positive_weight: Tensor | None = None
    share_positives: bool = False
    gradient_cutoff: float = 0.0

    @property
    def of_loss(self) -> dict:
        """The arguments of the loss."""
        return {
            "loss": self.loss,
            "scale": self.scale,
            "positive_weight": self.positive_weight,
            "share_positives": self.share_positives,
        }


def settings(loss: str = "squared_hinge", kind: str = "sgd", weight_decay: float = 0.0, **others) -> Settings:
    return Settings(loss, OptimizerConfig(kind=kind, weight_decay=weight_decay), **others)


def positive_weights(label: int) -> Tensor:
    return torch.linspace(0.25, 4.0, label)


def random_state(kind: str, label: int, fan_in: int) -> OptimizerState:
    """Return a state as earlier steps may have left it."""
    generator = torch.Generator().manual_seed(5)
    state = OptimizerState.zeros(kind, label, fan_in)
    for name, value in state.tensors().items():
        value.normal_(generator=generator)
        if name.endswith("second"):
            value.square_()
    return state


def copy_of(state: OptimizerState) -> OptimizerState:
    return OptimizerState(**{name: value.clone() for name, value in state.tensors().items()})


def step_in_place(
    problem: Problem, chosen: Settings, state: OptimizerState, step: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    return fused_step(
        *problem.of_step,
        optimizer=chosen.optimizer,
        learning_rate=chosen.rate,
        state=state,
        step=step,
        seed=seed,
        group_size=problem.group_size,
        gradient_cutoff=chosen.gradient_cutoff,
        **chosen.of_loss,
    )


@dataclass(frozen=True)
class Expected:
    """The exact outcome of a step, and how far a float32 one may be off."""

    gradients: oracles.Gradients
    update: oracles.Update
    gradient_bounds: oracles.Gradients
    update_bounds: oracles.Update


def expected_step(problem: Problem, chosen: Settings, state: OptimizerState, step: int) -> Expected:
    exact = oracles.gradients(problem, **chosen.of_loss, dtype=torch.float64)
    bounds = oracles.gradient_bounds(problem, **chosen.of_loss)
    rule = (chosen.optimizer, chosen.rate, state, step)
    return Expected(
        exact,
        oracles.exact_update(problem, exact, *rule),
        bounds,
        oracles.update_bounds(problem, exact, bounds, *rule),
    )


def assert_takes(
    expected: Expected, problem: Problem, chosen: Settings, state: OptimizerState, step: int
) -> Problem:
    """Take a step, in place of the state, and require all its results to be within their bounds."""
    after = problem.copy()
    loss, feature_gradient = step_in_place(after, chosen, state, step)

    exact, bound = expected.gradients, expected.gradient_bounds
    assert loss.dtype == torch.float64 and loss.shape == ()
    oracles.assert_within(loss, exact.loss, bound.loss, "loss")
    oracles.assert_within(feature_gradient, exact.features, bound.features, "feature gradient")
    update, bound = expected.update, expected.update_bounds
    oracles.assert_within(after.bias, update.bias, bound.bias, "bias")
    assert_weight = oracles.assert_within if after.weight.dtype == FLOAT32 else oracles.assert_within_rounded
    assert_weight(after.weight, update.weight, bound.weight, "weight")
    for name, value in state.tensors().items():
        oracles.assert_within(value, update.state[name], bound.state[name], name)
    for name in ("features", "indices", "offsets", "labels"):
        assert torch.equal(getattr(after, name), getattr(problem, name)), name
    return after


def assert_exact_step(problem: Problem, chosen: Settings, state: OptimizerState, step: int = 1) -> Problem:
    """Take a step, in place of the state, within the budget of the exact one; return the layer after it."""
    return assert_takes(expected_step(problem, chosen, state, step), problem, chosen, state, step)


def hand_problem() -> Problem:
    """Logits [[0.5, 0], [-3.25, -1]]; instance 0 has label 0, instance 1 has label 1."""
    return Problem(
        features=torch.tensor([[1.0, 2.0], [0.0, -1.0], [3.0, 1.0]]),
        weight=torch.tensor([[0.5, 1.0], [-1.0, 0.25]]),
        indices=torch.tensor([[0, 1], [2, 0]], dtype=torch.int32),
        bias=torch.tensor([0.0, -0.5]),
        offsets=torch.tensor([0, 1, 2]),
        labels=torch.tensor([0, 1]),
    )


def test_squared_hinge_step_has_its_hand_values(backend: str) -> None:
    # slack [[0.5, 1], [-2.25, 2]], so d loss / d logit [[-1, 2], [0, -4]] before the scale of 1/2
    problem = hand_problem()
    loss, feature_gradient = step_in_place(problem, settings(rate=0.125, scale=0.5), OptimizerState())
    assert loss.item() == 0.5 * (0.25 + 1.0 + 0.0 + 4.0)
    assert feature_gradient.tolist() == [[-0.25, 0.0], [-0.5, 1.0], [0.0, 2.0]]
    assert problem.weight.tolist() == [[0.3125, 1.125], [-0.75, 0.75]]
    assert problem.bias.tolist() == [-0.0625, -0.25]


def test_positive_weight_multiplies_the_loss_of_positives_only(backend: str) -> None:
    problem = hand_problem()
    chosen = settings(rate=0.125, scale=0.5, positive_weight=torch.tensor([2.0, 0.5]))
    loss, feature_gradient = step_in_place(problem, chosen, OptimizerState())
    assert loss.item() == 0.5 * (2.0 * 0.25 + 1.0 + 0.0 + 0.5 * 4.0)
    # d loss / d logit [[-1, 1], [0, -1]]
    assert feature_gradient.tolist() == [[-0.5, 0.25], [-1.0, 1.0], [0.0, 1.0]]
    assert problem.bias.tolist() == [0.0, -0.375]


def test_momentum_step_has_its_hand_values(backend: str) -> None:
    problem = hand_problem()
    state = OptimizerState(weight_first=torch.ones(2, 2), bias_first=torch.ones(2))
    optimizer = OptimizerConfig(kind="momentum", momentum=0.5, weight_decay=1.0)
    step_in_place(problem, Settings("squared_hinge", optimizer, rate=0.125, scale=0.5), state)
    assert state.weight_first.tolist() == [[2.0, -0.5], [-1.5, -3.5]]
    assert state.bias_first.tolist() == [1.0, -1.5]
    assert problem.weight.tolist() == [[0.4375 - 0.25, 0.875 + 0.0625], [-0.875 + 0.1875, 0.21875 + 0.4375]]
    assert problem.bias.tolist() == [-0.125, -0.3125]


def test_binary_cross_entropy_step_has_its_hand_values(backend: str) -> None:
    problem = hand_problem()
    problem.weight.zero_()
    problem.bias.zero_()
    loss, feature_gradient = step_in_place(problem, settings("bce", rate=1.0, scale=1.0), OptimizerState())
    assert loss.item() == pytest.approx(4 * math.log(2.0), rel=1e-6)
    assert feature_gradient.tolist() == [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    # d loss / d logit [[-1/2, 1/2], [1/2, -1/2]]
    assert problem.weight.tolist() == [[-0.5, 0.5], [-1.0, 0.5]]
    assert problem.bias.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("share_positives", [False, True])
@every_normalised
def test_softmax_steps_have_their_hand_values(backend: str, loss: str, share_positives: bool) -> None:
    # exp(z) = 1, 2, 4, 8; labels 1 and 2 are positive and weigh 3 and 1/2
    problem = Problem(
        features=torch.ones(1, 1),
        weight=torch.tensor([[1.0], [0.0], [0.0], [0.0]]),
        indices=torch.zeros(4, 1, dtype=torch.int32),
        bias=torch.tensor([-1.0, math.log(2.0), math.log(4.0), math.log(8.0)]),
        offsets=torch.tensor([0, 2]),
        labels=torch.tensor([2, 1]),
    )
    before = problem.copy()
    chosen = settings(
        loss,
        rate=1.0,
        scale=0.5,
        positive_weight=torch.tensor([9.0, 3.0, 0.5, 9.0]),
        share_positives=share_positives,
    )
    value, feature_gradient = step_in_place(problem, chosen, OptimizerState())
    if loss == "softmax":  # the sum over all labels is 15
        expected = 3.0 * math.log(15 / 2) + 0.5 * math.log(15 / 4)
        slopes = torch.tensor([3.5 / 15, 3.5 * 2 / 15 - 3.0, 3.5 * 4 / 15 - 0.5, 3.5 * 8 / 15])
    else:  # the sum over the negatives is 9, so that the positives' terms are log(11 / 2) and log(13 / 4)
        expected = 3.0 * math.log(11 / 2) + 0.5 * math.log(13 / 4)
        pull = 3.0 / 11 + 0.5 / 13
        slopes = torch.tensor([pull, -3.0 * 9 / 11, -0.5 * 9 / 13, 8.0 * pull])
    factor = 0.25 if share_positives else 0.5
    assert value.item() == pytest.approx(factor * expected, rel=1e-6)
    torch.testing.assert_close(before.bias - problem.bias, factor * slopes, rtol=2e-6, atol=0.0)
    torch.testing.assert_close(before.weight - problem.weight, factor * slopes[:, None], rtol=2e-6, atol=0.0)
    assert feature_gradient.item() == pytest.approx(factor * float(slopes[0]), rel=1e-6)


@pytest.mark.parametrize("kind", ["adam", "label_adam"])
def test_the_first_adam_step_moves_by_the_learning_rate(backend: str, kind: str) -> None:
    problem = hand_problem()
    problem.features[:] = 1.0  # so that all gradients of a label are equal
    problem.weight[:] = torch.tensor([[0.25, 0.25], [-1.0, -1.5]])
    problem.bias[:] = torch.tensor([-0.25, 0.5])
    before = problem.copy()
    # logits 0.25 and -2, slack [[0.75, 1.25], [-1, 3]], so the gradients are 1/4 and -3/2
    step_in_place(problem, settings(kind=kind, rate=0.125, scale=0.25), OptimizerState.zeros(kind, 2, 2))
    direction = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(
        problem.weight, before.weight + 0.125 * direction[:, None], rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(problem.bias, before.bias + 0.125 * direction, rtol=1e-6, atol=1e-6)


@cache
def shape_step(shape: Shape, family: str) -> tuple[Settings, OptimizerState, int, Expected]:
    """Return a step of this shape; loss, optimizer, decay and weights of positives cycle over the shapes."""
    number = SHAPES.index(shape)
    kind = KINDS[number % 4]
    chosen = settings(
        FAMILIES[family][number // 4 % 2],
        kind,
        weight_decay=(0.0, 0.1, 0.5)[number % 3],
        scale=1.0 / shape.batch,
        positive_weight=positive_weights(shape.label) if number % 5 < 2 else None,
        share_positives=number % 7 < 3,
    )
    state, step = random_state(kind, shape.label, shape.fan_in), 1 + number % 3
    return chosen, state, step, expected_step(oracles.shape_problem(shape), chosen, state, step)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_step_is_within_the_budget_of_the_exact_one(backend: str, family: str, shape: Shape) -> None:
    chosen, state, step, expected = shape_step(shape, family)
    assert_takes(expected, oracles.shape_problem(shape), chosen, copy_of(state), step)


GRID = [
    pytest.param(loss, kind, decay, weighted, id=f"{loss}-{kind}-decay{decay}-{weighted}")
    for loss, kind, decay, weighted in product(LOSSES, KINDS, (0.0, 0.3), ("unweighted", "weighted"))
]
STEPS = 4


def grid_settings(loss: str, kind: str, decay: float, weighted: str) -> Settings:
    return settings(
        loss,
        kind,
        decay,
        scale=1 / 17,
        positive_weight=positive_weights(65) if weighted == "weighted" else None,
        share_positives=weighted == "weighted",
    )


@cache
def batches(count: int = STEPS) -> list[Problem]:
    """Return one layer with a batch for every step."""
    return [oracles.make_problem(65, 16, 100, 17, group_size=16, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("loss", "kind", "decay", "weighted"), GRID)
def test_every_step_from_zero_state_is_within_the_budget_of_the_exact_one(
    backend: str, loss: str, kind: str, decay: float, weighted: str, weight_dtype: torch.dtype
) -> None:
    chosen = grid_settings(loss, kind, decay, weighted)
    layer = batches()[0]
    layer = replace(layer, weight=layer.weight.to(weight_dtype))
    state = OptimizerState.zeros(kind, 65, 16)
    for step, batch in enumerate(batches()[:3], start=1):
        problem = replace(layer, features=batch.features, offsets=batch.offsets, labels=batch.labels)
        layer = assert_exact_step(problem, chosen, state, step)


@dataclass(frozen=True)
class Run:
    """Where a layer is after some steps."""

    loss: Tensor
    feature_gradient: Tensor
    weight: Tensor
    bias: Tensor


def dense_run(chosen: Settings, dtype: torch.dtype) -> Run:
    """Train by dense algebra in this dtype."""
    weight, bias = batches()[0].weight.to(dtype, copy=True), batches()[0].bias.to(dtype, copy=True)
    zeros = OptimizerState.zeros(chosen.optimizer.kind, *weight.shape)
    trained = oracles.DenseOptimizer(chosen.optimizer, chosen.rate, weight, bias, zeros)
    for step, batch in enumerate(batches(), start=1):
        problem = replace(batch, weight=weight, bias=bias, indices=batches()[0].indices)
        found = oracles.gradients(problem, **chosen.of_loss, dtype=dtype)
        trained.step(found.weight, found.bias, step)
    return Run(found.loss, found.features, weight, bias)


@cache
def dense_runs(loss: str, kind: str, decay: float, weighted: str) -> tuple[Run, Run]:
    chosen = grid_settings(loss, kind, decay, weighted)
    return dense_run(chosen, torch.float64), dense_run(chosen, torch.float32)


def unfused_run(chosen: Settings) -> Run:
    """Train by sparse_linear, autograd and a torch optimizer, all float32."""
    weight, bias = batches()[0].weight.clone(), batches()[0].bias.clone()
    zeros = OptimizerState.zeros(chosen.optimizer.kind, *weight.shape)
    trained = oracles.DenseOptimizer(chosen.optimizer, chosen.rate, weight, bias, zeros)
    for step, batch in enumerate(batches(), start=1):
        leaves = [value.clone().requires_grad_() for value in (batch.features, weight, bias)]
        logits = sparse_linear(leaves[0], leaves[1], batches()[0].indices, leaves[2], batch.group_size)
        target = oracles.targets(batch, torch.float32)
        factor = oracles.factors(chosen.loss, target, chosen.positive_weight, chosen.share_positives)
        loss = chosen.scale * LOSSES[chosen.loss](logits, target > 0, factor).sum()
        loss.backward()
        trained.step(leaves[1].grad, leaves[2].grad, step)
    return Run(loss.detach(), leaves[0].grad, weight, bias)


def fused_run(chosen: Settings) -> Run:
    layer = batches()[0].copy()
    state = OptimizerState.zeros(chosen.optimizer.kind, *layer.weight.shape)
    for step, batch in enumerate(batches(), start=1):
        problem = replace(layer, features=batch.features, offsets=batch.offsets, labels=batch.labels)
        loss, feature_gradient = step_in_place(problem, chosen, state, step)
    return Run(loss, feature_gradient, layer.weight, layer.bias)


@pytest.mark.parametrize(("loss", "kind", "decay", "weighted"), GRID)
def test_several_fused_steps_are_as_exact_as_the_unfused_and_the_plain_path(
    backend: str, loss: str, kind: str, decay: float, weighted: str
) -> None:
    chosen = grid_settings(loss, kind, decay, weighted)
    exact, plain = dense_runs(loss, kind, decay, weighted)
    for path, run in (("fused", fused_run(chosen)), ("unfused", unfused_run(chosen))):
        for name in ("feature_gradient", "weight", "bias"):
            found, truth = getattr(run, name), getattr(exact, name)
            one_rounding_each_step = STEPS * UNIT * (truth.abs() + 1.0)
            oracles.assert_no_worse_than_plain(
                found, truth, getattr(plain, name), one_rounding_each_step, f"{path} {name}"
            )
        assert abs(float(run.loss) - float(exact.loss)) <= 2 * abs(float(plain.loss) - float(exact.loss)) + (
            oracles.gamma(STEPS * 65) * float(exact.loss)
        )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("slack", [0.0, 5.0], ids=["few active", "many active"])
def test_many_blocks_by_strips_equal_the_unfused_path(backend: str, loss: str, slack: float) -> None:
    problem = oracles.make_problem(20_011, 16, 16_500, 80)
    problem.bias.fill_(slack - 5.0)
    chosen = settings(loss, scale=1 / 80)
    copy = problem.copy()
    found, feature_gradient = step_in_place(copy, chosen, OptimizerState())
    leaves = [value.clone().requires_grad_() for value in (problem.features, problem.weight, problem.bias)]
    logits = sparse_linear(leaves[0], leaves[1], problem.indices, leaves[2])
    target = oracles.targets(problem, torch.float32)
    factor = oracles.factors(loss, target, None, chosen.share_positives)
    expected = chosen.scale * LOSSES[loss](logits, target > 0, factor).sum()
    expected.backward()
    torch.testing.assert_close(found.float(), expected.detach(), rtol=1e-4, atol=1e-6)
    for name, value, leaf in (
        ("features", feature_gradient, leaves[0].grad),
        ("weight", (problem.weight - copy.weight) / chosen.rate, leaves[1].grad),
        ("bias", (problem.bias - copy.bias) / chosen.rate, leaves[2].grad),
    ):
        assert leaf is not None
        size = float(leaf.abs().max())
        assert size > 0
        torch.testing.assert_close(
            value, leaf, rtol=1e-3, atol=1e-3 * size, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_bias_of_zero_gradient_is_not_decayed(backend: str) -> None:
    for kind in KINDS:
        problem = oracles.make_problem()
        problem.bias.fill_(-100.0)  # no instance is within the margin of a negative
        problem = replace(problem, offsets=torch.zeros(34, dtype=torch.int64), labels=problem.labels[:0])
        before = problem.copy()
        step_in_place(problem, settings(kind=kind, weight_decay=0.5), OptimizerState.zeros(kind, 65, 16))
        assert torch.equal(problem.bias, before.bias), kind
        decayed = before.weight.double() * (1.0 - 0.05 * 0.5)
        oracles.assert_within(problem.weight, decayed, oracles.gamma(3) * decayed.abs() + oracles.TINY, kind)


@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("input", "batch", "group_size"),
    [(300, 33, 1), (16_400, 64, 1), (300, 80, 16)],
    ids=["narrow", "by strips", "in groups"],
)
def test_exact_hinge_zeros_leave_inactive_labels_bit_identical(
    backend: str, weight_dtype: torch.dtype, input: int, batch: int, group_size: int
) -> None:
    problem = oracles.make_problem(
        label=1009, input=input, batch=batch, group_size=group_size, weight_dtype=weight_dtype
    )
    problem = replace(problem, labels=torch.arange(problem.labels.numel()) % 10 * 100)
    active = torch.zeros(1009, dtype=torch.bool)
    active[problem.labels] = True  # the positives' slack is large
    problem.bias.fill_(-100.0)
    problem.bias[::7] = -1.0  # and some negatives are within the margin
    problem.weight[::7] *= 0.1
    problem.weight[7] = 0.0  # slack exactly 0: still inactive
    truth = oracles.gradients(problem, **settings().of_loss, dtype=torch.float64)
    active |= truth.bias != 0
    assert not active[7] and 100 < int(active.sum()) < 200
    before = problem.copy()
    step_in_place(problem, settings(), OptimizerState())
    for value, old in ((problem.weight, before.weight), (problem.bias, before.bias)):
        assert oracles.bits(value[~active]) == oracles.bits(old[~active])
    assert not torch.equal(problem.bias[active], before.bias[active])


def test_a_batch_without_any_slack_has_loss_and_gradient_of_exactly_zero(backend: str) -> None:
    problem = oracles.make_problem()
    problem.bias.fill_(-100.0)
    problem = replace(problem, offsets=torch.zeros(34, dtype=torch.int64), labels=problem.labels[:0])
    loss, feature_gradient = step_in_place(problem, settings(), OptimizerState())
    assert loss.item() == 0.0 and not feature_gradient.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight_dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_inactive_labels_still_decay_and_follow_their_moments(
    backend: str, kind: str, weight_dtype: torch.dtype
) -> None:
    problem = oracles.make_problem(weight_dtype=weight_dtype)
    problem.bias[::2] = -100.0
    assert_exact_step(problem, settings(kind=kind, weight_decay=0.5), random_state(kind, 65, 16), step=7)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("size", [1.0, 30.0, 80.0, 88.0, 1000.0, 10_000.0])
def test_large_logits_of_either_sign_stay_finite_and_exact(backend: str, loss: str, size: float) -> None:
    problem = oracles.make_problem()
    problem.weight.zero_()
    problem.bias[:] = torch.tensor([-size, size]).repeat(33)[:65]
    assert (oracles.targets(problem)[1::2] > 0).any() and (oracles.targets(problem)[::2] > 0).any()
    after = assert_exact_step(problem, settings(loss), OptimizerState())
    assert after.weight.isfinite().all() and after.bias.isfinite().all()


@pytest.mark.parametrize("size", [-10_000.0, 10_000.0])
@every_normalised
def test_logits_far_from_zero_on_one_side_stay_finite_and_exact(backend: str, loss: str, size: float) -> None:
    problem = oracles.make_problem()
    problem.bias[:] += size
    after = assert_exact_step(problem, settings(loss), OptimizerState())
    assert after.weight.isfinite().all() and not torch.equal(after.weight, problem.weight)


RISES = {
    "less-than-the-reference-allows": torch.tensor([39.0]).repeat_interleave(16),
    "one-late-label": torch.tensor([41.0]),
    "one-late-label-far-above": torch.tensor([10_000.0]),
    "stairs": (50.0 * torch.arange(1, 9)).repeat_interleave(24),
    "stairs-just-below-the-reference": (39.5 * torch.arange(1, 9)).repeat_interleave(24),
}


@pytest.mark.parametrize("group_size", [1, 16])
@pytest.mark.parametrize("rise", RISES)
@every_normalised
def test_logits_that_rise_late_in_the_order_of_labels_give_the_exact_step(
    backend: str, loss: str, rise: str, group_size: int
) -> None:
    # The sum over labels is relative to a reference that must follow the largest logit, positive or not.
    problem = oracles.make_problem(label=300, batch=33, group_size=group_size)
    problem.bias[-len(RISES[rise]) - 2 : -2] += RISES[rise]
    assert_exact_step(problem, settings(loss, share_positives=True), OptimizerState())
    offsets, labels = oracles.pairs([[label] for label in range(297, 264, -1)])  # raised: up to 297
    assert_exact_step(replace(problem, offsets=offsets, labels=labels), settings(loss), OptimizerState())


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_show_in_the_loss(backend: str, loss: str, value: float) -> None:
    problem = oracles.make_problem()
    problem.weight[7, 3] = value
    found, _ = step_in_place(problem, settings(loss), OptimizerState())
    assert not found.isfinite()


def one_logit(logit: float, target: int, negatives: int) -> Problem:
    """Return a label with this logit and some of logit 0; after a step at rate 1, weight = -gradient."""
    offsets, labels = oracles.pairs([[0]] if target > 0 else [[]])
    label = 1 + negatives
    return Problem(
        features=torch.ones(1, 1),
        weight=torch.zeros(label, 1),
        indices=torch.zeros(label, 1, dtype=torch.int32),
        bias=torch.tensor([logit] + [0.0] * negatives),
        offsets=offsets,
        labels=labels,
    )


@pytest.mark.parametrize(("loss", "target"), [("bce", -1), ("bce", 1), ("decoupled_softmax", 1)])
def test_logistic_losses_keep_their_relative_precision_everywhere(
    backend: str, loss: str, target: int
) -> None:
    # Down to log(1 + e^-80) = 1.8e-35 and a gradient of the same size, not 0.
    logits = torch.cat([torch.linspace(-80.0, 80.0, 321), torch.linspace(-1.0, 1.0, 80)])
    losses, slopes = [], []
    for logit in logits.tolist():
        problem = one_logit(logit, target, negatives=int(loss == "decoupled_softmax"))  # of which N = 1
        value, _ = step_in_place(problem, settings(loss, rate=1.0, scale=1.0), OptimizerState())
        losses.append(value.item())
        slopes.append(-problem.weight[0].item())

    def truth(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        margin = target * logits.to(dtype)
        return torch.nn.functional.softplus(-margin, threshold=1e3), -target * torch.sigmoid(-margin)

    for found, exact, plain in zip((losses, slopes), truth(torch.float64), truth(FLOAT32), strict=True):
        relative, own = torch.tensor(found, dtype=torch.float64) / exact, plain / exact
        one = torch.ones_like(exact)
        oracles.assert_within(relative, one, oracles.gamma(oracles.ELEMENTARY) * one)
        oracles.assert_no_worse_than_plain(relative, one, own, UNIT * one)


def all_labels(problem: Problem) -> list[list[int]]:
    return [list(range(problem.weight.shape[0]))] * problem.features.shape[1]


POSITIVES = {
    "none": lambda problem: [[] for _ in range(problem.features.shape[1])],
    "all": all_labels,
    "all-of-the-last-instance": lambda problem: (
        [[]] * (problem.features.shape[1] - 1) + all_labels(problem)[:1]
    ),
    "last-label-of-every-instance": lambda problem: (
        [[problem.weight.shape[0] - 1]] * problem.features.shape[1]
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("positives", POSITIVES)
def test_any_pattern_of_positives_gives_the_exact_step(backend: str, loss: str, positives: str) -> None:
    problem = oracles.make_problem(label=63, batch=17)
    offsets, labels = oracles.pairs(POSITIVES[positives](problem))
    problem = replace(problem, offsets=offsets, labels=labels)
    chosen = settings(loss, positive_weight=positive_weights(63), share_positives=True)
    assert_exact_step(problem, chosen, OptimizerState())


@pytest.mark.parametrize("group_size", [1, 16])
@pytest.mark.parametrize(
    ("loss", "positives"), [("softmax", "none"), ("decoupled_softmax", "none"), ("decoupled_softmax", "all")]
)
def test_without_positives_or_their_rivals_a_softmax_step_is_exactly_nothing(
    backend: str, loss: str, positives: str, group_size: int
) -> None:
    problem = oracles.make_problem(label=63, batch=17, group_size=group_size)
    offsets, labels = oracles.pairs(POSITIVES[positives](problem))
    problem = replace(problem, offsets=offsets, labels=labels)
    before = problem.copy()
    value, feature_gradient = step_in_place(problem, settings(loss), OptimizerState())
    assert value.item() == 0.0 and not feature_gradient.any()
    assert oracles.bits(problem.weight) == oracles.bits(before.weight)
    assert oracles.bits(problem.bias) == oracles.bits(before.bias)


@every_normalised
def test_an_instance_without_positives_has_a_softmax_gradient_of_exactly_zero(
    backend: str, loss: str
) -> None:
    problem = oracles.make_problem()
    empty = problem.offsets.diff() == 0
    _, feature_gradient = step_in_place(problem, settings(loss), OptimizerState())
    assert 0 < int(empty.sum()) < 33
    assert torch.equal(feature_gradient.any(0), ~empty)


def constant_logits(logits: list[float], batch: int = 1) -> Problem:
    """Return equal instances without positives, of one input that is 1, with these logits; weights 1."""
    label = len(logits)
    return Problem(
        features=torch.ones(1, batch),
        weight=torch.ones(label, 1),
        indices=torch.zeros(label, 1, dtype=torch.int32),
        bias=torch.tensor(logits) - 1.0,
        offsets=torch.zeros(batch + 1, dtype=torch.int64),
        labels=torch.zeros(0, dtype=torch.int64),
    )


def test_a_label_at_or_below_the_gradient_cutoff_is_not_updated(backend: str) -> None:
    # slack 1/4, 1/2, 3/4 and 0, so d loss / d logit 1/2, 1, 3/2 and 0; the loss still has all of it
    problem = constant_logits([-0.75, -0.5, -0.25, -1.0])
    chosen = settings(rate=1.0, scale=0.25, gradient_cutoff=1.0)
    loss, feature_gradient = step_in_place(problem, chosen, OptimizerState())
    assert loss.item() == 0.25 * (1 / 16 + 1 / 4 + 9 / 16)
    assert problem.weight.flatten().tolist() == [1.0, 1.0, 1.0 - 0.375, 1.0]
    assert problem.bias.tolist() == [-1.75, -1.5, -1.25 - 0.375, -2.0]
    assert feature_gradient.item() == 0.375


@every_normalised
def test_the_gradient_cutoff_of_a_softmax_compares_the_whole_gradient(backend: str, loss: str) -> None:
    # One positive, of weight 8 and probability 1/2: the gradients are -4, 2, 1, 1/2 and 1/2 in both losses.
    problem = constant_logits([math.log(p) for p in (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16)])
    problem = replace(problem, offsets=torch.tensor([0, 1]), labels=torch.tensor([0]))
    chosen = settings(loss, rate=0.125, scale=1.0, positive_weight=torch.full((5,), 8.0))
    exact, cut = problem.copy(), problem.copy()
    value, _ = step_in_place(exact, chosen, OptimizerState())
    cut_value, _ = step_in_place(cut, replace(chosen, gradient_cutoff=1.125), OptimizerState())
    assert cut_value == value
    assert torch.equal(cut.weight[:2], exact.weight[:2]) and torch.equal(cut.bias[:2], exact.bias[:2])
    assert torch.equal(cut.weight[2:], problem.weight[2:]) and torch.equal(cut.bias[2:], problem.bias[2:])
    assert not (exact.weight == problem.weight).any()


def test_an_instance_above_the_cutoff_carries_those_of_its_tile_and_no_others(backend: str) -> None:
    # Of 128 instances the first has a gradient of 2 (logit 0), the others 1/2 (logit -3/4).
    problem = constant_logits([0.0], batch=128)
    problem.weight.fill_(0.75)
    problem.bias.fill_(-0.75)
    problem.features[0, 1:] = 0.0
    chosen = settings(rate=1.0, scale=1.0, gradient_cutoff=1.0)
    _, feature_gradient = step_in_place(problem, chosen, OptimizerState())
    tile = int(feature_gradient.count_nonzero())
    assert 16 <= tile <= 64
    assert feature_gradient[0].tolist() == [1.5] + [0.375] * (tile - 1) + [0.0] * (128 - tile)
    assert problem.weight.item() == 0.75 - 2.0
    assert problem.bias.item() == -0.75 - 2.0 - 0.5 * (tile - 1)


@pytest.mark.parametrize("group_size", [1, 16])
@pytest.mark.parametrize(
    ("loss", "quiet"),
    [("squared_hinge", -0.99), ("bce", -4.0), ("softmax", -4.0), ("decoupled_softmax", -4.0)],
)
def test_a_label_takes_the_exact_step_or_is_below_the_cutoff(
    backend: str, loss: str, quiet: float, group_size: int
) -> None:
    problem = oracles.make_problem(label=300, batch=16, group_size=group_size)
    problem.bias[152:] = quiet
    problem.weight[152:] *= 1e-3
    exact, cut = problem.copy(), problem.copy()
    value, _ = step_in_place(exact, settings(loss), OptimizerState())
    cut_value, _ = step_in_place(cut, settings(loss, gradient_cutoff=0.05), OptimizerState())
    assert cut_value == value
    logit = oracles.logits(*problem.layer).requires_grad_()
    target = oracles.targets(problem, FLOAT32)
    (slope,) = torch.autograd.grad(oracles.total_loss(loss, logit, target, None, False), logit)
    above = slope.abs().amax(1) > 0.05
    exactly, dropped = (
        (cut.weight == other.weight).all(1) & (cut.bias == other.bias) for other in (exact, problem)
    )
    assert exactly[above].all() and dropped[~above].all() and not exactly.all()


@pytest.mark.parametrize("kind", KINDS)
def test_labels_below_the_cutoff_still_decay_and_follow_their_moments(backend: str, kind: str) -> None:
    problem = oracles.make_problem()
    chosen = settings("softmax", kind, weight_decay=0.5, gradient_cutoff=1e30)
    state = random_state(kind, 65, 16)
    rule = (chosen.optimizer, chosen.rate, state, 7)
    exact = oracles.gradients(problem, **chosen.of_loss, dtype=torch.float64)
    bound = oracles.gradient_bounds(problem, **chosen.of_loss)
    nothing, off = (
        oracles.Gradients(of.loss, *map(torch.zeros_like, (of.features, of.weight, of.bias)))
        for of in (exact, bound)
    )
    update, off_update = (
        oracles.exact_update(problem, nothing, *rule),
        oracles.update_bounds(problem, nothing, off, *rule),
    )
    assert_takes(Expected(nothing, update, off, off_update), problem, chosen, state, 7)


def outcome(problem: Problem, chosen: Settings, **options: int) -> list[bytes]:
    """Return the bits of everything that a step from a fixed state gives."""
    problem = problem.copy()
    label, fan_in = problem.weight.shape
    state = random_state(chosen.optimizer.kind, label, fan_in)
    results = step_in_place(problem, chosen, state, **options)
    return [
        oracles.bits(value) for value in (*results, problem.weight, problem.bias, *state.tensors().values())
    ]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_repeated_positive_counts_once(backend: str, loss: str) -> None:
    problem = oracles.make_problem()
    chosen = settings(loss, positive_weight=positive_weights(65), share_positives=True)
    counts = 3 * problem.offsets.diff()
    repeated = replace(
        problem,
        offsets=torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        labels=torch.cat([row.repeat(3) for row in problem.labels.tensor_split(problem.offsets[1:-1])]),
    )
    assert repeated.labels.numel() == 3 * problem.labels.numel()
    assert outcome(repeated, chosen) == outcome(problem, chosen)


def test_pairs_are_the_positives_by_rising_label_each_once() -> None:
    offsets, labels = oracles.pairs([[4, 1, 4], [], [1, 0]])
    pair_label, pair_instance = pairs_by_label(offsets, labels, batch=3, label=5)
    assert pair_label.tolist() == [0, 1, 1, 4] and pair_instance.tolist() == [2, 0, 2, 0]
    assert pair_label.dtype == pair_instance.dtype == torch.int32


@pytest.mark.parametrize("loss", LOSSES)
def test_order_and_dtype_of_the_positives_do_not_matter(backend: str, loss: str) -> None:
    problem = oracles.make_problem()
    rows = problem.labels.tensor_split(problem.offsets[1:-1])
    turned = replace(problem, labels=torch.cat([row.flip(0) for row in rows]))
    assert not torch.equal(turned.labels, problem.labels)
    assert outcome(turned, settings(loss)) == outcome(problem, settings(loss))
    narrow = replace(problem, labels=problem.labels.to(torch.int32))
    assert outcome(narrow, settings(loss)) == outcome(problem, settings(loss))


@pytest.mark.parametrize("loss", FAMILIES["pointwise"])
def test_losses_of_single_logits_have_no_share_of_positives(backend: str, loss: str) -> None:
    problem = oracles.make_problem()
    shared = settings(loss, share_positives=True)
    assert outcome(problem, shared) == outcome(problem, settings(loss))


def test_the_optimizer_config_s_learning_rate_is_not_read(backend: str) -> None:
    problem = oracles.make_problem()
    chosen, other = (
        Settings("bce", OptimizerConfig(kind="adam", learning_rate=rate)) for rate in (1e-3, 10.0)
    )
    assert outcome(problem, chosen) == outcome(problem, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_touches_float32_weights_in_nothing(backend: str, kind: str) -> None:
    problem = oracles.make_problem()
    assert outcome(problem, settings(kind=kind), seed=1) == outcome(problem, settings(kind=kind), seed=2)


def test_a_learning_rate_of_zero_changes_no_weight(backend: str) -> None:
    for kind, dtype in product(KINDS, (FLOAT32, BFLOAT16)):
        problem = oracles.make_problem(weight_dtype=dtype)
        before = problem.copy()
        step_in_place(problem, settings(kind=kind, rate=0.0), random_state(kind, 65, 16))
        assert torch.equal(problem.weight, before.weight), kind
        assert torch.equal(problem.bias, before.bias), kind


def test_a_permuted_batch_gives_permuted_feature_gradients(backend: str) -> None:
    problem = oracles.make_problem()
    order = torch.randperm(33, generator=torch.Generator().manual_seed(3))
    rows = problem.labels.tensor_split(problem.offsets[1:-1])
    offsets, labels = oracles.pairs([rows[b].tolist() for b in order])
    permuted = replace(
        problem, features=problem.features[:, order].contiguous(), offsets=offsets, labels=labels
    )
    bound = 2.0 * oracles.gradient_bounds(problem, **settings().of_loss).features
    _, straight = step_in_place(problem.copy(), settings(), OptimizerState())
    _, turned = step_in_place(permuted.copy(), settings(), OptimizerState())
    oracles.assert_within(turned, straight[:, order].double(), bound[:, order])


def test_the_loss_of_many_labels_is_summed_in_more_than_float32(backend: str) -> None:
    problem = oracles.make_problem(label=20_000, fan_in=1, input=4, batch=128)
    problem.weight.zero_()
    problem.bias.fill_(-0.9)
    problem = replace(problem, offsets=torch.zeros(129, dtype=torch.int64), labels=problem.labels[:0])
    slack = 1.0 + float(problem.bias[0])
    loss, _ = step_in_place(problem, settings(scale=1.0), OptimizerState())
    assert loss.item() == pytest.approx(20_000 * 128 * slack**2, rel=float(oracles.gamma(128)))


def test_the_step_stands_outside_autograd(backend: str) -> None:
    problem = oracles.make_problem()
    for name in ("features", "weight", "bias"):
        getattr(problem, name).requires_grad_()
    loss, feature_gradient = step_in_place(problem, settings(), OptimizerState())
    assert not loss.requires_grad and not feature_gradient.requires_grad
    assert problem.weight.is_leaf and problem.weight.grad is None and problem.features.grad is None


def test_autograd_notices_weights_that_a_step_changed_between_forward_and_backward(backend: str) -> None:
    problem = oracles.make_problem()
    problem.features.requires_grad_()
    logits = sparse_linear(*problem.layer)
    step_in_place(problem, settings(), OptimizerState())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_states_have_a_version_for_every_step(backend: str) -> None:
    problem, state = oracles.make_problem(), OptimizerState.zeros("adam", 65, 16)
    before = [value._version for value in state.tensors().values()]
    step_in_place(problem, settings(kind="adam"), state)
    assert all(value._version > old for value, old in zip(state.tensors().values(), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "by_connection", "names"),
    [
        ("sgd", 0, []),
        ("momentum", 1, ["weight_first", "bias_first"]),
        ("adam", 2, ["weight_first", "weight_second", "bias_first", "bias_second"]),
        ("label_adam", 0, ["weight_second"]),
    ],
)
def test_state_has_what_its_optimizer_needs(kind: str, by_connection: int, names: list[str]) -> None:
    state = OptimizerState.zeros(kind, 5, 3)
    assert list(state.tensors()) == names
    assert all(value.dtype == FLOAT32 and not value.any() for value in state.tensors().values())
    assert [tuple(value.shape) for value in state.by_connection()] == [(5, 3)] * by_connection
