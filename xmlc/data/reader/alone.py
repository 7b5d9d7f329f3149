"""Reads one file without the others, as far as that goes: for checks."""

from __future__ import annotations

from pathlib import Path

from xmlc.data.reader import filters, lf, matrix, xmc
from xmlc.data.reader.files import Reading, lines
from xmlc.data.reader.sparse_text import INT32_MAX, pair_array
from xmlc.data.reader.spool import Scratch
from xmlc.data.reader.texts import decode_or_refuse


def read_alone(path: Path, layout: str, scratch: Scratch, reading: Reading) -> None:
    """Read one file of a folder of this layout; what other files promise about it is not checked.

    Raises:
        DataError: The file is malformed.
    """
    name = path.name.removesuffix(".gz")
    stem = name.rpartition(".")[0]
    if name in filters.FILES:
        pair_array(path, INT32_MAX, INT32_MAX, reading)
    elif layout == "lf" and name == "lbl.json":
        lf.read_labels(path, scratch, reading)
    elif layout == "lf" and name in lf.FILES:
        lf.read_split(path, INT32_MAX, scratch, reading)
    elif layout == "xmc" and name in ("train.txt", "test.txt"):
        xmc.read_xmc_split(path, scratch, reading)
    elif layout == "matrix" and stem.endswith("_X_Y"):
        matrix.read_labels(path, scratch, reading)
    elif layout == "matrix" and stem.endswith("_X_Xf"):
        matrix.read_features(path, scratch, reading)
    elif name in _TEXTS[layout]:
        for number, raw in lines(path):
            decode_or_refuse(path, number, raw, reading)


_TEXTS: dict[str, tuple[str, ...]] = {
    "lf": (),
    "matrix": matrix.TEXT_FILES,
    "xmc": ("labels.txt", "features.txt"),
}
