"""What a worker's step of the loss allocates at a size that is worth splitting."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xmlc.losses import multi_positive_loss
from xmlc.losses.multi_positive import Layout
from xmlc.parallel import Workers

WORKERS, BATCH, D = 8, 32_768, 512
SMALL_BATCH, POOLS = 8_192, (16_384, 65_536)
FEW_BYTES = 2**14  # where tiles begin; one float32 for each of a worker's further keys is more
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
    """A worker that allocates as among eight of equal parts; the others hold what it holds itself."""

    def __init__(self) -> None:
        super().__init__(alone=True)
        self.rank, self.size = 3, WORKERS

    def gather_sizes(self, *sizes: int, device: torch.device) -> list[list[int]]:
        return [list(sizes)] * WORKERS

    def _call(self, name: str, collective: Any, *arguments: Any, **options: Any) -> None:
        if name == "all_gather":
            parts, own = arguments
            for part in parts:
                part.copy_(own)  # counts and positions of positives, too, must be of a real batch
        for value in tree_leaves(arguments):
            value.nan_to_num_(0.0)  # what nobody has answered may be any number


def step_bytes(tile: int, layout: Layout = "row", query: int = BATCH, key: int = BATCH) -> int:
    """Return the most bytes that live at a time in forward and backward pass, own embeddings included."""
    own = query // WORKERS
    with Allocations() as allocations:
        queries = torch.zeros(own, D, requires_grad=True)
        keys = torch.zeros(key // WORKERS, D, requires_grad=True)
        positives = [[row] for row in range(own)]
        multi_positive_loss(
            queries, keys, positives, layout=layout, tile=tile, workers=OneOfEight()
        ).backward()
    assert queries.grad is not None and keys.grad is not None
    return allocations.peak


def own_bytes(query: int, key: int) -> int:
    """Return the bytes of a worker's own queries and keys and of their gradients."""
    return 2 * 4 * D * (query + key) // WORKERS


def test_a_batch_of_32768_on_eight_workers_takes_a_quarter_of_a_gibibyte() -> None:
    gathered = 4 * BATCH * D
    assert gathered < step_bytes(1024) <= MOST_BYTES


def further_bytes(layout: Layout, key: int) -> int:
    return step_bytes(1024, layout, SMALL_BATCH, key) - own_bytes(SMALL_BATCH, key)


def test_what_auto_needs_beside_inputs_and_gradients_does_not_grow_with_the_pool() -> None:
    small, large = (further_bytes("auto", pool) for pool in POOLS)
    assert abs(large - small) < FEW_BYTES


def test_what_row_needs_grows_with_the_gathered_keys() -> None:
    small, large = (further_bytes("row", pool) for pool in POOLS)
    assert large - small >= 4 * D * (POOLS[1] - POOLS[0])


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
