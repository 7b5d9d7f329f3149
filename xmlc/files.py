"""Files that are there whole or not at all, and reading what strangers may have put in their place."""

from __future__ import annotations

import fcntl
import json
import os
import reprlib
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

from xmlc.errors import CheckpointError


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a whole file so that ``path`` holds either its old content or ``data``, even after a power cut.

    Text is written as UTF-8. The folder of ``path`` must exist, and one process at a time may write to it.

    Raises:
        CheckpointError: The disk refuses (full, read-only).
    """
    with writing(path), replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a place to write a file at, which takes the place of ``path``, whole and on disk, at the end.

    After an error ``path`` is what it was.
    """
    temporary = temporary_of(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """Return where `replacing` prepares ``path``; one fixed name, so that the next write reuses it."""
    return path.with_name(f".{path.name}.tmp")


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process; on a file system without locks, do nothing."""
    with _opened(folder) as descriptor:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def remove_dead(folders: Iterable[Path]) -> None:
    """Remove those of the folders that no process holds: killed ones have left them."""
    for folder in folders:
        with suppress(OSError), _opened(folder) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a plain file to read; a link could lead out of its folder, and a pipe or device never end.

    Raises:
        OSError: There is none, it cannot be read, or it is something else.
    """
    _check_plain(path)
    with path.open("rb") as stream:
        yield stream


def check_writable(path: Path) -> None:
    """Check before a file is opened to write in place that it is a plain one, or not there yet.

    Raises:
        OSError: It is something else.
    """
    with suppress(FileNotFoundError):
        _check_plain(path)


def _check_plain(path: Path) -> None:
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path.name} is a link, a folder or a device, not a plain file")


def reason(error: OSError) -> str:
    """Say why the system refused, and of which file; NumPy's errors of a full disk know neither."""
    return (error.strerror or str(error)) + (f" ({error.filename})" if error.filename else "")


def parse_json(text: str | bytes) -> Any:
    """Parse one JSON value; bytes are UTF-8.

    Raises:
        ValueError: It is not JSON, or an object holds a key twice: one value would be lost in silence.
    """
    try:
        return _DECODER.decode(text.decode() if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("values nested too deeply") from None


def is_unicode(text: str) -> bool:
    """Return whether a string has no lone surrogate, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its keys and values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"an object with the key {reprlib.repr(twice)} twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the disk into a CheckpointError about ``path``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path}: must be writable, found: {error}; free space or choose another folder, "
            "what was there before is still whole"
        ) from error
