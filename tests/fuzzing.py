"""What every reader promises of any bytes: something sound, or an error on purpose of one printable line.

Used by the property tests (`tests/data/test_fuzzing.py`) and by the coverage-guided fuzzer
(`scripts/fuzz_readers`). A target takes the content of one file and puts it beside files that are right.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from xmlc.config import load_config
from xmlc.data.card import read_card
from xmlc.data.dataset import Dataset, Split, check_agreement
from xmlc.data.reader import read_folder
from xmlc.data.rows import CsrRows
from xmlc.errors import XmlcError

CORPUS = Path(__file__).parent / "data" / "fuzz-corpus"

_XMC = {"train.txt": b"2 3 2\n0 0:1\n1 2:1\n"}
_LF = {"trn.json": b'{"title": "T", "target_ind": [0]}\n', "lbl.json": b'{"title": "A"}\n{"title": "B"}\n'}
_MATRIX = {"trn_X_Xf.txt": b"2 3\n0:1\n2:1\n", "trn_X_Y.txt": b"2 2\n0:1\n1:1\n"}
_CHECKPOINT = {
    "manifest.json": (CORPUS / "checkpoint-manifest" / "plain").read_bytes(),
    "tensors-0.safetensors": (CORPUS / "checkpoint-tensors" / "plain").read_bytes(),
}
_FEATURES = 3  # of the models that the targets for `xmlc predict` stand for

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
    "config": ("config.toml", {}),
    "checkpoint-manifest": ("manifest.json", _CHECKPOINT),
    "checkpoint-tensors": ("tensors-0.safetensors", _CHECKPOINT),
    "predict-text": ("lines", {}),
    "predict-sparse": ("lines", {}),
    "predict-dense": ("lines", {}),
}
TARGETS = tuple(_TARGETS)


def runner(target: str, folder: Path) -> Callable[[bytes], bool]:
    """Return a function that reads bytes as the target's file, in a folder of its own.

    It returns whether they were accepted, and fails where a promise is broken.
    """
    name, beside = _TARGETS[target]
    prepare = _PREPARE.get(target, bytes)
    read = _READ.get(target, _read_set)
    folder.mkdir(parents=True, exist_ok=True)
    for other, content in beside.items():
        (folder / other).write_bytes(sealed(content) if other == "manifest.json" else content)

    def run(data: bytes) -> bool:
        (folder / name).write_bytes(prepare(data))
        try:
            read(folder / name)
        except XmlcError as error:
            assert "\n" not in str(error) or target in ("npy", "npz", "card", "config"), error
            assert len(str(error)) < 2000, error
            return False
        return True

    return run


def sealed(manifest: bytes) -> bytes:
    """Put the right checksum in the place of the first 64 zeros: anybody can compute one."""
    return manifest.replace(b"0" * 64, hashlib.sha256(manifest).hexdigest().encode(), 1)


def _packed(data: bytes) -> bytes:
    return data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 1)


def _read_set(path: Path) -> None:
    check_sound(read_folder(path.parent, path.parent))


def _read_checkpoint(path: Path) -> None:
    from xmlc.checkpoint import read_checkpoint

    read = read_checkpoint(path.parent)
    files = sum(file.stat().st_size for file in path.parent.glob("tensors-*"))
    assert sum(tensor.nbytes for tensor in read.tensors.values()) <= files


def _lines_for(takes: str) -> Callable[[Path], None]:
    """Read as `xmlc predict` does for a model that takes ``text``, ``sparse`` or ``dense`` instances."""
    problem = SimpleNamespace(feature_count=_FEATURES)
    model: Any = SimpleNamespace(takes=takes, model=SimpleNamespace(problem=problem))

    def read(path: Path) -> None:
        from xmlc.evaluation.inputs import parse_lines

        lines = path.read_bytes().splitlines(keepends=True)
        parsed = parse_lines(model, lines, str(path), 1)
        if takes == "text":
            assert len(parsed) == len(lines)
            assert all(isinstance(text, str) and text.encode() is not None for text in parsed)
            return
        assert parsed.shape == (len(lines), _FEATURES)
        assert np.isfinite(parsed.data if takes == "sparse" else parsed).all()

    return read


_PREPARE: dict[str, Callable[[bytes], bytes]] = {"xmc-gzip": _packed, "checkpoint-manifest": sealed}
_READ: dict[str, Callable[[Path], object]] = {
    "card": read_card,
    "config": load_config,
    "checkpoint-manifest": _read_checkpoint,
    "checkpoint-tensors": _read_checkpoint,
    **{f"predict-{takes}": _lines_for(takes) for takes in ("text", "sparse", "dense")},
}


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
