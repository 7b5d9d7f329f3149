"""The head on several workers under DDP: equal to one process, its replicas equal to each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import in_workers, uneven_rows

from xmlc import SparseHead
from xmlc.errors import WorkerError
from xmlc.parallel import Workers

INPUTS, LABELS, BATCH = 4, 37, 11
ROWS = [[number % 37, (number * number) % 37] if number % 4 else [] for number in range(BATCH)]


class Classifier(nn.Module):
    """An encoder and a head, seen by DDP as one module; it also has a buffer, which DDP broadcasts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(INPUTS, 6), nn.BatchNorm1d(6).eval())
        options = {"width": 13, "fan_in": 5, "weight_init": "fan_in", "loss": "bce"}
        self.head = SparseHead(6, LABELS, **{**options, **settings})

    def forward(self, features: Tensor, labels: list[list[int]]) -> Tensor:
        return self.head(self.encoder(features), labels).loss


def data() -> Tensor:
    return torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, own: slice, accumulate: bool, steps: int = 3) -> list[float]:
    """Take a few steps; where asked to, the first half of each batch without DDP's reduction."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        if accumulate:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else torch.enable_grad():
                model(data()[own].flip(1), ROWS[own]).backward()
        loss = model(data()[own], ROWS[own])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(rank: int, size: int) -> dict[str, Any]:
    """Train as one of several workers; return losses, all tensors, and what refused to run."""
    found: dict[str, Any] = {}
    for accumulate in (False, True):
        model = Classifier()
        losses = train(DistributedDataParallel(model), uneven_rows(rank, size, BATCH), accumulate)
        found[f"accumulate {accumulate}"] = (losses, model.state_dict())
    plain = Classifier(fused=False)
    found["plain"] = (train(DistributedDataParallel(plain), slice(None), False), plain.state_dict())
    found["calls"] = collectives_of_a_step()
    with torch.no_grad():  # alone: the others are not there
        found["evaluation"] = [model(data(), ROWS).item() for _ in range(rank + 1)]
        found["topk"] = [model.head.topk(torch.zeros(1, 6), 3) for _ in range(rank + 1)]
    found["differ"] = disagreements(rank)
    return found


def collectives_of_a_step() -> list[str]:
    """Return the collectives of forward and backward pass, by name."""
    layer, names, call = SparseHead(6, LABELS, width=None, fan_in=3), [], Workers._call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Workers, "_call", lambda self, *given, **o: (names.append(given[0]), call(self, *given, **o))
        )
        layer(torch.ones(2, 6), [[], []]).loss.backward()
    return names


def disagreements(rank: int) -> list[str]:
    """Return the errors of heads that are not the same on all workers."""
    messages = []
    redistributed = Classifier()
    train(redistributed, slice(0, 2), False, 1)
    if rank == 0:
        redistributed.head.redistribute(0.1)
    for model in (Classifier(seed=rank), Classifier(learning_rate=0.01 * (rank + 1)), redistributed):
        try:
            model(data(), ROWS)
            messages.append("no error")
        except WorkerError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("size", [2, 3])
def test_workers_under_ddp_equal_one_process(size: int, tmp_path: Path) -> None:
    found = in_workers(size, compare, tmp_path)
    for accumulate in (False, True):
        key = f"accumulate {accumulate}"
        alone = Classifier()
        truth = train(alone, slice(None), accumulate)
        for each in found:
            losses, tensors = each[key]
            assert losses == pytest.approx(truth, rel=1e-5)
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-6, msg=name)
                if "head.output" in name:
                    assert torch.equal(tensors[name], found[0][key][1][name]), f"replicas differ: {name}"
    plain = Classifier(fused=False)
    truth = train(plain, slice(None), False)
    for rank, each in enumerate(found):
        losses, tensors = each["plain"]
        assert losses == pytest.approx(truth, rel=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-6, msg=name)
        # Sizes, labels of each row, labels, features; the mean of the loss.
        assert each["calls"] == ["all_gather"] * 4 + ["all_reduce"]
        assert len(set(each["evaluation"])) == 1
        assert len(each["topk"]) == rank + 1
        assert all("must be the same on all workers" in message for message in each["differ"]), each["differ"]
