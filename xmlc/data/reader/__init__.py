"""Read a data set from the files that a folder holds, whatever their layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from xmlc.data.dataset import Dataset, check_agreement
from xmlc.data.reader import filters, lf, matrix, xmc
from xmlc.data.reader.files import DataWarning, Repairs, find
from xmlc.data.reader.spool import Scratch
from xmlc.errors import DataError

__all__ = ["DataWarning", "read_folder", "source_files"]

_Reader = Callable[[Path, Scratch, Repairs], Dataset]

# In order of preference: raw text, where it is, says more than a bag of words made from it.
_LAYOUTS: tuple[tuple[tuple[str, ...], _Reader], ...] = (
    (("trn.json", "lbl.json"), lf.read_lf),
    (matrix.STARTS, matrix.read_matrices),
    (("train.txt", "test.txt"), xmc.read_xmc),
)
_FILES = (*lf.FILES, *matrix.FILES, *xmc.FILES, *filters.FILES)


def source_files(folder: Path) -> list[Path]:
    """Return every file of the folder that a reader would look at, sorted."""
    return sorted(path for name in _FILES if (path := find(folder, name)) is not None)


def read_folder(folder: Path, scratch_folder: Path) -> Dataset:
    """Read all files of a data set.

    Args:
        folder: Holds the files of one layout, see ``docs/data-format.md``.
        scratch_folder: Writable folder on a disk with room for the data; nothing stays in it.

    Raises:
        DataError: The folder holds no layout, or a file of it is malformed; the message names file and line.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: must be a folder with a data set, found none; correct the path")
    repairs = Repairs()
    for starts, read in _LAYOUTS:
        if any(find(folder, name) is not None for name in starts):
            with Scratch(scratch_folder) as scratch:
                dataset = filters.with_filters(read(folder, scratch, repairs), folder, repairs)
            break
    else:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder"
        raise DataError(
            f"{folder}: must hold train.txt (XMC text), trn.json (LF text) or trn_X_Y.txt/.npz (matrices), "
            f"plain or .gz, found {found}; see docs/data-format.md"
        )
    dataset = replace(dataset, source=folder, warnings=repairs.messages())
    check_agreement(dataset)
    return dataset
