"""The head for anyone's encoder: its contract, its two modes, and what it refuses."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from xmlc import SparseHead
from xmlc.data.rows import CsrRows
from xmlc.errors import ConfigError, DataError, NativeError, XmlcError
from xmlc.losses import GradientCache
from xmlc.ops import LOSSES, sparse_linear_reference

HIDDEN, LABELS, BATCH = 6, 41, 5
ROWS = [[3, 40], [], [0], [7, 7, 2], [40]]
every_loss = pytest.mark.parametrize("loss", list(LOSSES))
every_width = pytest.mark.parametrize("width", [None, 19])


def head(width: int | None = 19, **settings: Any) -> SparseHead:
    """Return a head whose weights are not zero, so that all gradients count."""
    fan_in = 3 if width is None else 5
    return SparseHead(HIDDEN, LABELS, width=width, fan_in=fan_in, weight_init="fan_in", **settings)


def embeddings(batch: int = BATCH, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, HIDDEN, generator=generator).requires_grad_()


def state(layer: SparseHead) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.state_dict().items()}


def changed(layer: SparseHead, before: dict[str, Tensor]) -> set[str]:
    return {name for name, value in layer.state_dict().items() if not torch.equal(value, before[name])}


class Truth:
    """The head's formulas in float64 on plain tensors."""

    def __init__(self, layer: SparseHead, loss: str, reduction: str) -> None:
        output = layer.output
        self.layer, self.loss, self.reduction = layer, loss, reduction
        self.weight = output.weight.detach().double().requires_grad_()
        self.bias = output.bias.detach().double().requires_grad_()
        self.dense = [value.detach().double().requires_grad_() for value in layer.parameters()][:2]
        if layer.penultimate is None:
            self.dense = []

    def __call__(self, z: Tensor) -> Tensor:
        features = z.T
        if self.dense:
            features = (self.dense[0] @ z.T + self.dense[1][:, None]).relu()
        output = self.layer.output
        logits = sparse_linear_reference(features, self.weight, output.indices, self.bias, output.group_size)
        positive = torch.zeros(LABELS, len(z), dtype=torch.bool)
        for instance, row in enumerate(ROWS):
            positive[row, instance] = True
        factor = torch.full((LABELS, len(z)), output.loss.positive_weight, dtype=torch.float64)
        scale = 1.0 / len(z)
        if self.reduction == "mean" and "softmax" in self.loss:
            factor = factor / positive.sum(0).clamp_min(1)
        elif self.reduction == "mean":
            scale /= LABELS
        return scale * LOSSES[self.loss](logits, positive, factor).sum()


