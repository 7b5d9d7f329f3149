"""Makes filter files: the pairs of an instance and the label that is the instance itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from xmlc.data import card as cards
from xmlc.data.convert import new_file
from xmlc.data.dataset import Dataset, Split
from xmlc.data.reader import Reading, filters, lf, read_folder
from xmlc.data.reader.files import find, require
from xmlc.data.reader.spool import Scratch
from xmlc.data.reader.texts import read_texts
from xmlc.data.rows import CsrRows
from xmlc.data.store import scratch_folder
from xmlc.data.writer import pair_lines
from xmlc.errors import DataError

By = Literal["text", "uid", "ids"]
_ID_FILES = {"train": "trn_ids.txt", "test": "tst_ids.txt", "label": "lbl_ids.txt"}


def write_filters(source: str | Path, by: By) -> dict[Path, int]:
    """Write ``filter_labels_train.txt`` and ``filter_labels_test.txt`` into a data set's folder.

    Args:
        source: A folder, or the name of a known data set.
        by: What makes an instance and a label the same: equal ``text`` (the label's name, where labels have
            no text), equal ``uid`` of LF raw text, or equal lines of ``trn_ids.txt``, ``tst_ids.txt`` and
            ``lbl_ids.txt`` in the folder (``ids``). Empty ones are equal to nothing.

    Returns:
        The files written, and how many pairs each holds.

    Raises:
        DataError: The data set is malformed, has nothing to compare, or has a filter file already; or the
            folder cannot be written.
    """
    folder = cards.locate(source)
    present = [path.name for name in filters.FILES if (path := find(folder, name)) is not None]
    if present:
        raise DataError(
            f"{folder}: must have no filter files yet, found {', '.join(present)}; remove or rename them"
        )
    with scratch_folder() as scratch_path, Scratch(scratch_path) as scratch:
        dataset = read_folder(folder, scratch_path)
        labels = list(_label_keys(folder, dataset, by, scratch))
        found = {
            folder / f"filter_labels_{name}.txt": self_pairs(
                _instance_keys(folder, name, split, by, scratch), labels
            )
            for name, split in dataset.splits.items()
        }
    try:
        for path, pairs in found.items():
            new_file(path, pair_lines(pairs))
    except DataError:
        for path in found:  # one alone would be taken for all, and there was none before
            path.unlink(missing_ok=True)
        raise
    return {path: len(pairs.indices) for path, pairs in found.items()}


def self_pairs(instances: Iterable[bytes], labels: Iterable[bytes]) -> CsrRows:
    """Return the pairs [instance, label] whose keys are equal and not empty."""
    named: dict[bytes, list[int]] = {}
    count = 0
    for label, key in enumerate(labels):
        named.setdefault(key, []).append(label)
        count = label + 1
    offsets, indices = [0], list[int]()
    for key in instances:
        indices += named.get(key, ()) if key else ()
        offsets.append(len(indices))
    return CsrRows(np.array(offsets, np.int64), np.array(indices, np.int32), None, count)


def _label_keys(folder: Path, dataset: Dataset, by: By, scratch: Scratch) -> Iterable[bytes]:
    if by == "text":
        texts = dataset.label_names if dataset.label_texts is None else dataset.label_texts
        if texts is None:
            raise DataError(f"{folder}: labels must have texts or names to compare, found neither; use ids")
        return texts.blobs()
    return _keys(folder, "label", dataset.label_count, by, scratch)


def _instance_keys(folder: Path, name: str, split: Split, by: By, scratch: Scratch) -> Iterable[bytes]:
    if by == "text":
        if split.texts is None:
            raise DataError(f"{folder}: instances must have texts to compare, found features; use ids")
        return split.texts.blobs()
    return _keys(folder, name, split.instances, by, scratch)


def _keys(folder: Path, name: str, rows: int, by: By, scratch: Scratch) -> Iterator[bytes]:
    if by == "ids":
        return read_texts(require(folder, _ID_FILES[name]), rows, scratch, Reading()).blobs()
    file = {"train": "trn.json", "test": "tst.json", "label": "lbl.json"}[name]
    return (uid.encode() for uid in lf.read_uids(require(folder, file)))
