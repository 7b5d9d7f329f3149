"""Splits a data set into training and test: by a seed, fair to rare labels, and with groups kept whole."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmlc.data import card as cards
from xmlc.data.convert import read_source, source_records, warn_of_repairs, write_folder
from xmlc.data.dataset import Dataset, Split
from xmlc.data.describe import row_bytes
from xmlc.data.reader import Reading, layout_of
from xmlc.data.reader.files import find
from xmlc.data.reader.spool import Scratch
from xmlc.data.reader.texts import read_texts
from xmlc.data.rows import CsrRows, Int64, TextColumn, concatenate_rows
from xmlc.data.store import scratch_folder
from xmlc.data.writer import Format, Records
from xmlc.errors import DataError

_ROWS = ("train_rows.txt", "test_rows.txt")


def split_dataset(
    source: str | Path,
    target: Path,
    *,
    fraction: float,
    seed: int,
    groups: Path | None = None,
    identical: bool = False,
    pool: bool = False,
    layout: Format | None = None,
) -> Dataset:
    """Write a data set anew with a test split of about ``fraction`` of the instances.

    ``train_rows.txt`` and ``test_rows.txt`` in the new folder say which row of the source each instance was;
    after ``pool``, rows of the test split count on after those of training.

    Args:
        source: A folder, or the name of a known data set.
        target: The folder to make.
        fraction: Of the instances, above 0 and below 1.
        seed: The same seed gives the same split.
        groups: File with the name of each instance's group, one per line; a group stays on one side. An empty
            line is a group of its own.
        identical: Keep instances with the same text or features on one side.
        pool: Split training and test together; otherwise a data set that has a test split is refused.
        layout: As `writer.write_dataset`; None keeps the source's.

    Raises:
        DataError: The source or the groups are malformed or do not fit, or as `convert.convert`.
    """
    if not 0 < fraction < 1:
        raise DataError(f"split: the fraction must be above 0 and below 1, found {fraction}; correct it")
    with scratch_folder() as scratch_path, Scratch(scratch_path) as scratch:
        folder = cards.locate(source)
        reading = Reading()
        dataset, card = read_source(folder, scratch_path, reading)
        if dataset.test is not None and not pool:
            raise DataError(
                f"{folder}: must have no test split yet, found one of {dataset.test.instances} instances; "
                "pass --pool to split training and test together"
            )
        whole = dataset.train if dataset.test is None else _pooled(dataset.train, dataset.test)
        keys = []
        if groups is not None:
            keys.append(_ids(read_texts(groups, whole.instances, scratch, Reading()).blobs()))
        if identical:
            keys.append(_ids(row_bytes(whole)))
        in_test = stratified(whole.labels, _units(keys, whole.instances), fraction, seed)
        if in_test.all() or not in_test.any():
            raise DataError(
                f"{folder}: both sides must hold an instance, found {np.count_nonzero(in_test)} of "
                f"{whole.instances} for test; choose another fraction or smaller groups"
            )
        rows = [np.flatnonzero(~in_test), np.flatnonzero(in_test)]
        made = replace(dataset, train=_take(whole, rows[0]), test=_take(whole, rows[1]))
        extra = {
            name: "".join(f"{row}\n" for row in part.tolist()) for name, part in zip(_ROWS, rows, strict=True)
        }
        written = layout or _layout(folder, dataset)
        records = _split_records(folder, written, in_test)
        write_folder(made, card, target, written, scratch_path, records, extra)
        warn_of_repairs(target, dataset, reading, records)
        return made


def stratified(labels: CsrRows, units: Int64, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Choose the instances of the test split.

    Iterative stratification (Sechidis et al. 2011, algorithm 1) over units instead of instances: the label
    with the fewest units left goes first, and each of its units to the side that lacks this label most. At
    the end every label that has lost all its units to the test split gets one back, so that no label of the
    data is without training instances.

    Args:
        labels: [instance, label].
        units: Number of each instance's unit, [instance]; a unit stays whole.
        fraction: Share of the test split.
        seed: Orders the units; the same seed gives the same choice.

    Returns:
        True for the test split, [instance].
    """
    count = int(units.max()) + 1
    sizes = np.bincount(units, minlength=count)
    occurring, columns = np.unique(labels.indices, return_inverse=True)
    rows = units[labels.entry_rows]
    matrix = scipy.sparse.csr_array((np.ones(len(rows)), (rows, columns)), (count, len(occurring)))
    rank = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64))).permutation(count)
    chosen = _Stratifier(matrix, sizes, fraction, rank).run()
    return chosen[units]