@every_loss
@every_width
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("group_size", [1, 16])
def test_a_fused_step_equals_plain_sgd_in_float64(
    loss: str, width: int | None, reduction: str, group_size: Any
) -> None:
    settings = {"kind": loss, "reduction": reduction, "positive_weight": 1.5}
    fused = head(width, loss=settings, group_size=group_size, optimizer="sgd", learning_rate=0.3)
    plain = head(width, loss=settings, group_size=group_size, fused=False)
    truth = Truth(fused, loss, reduction)
    z, plain_z, exact_z = embeddings(), embeddings(), embeddings().detach().double().requires_grad_()
    found, plain_found, exact = fused(z, ROWS).loss, plain(plain_z, ROWS).loss, truth(exact_z)
    for value in (found, plain_found):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
    for value in (found, plain_found, exact):
        value.backward()
    torch.optim.SGD([plain.weight, plain.bias], lr=0.3).step()
    torch.optim.SGD([truth.weight, truth.bias], lr=0.3).step()
    assert not torch.equal(truth.weight.float(), head(width, group_size=group_size).output.weight)
    for layer, gradient in ((fused, z.grad), (plain, plain_z.grad)):
        weight, bias = layer._weight_and_bias()
        torch.testing.assert_close(weight.detach().double(), truth.weight.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(bias.detach().double(), truth.bias.detach(), rtol=1e-5, atol=1e-6)
        assert gradient is not None and exact_z.grad is not None
        torch.testing.assert_close(gradient.double(), exact_z.grad, rtol=1e-5, atol=1e-6)
        if layer.penultimate is not None:
            for ours, right in zip(layer.penultimate.parameters(), truth.dense, strict=True):
                assert ours.grad is not None and right.grad is not None
                torch.testing.assert_close(ours.grad.double(), right.grad, rtol=1e-5, atol=1e-6)


@every_width
def test_the_incoming_gradient_scales_what_goes_on_and_not_the_output_layer(width: int | None) -> None:
    one, scaled = head(width), head(width)
    z, scaled_z = embeddings(), embeddings()
    one(z, ROWS).loss.backward()
    (1024.0 * scaled(scaled_z, ROWS).loss).backward()
    assert torch.equal(one.output.weight, scaled.output.weight)
    assert z.grad is not None and scaled_z.grad is not None
    assert torch.equal(1024.0 * z.grad, scaled_z.grad)
    for ours, theirs in zip(one.parameters(), scaled.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(1024.0 * ours.grad, theirs.grad)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float8_e4m3fn"])
def test_the_forward_pass_changes_nothing(weight_dtype: Any) -> None:
    layer = head(weight_dtype=weight_dtype)
    before = state(layer)
    loss = layer(embeddings(), ROWS).loss
    with torch.no_grad():
        assert layer(embeddings(), ROWS).loss == loss.detach()
    with torch.inference_mode():
        assert layer(embeddings().detach(), ROWS).loss == loss.detach()
    assert changed(layer, before) == set()
    loss.backward()  # none of them stands between
    assert changed(layer, before) >= {"output.weight", "output.bias", "steps"}


def test_gradient_accumulation_accumulates_all_but_the_output_layer() -> None:
    layer = head()
    assert layer.penultimate is not None
    gradients = []
    for seed in (1, 2):
        twin = copy.deepcopy(layer)
        twin.penultimate.zero_grad()
        (twin(embeddings(seed=seed), ROWS).loss / 2).backward()
        gradients.append(twin.penultimate.weight.grad)
        (layer(embeddings(seed=seed), ROWS).loss / 2).backward()
        assert torch.equal(layer.output.weight, twin.output.weight)
    assert int(layer.steps) == 2
    torch.testing.assert_close(layer.penultimate.weight.grad, gradients[0] + gradients[1])


def test_the_head_learns_over_a_frozen_encoder() -> None:
    layer = head(None, loss="bce", learning_rate=0.05)
    z = embeddings().detach()
    first = layer(z, ROWS).loss.item()
    for _ in range(50):
        layer(z, ROWS).loss.backward()
    assert layer(z, ROWS).loss.item() < 0.3 * first
    assert set(layer.topk(z, 2)[1][0].tolist()) == {3, 40}


def test_in_eval_mode_the_backward_pass_updates_nothing() -> None:
    training, layer = head(), head().eval()
    before = state(layer)
    z, same = embeddings(), embeddings()
    for _ in range(2):
        layer(z, ROWS).loss.backward()
    training(same, ROWS).loss.backward()
    assert changed(layer, before) == set()
    assert z.grad is not None and same.grad is not None
    torch.testing.assert_close(z.grad, 2 * same.grad)


@every_width
def test_under_autocast_gradients_are_those_of_low_precision(width: int | None) -> None:
    layer, plain = head(width, loss="bce"), head(width, loss="bce")
    z, exact = embeddings().detach().bfloat16().requires_grad_(), embeddings()
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(z, ROWS).loss
    assert loss.dtype == torch.float32
    (8.0 * loss).backward()
    (8.0 * plain(exact, ROWS).loss).backward()
    assert z.grad is not None and exact.grad is not None
    assert z.grad.dtype == torch.bfloat16
    assert (z.grad.float() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_a_gradient_scaler_reaches_all_but_the_output_layer() -> None:
    layers = []
    for scale in (1.0, 1024.0):
        layer = head()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for seed in range(3):
            scaler.scale(layer(embeddings(seed=seed), ROWS).loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(layer.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        layers.append(layer)
    assert changed(layers[1], state(layers[0])) == set()
    assert changed(layers[0], state(head())) >= {"output.weight", "penultimate.weight"}


def test_under_activation_checkpointing_a_step_is_one_step() -> None:
    plain, layer = head(), head()
    z, again = embeddings(), embeddings()
    plain(z, ROWS).loss.backward()
    checkpoint(lambda values: layer(values, ROWS).loss, again, use_reentrant=False).backward()
    assert changed(layer, state(plain)) == set()
    assert z.grad is not None and again.grad is not None
    assert torch.equal(z.grad, again.grad)


def test_behind_a_gradient_cache_a_large_batch_is_one_step() -> None:
    layers = []
    for cached in (False, True):
        layer, encoder, cache = head(), nn.Linear(4, HIDDEN), GradientCache(2)
        nn.init.constant_(encoder.weight, 0.5)
        nn.init.zeros_(encoder.bias)
        inputs = embeddings().detach()[:, :4]
        layer(cache.embed(encoder, inputs) if cached else encoder(inputs), ROWS).loss.backward()
        cache.backward()
        layers.append((layer, encoder))
    (layer, encoder), (other, twin) = layers
    assert changed(other, state(layer)) == set()
    assert int(other.steps) == 1
    assert encoder.weight.grad is not None and twin.weight.grad is not None
    torch.testing.assert_close(twin.weight.grad, encoder.weight.grad)


def test_a_second_backward_pass_is_refused() -> None:
    layer = head()
    loss = layer(embeddings(), ROWS).loss
    loss.backward(retain_graph=True)
    after = state(layer)
    with pytest.raises(XmlcError, match="every backward pass updates it; call the head again"):
        loss.backward()
    assert changed(layer, after) == set()
    loss = layer(embeddings(), ROWS).loss
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_two_losses_in_one_graph_are_refused() -> None:
    layer = head()
    total = layer(embeddings(), ROWS).loss + layer(embeddings(seed=2), ROWS).loss
    with pytest.raises(XmlcError, match="use fused=False to add up losses"):
        total.backward()
    assert int(layer.steps) == 1


def test_second_derivatives_are_refused() -> None:
    layer, z = head(), embeddings()
    with pytest.raises(XmlcError, match="the loss: must be differentiated once, found create_graph=True"):
        torch.autograd.grad(layer(z, ROWS).loss, z, create_graph=True)
    assert int(layer.steps) == 0


def test_redistribution_between_the_passes_is_refused() -> None:
    layer = head()
    loss = layer(embeddings(), ROWS).loss
    layer.redistribute(0.1)
    with pytest.raises(XmlcError, match="found it changed"):
        loss.backward()


@pytest.mark.parametrize("fused", [True, False])
@every_width
def test_topk_equals_sorting_all_logits(fused: bool, width: int | None) -> None:
    layer = head(width, fused=fused)
    z = embeddings()
    weight, bias = layer._weight_and_bias()
    logits = sparse_linear_reference(layer.features(z), weight, layer.output.indices, bias).T
    expected, labels = logits.sort(dim=1, descending=True, stable=True)
    scores, found = layer.topk(z, 7)
    assert torch.equal(found, labels[:, :7])
    torch.testing.assert_close(scores, expected[:, :7].detach())
    assert not scores.requires_grad


def test_labels_come_as_lists_matrices_arrays_or_padded_tensors() -> None:
    z = embeddings()
    expected = head()(z, ROWS).loss
    lengths, flat = [len(set(row)) for row in ROWS], [label for row in ROWS for label in sorted(set(row))]
    offsets = np.cumsum([0, *lengths])
    matrix = scipy.sparse.csr_array((np.ones(len(flat)), flat, offsets), shape=(BATCH, LABELS))
    padded = torch.tensor([row + [-100] * (3 - len(row)) for row in ROWS])
    arrays = (offsets, np.array(flat))
    for given in (matrix, padded, arrays, tuple(map(torch.from_numpy, arrays)), tuple(ROWS)):
        assert torch.equal(head()(z, given).loss, expected)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "label_adam"])
def test_a_state_dict_continues_as_the_head_it_came_from(kind: str) -> None:
    layer, other = head(optimizer=kind), SparseHead(HIDDEN, LABELS, width=19, fan_in=5, optimizer=kind)
    for _ in range(3):
        layer(embeddings(), ROWS).loss.backward()
    layer.redistribute(0.2)
    wrapped, target = nn.Sequential(layer), nn.Sequential(other)
    target.load_state_dict(wrapped.state_dict())
    assert changed(other, state(layer)) == set()
    for each in (layer, other):
        each(embeddings(seed=3), ROWS).loss.backward()
        each.redistribute(0.2)
    assert changed(other, state(layer)) == set()


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_a_state_dict_survives_safetensors(weight_dtype: Any, tmp_path: Path) -> None:
    layer, other = head(weight_dtype=weight_dtype), head(weight_dtype=weight_dtype)
    layer(embeddings(), ROWS).loss.backward()
    save_file(layer.state_dict(), tmp_path / "head.safetensors")
    other.load_state_dict(load_file(tmp_path / "head.safetensors"))
    assert changed(other, state(layer)) == set()


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_state_dict_holds_a_narrow_state(state_dtype: str, tmp_path: Path) -> None:
    optimizer = {"kind": "adam", "state_dtype": state_dtype}
    layer, other = head(optimizer=optimizer), head(optimizer=optimizer)
    losses = []
    for _ in range(100):
        result = layer(embeddings(), ROWS)
        losses.append(float(result.loss.detach()))
        result.loss.backward()
    assert losses[-1] < 0.5 * losses[0]
    assert layer.output.state.dtype == getattr(torch, state_dtype)
    save_file(layer.state_dict(), tmp_path / "head.safetensors")
    other.load_state_dict(load_file(tmp_path / "head.safetensors"))
    assert changed(other, state(layer)) == set()
    for each in (layer, other):
        each(embeddings(), ROWS).loss.backward()
        each.redistribute(0.2)
    assert changed(other, state(layer)) == set()
    with pytest.raises(RuntimeError, match=r"output.state.weight_first must be torch.float32"):
        head().load_state_dict(layer.state_dict(), strict=False)


@pytest.mark.parametrize("weight_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_weights_rank_move_and_learn(weight_dtype: Any) -> None:
    layer = head(weight_dtype=weight_dtype)
    losses = []
    for _ in range(200):
        result = layer(embeddings(), ROWS)
        losses.append(float(result.loss.detach()))
        result.loss.backward()
    assert losses[-1] < 0.5 * losses[0]
    _, labels = layer.topk(embeddings(), 1)
    assert all(int(labels[row]) in positives for row, positives in enumerate(ROWS) if positives)
    assert layer.redistribute(0.3) > 0


def test_autograd_cannot_train_float8_weights() -> None:
    with pytest.raises(ConfigError, match=r"must be float32 or bfloat16.*found float8_e5m2; leave fused"):
        head(weight_dtype="float8_e5m2", fused=False)


def test_a_state_dict_of_another_head_is_refused() -> None:
    layer = head()
    with pytest.raises(
        RuntimeError, match=r"output.weight must be torch.float32 \[41, 5\].*found .*\[40, 5\]"
    ):
        layer.load_state_dict(SparseHead(HIDDEN, 40, width=19, fan_in=5).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"output.state.weight_first"'):
        layer.load_state_dict(head(optimizer="sgd").state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"output.state.weight_first"'):
        head(optimizer="sgd").load_state_dict(layer.state_dict())


def test_a_copy_is_independent() -> None:
    layer = head()
    twin = copy.deepcopy(layer)
    twin(embeddings(), ROWS).loss.backward()
    assert changed(layer, state(head())) == set()
    assert int(twin.steps) == 1


def test_moving_takes_the_output_layer_along_and_keeps_its_dtypes() -> None:
    layer = nn.Sequential(head()).to("meta")[0]
    assert layer.device.type == "meta"
    assert layer.output.weight.device.type == layer.output.state.weight_first.device.type == "meta"
    halved = head().bfloat16()
    assert halved.output.weight.dtype == torch.float32
    assert halved.penultimate.weight.dtype == torch.bfloat16
    halved(embeddings().bfloat16().detach(), ROWS).loss.backward()


def test_only_the_penultimate_layer_is_a_parameter_and_nothing_a_buffer() -> None:
    assert {name for name, _ in head().named_parameters()} == {"penultimate.weight", "penultimate.bias"}
    assert list(head(None).parameters()) == []
    assert {name for name, _ in head(None, fused=False).named_parameters()} == {"weight", "bias"}
    for layer in (head(), head(fused=False)):
        assert list(layer.buffers()) == []


def test_redistribution_keeps_fan_in_and_clears_the_optimizers_state() -> None:
    for fused in (True, False):
        layer = head(fused=fused)
        optimizer = None if fused else torch.optim.Adam(layer.parameters())
        layer(embeddings(), ROWS).loss.backward()
        if optimizer is not None:
            optimizer.step()
        before = layer.output.indices.clone()
        assert layer.redistribute(0.5, optimizer) == (before.numel() + 1) // 2
        weight, _ = layer._weight_and_bias()
        moments = (
            layer.output.state.by_connection()
            if optimizer is None
            else [optimizer.state[layer.weight][name] for name in ("exp_avg", "exp_avg_sq")]
        )
        fresh = weight == 0.0
        assert fresh.float().mean() >= 0.45
        for moment in moments:
            assert (moment[fresh] == 0.0).all()
        assert all(len(set(row)) == 5 for row in layer.output.indices.int().tolist())


def test_another_learning_rate_counts_from_the_next_step() -> None:
    layer = head(optimizer="sgd")
    layer.learning_rate = 0.0
    before = state(layer)
    layer(embeddings(), ROWS).loss.backward()
    assert changed(layer, before) == {"steps"}
    with pytest.raises(ConfigError, match="learning_rate must be a number of at least 0, found nan"):
        layer.learning_rate = math.nan


def test_one_seed_gives_one_head_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, second = head(seed=3), head(seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert changed(first, state(second)) == set()
    assert changed(first, state(head(seed=4))) >= {"output.weight", "output.indices", "penultimate.weight"}


NAN = torch.full((BATCH, HIDDEN), math.nan)
MULTI_HOT = torch.zeros(BATCH, LABELS, dtype=torch.long)
MULTI_HOT[:, 7] = 1


@pytest.mark.parametrize(
    ("z", "rows", "message"),
    [
        (torch.zeros(BATCH, HIDDEN), [[41], *ROWS[1:]], r"SparseHead: labels: labels must lie in \[0, 41\)"),
        (torch.zeros(BATCH, HIDDEN), ROWS[1:], "one row for each of the 5 embeddings, found 4 rows"),
        (torch.zeros(BATCH, HIDDEN), [[0.5], *ROWS[1:]], "row 0 must be a list of integers"),
        (torch.zeros(BATCH, HIDDEN), (np.array([0, 2]), np.array([1])), "give rows of labels as a list"),
        (torch.zeros(BATCH, HIDDEN), (np.array([0, 2]), np.array([1, 1])), "found 1 rows"),
        (torch.zeros(BATCH, HIDDEN), MULTI_HOT, "must be the labels themselves, found rows of 41 numbers"),
        (torch.zeros(BATCH, HIDDEN), MULTI_HOT.tolist(), "only 0 and 1, which looks multi-hot; give lists"),
        (torch.zeros(BATCH, HIDDEN), MULTI_HOT.numpy(), "only 0 and 1, which looks multi-hot; give lists"),
        (
            torch.zeros(BATCH, HIDDEN),
            scipy.sparse.csr_array((BATCH, 40)),
            r"SparseHead: labels: a matrix must have one column for each of the 41 labels, found \[5, 40\]",
        ),
        (torch.zeros(BATCH, HIDDEN), scipy.sparse.csr_array((BATCH, 42)), r"found \[5, 42\]; give it all"),
        (torch.zeros(BATCH, HIDDEN), CsrRows.empty(BATCH, 40), r"found \[5, 40\]; give it all columns"),
        (torch.zeros(0, HIDDEN), [], r"embeddings must be .* found torch.float32 \[0, 6\]"),
        (torch.zeros(BATCH, 7), ROWS, r"embeddings must be .* found torch.float32 \[5, 7\]"),
        (torch.zeros(BATCH, HIDDEN, 1), ROWS, r"found torch.float32 \[5, 6, 1\]"),
        (torch.zeros(BATCH, HIDDEN, dtype=torch.int64), ROWS, r"found torch.int64 \[5, 6\]"),
        (torch.zeros(BATCH, HIDDEN, device="meta"), ROWS, "on the head's device cpu, found .* on meta"),
        (np.zeros((BATCH, HIDDEN)), ROWS, "found ndarray"),
        (NAN, ROWS, "embeddings must be finite in float32, found NaN or infinity"),
        (NAN.nan_to_num(nan=math.inf), ROWS, "embeddings must be finite"),
        (
            torch.full((BATCH, HIDDEN), 1e300, dtype=torch.float64),
            ROWS,
            "embeddings must be finite in float32",
        ),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_bad_input_is_named_and_changes_nothing(z: Any, rows: Any, message: str, fused: bool) -> None:
    layer = head(fused=fused)
    before = state(layer)
    with pytest.raises(DataError, match=message):
        layer(z, rows)
    assert changed(layer, before) == set()


def test_rows_as_wide_as_the_labels_are_lists_where_they_can_be() -> None:
    """Multi-hot integers were once read as lists: every row had the labels 0 and 1."""
    padded = torch.full((BATCH, LABELS), -1)
    padded[:, :2] = torch.tensor([0, 1])
    layer, z, lists = head(), embeddings(), [[0, 1]] * BATCH
    assert torch.equal(layer(z, padded).loss, layer(z, lists).loss)
    every = torch.arange(LABELS).repeat(BATCH, 1)
    assert torch.equal(layer(z, every).loss, layer(z, every.tolist()).loss)
    few = SparseHead(HIDDEN, 2, width=None, fan_in=3)
    assert torch.equal(few(z, torch.tensor([[0, 1]] * BATCH)).loss, few(z, lists).loss)


def test_a_penultimate_layer_that_overflows_is_named() -> None:
    layer = head()
    assert layer.penultimate is not None
    nn.init.constant_(layer.penultimate.weight, 3e38)
    with pytest.raises(DataError, match="the penultimate layer must give finite numbers"):
        layer(torch.ones(BATCH, HIDDEN), ROWS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 0}, "hidden must be an integer of at least 1, found 0"),
        ({"label_count": True}, "label_count must be an integer of at least 1, found True"),
        ({"loss": "hinge"}, "SparseHead: loss.kind"),
        ({"loss": {"kidn": "bce"}}, "unknown key loss.kidn; did you mean loss.kind"),
        ({"loss": 5}, "loss and optimizer must be a kind or a table of settings, found 5"),
        ({"optimizer": "adamw"}, "SparseHead: output_optimizer.kind"),
        ({"learning_rate": -1.0}, "SparseHead: output_optimizer.learning_rate"),
        ({"fan_in": 33, "width": 32}, "fan_in must be at most width = 32, found 33"),
        ({"width": None, "fan_in": 7}, "fan_in must be at most width = 6, found 7"),
        (
            {"width": 0, "fan_in": 5},
            "width must be an integer of at least 1, or None for no penultimate layer, found 0",
        ),
        ({"width": True}, "or None for no penultimate layer, found True"),
        ({"group": 3}, "SparseHead: group must be a torch.distributed process group or None, found 3; make"),
        ({"group_size": 3}, "model.group_size"),
        ({"seed": -1}, "training.seed"),
        (
            {"fused": False, "learning_rate": 0.1},
            "with fused=False the caller's optimizer updates the weights",
        ),
        ({"fused": False, "loss": {"gradient_cutoff": 0.1}}, "gradient_cutoff must be 0 with fused=False"),
        ({"loss": {"positive_weight_propensity": True}}, "positive_weight_propensity must be false"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SparseHead(**{"hidden": HIDDEN, "label_count": LABELS, **settings})


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({"label_count": 10**12, "width": None}, r"output.weight \[1000000000000, 6\]"),
        (
            {"label_count": 10**12, "width": None, "label_parallel": True},
            r"output.indices \[1000000000000, 6\]",
        ),
        ({"label_count": 10**12, "width": None, "fused": False}, "output.weight"),
        ({"width": 10**12}, r"penultimate.weight \[1000000000000, 6\]"),
    ],
)
def test_weights_that_cannot_fit_are_refused_before_they_are_made(
    settings: dict[str, Any], largest: str
) -> None:
    """The allocator's own error was all one saw."""
    message = rf"SparseHead: the weights must fit into this machine's memory of .* the most in {largest}"
    with pytest.raises(ConfigError, match=message):
        SparseHead(**{"hidden": HIDDEN, "label_count": LABELS, "fan_in": 6, **settings})


def test_misused_methods_are_refused() -> None:
    with pytest.raises(NativeError, match=r"k must lie in \[1, label\] = \[1, 41\], got 42"):
        head().topk(embeddings(), 42)
    with pytest.raises(ConfigError, match="optimizer must be given with fused=False, and only then"):
        head(fused=False).redistribute(0.1)
    with pytest.raises(NativeError, match="fraction"):
        head().redistribute(1.1)
    with pytest.raises(ConfigError, match="DataParallel's replicas cannot share an output layer"):
        head()._replicate_for_data_parallel()  # what nn.DataParallel calls, with two devices


def test_the_initial_bias_follows_the_loss() -> None:
    for loss, bias in (("squared_hinge", -1.0), ("bce", -math.log(40)), ("softmax", 0.0)):
        assert head(loss=loss).output.bias.unique().tolist() == pytest.approx([bias])
    assert head(loss="bce", bias_init=0.5).output.bias.unique().tolist() == [0.5]


def test_a_copy_of_a_head_for_autograd_shares_its_own_weights_with_its_layer() -> None:
    """They used to be apart: twice the memory, and a layer that stayed behind the parameters."""
    layer = head(fused=False)
    twin = copy.deepcopy(layer)
    assert twin.output.weight.data_ptr() == twin.weight.data_ptr() != layer.weight.data_ptr()
    assert twin.output.bias.data_ptr() == twin.bias.data_ptr()


def test_embeddings_that_are_not_dense_are_refused() -> None:
    with pytest.raises(DataError, match=r"must be a floating-point tensor .* found torch\.sparse_coo"):
        head()(embeddings().detach().to_sparse(), ROWS)
