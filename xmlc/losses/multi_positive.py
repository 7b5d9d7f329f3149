"""The multi-positive contrastive loss: its functional core, its split over workers, and a module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.distributed as distributed
from torch import Tensor, nn

from xmlc.data.ragged import RaggedLabels, described, holds_values, ragged_rows
from xmlc.data.rows import CsrRows
from xmlc.errors import ConfigError, DataError
from xmlc.losses.tiles import Pairs, RowSums, Scores, gradients, row_losses
from xmlc.ops.checks import differentiated_once
from xmlc.parallel import Workers, check_group

Kind = Literal["decoupled_softmax", "softmax", "sigmoid"]
Layout = Literal["row", "column", "auto"]
KINDS = get_args(Kind)
TILE = 1024


def multi_positive_loss(
    queries: Tensor,
    keys: Tensor,
    positives: RaggedLabels,
    *,
    ignored: RaggedLabels | None = None,
    kind: Kind = "decoupled_softmax",
    scale: Tensor | float = 20.0,
    bias: Tensor | float = 0.0,
    layout: Layout = "auto",
    tile: int = TILE,
    workers: Workers | None = None,
) -> Tensor:
    """Return the mean over queries of a contrastive loss against a pool of keys.

    With s[i, l] = scale * queries[i] . keys[l] + bias and P the positives of row i in the pool::

        decoupled_softmax  mean over p in P of  log(exp(s[i, p]) + sum over l not in P of exp(s[i, l]))
                           - s[i, p]
        softmax            mean over p in P of  log(sum over l of exp(s[i, l])) - s[i, p]
        sigmoid            sum over l of softplus(s[i, l])  -  sum over p in P of s[i, p]

    A row without positives has loss 0; so has, for ``decoupled_softmax``, one with nothing but positives.
    Both count in the mean. Sums are float32 (float64 for float64 inputs), scores exist in tiles of
    [tile, tile] only, and are computed once for the loss and once more for the gradients.

    With several workers the pool is the keys of all workers in the order of their ranks, the mean is over the
    queries of all workers, and every worker returns that same mean. ``row`` gathers the keys, ``column`` the
    queries, which with their gradient are what a worker holds beside its own; ``auto`` gathers the smaller
    side. **After DDP's mean over workers every gradient (queries, keys,
    scale, bias) equals the one-process gradient**: a worker's own gradients are its share times the number of
    workers. All workers must give the same scale, bias, kind and layout, and back-propagate the same
    gradient.

    Args:
        queries: float [query, d]; workers may hold different numbers, also none.
        keys: float [key, d], likewise.
        positives: For each own query, its positives as positions in the pool: lists, compressed rows, a SciPy
            matrix, or an int tensor padded with negatives.
        ignored: Pairs that count neither as positives nor as negatives, given like ``positives``, of which
            they take some away; by all workers or by none.
        kind: See above.
        scale: Factor on the dot product, a number or tensor []; 1 / temperature.
        bias: Added to every score; the softmaxes do not feel it.
        layout: What is gathered, see above.
        tile: Rows and columns of a tile.
        workers: Who shares the pool; torch.distributed's default group if there is one, else this process.

    Returns:
        The loss [], float32 or float64. Differentiable once.

    Raises:
        DataError: Embeddings are empty, not finite or do not fit each other; a positive is out of range;
            scale or bias is no finite number.
        ConfigError: Kind, layout or tile is unknown.
        WorkerError: Another worker stopped.
    """
    _check_settings(kind, layout, tile)
    _check_embeddings(queries, keys)
    dtype = torch.float64 if queries.dtype == torch.float64 else torch.float32
    scale, bias = _number("scale", scale, queries, dtype), _number("bias", bias, queries, dtype)
    workers = Workers() if workers is None else workers
    sizes = workers.gather_sizes(len(queries), len(keys), device=queries.device)
    split = _Split(workers, [size[0] for size in sizes], [size[1] for size in sizes])
    if split.query == 0 or split.key == 0:
        raise DataError(
            f"multi_positive_loss: queries and keys must not be empty, found {split.query} queries and "
            f"{split.key} keys over all workers"
        )
    rows = ragged_rows(positives, len(queries), split.key, "multi_positive_loss: positives")
    none = CsrRows.empty(rows.rows, rows.columns)
    left_out = none
    if ignored is not None:
        left_out = ragged_rows(ignored, len(queries), split.key, "multi_positive_loss: ignored")
        rows = rows.without(left_out)
    by_row = layout == "row" or (layout == "auto" and split.key <= split.query)

    def pairs_of(each: CsrRows) -> Pairs:
        if by_row or each is none:
            return _pairs(each, queries.device, dtype)
        return _own_columns(each, split, queries.device, dtype)

    pairs = pairs_of(rows), pairs_of(left_out)
    return _Loss.apply(queries, keys, scale, bias, pairs, kind, tile, split, by_row)


@dataclass(frozen=True)
class _Split:
    """How many queries and keys each worker has."""

    workers: Workers
    queries: list[int]
    keys: list[int]

    @property
    def query(self) -> int:
        return sum(self.queries)

    @property
    def key(self) -> int:
        return sum(self.keys)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        scale: Tensor,
        bias: Tensor,
        pairs: tuple[Pairs, Pairs],  # positives, ignored
        kind: str,
        tile: int,
        split: _Split,
        by_row: bool,
    ) -> Tensor:
        workers = split.workers
        if by_row:
            keys = workers.gather_rows(keys, split.keys)
        else:
            queries = workers.gather_rows(queries, split.queries)
        scores = Scores(kind, queries, keys, pairs[0], pairs[1], scale, bias, tile)
        losses, sums = row_losses(scores, Workers(alone=True) if by_row else workers)
        loss = losses.sum() / split.query
        ctx.save_for_backward(
            queries, keys, scale, bias, sums.log_sum, sums.log_sum_gradient, sums.pair_gradient
        )
        ctx.rest = (pairs, kind, tile, split, by_row)
        return workers.sum(loss) if by_row else loss

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        differentiated_once("multi_positive_loss: the loss")
        queries, keys, scale, bias, *sums = ctx.saved_tensors
        pairs, kind, tile, split, by_row = ctx.rest
        scores = Scores(kind, queries, keys, pairs[0], pairs[1], scale, bias, tile)
        of_queries, of_keys, of_scale, of_bias = gradients(scores, RowSums(*sums))
        factor = loss_gradient * (split.workers.size / split.query)
        if by_row:
            of_keys = split.workers.reduce_scatter_rows(of_keys, split.keys)
        else:
            of_queries = split.workers.reduce_scatter_rows(of_queries, split.queries)
        own = (of_queries.mul_(factor).to(queries.dtype), of_keys.mul_(factor).to(keys.dtype))
        return *own, of_scale * factor, of_bias * factor, None, None, None, None, None


def _pairs(rows: CsrRows, device: torch.device, dtype: torch.dtype) -> Pairs:
    count = torch.from_numpy(rows.offsets).diff()
    query = torch.arange(rows.rows).repeat_interleave(count)
    key = torch.from_numpy(rows.indices).long()
    return Pairs(query.to(device), key.to(device), count.to(device, dtype))


def _own_columns(rows: CsrRows, split: _Split, device: torch.device, dtype: torch.dtype) -> Pairs:
    """Return the pairs of all workers' queries among this worker's keys, numbered from its first."""
    workers = split.workers
    count = torch.from_numpy(rows.offsets).diff().to(device)
    key = torch.from_numpy(rows.indices).long().to(device)
    lengths = [size[0] for size in workers.gather_sizes(len(key), device=device)]
    count = workers.gather_rows(count, split.queries)
    key = workers.gather_rows(key, lengths)
    query = torch.arange(split.query, device=device).repeat_interleave(count)
    first = sum(split.keys[: workers.rank])
    own = (key >= first) & (key < first + split.keys[workers.rank])
    return Pairs(query[own], key[own] - first, count.to(dtype))


def _check_settings(kind: object, layout: object, tile: object) -> None:
    if kind not in KINDS:
        raise ConfigError(f"multi_positive_loss: kind must be one of {', '.join(KINDS)}, found {kind!r}")
    if layout not in get_args(Layout):
        raise ConfigError(f"multi_positive_loss: layout must be row, column or auto, found {layout!r}")
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise ConfigError(f"multi_positive_loss: tile must be an integer of at least 1, found {tile!r}")


def _check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"MultiPositive: {name} must be True or False, found {value!r}")


def _check_embeddings(queries: Tensor, keys: Tensor) -> None:
    for name, value in (("queries", queries), ("keys", keys)):
        fits = isinstance(value, Tensor) and holds_values(value) and value.dtype in _DTYPES
        if not fits or value.dim() != 2 or value.shape[1] == 0:
            raise DataError(
                f"multi_positive_loss: {name} must be a dense tensor [{_ROW[name]}, d] of float32, float64, "
                f"float16 or bfloat16, found {described(value)}"
            )
        if not value.isfinite().all():
            raise DataError(
                f"multi_positive_loss: {name} must be finite, found NaN or infinity; "
                "lower the learning rate, or look for the layer that makes them"
            )
    if queries.shape[1] != keys.shape[1] or queries.device != keys.device or queries.dtype != keys.dtype:
        raise DataError(
            "multi_positive_loss: queries and keys must have the same d, dtype and device, found "
            f"{list(queries.shape)} {queries.dtype} {queries.device} and "
            f"{list(keys.shape)} {keys.dtype} {keys.device}"
        )


def _is_number(value: object) -> bool:
    plain = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return plain and math.isfinite(value)  # type: ignore[arg-type]


def _number(name: str, value: Tensor | float, queries: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale or bias as a tensor [] where the queries are."""
    found = described(value) if isinstance(value, Tensor) else repr(value)
    fits = _is_number(value)
    if isinstance(value, Tensor):
        fits = holds_values(value) and value.is_floating_point() and value.numel() == 1
    if fits:
        number = torch.as_tensor(value, dtype=dtype, device=queries.device).reshape(())
        if number.isfinite():
            return number
        found = f"{number.item()}"
    raise DataError(
        f"multi_positive_loss: {name} must be one finite number, found {found}; where it is learnt, lower "
        "its learning rate"
    )


