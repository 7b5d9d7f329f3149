"""Files with one name or text per line."""

from __future__ import annotations

from pathlib import Path

from xmlc.data.reader.files import Reading, decode, find, lines, shorten
from xmlc.data.reader.spool import Scratch, TextSpool
from xmlc.data.rows import TextColumn
from xmlc.errors import DataError


def find_texts(
    folder: Path, names: tuple[str, ...], rows: int, scratch: Scratch, reading: Reading
) -> TextColumn | None:
    """Read the first of ``names`` that the folder holds; None if it holds none of them.

    Raises:
        DataError: As `read_texts`.
    """
    for name in names:
        path = find(folder, name)
        if path is not None:
            return read_texts(path, rows, scratch, reading)
    return None


def read_texts(path: Path, rows: int, scratch: Scratch, reading: Reading) -> TextColumn:
    """Read one text for each of ``rows``; blank lines beyond them are left out.

    Raises:
        DataError: There are more or fewer lines, or the file is not UTF-8.
    """
    texts = TextSpool(scratch)
    found = 0
    for found, raw in lines(path):
        text = decode_or_refuse(path, found, raw, reading)
        if found <= rows:
            texts.append(text)
        elif text.strip():
            raise DataError(
                f"{path}:{found}: must hold {rows} lines, one per row, found one more: {shorten(text)}; "
                "remove it or use the file that belongs to this data set"
            )
    if found < rows:
        raise DataError(
            f"{path}: must hold {rows} lines, one per row, found {found}; use the file that belongs to this "
            "data set"
        )
    return texts.finish()


def decode_or_refuse(path: Path, line: int, raw: bytes, reading: Reading) -> str:
    """Decode one line; one that is not UTF-8 goes to ``reading.refuse``."""
    try:
        return decode(f"{path}:{line}", raw)
    except DataError as error:
        reading.refuse(error)
        return ""
