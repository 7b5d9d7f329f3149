"""Dense float64 truth of the contrastive losses, and problems with awkward rows."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor


def dense_loss(
    queries: Tensor,
    keys: Tensor,
    positive: Tensor,
    kind: str,
    scale: Tensor,
    bias: Tensor,
    ignored: Tensor | None = None,
) -> Tensor:
    """Evaluate the documented formula, row by row; positive and ignored are bool [query, key]."""
    total = torch.zeros((), dtype=queries.dtype)
    counted = torch.ones_like(positive) if ignored is None else ~ignored
    for row, known, kept in zip(scale * queries @ keys.T + bias, positive, counted, strict=True):
        row, known = row[kept], known[kept]
        if not known.any():
            continue
        if kind == "sigmoid":
            total = total + functional.softplus(row).sum() - row[known].sum()
        for score in row[known] if kind != "sigmoid" else ():
            others = row if kind == "softmax" else torch.cat([row[~known], score[None]])
            total = total + (others.logsumexp(0) - score) / known.sum()
    return total / len(queries)


def problem(query: int = 7, key: int = 11, d: int = 5, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return embeddings and positives; row 0 has none, row 1 all, row 2 the first and the last key."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(query, d, generator=generator, dtype=torch.float64)
    keys = torch.randn(key, d, generator=generator, dtype=torch.float64)
    positive = torch.rand(query, key, generator=generator) < 0.3
    positive[0], positive[1], positive[2, [0, -1]] = False, True, True
    return queries, keys, positive


def lists(positive: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in positive]