_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_ROW = {"queries": "query", "keys": "key"}


class MultiPositive(nn.Module):
    """`multi_positive_loss` with its settings, and its scale and bias as parameters where they are learnt.

    Called as ``loss(queries, keys, positives)``. The embeddings are taken as they are: give unit vectors for
    cosines. A learnt scale is held as its logarithm, ``log_scale``; wrap the module in DDP with the encoders,
    so that these parameters' gradients are averaged too.
    """

    def __init__(
        self,
        kind: Kind = "decoupled_softmax",
        *,
        temperature: float = 0.05,
        bias: float = 0.0,
        learn_scale: bool = False,
        learn_bias: bool = False,
        layout: Layout = "auto",
        tile: int = TILE,
        group: distributed.ProcessGroup | None = None,
        gather_across_devices: bool = True,
    ) -> None:
        """Take the settings.

        Args:
            kind: ``decoupled_softmax``, ``softmax`` or ``sigmoid``.
            temperature: 1 / scale, at the start where the scale is learnt.
            bias: Added to every score, at the start where it is learnt.
            learn_scale: Make ``log_scale`` a parameter.
            learn_bias: Make ``bias`` a parameter (for ``sigmoid``).
            layout: See `multi_positive_loss`.
            tile: See `multi_positive_loss`.
            group: Workers that share the pool; None is torch.distributed's default group, if there is one.
            gather_across_devices: False: each worker's pool is its own keys.

        Raises:
            ConfigError: A setting is unknown or out of range.
        """
        super().__init__()
        _check_settings(kind, layout, tile)
        # As small as float32 can invert.
        if not _is_number(temperature) or not 1e-30 <= temperature <= 1e30:
            raise ConfigError(
                f"MultiPositive: temperature must be a number from 1e-30 to 1e30, found {temperature!r}"
            )
        if not _is_number(bias):
            raise ConfigError(f"MultiPositive: bias must be a finite number, found {bias!r}")
        _check_flags(
            learn_scale=learn_scale, learn_bias=learn_bias, gather_across_devices=gather_across_devices
        )
        check_group(group, "MultiPositive")
        self.kind, self.layout, self.tile = kind, layout, tile
        self.group, self.gather_across_devices = group, gather_across_devices
        self.log_scale = nn.Parameter(torch.tensor(-math.log(temperature)), requires_grad=learn_scale)
        self.bias = nn.Parameter(torch.tensor(float(bias)), requires_grad=learn_bias)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        positives: RaggedLabels,
        ignored: RaggedLabels | None = None,
        workers: Workers | None = None,
    ) -> Tensor:
        """Return the loss []; see `multi_positive_loss`. ``workers`` stand in place of the group's."""
        return multi_positive_loss(
            queries,
            keys,
            positives,
            ignored=ignored,
            kind=self.kind,
            scale=self.log_scale.exp(),
            bias=self.bias,
            layout=self.layout,
            tile=self.tile,
            workers=workers or Workers(self.group, alone=not self.gather_across_devices),
        )
