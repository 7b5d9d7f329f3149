"""XMC text: ``train.txt`` and ``test.txt``, a header and one ``l1,l2 f:v f:v`` line per instance."""

from __future__ import annotations

from pathlib import Path

from xmlc.data.dataset import Dataset, Split, feature_columns
from xmlc.data.reader.files import Reading, find, require
from xmlc.data.reader.sparse_text import Layout, read_header, read_rows
from xmlc.data.reader.spool import Scratch
from xmlc.data.reader.texts import find_texts

FILES = ("train.txt", "test.txt", "labels.txt", "features.txt")
_HEADER = ("instances", "features", "labels")


def read_xmc(folder: Path, scratch: Scratch, reading: Reading) -> Dataset:
    """Read a folder of XMC text; ``test.txt`` and the names ``labels.txt``, ``features.txt`` may be absent.

    Raises:
        DataError: A file is missing or malformed.
    """
    train = read_xmc_split(require(folder, "train.txt"), scratch, reading)
    test_path = find(folder, "test.txt")
    test = None if test_path is None else read_xmc_split(test_path, scratch, reading)
    label_count, feature_count = train.labels.columns, feature_columns(train.features)
    return Dataset(
        name=folder.name,
        kind="sparse",
        train=train,
        test=test,
        label_count=label_count,
        feature_count=feature_count,
        label_names=find_texts(folder, ("labels.txt",), label_count, scratch, reading),
        feature_names=find_texts(folder, ("features.txt",), feature_count, scratch, reading),
    )


def read_xmc_split(path: Path, scratch: Scratch, reading: Reading) -> Split:
    """Read one file of XMC text.

    Raises:
        DataError: The file is malformed.
    """
    instances, features, labels = read_header(path, _HEADER)
    feature_rows, label_rows = read_rows(
        Layout(path, instances, features, labels, base=reading.base), scratch, reading
    )
    assert label_rows is not None
    return Split(label_rows, feature_rows)
