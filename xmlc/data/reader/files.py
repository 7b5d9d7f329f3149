"""Files of a data set: found plain or gzipped, read in blocks of whole lines, refused with their line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from xmlc.errors import DataError

_BLOCK_BYTES = 1 << 21
_LONGEST_LINE_BYTES = 1 << 28


class DataWarning(UserWarning):
    """Data was accepted after a harmless repair that its owner should know about."""


@dataclass
class Repairs:
    """Counts of what was repaired while reading one data set."""

    features: int = 0
    labels: int = 0
    pairs: int = 0

    def messages(self) -> tuple[str, ...]:
        """Return at most one sentence that counts every kind of repair."""
        parts = [
            f"{count} repeated {what}"
            for count, what in (
                (self.features, "features summed"),
                (self.labels, "labels merged"),
                (self.pairs, "filter pairs merged"),
            )
            if count
        ]
        return (", ".join(parts),) if parts else ()


def find(folder: Path, name: str) -> Path | None:
    """Return ``folder/name`` or, for text, ``folder/name.gz``, whichever is there.

    Raises:
        DataError: Both are there.
    """
    plain, packed = folder / name, folder / f"{name}.gz"
    if name.endswith((".npy", ".npz")):
        return plain if plain.is_file() else None
    if plain.is_file() and packed.is_file():
        raise DataError(f"{folder}: must hold one of {plain.name} and {packed.name}, found both; remove one")
    return next((path for path in (plain, packed) if path.is_file()), None)


def require(folder: Path, name: str) -> Path:
    """Return `find`'s path.

    Raises:
        DataError: Neither is there.
    """
    path = find(folder, name)
    if path is None:
        raise DataError(f"{folder}: must hold {name} or {name}.gz, found neither; put the file there")
    return path


def line_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (1-based number of the first line, whole lines), each line with its newline, no byte order mark.

    Raises:
        DataError: The file cannot be read, is cut short, or is not text in UTF-8 (as far as bytes tell).
    """
    line = 1
    rest = b""
    try:
        with _open(path) as file:
            first = True
            while chunk := file.read(_BLOCK_BYTES):
                if first:
                    chunk = _without_mark(path, chunk)
                    first = False
                if b"\0" in chunk:
                    line += (rest + chunk).partition(b"\0")[0].count(b"\n")
                    raise DataError(
                        f"{path}:{line}: must be text in UTF-8, found a zero byte; export the file as text"
                    )
                end = chunk.rfind(b"\n") + 1
                if not end:
                    rest += chunk
                    if len(rest) > _LONGEST_LINE_BYTES:
                        raise DataError(
                            f"{path}:{line}: a line must be shorter than {_LONGEST_LINE_BYTES} bytes, "
                            "found a longer one; write one instance per line"
                        )
                    continue
                block = rest + chunk[:end]
                rest = chunk[end:]
                yield line, block
                line += block.count(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}:{line}: must be a whole gzip file, found at or after this line: {error}; "
            "copy or download it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: must be a readable file, found: {error.strerror}; check its rights"
        ) from None
    if rest:
        yield line, rest + b"\n"


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (1-based number, line without its end).

    Raises:
        DataError: As `line_blocks`, or a line is not UTF-8.
    """
    for first, block in line_blocks(path):
        for number, raw in enumerate(block[:-1].split(b"\n"), first):
            yield number, decode(path, number, raw.removesuffix(b"\r"))


def decode(path: Path, line: int, raw: bytes) -> str:
    """Decode one line.

    Raises:
        DataError: It is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{line}: must be text in UTF-8, found byte 0x{raw[error.start]:02x} at column "
            f"{error.start + 1}; convert the file (iconv -t utf-8)"
        ) from None


def shorten(text: bytes | str, limit: int = 60) -> str:
    """Quote what was found, cut to a readable length."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def _open(path: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _without_mark(path: Path, chunk: bytes) -> bytes:
    if chunk.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}:1: must be text in UTF-8, found UTF-16; convert the file (iconv -t utf-8)")
    if chunk.startswith(b"\x1f\x8b"):
        raise DataError(f"{path}:1: must be text, found gzip; name the file {path.name}.gz")
    return chunk.removeprefix(b"\xef\xbb\xbf")
