"""Files of a data set: found plain or gzipped, read in blocks of whole lines, refused with their line."""

from __future__ import annotations

import gzip
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from xmlc.errors import DataError

GRADED = "relevance of a label other than 0 and 1"
_BLOCK_BYTES = 1 << 19  # what is made of a block stays in the second-level cache
LONGEST_LINE_BYTES = 1 << 28
_NEWLINE = ord("\n")

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_PACKED = {
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},  # "BZh" alone may be text
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf": "7z",
    b"\x1f\x9d": "compress",
}


class DataWarning(UserWarning):
    """Data was accepted after a harmless repair that its owner should know about."""


@dataclass(frozen=True)
class IndexBase:
    """The first index of each kind in text files; array files always count from 0."""

    labels: int = 0
    features: int = 0
    instances: int = 0
    """Of filter files; everywhere else an instance is its line."""


@dataclass
class Reading:
    """One reading of a data set: what it was told, and what it repaired."""

    base: IndexBase = field(default_factory=IndexBase)
    features: int = 0
    labels: int = 0
    pairs: int = 0
    unheld: Counter[str] = field(default_factory=Counter)
    """What lines say that a data set does not hold, and how often: harmless until they are written anew."""

    def refuse(self, error: DataError) -> None:
        """Raise what is wrong with one line or row; a check notes it instead, and reads it as empty."""
        raise error

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
        DataError: Both are there, or what is there is no regular file.
    """
    names = (name,) if name.endswith((".npy", ".npz")) else (name, f"{name}.gz")
    paths = [path for each in names if is_file(path := folder / each)]
    if len(paths) > 1:
        raise DataError(
            f"{folder}: must hold one of {paths[0].name} and {paths[1].name}, found both; remove one"
        )
    return paths[0] if paths else None


def is_file(path: Path) -> bool:
    """Return whether a file is there.

    Raises:
        DataError: What is there is no regular file, or leads to none.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if not path.is_symlink():
            return False
        raise DataError(
            f"{path}: must be a regular file, found a link to {path.readlink()}, which is not there; "
            "put the file there or remove the link"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: must be readable, found: {error.strerror}; check its rights") from None
    if not stat.S_ISREG(mode):
        found = next((word for test, word in _KINDS if test(mode)), "something else")
        raise DataError(
            f"{path}: must be a regular file, found {found}; files are read more than once: put a file there"
        )
    return True


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
    parts: list[bytes] = []  # of a line whose end has not come yet
    length = 0
    first = True
    try:
        with _open(path) as file:
            while chunk := file.read(_BLOCK_BYTES):
                if first:
                    chunk = _without_mark(path, chunk)
                    first = False
                if b"\0" in chunk:
                    line += chunk.partition(b"\0")[0].count(b"\n")
                    raise DataError(
                        f"{path}:{line}: must be text in UTF-8, found a zero byte; export the file as text"
                    )
                end = chunk.rfind(b"\n") + 1
                length += len(chunk)
                if not end:
                    parts.append(chunk)
                    check_length(length, f"{path}:{line}")
                    continue
                block = b"".join((*parts, chunk[:end]))
                parts, length = [chunk[end:]], len(chunk) - end
                yield line, block
                line += line_count(block)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}:{line}: must be a whole gzip file, found at or after this line: {error}; "
            "copy or download it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: must be a readable file, found: {error.strerror}; check its rights"
        ) from None
    if rest := b"".join(parts):
        yield line, rest + b"\n"


def check_length(length: int, where: str) -> None:
    """Check the bytes of a line, of which memory takes some multiple.

    Raises:
        DataError: There are too many.
    """
    if length > LONGEST_LINE_BYTES:
        raise DataError(
            f"{where}: a line must be shorter than {LONGEST_LINE_BYTES} bytes, found a longer one; write one "
            "instance per line"
        )


def line_count(block: bytes) -> int:
    """Return the number of newlines; several times as fast as ``bytes.count``."""
    return int(np.count_nonzero(np.frombuffer(block, np.uint8) == _NEWLINE))


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (1-based number, line without its end).

    Raises:
        DataError: As `line_blocks`.
    """
    for first, block in line_blocks(path):
        for number, raw in enumerate(block[:-1].split(b"\n"), first):
            yield number, raw.removesuffix(b"\r")


def decode(where: str, raw: bytes) -> str:
    """Decode one line.

    Raises:
        DataError: It is not UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: must be text in UTF-8, found byte 0x{raw[error.start]:02x} at column "
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
        again = path.suffix == ".gz"
        advice = "unpack it once" if again else f"name the file {path.name}.gz"
        raise DataError(f"{path}:1: must be text, found gzip{' in gzip' * again}; {advice}")
    packed = next((name for magic, name in _PACKED.items() if chunk.startswith(magic)), None)
    if packed is not None:
        raise DataError(f"{path}:1: must be text, plain or packed by gzip, found {packed}; unpack it")
    return chunk.removeprefix(b"\xef\xbb\xbf")
