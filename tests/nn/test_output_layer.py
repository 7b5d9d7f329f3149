"""Output layers: one step, ranking, redistribution, what they share with the ops and autograd."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from torch import Tensor

from xmlc.config import LossConfig, ModelConfig, OptimizerConfig, RedistributionConfig
from xmlc.data import CsrRows
from xmlc.nn import output_layer
from xmlc.nn.direct import DirectConnections
from xmlc.nn.output_layer import DenseOutput, SparseOutput, loss_scale
from xmlc.ops import quantise, widen
from xmlc.training.optimizers import block_optimizer

LABELS, INPUTS, BATCH, FAN_IN = 37, 11, 9, 4
BLOCK_LABELS = 5  # of a dense layer
every_loss = pytest.mark.parametrize("loss_kind", ["squared_hinge", "bce", *oracles.NORMALISED])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def features(seed: int = 1) -> Tensor:
    return torch.empty(INPUTS, BATCH).normal_(generator=generator(seed))


def positives() -> CsrRows:
    """Return labels of a batch of which every third instance has none."""
    rng = np.random.default_rng(5)
    rows = [[] if b % 3 == 1 else sorted(rng.choice(LABELS, 1 + b % 4, replace=False)) for b in range(BATCH)]
    offsets = np.cumsum([0, *map(len, rows)])
    return CsrRows(offsets, np.array([label for row in rows for label in row], np.int32), None, LABELS)


def target() -> Tensor:
    rows = positives().to_scipy().toarray()
    return torch.from_numpy(2.0 * (rows.T > 0) - 1.0)  # [label, batch]


def sparse_layer(
    weight_init: str = "fan_in",
    weight_dtype: str = "float32",
    group_size: int = 1,
    loss: LossConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    positive_weight: Tensor | None = None,
    fan_in: int = FAN_IN,
) -> SparseOutput:
    settings: dict[str, Any] = {
        "width": INPUTS,
        "fan_in": fan_in,
        "group_size": group_size,
        "weight_init": weight_init,
        "weight_dtype": weight_dtype,
    }
    bias = torch.empty(LABELS).normal_(generator=generator(3))
    return SparseOutput(
        LABELS,
        ModelConfig(**settings),
        loss or LossConfig(),
        optimizer or OptimizerConfig(kind="adam", learning_rate=0.01),
        bias,
        positive_weight,
        seed=1,
        generator=generator(),
    )


def dense_layer(loss: LossConfig, positive_weight: Tensor | None = None) -> DenseOutput:
    bias = torch.empty(LABELS).normal_(generator=generator(3))
    return DenseOutput(LABELS, INPUTS, loss, bias, positive_weight, generator(), BLOCK_LABELS * INPUTS * 4)


def test_the_loss_is_the_mean_over_the_batch_of_the_sum_or_mean_over_labels() -> None:
    assert loss_scale(LossConfig(reduction="sum"), batch=4, label=100) == 1 / 4
    assert loss_scale(LossConfig(reduction="mean"), batch=4, label=100) == 1 / 400


@pytest.mark.parametrize("kind", oracles.NORMALISED)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_softmax_loss_is_the_mean_over_the_batch_and_has_no_mean_over_labels(
    kind: Any, reduction: Any
) -> None:
    assert loss_scale(LossConfig(kind=kind, reduction=reduction), batch=4, label=100) == 1 / 4


def of_loss(loss: LossConfig, positive_weight: Tensor | None) -> dict[str, Any]:
    """Return the arguments of the oracles for a layer's loss."""
    return {
        "loss": loss.kind,
        "scale": loss_scale(loss, BATCH, LABELS),
        "positive_weight": positive_weight,
        "share_positives": loss.reduction == "mean",
    }


# ---- dense -----------------------------------------------------------------------------------------------


