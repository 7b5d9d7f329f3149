"""What a worker's step of the loss allocates at a size that is worth splitting."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xmlc.losses import multi_positive_loss
from xmlc.parallel import Workers

WORKERS, BATCH, D = 8, 32_768, 512
MOST_BYTES = 2**28  # 0.25 GiB; one [batch of a worker, batch] in float32 alone is twice that


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that live, and the most at any time; leaves out dense products."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:  # their values do not matter here, their time would
            result = args[0].new_zeros(args[0].shape[0], args[1].shape[1])
        elif func is torch.ops.aten.addmm_.default:
            result = args[0]
        else:
            result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf.untyped_storage())
        return result

    def count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, key, size)

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class OneOfEight(Workers):
    """A worker that allocates as among eight of equal parts, and that nobody answers."""

    def __init__(self) -> None:
        super().__init__(alone=True)
        self.rank, self.size = 3, WORKERS

    def gather_sizes(self, *sizes: int, device: torch.device) -> list[list[int]]:
        return [list(sizes)] * WORKERS

    def _call(self, name: str, collective: Any, *arguments: Any, **options: Any) -> None:
        for value in tree_leaves(arguments):
            value.nan_to_num_(0.0)  # what nobody has answered may be any number


def step_bytes(tile: int) -> int:
    """Return the most bytes that live at a time in forward and backward pass, own embeddings included."""
    own = BATCH // WORKERS
    with Allocations() as allocations:
        queries, keys = torch.zeros(own, D, requires_grad=True), torch.zeros(own, D, requires_grad=True)
        positives = [[row] for row in range(own)]
        multi_positive_loss(
            queries, keys, positives, layout="row", tile=tile, workers=OneOfEight()
        ).backward()
    assert queries.grad is not None and keys.grad is not None
    return allocations.peak


def test_a_batch_of_32768_on_eight_workers_takes_a_quarter_of_a_gibibyte() -> None:
    gathered = 4 * BATCH * D
    assert gathered < step_bytes(1024) <= MOST_BYTES


def test_the_tracker_counts_what_lives() -> None:
    with Allocations() as allocations:
        first = torch.ones(1000)
        second = first + 1.0
        del first
        third = second.view(10, 100).exp()
        second.mul_(2.0)
    assert (allocations.live, allocations.peak) == (8000, 8000)
    del second, third
    assert allocations.live == 0
