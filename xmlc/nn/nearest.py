"""The nearest of many embeddings, exactly, block by block."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from xmlc.data.rows import CsrRows

KEYS_AT_ONCE = 8192
"""Keys that are scored at a time: memory is queries * this, however many keys there are."""


def nearest(queries: Tensor, keys: Tensor, k: int, excluded: CsrRows | None = None) -> tuple[Tensor, Tensor]:
    """Return the k highest products ``queries @ keys.T`` and their keys, [query, k] each, best first.

    Ties go to the lowest key.

    Args:
        queries: [query, d].
        keys: [key, d].
        k: At most the number of keys.
        excluded: Pairs [query, key] that come last, with score -inf; or None.
    """
    scores = queries.new_empty(len(queries), 0)
    numbers = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    for first in range(0, len(keys), KEYS_AT_ONCE):
        block = queries @ keys[first : first + KEYS_AT_ONCE].T
        if excluded is not None:
            here = (excluded.indices >= first) & (excluded.indices < first + block.shape[1])
            block[excluded.entry_rows[here], excluded.indices[here] - first] = -math.inf
        best, columns = _highest(block, min(k, block.shape[1]))
        # Earlier keys stand first and the sort is stable.
        scores, order = torch.cat([scores, best], 1).sort(dim=1, descending=True, stable=True)
        numbers = torch.cat([numbers, columns + first], 1).gather(1, order[:, :k])
        scores = scores[:, :k]
    return scores, numbers


def _highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k highest of every row and their columns, by falling score, then by rising column."""
    best, columns = scores.topk(k)  # of equal scores it takes any
    tied = ((scores >= best[:, -1:]).sum(1) > k).nonzero().flatten()
    if len(tied):
        _, order = scores[tied].sort(dim=1, descending=True, stable=True)
        columns[tied] = order[:, :k]
    columns = columns.sort(dim=1).values
    best, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
    return best, columns.gather(1, order)
