"""Read a data set from the files that a folder holds, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from xmlc.data.dataset import Dataset, disagreements
from xmlc.data.reader import filters, lf, matrix, xmc
from xmlc.data.reader.files import DataWarning, IndexBase, Reading, find
from xmlc.data.reader.spool import Scratch
from xmlc.data.rows import CsrRows
from xmlc.errors import DataError

__all__ = ["DataWarning", "IndexBase", "Layout", "Reading", "layout_of", "read_folder", "source_files"]

Layout = Literal["lf", "matrix", "xmc"]
_Reader = Callable[[Path, Scratch, Reading], Dataset]

# In order of preference: raw text, where it is, says more than a bag of words made from it.
_STARTS: dict[Layout, tuple[str, ...]] = {
    "lf": ("trn.json", "lbl.json"),
    "matrix": matrix.STARTS,
    "xmc": ("train.txt", "test.txt"),
}
_READERS: dict[Layout, _Reader] = {"lf": lf.read_lf, "matrix": matrix.read_matrices, "xmc": xmc.read_xmc}
_FILES = (*lf.FILES, *matrix.FILES, *xmc.FILES, *filters.FILES)


def source_files(folder: Path, reading: Reading | None = None) -> list[Path]:
    """Return every file of the folder that a reader would look at, sorted.

    Raises:
        DataError: One is no regular file, or is there both plain and packed, and ``reading`` minds.
    """
    paths = []
    for name in _FILES:
        try:
            paths.append(find(folder, name))
        except DataError as error:
            (reading or Reading()).refuse(error)
    return sorted(path for path in paths if path is not None)


def read_folder(folder: Path, scratch_folder: Path, reading: Reading | None = None) -> Dataset:
    """Read all files of a data set.

    Args:
        folder: Holds the files of one layout, see ``docs/data-format.md``.
        scratch_folder: Writable folder on a disk with room for the data; nothing stays in it.
        reading: How to read, and who counts repairs; None takes a plain `Reading`.

    Raises:
        DataError: The folder holds no layout, or a file of it is malformed; the message names file and line.
    """
    reading = reading or Reading()
    layout = layout_of(folder)
    with Scratch(scratch_folder) as scratch:
        dataset = filters.with_filters(_READERS[layout](folder, scratch, reading), folder, reading)
    dataset = replace(dataset, source=folder, warnings=(*reading.messages(), *_suspicions(dataset, reading)))
    for problem in disagreements(dataset):
        reading.refuse(DataError(problem))
    return dataset


def _suspicions(dataset: Dataset, reading: Reading) -> Iterator[str]:
    splits = dataset.splits.values()
    columns = [split.labels for split in splits]
    columns += [split.features for split in splits if isinstance(split.features, CsrRows)]
    if reading.base == IndexBase() and len(columns) > len(splits) and not any(map(_has_first, columns)):
        yield (
            "neither label 0 nor feature 0 occurs; if the files count from 1, "
            "`xmlc data convert --index-base 1` makes ones that count from 0"
        )


def _has_first(rows: CsrRows) -> bool:
    return bool(len(rows.indices)) and int(rows.indices.min()) == 0


def layout_of(folder: Path) -> Layout:
    """Return the layout that a folder is read as.

    Raises:
        DataError: It is no folder, or holds no layout.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        found = "a file" if folder.is_file() else "none" if not folder.exists() else error.strerror
        raise DataError(
            f"{folder}: must be a folder with a data set, found {found}; correct the path"
        ) from None
    for layout, starts in _STARTS.items():
        if any(find(folder, name) is not None for name in starts):
            return layout
    raise DataError(
        f"{folder}: must hold train.txt (XMC text), trn.json (LF text) or trn_X_Y.txt/.npz (matrices), "
        f"plain or .gz, found {', '.join(names[:8]) or 'an empty folder'}; see docs/data-format.md"
    )
