"""A head whose labels are shared out to workers: equal to one process that has them all."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import in_workers, uneven_rows

from xmlc import SparseHead
from xmlc.config import OptimizerConfig
from xmlc.data.ragged import ragged_rows
from xmlc.errors import ConfigError, NativeError
from xmlc.nn import output_layer
from xmlc.ops import LabelSums, OptimizerState
from xmlc.ops.top_labels import top_labels_reference
from xmlc.parallel import Workers, deal_labels

INPUTS, LABELS, BATCH = 4, 150, 11
# With positives at both ends, whichever worker has them, and rows without any.
ROWS = [[0, number * 13 % LABELS, LABELS - 1][: number % 4] for number in range(BATCH)]
COUNTS = np.arange(LABELS)[::-1] ** 2
SETTINGS: list[dict[str, Any]] = [
    {"loss": {"kind": "bce", "positive_weight": 2.0}, "optimizer": "adam"},
    {"loss": {"kind": "squared_hinge", "reduction": "mean"}, "optimizer": "label_adam", "group_size": 16},
    {"loss": "bce", "optimizer": {"kind": "momentum", "weight_decay": 0.1}, "weight_init": "glorot_flat"},
    {"loss": {"kind": "softmax", "positive_weight": 2.0}, "optimizer": "adam", "group_size": 16},
    {"loss": {"kind": "decoupled_softmax", "reduction": "mean"}, "optimizer": "momentum"},
]
OF_ALL = (None, COUNTS, COUNTS, None, COUNTS)
"""The label counts of each of the settings."""


class Classifier(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(INPUTS, 6)
        options = {"width": 23, "fan_in": 5, "weight_init": "fan_in", "learning_rate": 0.05}
        self.head = SparseHead(6, LABELS, **{**options, **settings})

    def forward(self, features: Tensor, labels: list[list[int]]) -> Tensor:
        return self.head(self.encoder(features), labels).loss


def data() -> Tensor:
    return torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, own: slice) -> dict[str, Any]:
    """Take two steps and look at a third; return losses and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(data()[own], ROWS[own])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [each.grad for each in model.parameters()]
    model.eval()
    optimizer.zero_grad()
    model(data()[own].flip(1), ROWS[own]).backward()
    gradients += [each.grad for each in model.parameters()]
    with torch.no_grad():
        losses.append(model(data()[own], ROWS[own]).item())
    return {"losses": losses, "gradients": gradients}


def in_one_process(settings: dict[str, Any]) -> tuple[dict[str, Any], Classifier]:
    model = Classifier(**settings)
    return train(model, slice(None)), model


def compare_all(rank: int, _: int) -> dict[int, dict[str, Any]]:
    """Take part in groups of two to four workers; one of one is alone."""
    alone = [distributed.new_group([each]) for each in range(4)][rank]
    groups = {size: distributed.new_group(list(range(size))) for size in (2, 3, 4)}
    return {size: compare(rank, size, group, alone) for size, group in groups.items() if rank < size}


def compare(rank: int, size: int, group: Any = None, alone_in: Any = None) -> dict[str, Any]:
    """Train as one of several workers; return what differs from one process, and what was communicated."""
    wrong, own, shared_out = [], uneven_rows(rank, size, BATCH), {"label_parallel": True, "group": group}
    for settings, counts in zip(SETTINGS, OF_ALL, strict=True):
        truth, alone = in_one_process({**settings, "seed": 3, "group": alone_in})
        model = Classifier(**settings, seed=3, label_counts=counts, **shared_out)
        try:
            assert abs(len(model.head.output.weight) - LABELS / size) < 2 * model.head.output.group_size
            shared = DistributedDataParallel(model, process_group=group) if size > 1 else model
            found = train(shared, own)
            torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)
            state = copy.deepcopy(model).state_dict()
            torch.testing.assert_close(state, alone.state_dict(), rtol=1e-4, atol=1e-6)
            for k in (1, 7, LABELS):
                embeddings = alone.encoder(data()).detach()
                scores, labels = model.head.topk(embeddings[own], k)
                expected, truth_labels = alone.head.topk(embeddings, k)
                torch.testing.assert_close(scores, expected[own], rtol=1e-4, atol=1e-5)
                assert k == LABELS or torch.equal(labels, truth_labels[own])
            # The whole state goes to any number of workers, here from one process; then nothing differs.
            model.load_state_dict(alone.state_dict())
            again = model.state_dict()
            assert all(same(each, again[name]) for name, each in alone.state_dict().items())
            # Equal to the last bit now, so that ties are decided alike, too.
            assert torch.equal(model.head.topk(embeddings[own], 9)[1], alone.head.topk(embeddings, 9)[1][own])
            check_redistribution(model.head, alone.head)
        except AssertionError as error:
            wrong.append(f"{settings} {counts is None}: {error}")
    wrong += check_in_float64(own, shared_out, alone_in)
    if size <= 3:  # units of 64 labels
        wrong += check_float8(own, shared_out, alone_in)
    calls = {loss: collectives(shared_out, loss) for loss in ("bce", "softmax")}
    return {"wrong": wrong, "calls": calls}


