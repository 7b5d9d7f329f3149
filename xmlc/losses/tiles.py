"""A contrastive loss tile by tile: nothing of size [query, key] is ever held.

With s = scale * q . k + bias, every kind is a function of each row's positive scores and of one sum over the
row's other scores. A first pass finds the sums; a second one evaluates the gradient of every score from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from xmlc.parallel import Workers


@dataclass(frozen=True)
class Pairs:
    """Positives of the queries within some keys, by rising query, each once."""

    query: Tensor  # int64 [pair]
    key: Tensor  # int64 [pair]
    count: Tensor  # [query], positives of each query over all keys, on whichever worker
    """Zero where a query has none: such a row counts nothing."""


@dataclass(frozen=True)
class Scores:
    """Scores of some queries against some keys."""

    kind: str
    queries: Tensor  # [query, d]
    keys: Tensor  # [key, d]
    pairs: Pairs
    ignored: Pairs
    """Pairs that are neither positives nor negatives; none of ``pairs`` is among them."""
    scale: Tensor  # []
    bias: Tensor  # []
    tile: int

    def rows(self, values: Tensor, first: int) -> Tensor:
        """Return a tile of rows in the precision of the sums: float32, or float64 where that was given."""
        return values[first : first + self.tile].to(self.scale.dtype)

    def tiles(self) -> Iterator[_Tile]:
        """Yield all tiles, at most [tile, tile], with their positives and what is ignored."""
        starts = torch.tensor([*range(self.tile, len(self.keys), self.tile)], dtype=torch.int64)
        for first in range(0, len(self.queries), self.tile):
            queries = self.rows(self.queries, first)
            rows = slice(first, first + len(queries))
            positives, ignored = (_by_column(pairs, rows, starts) for pairs in (self.pairs, self.ignored))
            for first_key, chosen, left_out in zip(
                range(0, len(self.keys), self.tile),
                positives,
                ignored,
                strict=False,  # without keys there is no tile
            ):
                keys = self.rows(self.keys, first_key)
                yield _Tile(
                    rows,
                    slice(first_key, first_key + len(keys)),
                    queries,
                    keys,
                    queries @ keys.T,
                    chosen,
                    self.pairs.query[chosen] - first,
                    self.pairs.key[chosen] - first_key,
                    (self.ignored.query[left_out] - first, self.ignored.key[left_out] - first_key),
                )


def _by_column(pairs: Pairs, rows: slice, starts: Tensor) -> tuple[Tensor, ...]:
    """Return the positions of the pairs of some rows, by tile of columns; ``starts`` lacks the first."""
    bounds = torch.tensor([rows.start, rows.stop], device=pairs.query.device)
    pair, end = torch.searchsorted(pairs.query, bounds).tolist()
    keys, order = pairs.key[pair:end].sort(stable=True)
    return torch.tensor_split(order + pair, torch.searchsorted(keys.cpu(), starts))


@dataclass(frozen=True)
class _Tile:
    rows: slice
    columns: slice
    queries: Tensor  # [row, d]
    keys: Tensor  # [column, d]
    raw: Tensor  # [row, column], q . k
    pair: Tensor  # [positive], positions in `Pairs`
    row: Tensor  # [positive]
    column: Tensor  # [positive]
    ignored: tuple[Tensor, Tensor]  # rows and columns, [ignored] each


@dataclass(frozen=True)
class RowSums:
    """What the second pass needs of every row."""

    log_sum: Tensor  # [query], log sum exp over all keys (softmax) or the negatives (decoupled_softmax)
    log_sum_gradient: Tensor  # [query], d row loss / d log_sum
    pair_gradient: Tensor  # [pair], direct d row loss / d positive score


def row_losses(scores: Scores, workers: Workers) -> tuple[Tensor, RowSums]:
    """Return the loss of every query [query]; ``workers`` are those that hold the other keys."""
    kind, pairs = scores.kind, scores.pairs
    rows = len(scores.queries)
    log_sum = scores.scale.new_full((rows,), -math.inf)
    soft_sum = scores.scale.new_zeros(rows)
    positive = scores.scale.new_empty(len(pairs.query))  # [pair]
    for tile in scores.tiles():
        value = tile.raw * scores.scale + scores.bias
        positive[tile.pair] = value[tile.row, tile.column]
        value[tile.ignored] = -math.inf
        if kind == "sigmoid":
            soft_sum[tile.rows] += functional.softplus(value).sum(1)
            continue
        if kind == "decoupled_softmax":
            value[tile.row, tile.column] = -math.inf
        log_sum[tile.rows] = torch.logaddexp(log_sum[tile.rows], value.logsumexp(1))
    known = (pairs.count > 0).to(positive.dtype)
    if kind == "sigmoid":
        losses = soft_sum.index_add_(0, pairs.query, -positive) * known
        return workers.sum(losses), RowSums(log_sum, known, -torch.ones_like(positive))
    if workers.size > 1:
        highest = workers.max(log_sum.clone())
        offset = torch.where(highest.isfinite(), highest, 0.0)
        log_sum = workers.sum((log_sum - offset).exp()).log() + offset
    share = 1.0 / pairs.count[pairs.query]
    above = log_sum[pairs.query] - positive
    if kind == "softmax":
        losses = torch.zeros_like(log_sum).index_add_(0, pairs.query, share * above)
        return workers.sum(losses), RowSums(log_sum, known, -share)
    gradient = share * above.sigmoid()
    both = torch.stack([share * functional.softplus(above), gradient])  # [2, pair]
    sums = workers.sum(log_sum.new_zeros(2, rows).index_add_(1, pairs.query, both))
    return sums[0], RowSums(log_sum, sums[1], -gradient)


def gradients(scores: Scores, sums: RowSums) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d (sum of row losses) / d queries [query, d], keys [key, d], scale [] and bias []."""
    kind = scores.kind
    dtype = scores.scale.dtype
    query_gradient = torch.zeros_like(scores.queries, dtype=dtype)
    key_gradient = torch.zeros_like(scores.keys, dtype=dtype)
    scale_gradient, bias_gradient = torch.zeros_like(scores.scale), torch.zeros_like(scores.bias)
    for tile in scores.tiles():
        value = tile.raw * scores.scale + scores.bias
        factor = sums.log_sum_gradient[tile.rows, None]
        if kind == "sigmoid":
            gradient = value.sigmoid() * factor
        else:
            # The exponent is at most 0 wherever the result is kept: no overflow at any scale.
            exponent = (value - sums.log_sum[tile.rows, None]).clamp_max_(0.0)
            gradient = exponent.exp() * factor
        if kind == "decoupled_softmax":
            gradient[tile.row, tile.column] = 0.0
        gradient[tile.row, tile.column] += sums.pair_gradient[tile.pair]
        gradient[tile.ignored] = 0.0
        query_gradient[tile.rows].addmm_(gradient, tile.keys)
        key_gradient[tile.columns].addmm_(gradient.T, tile.queries)
        scale_gradient += (gradient * tile.raw).sum()
        bias_gradient += gradient.sum()
    return query_gradient.mul_(scores.scale), key_gradient.mul_(scores.scale), scale_gradient, bias_gradient
