"""The pool of labels that all workers share in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmlc.data.ragged import RaggedLabels, described, holds_values, ragged_rows
from xmlc.data.rows import CsrRows
from xmlc.errors import ConfigError, DataError
from xmlc.parallel import Workers

_WHERE = "label_pool"


@dataclass(frozen=True)
class LabelPool:
    """A worker's view of the labels that are this step's keys."""

    own: Tensor  # int64 [key]
    """Labels that this worker encodes: its part of the pool, rising."""
    labels: Tensor  # int64 [pool]
    """Labels of the pool by position: all workers' ``own``, one after the other."""
    positives: CsrRows
    """Positions in the pool of all known positives of this worker's instances."""
    ignored: CsrRows
    """Positions in the pool of what is neither positive nor negative of them."""


def label_pool(
    candidates: Any,
    known: RaggedLabels,
    label_count: int,
    workers: Workers | None = None,
    device: torch.device | str = "cpu",
    ignored: RaggedLabels | None = None,
) -> LabelPool:
    """Make the pool of the labels that any worker asks for, each once, and share them out evenly.

    For `multi_positive_loss`: ``keys`` are the embeddings of ``own``, ``positives`` the positives. Where a
    label that two workers sampled stood in the pool twice, one of them would be a negative of its own
    instance; and so would a known positive that this worker did not sample, but another did.

    Args:
        candidates: Integers, any number, in any order, repeated or not: sampled positives and negatives.
        known: All known positives of each own instance, in the pool or not (`RaggedLabels`).
        label_count: Labels lie in [0, label_count).
        workers: Who shares the pool; torch.distributed's default group if there is one, else this process.
        device: Where the workers' collectives work; ``cuda`` under NCCL.
        ignored: Of each own instance the labels that are neither positives nor negatives (`RaggedLabels`).

    Returns:
        The pool. A worker's part is empty where the pool has fewer labels than there are workers.

    Raises:
        DataError: A label is no integer or out of range, or no worker has a candidate.
        ConfigError: torch cannot use the device, or it holds no values.
        WorkerError: Another worker stopped.
    """
    if isinstance(label_count, bool) or not isinstance(label_count, int | np.integer) or label_count < 1:
        raise DataError(f"{_WHERE}: label_count must be an integer of at least 1, found {label_count!r}")
    workers = Workers() if workers is None else workers
    asked = _to(device, torch.from_numpy(_labels(candidates, label_count)))
    rows = ragged_rows(known, None, label_count, f"{_WHERE}: known")
    left_out = CsrRows.empty(rows.rows, label_count)
    if ignored is not None:
        left_out = ragged_rows(ignored, rows.rows, label_count, f"{_WHERE}: ignored")
    lengths = [size[0] for size in workers.gather_sizes(len(asked), device=asked.device)]
    if sum(lengths) == 0:
        raise DataError(f"{_WHERE}: candidates must hold a label on some worker, found none on any")
    labels = torch.unique(workers.gather_rows(asked, lengths).cpu())
    bounds = [len(labels) * rank // workers.size for rank in range(workers.size + 1)]
    own = labels[bounds[workers.rank] : bounds[workers.rank + 1]]
    positives, left_out = (_positions(each, labels.numpy()) for each in (rows, left_out))
    return LabelPool(own, labels, positives, left_out)


def _labels(candidates: Any, label_count: int) -> np.ndarray:
    """Return the candidates, each once, rising, int64."""
    if isinstance(candidates, Tensor) and not holds_values(candidates):
        raise DataError(f"{_WHERE}: candidates must be a dense tensor, found {described(candidates)}")
    try:
        given = (
            candidates.detach().cpu().numpy() if isinstance(candidates, Tensor) else np.asarray(candidates)
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{_WHERE}: candidates must be integers, any number, found {error}") from None
    if given.size and given.dtype.kind not in "iu":
        raise DataError(f"{_WHERE}: candidates must be integers, found {given.dtype}")
    labels = np.unique(given.astype(np.int64))
    if len(labels) and not 0 <= labels[0] <= labels[-1] < label_count:
        raise DataError(
            f"{_WHERE}: candidates must lie in [0, {label_count}), found {labels[0]} to {labels[-1]}"
        )
    return labels


def _to(device: torch.device | str, labels: Tensor) -> Tensor:
    try:
        moved = labels.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ConfigError(
            f"{_WHERE}: device must be one that torch can use here, found {device!r} ({error}); name another"
        ) from None
    if not holds_values(moved):
        raise ConfigError(f"{_WHERE}: device must hold values, found {device!r}; name cpu or cuda")
    return moved


def _positions(known: CsrRows, labels: np.ndarray) -> CsrRows:
    """Return the positions of known labels among the rising labels of the pool, leaving out the others."""
    place = np.searchsorted(labels, known.indices)
    found = labels[np.minimum(place, len(labels) - 1)] == known.indices
    return CsrRows(known.offsets, place.astype(np.int32), None, len(labels)).keep(found)