def check_in_float64(own: slice, shared_out: dict[str, Any], alone_in: Any) -> list[str]:
    """With the references in place of the kernels, only the order of sums in float64 can differ."""
    wrong = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_layer, "fused_step", exact_step)
        patch.setattr(output_layer, "log_normaliser", exact_sums)
        patch.setattr(output_layer, "top_labels", top_labels_reference)
        for settings, counts in zip(SETTINGS, OF_ALL, strict=True):
            truth = train_in_float64(slice(None), {**settings, "group": alone_in})
            found = train_in_float64(own, {**settings, **shared_out, "label_counts": counts})
            try:
                torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
            except AssertionError as error:
                wrong.append(f"float64 {settings}: {error}")
    return wrong


def train_in_float64(own: slice, settings: dict[str, Any]) -> dict[str, Any]:
    """Take two steps of an encoder and an output layer, and rank; return all that comes of it."""
    torch.manual_seed(0)
    encoder = nn.Linear(INPUTS, 23).double()
    options = {"width": None, "fan_in": 5, "weight_init": "fan_in", "seed": 3}
    head = SparseHead(23, LABELS, **{**options, **settings})
    layer = head.parallel or head.output
    in_float64(head.output)
    positives = ragged_rows(ROWS[own], len(ROWS[own]), LABELS, "test")
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    losses, gradients, features = [], [], data().double()
    for step in (1, 2):
        hidden = encoder(features[own]).relu()
        loss, gradient = layer.step(hidden.detach().T.contiguous(), positives, 0.05, step)
        assert gradient.dtype == torch.float64
        optimizer.zero_grad()
        (hidden * gradient.T).sum().backward()
        mine = [each.grad for each in encoder.parameters() if each.grad is not None]
        head.workers.sum_gradients(mine)
        losses.append(loss)
        gradients += [each.clone() for each in mine]
        optimizer.step()
    with torch.no_grad():
        ranked = [layer.top_labels(encoder(features).relu().T.contiguous(), k) for k in (1, 7, LABELS)]
    return {
        "losses": losses,
        "gradients": gradients,
        "encoder": list(encoder.parameters()),
        "layer": dict(head.state_dict()),
        "ranked": ranked,
    }


def in_float64(layer: output_layer.SparseOutput) -> None:
    layer.feature_dtype = torch.float64
    layer.weight, layer.bias = layer.weight.double(), layer.bias.double()
    layer.state = OptimizerState(**{name: each.double() for name, each in layer.state.tensors().items()})


def exact_step(
    features: Tensor,
    positive_offsets: Tensor,
    positive_labels: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    *,
    optimizer: OptimizerConfig,
    learning_rate: float,
    state: OptimizerState,
    step: int,
    group_size: int,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Take the step of `fused_step` by dense algebra in float64."""
    problem = oracles.Problem(
        features, weight, indices, bias, positive_offsets, positive_labels.long(), group_size
    )
    of_loss = {name: others[name] for name in ("loss", "scale", "positive_weight", "share_positives")}
    if "normaliser" in others:
        of_loss["normaliser"] = others["normaliser"]
        del of_loss["share_positives"]
        gradient = oracles.gradients_of_part(problem, **of_loss)
    else:
        gradient = oracles.gradients(problem, dtype=torch.float64, **of_loss)
    exact = oracles.DenseOptimizer(optimizer, learning_rate, weight, bias, state)
    exact.step(gradient.weight, gradient.bias, step)
    for name, value in state.tensors().items():
        value.copy_(exact.state[name])
    return gradient.loss, gradient.features


def exact_sums(
    features: Tensor,
    positive_offsets: Tensor,
    positive_labels: Tensor,
    weight: Tensor,
    indices: Tensor,
    bias: Tensor,
    *,
    loss: str,
    group_size: int,
    **_: Any,
) -> LabelSums:
    """Return what `log_normaliser` does by dense algebra in float64."""
    problem = oracles.Problem(features, weight, indices, bias, positive_offsets, positive_labels.long())
    logit = oracles.logits(features, weight, indices, bias, group_size)
    target = oracles.targets(problem)
    label, instance = (target > 0).nonzero().T
    return LabelSums(
        oracles.log_sum(loss, logit, target), label.int(), instance.int(), logit[label, instance]
    )


def check_float8(own: slice, shared_out: dict[str, Any], alone_in: Any) -> list[str]:
    """Weights and state rounded at random differ from one process's; those that are loaded must not."""
    optimizer = {"kind": "adam", "state_dtype": "float8_e4m3fn"}
    settings = {"weight_dtype": "float8_e4m3fn", "loss": "bce", "optimizer": optimizer}
    _, alone = in_one_process({**settings, "group": alone_in})
    model = Classifier(**settings, label_counts=COUNTS, **shared_out)
    started, fresh = model.state_dict(), Classifier(**settings).state_dict()
    wrong = [f"start {name}" for name, each in fresh.items() if not same(each, started[name])]
    model.load_state_dict(alone.state_dict())
    again = model.state_dict()
    wrong += [f"loaded {name}" for name, each in alone.state_dict().items() if not same(each, again[name])]
    embeddings = alone.encoder(data()).detach()
    if not same(model.head.topk(embeddings[own], 9)[1], alone.head.topk(embeddings, 9)[1][own]):
        wrong.append("topk")
    losses = train(model, own)["losses"]
    return wrong if losses[1] < losses[0] else [*wrong, f"losses {losses}"]


def same(first: Tensor, second: Tensor) -> bool:
    """Compare bits: torch compares no float8."""
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (first, second)]
    return torch.equal(*bits)