def dense_truth(
    layer: DenseOutput, loss: LossConfig, optimizer: OptimizerConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Take one step of a copy in this dtype by autograd over all labels at once."""
    x = features().to(dtype).requires_grad_()
    weight = layer.linear.weight.to(dtype, copy=True).requires_grad_()
    bias = layer.linear.bias.to(dtype, copy=True).requires_grad_()
    goal = target().to(dtype)
    settings = of_loss(loss, layer.positive_weight)
    scale = settings.pop("scale")
    value = scale * oracles.total_loss(logit=weight @ x + bias[:, None], target=goal, **settings)
    gradients = torch.autograd.grad(value, (x, weight, bias))
    new_weight, new_bias = weight.detach(), bias.detach()
    state = oracles.OptimizerState.zeros(optimizer.kind, LABELS, INPUTS)
    rate = optimizer.learning_rate
    oracles.DenseOptimizer(optimizer, rate, new_weight, new_bias, state).step(gradients[1], gradients[2], 1)
    return {"loss": value.detach(), "features": gradients[0], "weight": new_weight, "bias": new_bias}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@every_loss
def test_a_dense_step_equals_autograd_and_a_torch_optimizer(
    loss_kind: Any, reduction: Any, kind: Any, weighted: bool
) -> None:
    loss = LossConfig(kind=loss_kind, reduction=reduction)
    optimizer = OptimizerConfig(kind=kind, learning_rate=0.1, eps=1e-3, weight_decay=0.5)
    weight = torch.linspace(0.5, 3.0, LABELS) if weighted else None
    layer = dense_layer(loss, weight)
    exact, plain = (dense_truth(layer, loss, optimizer, dtype) for dtype in (torch.float64, torch.float32))
    layer.block_optimizer = block_optimizer(layer.linear.parameters(), optimizer)
    loss_sum, gradient = layer.step(features(), positives(), 0.1, 1)
    found = {
        "loss": loss_sum,
        "features": gradient,
        "weight": layer.linear.weight,
        "bias": layer.linear.bias,
    }
    for name, true in exact.items():
        slack = 4 * oracles.UNIT * (true.abs() + 1.0)
        oracles.assert_no_worse_than_plain(found[name], true, plain[name].double(), slack, name)


@pytest.mark.parametrize("k", [1, 5, LABELS])
def test_a_dense_layer_ranks_like_a_stable_sort_of_all_logits(k: int) -> None:
    layer = dense_layer(LossConfig())
    layer.linear.weight.copy_(layer.linear.weight.round(decimals=1))
    scores, labels = layer.top_labels(features(), k)
    # Block by block: a library may round a product of fewer rows otherwise.
    logits = torch.cat([block(features()) for block in layer.linear.blocks])
    expected, order = oracles.top(logits, k)
    assert torch.equal(scores, expected)
    assert torch.equal(labels, order)


def test_ties_of_a_dense_layer_go_to_the_lowest_label_across_blocks() -> None:
    layer = dense_layer(LossConfig())
    layer.linear.weight.zero_()
    layer.linear.bias.zero_()
    layer.linear.bias[30] = 1.0
    scores, labels = layer.top_labels(features(), 7)
    assert labels.tolist() == [[30, 0, 1, 2, 3, 4, 5]] * BATCH
    assert scores.tolist() == [[1.0] + [0.0] * 6] * BATCH


# ---- sparse ----------------------------------------------------------------------------------------------


def sparse_problem(layer: SparseOutput) -> oracles.Problem:
    rows = positives()
    return oracles.Problem(
        features(),
        layer.weight,
        layer.indices,
        layer.bias,
        torch.from_numpy(rows.offsets),
        torch.from_numpy(rows.indices).long(),
        layer.group_size,
    ).copy()


@pytest.mark.parametrize("group_size", [1, 16])
@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "label_adam"])
@every_loss
def test_a_sparse_step_is_the_exact_update_within_its_bound(
    loss_kind: Any, kind: Any, group_size: int
) -> None:
    loss = LossConfig(kind=loss_kind, reduction="mean")
    optimizer = OptimizerConfig(kind=kind, learning_rate=0.1, eps=1e-3)
    weight = torch.linspace(0.5, 3.0, LABELS)
    layer = sparse_layer(group_size=group_size, loss=loss, optimizer=optimizer, positive_weight=weight)
    problem = sparse_problem(layer)
    settings = of_loss(loss, weight)
    truth = oracles.gradients(problem, dtype=torch.float64, **settings)
    bound = oracles.gradient_bounds(problem, **settings)
    zeros = oracles.OptimizerState.zeros(kind, LABELS, FAN_IN)
    exact = oracles.exact_update(problem, truth, optimizer, 0.1, zeros, 1)
    allowed = oracles.update_bounds(problem, truth, bound, optimizer, 0.1, zeros, 1)

    loss_sum, gradient = layer.step(features(), positives(), 0.1, 1)

    oracles.assert_within(loss_sum, truth.loss, bound.loss, "loss")
    oracles.assert_within(gradient, truth.features, bound.features, "features")
    oracles.assert_within(layer.weight, exact.weight, allowed.weight, "weight")
    oracles.assert_within(layer.bias, exact.bias, allowed.bias, "bias")


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("size", [1.0, 10_000.0])
@every_loss
def test_a_dense_layer_takes_the_step_of_a_sparse_one_with_all_inputs(
    loss_kind: Any, size: float, reduction: Any
) -> None:
    loss = LossConfig(kind=loss_kind, reduction=reduction)
    optimizer = OptimizerConfig(kind="sgd", learning_rate=0.1)
    weight = torch.linspace(0.5, 3.0, LABELS)
    sparse = sparse_layer(loss=loss, optimizer=optimizer, positive_weight=weight, fan_in=INPUTS)
    full = dense_layer(loss, weight)
    full.block_optimizer = block_optimizer(full.linear.parameters(), optimizer)
    for bias in (sparse.bias, full.linear.bias):
        bias.mul_(size)  # also logits whose exp overflows
    full.linear.weight.copy_(oracles.dense(sparse.weight, sparse.indices, 1, INPUTS))
    problem, settings, state = sparse_problem(sparse), of_loss(loss, weight), oracles.OptimizerState()
    truth = oracles.gradients(problem, dtype=torch.float64, **settings)
    bound = oracles.gradient_bounds(problem, **settings)
    exact = oracles.exact_update(problem, truth, optimizer, 0.1, state, 1)
    allowed = oracles.update_bounds(problem, truth, bound, optimizer, 0.1, state, 1)
    places = sparse.indices.long()
    for name, layer in (("sparse", sparse), ("dense", full)):
        loss_sum, gradient = layer.step(features(), positives(), 0.1, 1)
        found = layer.tensors()
        connections = found["weight"] if name == "sparse" else found["weight"].gather(1, places)
        oracles.assert_within(loss_sum, truth.loss, bound.loss, f"{name} loss")
        oracles.assert_within(gradient, truth.features, bound.features, f"{name} features")
        oracles.assert_within(connections, exact.weight, allowed.weight, f"{name} weight")
        oracles.assert_within(found["bias"], exact.bias, allowed.bias, f"{name} bias")


@pytest.mark.parametrize("output", ["sparse", "dense"])
@pytest.mark.parametrize(
    ("kind", "rows"), [("softmax", [[]]), ("decoupled_softmax", [[]]), ("decoupled_softmax", [range(LABELS)])]
)
def test_without_positives_or_their_rivals_a_softmax_step_is_exactly_nothing(
    kind: Any, rows: list[list[int]], output: str
) -> None:
    loss, optimizer = LossConfig(kind=kind), OptimizerConfig(kind="sgd")
    layer = sparse_layer(loss=loss, optimizer=optimizer) if output == "sparse" else dense_layer(loss)
    if isinstance(layer, DenseOutput):
        layer.block_optimizer = block_optimizer(layer.linear.parameters(), optimizer)
    before = {name: value.clone() for name, value in layer.tensors().items()}
    labels = np.array([label for row in rows * BATCH for label in row], np.int32)
    offsets = np.arange(BATCH + 1) * len(rows[0])
    value, gradient = layer.step(features(), CsrRows(offsets, labels, None, LABELS), 0.1, 1)
    assert float(value) == 0.0 and not gradient.any()
    assert all(torch.equal(value, before[name]) for name, value in layer.tensors().items())


def test_a_sparse_layer_passes_its_gradient_cutoff_on() -> None:
    layer = sparse_layer(loss=LossConfig(gradient_cutoff=1e30), optimizer=OptimizerConfig(kind="sgd"))
    before = layer.weight.clone()
    loss, gradient = layer.step(features(), positives(), 0.1, 1)
    assert float(loss) > 0.0 and not gradient.any()
    assert torch.equal(layer.weight, before)


def test_a_sparse_layer_ranks_like_a_stable_sort_of_all_logits() -> None:
    layer = sparse_layer()
    problem = sparse_problem(layer)
    _, labels = layer.top_labels(features(), 6)
    exact = oracles.logits(
        problem.features.double(), problem.weight.double(), problem.indices, problem.bias.double(), 1
    )
    assert torch.equal(labels, oracles.top(exact, 6)[1])


def test_any_number_of_threads_takes_the_same_step() -> None:
    def bits(threads: int) -> list[bytes]:
        layer = SparseOutput(
            3000,
            ModelConfig(width=512, fan_in=32, weight_init="fan_in"),
            LossConfig(),
            OptimizerConfig(kind="adam"),
            torch.full((3000,), -1.0),
            None,
            seed=1,
            generator=generator(),
        )
        rows = CsrRows(np.arange(65), np.arange(64, dtype=np.int32) * 40, None, 3000)
        x = torch.empty(512, 64).normal_(generator=generator(2))
        with oracles.threads(threads):
            loss, gradient = layer.step(x, rows, 0.1, 1)
            scores, labels = layer.top_labels(x, 5)
        return [oracles.bits(value) for value in (loss, gradient, layer.weight, layer.bias, scores, labels)]

    assert bits(1) == bits(2) == bits(5)


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("group_size", [1, 16])
def test_redistribution_moves_the_asked_share_and_forgets_its_state(
    group_size: int, weight_dtype: str
) -> None:
    layer = sparse_layer(group_size=group_size, weight_dtype=weight_dtype)
    layer.step(features(), positives(), 0.1, 1)
    before = layer.indices.numpy().copy()
    config = RedistributionConfig(mode="fraction", fraction=0.5, new_value="zero", scope="layer")
    moved = layer.redistribute(config, 0.5, 1)
    assert moved == before.size // 4  # connections of a group move together
    assert int((before != layer.indices.numpy()).sum()) <= moved
    fresh = layer.weight.float() == 0.0
    assert int(fresh.sum()) >= moved
    assert layer.state.weight_first is not None
    assert (layer.state.weight_first[fresh] == 0).all()
    assert all(len(set(row.tolist())) == FAN_IN for row in layer.indices.numpy())


def test_redistribution_by_threshold_scales_the_threshold() -> None:
    layer = sparse_layer()
    config = RedistributionConfig(mode="threshold", threshold=0.2, new_value="zero")
    below = int((layer.weight.abs() < 0.1).sum())
    assert 0 < below < layer.weight.numel()
    assert layer.redistribute(config, 0.5, 1) == below


def test_a_strength_of_zero_moves_nothing() -> None:
    layer = sparse_layer()
    before = layer.indices.numpy().copy()
    assert layer.redistribute(RedistributionConfig(mode="fraction", fraction=0.5), 0.0, 1) == 0
    np.testing.assert_array_equal(layer.indices.numpy(), before)


@pytest.mark.parametrize(
    ("weight_init", "bound"),
    [("zero", 0.0), ("fan_in", 1 / math.sqrt(FAN_IN)), ("glorot_flat", math.sqrt(3 / (LABELS * FAN_IN)))],
)
def test_weights_start_within_their_bound(weight_init: str, bound: float) -> None:
    largest = float(sparse_layer(weight_init).weight.abs().max())
    assert 0.95 * bound <= largest <= bound


def test_weights_are_kept_in_their_dtype() -> None:
    assert sparse_layer(weight_dtype="bfloat16").weight.dtype == torch.bfloat16
    assert sparse_layer().weight.dtype == torch.float32
    assert sparse_layer().weight_scale is None


@pytest.mark.parametrize("weight_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_weights_start_as_float32_s_rounded_to_the_nearest(
    weight_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    label = 200
    monkeypatch.setattr(output_layer, "LABELS_DRAWN_AT_ONCE", 128)

    def start(dtype: Any) -> SparseOutput:
        model = ModelConfig(width=64, fan_in=8, weight_dtype=dtype, weight_init="fan_in")
        return SparseOutput(
            label, model, LossConfig(), OptimizerConfig(), torch.zeros(label), None, 1, generator()
        )

    exact, layer = start("float32"), start(weight_dtype)
    assert layer.weight.dtype == getattr(torch, weight_dtype)
    assert layer.weight_scale is not None and layer.tensors()["weight_scale"] is layer.weight_scale
    weight, scale = quantise(exact.weight, layer.weight.dtype)
    assert torch.equal(layer.weight.float(), weight.float())
    assert torch.equal(layer.weight_scale, scale)
    relative = 2.0**-4 if weight_dtype == "float8_e4m3fn" else 2.0**-3
    close = (widen(weight, scale) - exact.weight).abs() <= relative * exact.weight.abs() + 1e-5
    assert bool(close.all())


def test_float8_weights_that_start_at_zero_find_their_scale() -> None:
    layer = sparse_layer("zero", weight_dtype="float8_e4m3fn")
    layer.step(features(), positives(), 0.1, 1)
    assert layer.weight_scale is not None
    largest = float(widen(layer.weight, layer.weight_scale).abs().max())
    assert 0.01 < largest <= 448.0 * float(layer.weight_scale.max()) < 4.0 * largest


def test_tensors_are_the_layer_itself() -> None:
    layer = sparse_layer()
    tensors = layer.tensors()
    assert set(tensors) == {
        "indices",
        "weight",
        "bias",
        "state.weight_first",
        "state.weight_second",
        "state.bias_first",
        "state.bias_second",
    }
    assert tensors["weight"].data_ptr() == layer.weight.data_ptr()


# ---- pairs that are skipped ------------------------------------------------------------------------------


def skipped() -> CsrRows:
    """Return pairs to skip, none of them positive; the third instance has none."""
    positive = positives().to_scipy().toarray() > 0
    rng = np.random.default_rng(6)
    rows = [
        [] if b == 2 else sorted(rng.choice(np.flatnonzero(~positive[b]), 5, replace=False))
        for b in range(BATCH)
    ]
    offsets = np.cumsum([0, *map(len, rows)])
    return CsrRows(offsets, np.array([label for row in rows for label in row], np.int32), None, LABELS)


@every_loss
def test_a_step_skips_pairs_as_if_they_were_not_there(loss_kind: Any) -> None:
    """Against autograd in float64 over what is left."""
    optimizer = OptimizerConfig(kind="sgd", learning_rate=0.1)
    layer = sparse_layer(loss=LossConfig(kind=loss_kind), optimizer=optimizer)
    weight = layer.weight.double().clone().requires_grad_()
    bias = layer.bias.double().clone().requires_grad_()
    inputs = features().double().requires_grad_()
    logits = oracles.logits(inputs, weight, layer.indices.long(), bias, 1)  # [label, batch]
    left = torch.from_numpy(skipped().to_scipy().toarray().T == 0)
    positive = target() > 0
    if loss_kind in oracles.NORMALISED:
        loss = logits.new_zeros(())
        for b in range(BATCH):
            scores, own = logits[left[:, b], b], positive[left[:, b], b]
            for score in scores[own]:
                rivals = scores if loss_kind == "softmax" else torch.cat([score[None], scores[~own]])
                loss = loss + rivals.logsumexp(0) - score
    else:
        loss = oracles.losses(loss_kind, logits, target())[left].sum()
    (loss / BATCH).backward()

    found, gradient = layer.step(features(), positives(), 0.1, 1, skipped=skipped())

    torch.testing.assert_close(found.double(), loss.detach() / BATCH, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient.double(), inputs.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        layer.weight.double(), (weight - 0.1 * weight.grad).detach(), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(layer.bias.double(), (bias - 0.1 * bias.grad).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss_kind", ["squared_hinge", "bce"])
def test_a_label_skipped_everywhere_stays_and_the_others_move_as_ever(
    loss_kind: Any,
) -> None:
    words = CsrRows(np.arange(BATCH + 1), np.arange(BATCH, dtype=np.int32) % 4, np.ones(BATCH, np.float32), 4)
    everywhere = CsrRows(np.arange(BATCH + 1), np.full(BATCH, 7, np.int32), None, LABELS)

    def made() -> SparseOutput:
        layer = sparse_layer(
            loss=LossConfig(kind=loss_kind), optimizer=OptimizerConfig(kind="sgd", learning_rate=0.1)
        )
        layer.direct = DirectConnections(LABELS, 4, 2, layer.optimizer)
        indices = np.tile(np.array([[0, 2]], np.int32), (LABELS, 1))
        layer.direct.connect(indices, np.full((LABELS, 2), 0.25, np.float32))
        return layer

    plain, skipping, start = made(), made(), made()
    plain.step(features(), positives(), 0.1, 1, words)
    skipping.step(features(), positives().without(everywhere), 0.1, 1, words, everywhere)
    others = np.arange(LABELS) != 7
    for name, value in skipping.tensors().items():
        assert torch.equal(value[7], start.tensors()[name][7]), name
        assert torch.equal(value[others], plain.tensors()[name][others]), name
    moved = skipping.tensors()["direct.weight"][others] != start.tensors()["direct.weight"][others]
    assert moved.any()


@every_loss
@pytest.mark.parametrize(
    ("weight_dtype", "group_size"),
    [("float32", 1), ("bfloat16", 1), ("float32", 16), ("float8_e4m3fn", 1), ("float8_e5m2", 16)],
)
def test_evaluation_is_a_step_that_changes_nothing(
    loss_kind: Any, weight_dtype: str, group_size: int
) -> None:
    layer = sparse_layer(weight_dtype=weight_dtype, group_size=group_size, loss=LossConfig(kind=loss_kind))
    before = {name: value.clone() for name, value in layer.tensors().items()}
    versions = [value._version for value in layer.tensors().values()]
    loss, gradient = layer.evaluate(features(), positives(), gradient=True)
    alone, nothing = layer.evaluate(features(), positives(), gradient=False)
    assert all(torch.equal(value, before[name]) for name, value in layer.tensors().items())
    assert [value._version for value in layer.tensors().values()] == versions
    expected, step_gradient = layer.step(features(), positives(), 0.1, 1)
    assert torch.equal(loss, expected) and torch.equal(alone, expected)
    assert torch.equal(gradient, step_gradient)
    assert not nothing.any()


def test_evaluation_of_a_layer_that_goes_by_strips_of_inputs_equals_its_step() -> None:
    width, batch = 16_400, 50
    wide = ModelConfig(width=width, weight_init="fan_in")
    zeros = torch.zeros(LABELS)
    layer = SparseOutput(LABELS, wide, LossConfig(), OptimizerConfig(), zeros, None, 1, generator())
    inputs = torch.randn(width, batch, generator=generator(2))
    own = CsrRows(np.arange(batch + 1), np.arange(batch, dtype=np.int32) % LABELS, None, LABELS)
    alone, nothing = layer.evaluate(inputs, own, gradient=False)
    assert torch.equal(alone, layer.step(inputs, own, 0.1, 1)[0])
    assert not nothing.any()


# ---- active gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss_kind", ["squared_hinge", "bce"])
@pytest.mark.parametrize("cutoff", [0.0, 0.3])
@pytest.mark.parametrize(
    ("group_size", "weight_dtype"), [(1, "float32"), (16, "bfloat16"), (1, "float8_e4m3fn")]
)
def test_the_active_share_counts_the_gradients_beyond_the_cutoff(
    monkeypatch: pytest.MonkeyPatch, loss_kind: Any, cutoff: float, group_size: int, weight_dtype: str
) -> None:
    monkeypatch.setattr(output_layer, "LOGITS_LOOKED_AT_ONCE", 1)  # three blocks
    label = 150
    model = ModelConfig(
        width=INPUTS, fan_in=FAN_IN, group_size=group_size, weight_dtype=weight_dtype, weight_init="fan_in"
    )
    loss = LossConfig(kind=loss_kind, gradient_cutoff=cutoff)
    bias = torch.empty(label).normal_(generator=generator(3))
    weight = torch.empty(label).uniform_(0.1, 2.0, generator=generator(4))
    layer = SparseOutput(label, model, loss, OptimizerConfig(), bias, weight, 1, generator())
    own = replace(positives(), columns=label)
    wide = widen(layer.weight, layer.weight_scale).double()
    exact = oracles.logits(features().double(), wide, layer.indices, layer.bias.double(), group_size)
    positive = torch.from_numpy(own.to_scipy().toarray().T > 0)
    exact.requires_grad_()
    losses = oracles.losses(loss_kind, exact, 2.0 * positive - 1.0)
    (losses * torch.where(positive, weight.double()[:, None], 1.0)).sum().backward()
    assert exact.grad is not None
    expected = float((exact.grad.abs() > cutoff).double().mean())
    assert layer.active_share(features(), own) == expected
    assert (expected == 1.0) == (loss_kind == "bce" and cutoff == 0.0)


def test_the_active_share_sees_direct_connections_and_skipped_pairs() -> None:
    words = CsrRows(np.arange(BATCH + 1), np.zeros(BATCH, np.int32), np.ones(BATCH, np.float32), 4)
    layer = sparse_layer()
    layer.weight.zero_()
    layer.bias.fill_(-2.0)  # beyond the margin of a negative
    layer.direct = DirectConnections(LABELS, 4, 1, layer.optimizer)
    indices, weight = np.zeros((LABELS, 1), np.int32), np.zeros((LABELS, 1), np.float32)
    weight[7] = 1.5  # within it
    layer.direct.connect(indices, weight)
    none = CsrRows.empty(BATCH, LABELS)
    assert layer.active_share(features(), none, CsrRows.empty(BATCH, 4)) == 0.0
    assert layer.active_share(features(), none, words) == 1 / LABELS
    first = CsrRows(np.array([0] + BATCH * [1]), np.array([7], np.int32), None, LABELS)
    assert layer.active_share(features(), none, words, first) == (BATCH - 1) / (LABELS * BATCH)
    share = len(positives().indices) / (LABELS * BATCH)
    assert layer.active_share(features(), positives(), CsrRows.empty(BATCH, 4)) == share
