"""Which worker owns which labels of a layer that is shared out, and the whole of what each holds in part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.data.rows import CsrRows, Int64, offsets_of
from xmlc.errors import ConfigError
from xmlc.parallel.workers import Workers

PIECE_BYTES = 16 << 20
"""Of a tensor that is brought together from all workers, piece by piece."""


@dataclass(frozen=True, eq=False)
class LabelShares:
    """Every label has one owner; units of consecutive labels stay together.

    A worker's own labels keep their order: the tensors of its part are rows of the whole layer's, in rising
    order, so that ties among its labels are decided as in the whole layer.
    """

    label: int
    unit: int
    """Consecutive labels that stay together: a group, or the 64 of a scale of float8 weights."""
    owner: NDArray[np.int32]
    """The rank that owns each unit. [ceil(label / unit)]"""

    def labels(self, rank: int) -> Int64:
        """Return a worker's labels, rising."""
        starts = np.flatnonzero(self.owner == rank) * self.unit
        labels = (starts[:, None] + np.arange(self.unit)).ravel()
        return labels[labels < self.label].astype(np.int64)

    def rows(self, rank: int, of_each: int = 1) -> Int64:
        """Return which rows a worker has, rising, of a tensor with a row for so many consecutive labels."""
        labels = self.labels(rank)
        return labels[labels % of_each == 0] // of_each


def deal_labels(
    label: int, workers: int, unit: int = 1, counts: NDArray[np.int64] | None = None
) -> LabelShares:
    """Share labels out, to every worker as many units as to the others, or one fewer.

    Without ``counts`` the shares are contiguous. With them, the units are dealt out by falling count, there
    and back again (0, 1, 2, 2, 1, 0, 0, …), so that the workers have about the same number of positives, too:
    sums of counts differ by at most the largest count of a unit.

    Args:
        label: Number of labels.
        workers: Number of workers.
        unit: Consecutive labels that stay together.
        counts: Positives of each label in the training data, [label].

    Raises:
        ConfigError: There are fewer units than workers.
    """
    units = -(-label // unit)
    if units < workers:
        raise ConfigError(
            f"workers: each must own at least one of the {units} units of {unit} labels, found {workers} "
            "workers; start fewer"
        )
    place = np.arange(units)
    if counts is None:
        return LabelShares(label, unit, (place * workers // units).astype(np.int32))
    order = np.argsort(-np.add.reduceat(counts, place * unit), kind="stable")
    turn, seat = np.divmod(place, workers)
    owner = np.empty(units, np.int32)
    owner[order] = np.where(turn % 2 == 0, seat, workers - 1 - seat)
    return LabelShares(label, unit, owner)


class OwnLabels:
    """The labels of this worker: between the whole layer's numbers and those of the worker's own part."""

    def __init__(self, shares: LabelShares, workers: Workers) -> None:
        self.shares = shares
        self.workers = workers
        self.labels = shares.labels(workers.rank)  # [own], rising
        self._place = np.full(shares.label, -1, np.int32)  # of each label among the own ones
        self._place[self.labels] = np.arange(len(self.labels), dtype=np.int32)

    def columns(self, rows: CsrRows) -> CsrRows:
        """Return the own columns of a matrix [row, label], numbered as in the part."""
        place = self._place[rows.indices]
        kept = rows.keep(place >= 0)
        return replace(kept, indices=self._place[kept.indices], columns=len(self.labels))

    def places(self, labels: Tensor) -> Tensor:
        """Return where labels, int32 or int64, lie in the part; -1 for those of others. int32"""
        return torch.from_numpy(self._place[labels.cpu().numpy()]).to(labels.device)

    def pieces(self, own: Tensor, of_each: int = 1) -> Iterator[Tensor]:
        """Yield a tensor of which ``own`` holds this worker's rows, piece by piece, on every worker.

        One collective each, which all workers must take part in.

        Args:
            own: [row of this worker, …].
            of_each: Consecutive labels of a row.

        Yields:
            The bytes of a run of rows on the CPU, uint8 [row, byte].
        """
        data = as_bytes(own)
        rows = self.row_count(of_each)
        of_workers = [self.shares.rows(rank, of_each) for rank in range(self.workers.size)]
        step = max(1, PIECE_BYTES // max(1, data.shape[1]))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            bounds = [np.searchsorted(each, (first, last)) for each in of_workers]
            mine = slice(*bounds[self.workers.rank])
            lengths = [int(end - start) for start, end in bounds]
            gathered = self.workers.gather_rows(data[mine], lengths).cpu()
            places = [each[start:end] - first for each, (start, end) in zip(of_workers, bounds, strict=True)]
            piece = torch.empty(last - first, data.shape[1], dtype=torch.uint8)
            piece[torch.from_numpy(np.concatenate(places))] = gathered
            yield piece

    def row_count(self, of_each: int = 1) -> int:
        """Return the rows of a whole tensor with a row for so many labels."""
        return -(-self.shares.label // of_each)

    def whole(self, own: Tensor, of_each: int = 1) -> Tensor:
        """Return the tensor of which ``own`` holds this worker's rows, on the CPU; see `pieces`."""
        whole = torch.empty(self.row_count(of_each), *own.shape[1:], dtype=own.dtype)
        data, first = as_bytes(whole), 0
        for piece in self.pieces(own, of_each):
            data[first : first + len(piece)] = piece
            first += len(piece)
        return whole

    def take(self, whole: Tensor, own: Tensor, of_each: int = 1) -> None:
        """Copy this worker's rows of a whole tensor into its part; of any dtype."""
        rows = torch.from_numpy(self.shares.rows(self.workers.rank, of_each)).to(whole.device)
        as_bytes(own).copy_(as_bytes(whole)[rows])
        torch.autograd.graph.increment_version([own])  # changed through a view of another dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor [row, …] as its bytes, uint8 [row, byte], sharing memory.

    Neither gloo nor indexing knows every dtype: both lack uint16.
    """
    rows = len(tensor)
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return torch.empty(rows, 0, dtype=torch.uint8, device=tensor.device)
    return flat.view(torch.uint8).view(rows, -1)


def gather_compressed(
    workers: Workers, parts: list[CsrRows], device: torch.device, *further: int
) -> tuple[list[CsrRows], list[list[int]]]:
    """Return the rows of all workers, those of lower ranks first, and their sizes.

    Takes one collective for the sizes, one for the entries of each row, and for each matrix one for its
    columns and one for its values, if it has some.

    Args:
        workers: Who takes part; each gives as many matrices.
        parts: Of equally many rows.
        device: Where the collectives take place.
        further: Numbers to exchange with the sizes.

    Returns:
        The matrices, and of each worker: rows, entries of each matrix, ``further``.
    """
    entries = [len(part.indices) for part in parts]
    sizes = workers.gather_sizes(parts[0].rows, *entries, *further, device=device)
    rows = [size[0] for size in sizes]
    counts = np.stack([np.diff(part.offsets) for part in parts], axis=1)
    counts = workers.gather_rows(torch.from_numpy(counts).to(device), rows).cpu().numpy()
    gathered = []
    for number, part in enumerate(parts):
        lengths = [size[1 + number] for size in sizes]
        columns, values = (
            None
            if each is None
            else workers.gather_rows(torch.from_numpy(np.ascontiguousarray(each)).to(device), lengths)
            .cpu()
            .numpy()
            for each in (part.indices, part.values)
        )
        assert columns is not None, "every matrix has columns"
        gathered.append(CsrRows(offsets_of(counts[:, number]), columns, values, part.columns))
    return gathered, sizes