def check_redistribution(head: SparseHead, alone: SparseHead) -> None:
    """The same connections move as in one process, though to other inputs; many are 0 the second time."""
    for fraction in (0.13, 0.2):
        moved, expected = head.redistribute(fraction), alone.redistribute(fraction)
        assert moved == expected
        after, truth = head.state_dict(), alone.state_dict()
        zeros, expected_zeros = (int((each["output.weight"] == 0).sum()) for each in (after, truth))
        assert zeros == expected_zeros
        rows = after["output.indices"].int().sort(1).values
        assert (rows.diff(dim=1) > 0).all() and rows.max() < 23
    head.load_state_dict(truth)


def collectives(shared_out: dict[str, Any], loss: str) -> list[str]:
    """Return the collectives of forward and backward pass, of `topk`, and of a redistribution, by name."""
    names, call = [], Workers._call
    layer = SparseHead(6, LABELS, width=None, fan_in=3, loss=loss, **shared_out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Workers, "_call", lambda self, *given, **o: (names.append(given[0]), call(self, *given, **o))
        )
        layer(torch.ones(2, 6), [[], []]).loss.backward()
        names.append("topk")
        layer.topk(torch.ones(2, 6))
        names.append("redistribute")
        layer.redistribute(0.1)
    return names


def test_shared_out_labels_equal_one_process(tmp_path: Path) -> None:
    alone = compare(0, 1)
    assert alone["wrong"] == []
    assert all(each == ["topk", "redistribute"] for each in alone["calls"].values())
    for of_sizes in in_workers(4, compare_all, tmp_path):
        for size, found in of_sizes.items():
            assert found["wrong"] == [], f"{size} workers"
            for loss, calls in found["calls"].items():
                # In either pass: the sums over labels, the positives' pull.
                sums = ["all_gather", "all_reduce"] if loss == "softmax" else []
                assert calls == [
                    # Sizes, labels of each row, labels, features; the loss; the features' gradient.
                    *["all_gather"] * 4,
                    *[*sums, "all_reduce", *sums, "reduce_scatter"],
                    # Sizes, features, scores, labels.
                    *["topk", *["all_gather"] * 4],
                    # Upper and lower half of the limit's bits, ties; the number of connections that moved.
                    *["redistribute", "all_reduce", "all_reduce", "all_gather", "all_reduce"],
                ]


@pytest.mark.parametrize(("label", "workers", "unit"), [(150, 4, 1), (150, 4, 16), (7, 7, 1), (64, 1, 64)])
def test_dealt_labels_have_one_owner_and_balanced_positives(label: int, workers: int, unit: int) -> None:
    counts = np.random.default_rng(0).zipf(1.5, label).clip(max=1000)
    for given in (None, counts):
        shares = deal_labels(label, workers, unit, given)
        labels = [shares.labels(rank) for rank in range(workers)]
        assert np.array_equal(np.sort(np.concatenate(labels)), np.arange(label))
        assert all((np.diff(each) > 0).all() for each in labels)
        sizes = [len(each) for each in labels]
        assert max(sizes) - min(sizes) <= 2 * unit - 1
    sums = [counts[each].sum() for each in labels]
    largest = np.add.reduceat(counts, np.arange(0, label, unit)).max()
    assert max(sums) - min(sums) <= largest


def test_what_cannot_be_shared_out_says_so() -> None:
    with pytest.raises(ConfigError, match="at least one of the 3 units of 64 labels, found 4 workers"):
        deal_labels(150, 4, 64)
    with pytest.raises(ConfigError, match="label_parallel needs fused=True"):
        SparseHead(6, 9, width=None, fan_in=3, fused=False, label_parallel=True)
    with pytest.raises(
        ConfigError, match="label_counts must be integers of at least 0, \\[9\\], found int64 \\[2\\]"
    ):
        SparseHead(6, 9, width=None, fan_in=3, label_parallel=True, label_counts=[1, 2])
    with pytest.raises(ConfigError, match="found label_parallel=False"):
        SparseHead(6, 9, width=None, fan_in=3, label_counts=[1] * 9)
    head = SparseHead(6, 9, width=None, fan_in=3, label_parallel=True)
    with pytest.raises(NativeError, match="k must lie in \\[1, label\\]"):
        head.topk(torch.zeros(1, 6), 10)
    with pytest.raises(NativeError, match="fraction must lie in"):
        head.redistribute(1.5)
