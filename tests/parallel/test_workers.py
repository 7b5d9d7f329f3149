"""Joining the workers that a launcher started, and what sums over them are made of."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as distributed

from xmlc.errors import WorkerError
from xmlc.parallel import ALONE, joined, workers


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment as torchrun makes it, but for where to meet."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    return monkeypatch


def test_a_process_without_a_launcher_is_alone() -> None:
    with joined("cpu", 60.0) as found:
        assert found is ALONE
    assert not distributed.is_initialized()


def test_one_launched_worker_is_alone(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("WORLD_SIZE", "1")
    with joined("cpu", 60.0) as found:
        assert found is ALONE


def test_workers_that_cannot_meet_say_so(launched: pytest.MonkeyPatch) -> None:
    expected = "torchrun's 2 workers must reach each other, worker 1 found: .*MASTER_PORT.*; see torchrun's"
    with pytest.raises(WorkerError, match=expected), joined("cpu", 60.0):
        pass


def test_buckets_hold_one_dtype_and_no_more_than_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BUCKET_BYTES", 40)
    tensors = [torch.zeros(4), torch.zeros(6), torch.zeros(1), torch.zeros(1).double(), torch.zeros(99)]
    lengths = [[len(each) for each in bucket] for bucket in workers._buckets(tensors)]
    assert lengths == [[4, 6], [1], [1], [99]]
