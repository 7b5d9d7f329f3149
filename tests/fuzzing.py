"""What every reader promises of any bytes: a sound data set, or a `DataError` of one printable line.

Used by the property tests (`tests/data/test_fuzzing.py`) and by the coverage-guided fuzzer
(`scripts/fuzz_readers`). A target takes the content of one file and puts it beside files that are right.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np

from xmlc.data.dataset import Dataset, Split, check_agreement
from xmlc.data.reader import read_folder
from xmlc.data.rows import CsrRows
from xmlc.errors import DataError

CORPUS = Path(__file__).parent / "data" / "fuzz-corpus"

_XMC = {"train.txt": b"2 3 2\n0 0:1\n1 2:1\n"}
_LF = {"trn.json": b'{"title": "T", "target_ind": [0]}\n', "lbl.json": b'{"title": "A"}\n{"title": "B"}\n'}
_MATRIX = {"trn_X_Xf.txt": b"2 3\n0:1\n2:1\n", "trn_X_Y.txt": b"2 2\n0:1\n1:1\n"}

# Name of the target to the file that takes the bytes, and the files beside it.
_TARGETS: dict[str, tuple[str, dict[str, bytes]]] = {
    "xmc": ("train.txt", {}),
    "xmc-gzip": ("train.txt.gz", {}),
    "xmc-test": ("test.txt", _XMC),
    "labels": ("labels.txt", _XMC),
    "filters": ("filter_labels_train.txt", _XMC),
    "lf-train": ("trn.json", _LF),
    "lf-labels": ("lbl.json", _LF),
    "matrix-features": ("trn_X_Xf.txt", _MATRIX),
    "matrix-labels": ("trn_X_Y.txt", _MATRIX),
    "npz": ("trn_X_Xf.npz", {"trn_X_Y.txt": _MATRIX["trn_X_Y.txt"]}),
    "npy": ("trn_X_Xf.npy", {"trn_X_Y.txt": _MATRIX["trn_X_Y.txt"]}),
    "card": ("dataset.toml", _XMC),
}
TARGETS = tuple(_TARGETS)


def runner(target: str, folder: Path) -> Callable[[bytes], bool]:
    """Return a function that reads bytes as the target's file, in a folder of its own.

    It returns whether they were accepted, and fails where a promise is broken.
    """
    name, beside = _TARGETS[target]
    folder.mkdir(parents=True, exist_ok=True)
    for other, content in beside.items():
        if other != name:
            (folder / other).write_bytes(content)

    def run(data: bytes) -> bool:
        if target == "xmc-gzip" and not data.startswith(b"\x1f\x8b"):
            data = gzip.compress(data, 1)
        (folder / name).write_bytes(data)
        try:
            if target == "card":
                from xmlc.data.card import read_card

                read_card(folder / name)
            else:
                check_sound(read_folder(folder, folder))
        except DataError as error:
            assert "\n" not in str(error) or target in ("npy", "npz", "card"), error
            assert len(str(error)) < 2000, error
            return False
        return True

    return run


def check_sound(dataset: Dataset) -> None:
    """Fail where an invariant of a data set does not hold."""
    check_agreement(dataset)
    for split in [dataset.train] + ([] if dataset.test is None else [dataset.test]):
        _check_rows(split.labels, dataset.label_count, split)
        if isinstance(split.features, CsrRows):
            _check_rows(split.features, dataset.feature_count, split)
            assert split.features.values is not None
            assert np.isfinite(split.features.values).all()
        if split.filter_pairs is not None:
            _check_rows(split.filter_pairs, dataset.label_count, split)
        if split.texts is not None:
            assert len(list(split.texts)) == split.instances


def _check_rows(rows: CsrRows, columns: int, split: Split) -> None:
    assert rows.columns == columns
    assert rows.rows == split.instances
    assert rows.offsets[0] == 0
    assert rows.offsets[-1] == len(rows.indices)
    assert (np.diff(rows.offsets) >= 0).all()
    if len(rows.indices):
        assert 0 <= rows.indices.min() <= rows.indices.max() < columns
        row = np.repeat(np.arange(rows.rows), np.diff(rows.offsets))
        assert (np.diff(row * columns + rows.indices) > 0).all()  # ascending, each once