class _Stratifier:
    """The state of one stratification; sides are 0, training, and 1, test."""

    def __init__(self, matrix: scipy.sparse.csr_array, sizes: Int64, fraction: float, rank: Int64) -> None:
        self._matrix = matrix  # [unit, label], instances of the unit that have the label
        self._columns = matrix.tocsc()
        self._sizes = sizes
        self._rank = rank
        shares = np.array([1 - fraction, fraction])
        self._wanted = np.outer(shares, matrix.sum(axis=0))  # [side, label], instances still lacking
        self._wanted_instances = shares * sizes.sum()  # [side]
        self._left = np.diff(self._columns.indptr)  # [label], units not yet placed
        self._side = np.full(len(sizes), -1, np.int8)  # [unit]
        self._queue = [(int(left), label) for label, left in enumerate(self._left)]
        heapq.heapify(self._queue)

    def run(self) -> NDArray[np.bool_]:
        """Place every unit; return True for those of the test split."""
        while self._queue:
            left, label = heapq.heappop(self._queue)
            if left and left == self._left[label]:  # else it was queued anew since
                for unit in self._units_of(label):
                    if self._side[unit] < 0:
                        self._place(unit, self._lacking(self._wanted[:, label]))
        unlabelled = np.flatnonzero(self._side < 0)
        for unit in unlabelled[np.argsort(self._rank[unlabelled])].tolist():
            self._place(unit, self._lacking(self._wanted_instances))
        for label in range(self._matrix.shape[1]):
            units = self._units_of(label)
            if (self._side[units] == 1).all():
                self._side[units[0]] = 0
        return self._side == 1

    def _units_of(self, label: int) -> Int64:
        start, end = self._columns.indptr[label : label + 2]
        units = self._columns.indices[start:end]
        return units[np.argsort(self._rank[units])]

    def _lacking(self, wanted: NDArray[np.float64]) -> int:
        """Return the side that lacks more of a label; of equals, the one that lacks more instances."""
        difference = wanted[1] - wanted[0]
        if abs(difference) < 1e-9:  # sums of shares are not exact
            difference = self._wanted_instances[1] - self._wanted_instances[0]
        return int(difference > 0)

    def _place(self, unit: int, side: int) -> None:
        start, end = self._matrix.indptr[unit : unit + 2]
        labels = self._matrix.indices[start:end]
        self._side[unit] = side
        self._wanted[side, labels] -= self._matrix.data[start:end]
        self._wanted_instances[side] -= self._sizes[unit]
        self._left[labels] -= 1
        for label in labels.tolist():
            heapq.heappush(self._queue, (int(self._left[label]), label))


def _ids(keys: Iterator[bytes]) -> Int64:
    """Number equal keys alike, an empty one for itself."""
    numbers: dict[bytes | int, int] = {}
    return np.array([numbers.setdefault(key or row, len(numbers)) for row, key in enumerate(keys)], np.int64)


def _units(keys: list[Int64], instances: int) -> Int64:
    """Number the units: instances that share a key, or are joined by a chain of such."""
    if not keys:
        return np.arange(instances)
    nodes = instances + sum(int(ids.max()) + 1 for ids in keys)
    rows, columns, first = [], [], instances
    for ids in keys:
        rows.append(np.arange(instances))
        columns.append(ids + first)
        first += int(ids.max()) + 1
    edges = (np.ones(instances * len(keys)), (np.concatenate(rows), np.concatenate(columns)))
    graph = scipy.sparse.csr_array(edges, (nodes, nodes))
    component = scipy.sparse.csgraph.connected_components(graph, directed=False)[1][:instances]
    return np.unique(component, return_inverse=True)[1].astype(np.int64)


def _pooled(train: Split, test: Split) -> Split:
    """Return the instances of both, those of training first."""

    def rows(first: CsrRows, second: CsrRows) -> CsrRows:
        return concatenate_rows([first, second], first.columns)

    features = train.features
    if isinstance(features, CsrRows):
        assert isinstance(test.features, CsrRows), "features of one data set are of one kind"
        features = rows(features, test.features)
    elif features is not None:
        assert test.features is not None
        features = np.concatenate([features, np.asarray(test.features)])
    texts = None
    if train.texts is not None and test.texts is not None:
        texts = TextColumn.from_strings([*train.texts, *test.texts])
    pairs = None
    if train.filter_pairs is not None or test.filter_pairs is not None:
        pairs = rows(*(_pairs(split) for split in (train, test)))
    return Split(rows(train.labels, test.labels), features, texts, pairs)


def _pairs(split: Split) -> CsrRows:
    if split.filter_pairs is not None:
        return split.filter_pairs
    return CsrRows.empty(split.instances, split.labels.columns)


def _split_records(folder: Path, layout: Format, in_test: NDArray[np.bool_]) -> Records:
    """Return `source_records` of either side, and of the labels."""
    records = source_records(folder, layout)
    if not records:
        return records

    def side(chosen: NDArray[np.bool_]) -> Iterator[Mapping[str, Any]]:
        found = source_records(folder, layout)
        return compress(chain(found["train"], found.get("test", ())), chosen)

    return {"train": side(~in_test), "test": side(in_test), "labels": records["labels"]}


def _take(split: Split, rows: Int64) -> Split:
    features = split.features
    if isinstance(features, CsrRows):
        features = features.take(rows)
    elif features is not None:
        features = features[rows]
    return Split(
        split.labels.take(rows),
        features,
        None if split.texts is None else split.texts.take(rows),
        None if split.filter_pairs is None else split.filter_pairs.take(rows),
    )


def _layout(folder: Path, dataset: Dataset) -> Format:
    layout = layout_of(folder)
    if layout != "matrix":
        return layout
    return "matrix" if dataset.kind != "dense" and find(folder, "trn_X_Y.txt") is not None else "npz"
