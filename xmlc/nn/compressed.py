"""Activations kept for the backward pass in 8 bits, a scale for every row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

SHORTEST_ROW = 16
"""Numbers of a row that is compressed: below, scales would take too much of what is spared."""
_HIGHEST = 127.0
_REARRANGING = {
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Expand", "ToCopy")
}
"""What autograd calls the operations that a weight goes through on its way to a product."""


class Compressed(NamedTuple):
    """Rows as ``codes * scale``."""

    codes: Tensor  # int8, the shape of the tensor
    scale: Tensor  # float32 [..., 1]
    dtype: torch.dtype


@contextmanager
def compressed_activations() -> Iterator[None]:
    """Keep what the forward pass within saves of its activations in int8; the backward pass may be outside.

    ::

        scale = max |row| / 127                # of the last axis
        saved = round(row / scale)             # int8, to the nearest, ties to even
        restored = saved * scale               # when the backward pass asks for it: off by scale / 2 at most

    The forward pass computes with full activations, so outputs and loss are the same bits; gradients are
    those at the restored activations. Compressed is what autograd saves where it is floating point, on the
    graph, and has rows of at least 16 numbers. Masks of dropout, which are 0 or one number, become bytes and
    come back exactly. Everything else stays as it is: weights, indices, an operation's statistics (means,
    attention's logarithms of sums), which are not on the graph; and whatever holds NaN or infinity.

    A `SparseHead` within keeps its units in int8 too: its output layer's step then sees restored ones.

    Four bytes become little more than one, and two of bfloat16 as well. It costs a pass over each of them in
    both directions. Recomputed activations (torch.utils.checkpoint) save nothing that could be compressed.
    """
    latest: list[tuple[Tensor, int, Compressed]] = []

    def pack(tensor: Tensor) -> Tensor | Compressed:
        if not _has_rows(tensor):
            return tensor
        if not tensor.requires_grad:
            return _mask(tensor)
        if tensor.is_leaf or _is_weight(tensor):
            return tensor
        # Products of one input (queries, keys, values) save it one after the other; so do an operation that
        # saves its result and the next one, whose input that is.
        if latest and _is_same(latest[0][0], tensor) and latest[0][1] == tensor._version:
            return latest[0][2]
        packed = compress(tensor)
        if packed is None:
            return tensor
        latest[:] = [(tensor.detach(), tensor._version, packed)]
        return packed

    with saved_tensors_hooks(pack, _unpack):
        try:
            yield
        finally:
            latest.clear()


def compress(tensor: Tensor) -> Compressed | None:
    """Return a floating-point tensor compressed by rows of its last axis; None where it is not finite."""
    rows = tensor.detach()
    highest = rows.abs().amax(-1, keepdim=True).float()
    if not highest.isfinite().all():
        return None
    scale = (highest / _HIGHEST).clamp_min_(torch.finfo(torch.float32).tiny)
    return Compressed((rows / scale).round_().to(torch.int8), scale, tensor.dtype)


def restore(packed: Compressed) -> Tensor:
    """Return the tensor that was compressed, nearly."""
    return (packed.codes * packed.scale).to(packed.dtype)


def _unpack(packed: Any) -> Tensor:
    return restore(packed) if isinstance(packed, Compressed) else packed


def _has_rows(tensor: Tensor) -> bool:
    return (
        tensor.is_floating_point()
        and tensor.layout is torch.strided
        and tensor.dim() >= 2
        and tensor.shape[-1] >= SHORTEST_ROW
    )


def _mask(tensor: Tensor) -> Tensor | Compressed:
    """Return a tensor whose rows hold 0 and one positive number only as bytes, others as they are."""
    highest = tensor.amax(-1, keepdim=True)
    kept = tensor != 0
    if not torch.equal(torch.where(kept, highest, 0.0), tensor):
        return tensor
    return Compressed(kept.to(torch.int8), highest.float(), tensor.dtype)


def _is_weight(tensor: Tensor) -> bool:
    """Return whether it is a parameter, perhaps transposed or cast."""
    node = tensor.grad_fn
    while node is not None and node.name() in _REARRANGING and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node is not None and node.name().endswith("AccumulateGrad")


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether both show the same numbers of one storage."""
    return (
        first.data_ptr() == second.data_ptr()
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.dtype == second.dtype
    )
