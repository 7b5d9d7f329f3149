"""The checkpoint format: a folder of safetensors data under a checksummed manifest; no pickle anywhere.

One atomic rename commits a checkpoint. Its tensors go into a data file of a name not yet used, which
reaches the disk first; then ``manifest.json`` is replaced. So a folder holds the old checkpoint until it
holds the new one, whatever interrupts the writing, and the next write removes what such a one left behind.
``docs/checkpoint-format.md`` specifies the files.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, JsonValue, NonNegativeInt, ValidationError, model_validator

from xmlc.errors import CheckpointError
from xmlc.files import open_regular, parse_json, sync, temporary_of, write_atomic, writing

FORMAT = "xmlc-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"

CHUNK_BYTES = 16 * 2**20
"""Bytes hashed and moved at once; also the largest buffer for a tensor that is not on the CPU."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes that a checkpoint can hold, by their names in safetensors."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RESERVED_NAME = "__metadata__"  # a safetensors header keeps it for itself
_DATA_FILE = re.compile(r"tensors-[0-9]+\.safetensors")
_CHECKPOINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_POINTER_BYTES = 1024  # a file's name has at most 255
_BLANK_CHECKSUM = "0" * 64
_brief = reprlib.Repr().repr  # of what a stranger wrote: a line, not a page
_OTHER_TENSORS = "check the run's configuration"
_LOAD_ANOTHER = "load another checkpoint of the run, or a fresh copy of this one"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory."""

    metadata: Mapping[str, JsonValue]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Pieces:
    """A tensor that no process need hold whole: its bytes come piece by piece when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Iterator[torch.Tensor]]
    """Yields the bytes in their order, uint8 of any shape, contiguous and on the CPU."""


Storable = torch.Tensor | Pieces


def writing_order(tensors: Mapping[str, Storable]) -> list[str]:
    """Return the names in the order in which `write_checkpoint` writes their tensors.

    Falling item size keeps every tensor aligned, which memory-mapping readers need.
    """
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def write_checkpoint(
    folder: Path, tensors: Mapping[str, Storable], metadata: Mapping[str, JsonValue]
) -> None:
    """Make ``folder`` the checkpoint of ``tensors`` and ``metadata``, in place of the one it may hold.

    At every instant the folder holds the old checkpoint or the new one, whole. Tensors are written one by
    one: a contiguous tensor on the CPU is not copied, one on another device passes through ``CHUNK_BYTES`` at
    a time, a non-contiguous one is copied alone, and `Pieces` are made as they are written. Only one process
    at a time may write to a folder.

    Args:
        folder: Made where it does not exist, with its parents.
        tensors: Any shapes, the dtypes of ``DTYPES``, any names but ``__metadata__``.
        metadata: JSON values; NaN and infinities are not JSON.

    Raises:
        CheckpointError: A tensor or the metadata cannot be stored, or the disk refuses (full, read-only). The
            old checkpoint is still whole and nothing of the new one remains; only where the flush after the
            rename fails does the folder hold the new one.
    """
    _check_storable(folder, tensors, metadata)
    try:
        with writing(folder):
            _clean(folder)
            folder.mkdir(parents=True, exist_ok=True)
            names = (f"tensors-{number}.safetensors" for number in itertools.count())
            data = next(folder / name for name in names if not (folder / name).exists())
            entries = _write_data(data, tensors)
            sync(folder)
            write_atomic(folder / MANIFEST, _manifest_text(entries, metadata))
            sync(folder.parent)
    finally:
        with suppress(OSError):
            _clean(folder)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint into new CPU tensors, verifying every byte.

    Raises:
        CheckpointError: The folder holds no checkpoint, one of a newer version, or one that is not whole.
    """
    reader = CheckpointReader(folder)
    return Checkpoint(reader.metadata, {name: reader.read(name) for name in reader.shapes})


def read_into(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, JsonValue]:
    """Read a checkpoint into existing tensors, on any device, verifying every byte; return its metadata.

    Changes ``tensors`` in place. After an error about damaged data some of them already hold new values.

    Args:
        folder: The checkpoint.
        tensors: Contiguous tensors of exactly the checkpoint's names, dtypes and shapes.

    Raises:
        CheckpointError: As ``read_checkpoint``, or the tensors are not those of the checkpoint.
    """
    reader = CheckpointReader(folder)
    _check_names(f"{folder}: the checkpoint", set(tensors), set(reader.shapes), _OTHER_TENSORS)
    for name, tensor in tensors.items():
        reader.check_fits(name, tensor)
    for name, tensor in tensors.items():
        reader.read_into(name, tensor)
    return reader.metadata


class CheckpointReader:
    """A checkpoint whose tensors are read one by one, each verified as it is read.

    So that no tensor need be in memory twice: those of a model are read straight into its own.
    """

    def __init__(self, folder: Path) -> None:
        """Read and verify the manifest, and the headers and sizes of the data files.

        Raises:
            CheckpointError: The folder holds no checkpoint, one of a newer version, or one that is cut short.
        """
        manifest = _checked_manifest(folder)
        self.folder = folder
        self.metadata: Mapping[str, JsonValue] = manifest.metadata
        self.shapes = {name: tuple(entry.shape) for name, entry in manifest.tensors.items()}
        self._places: dict[str, tuple[_Entry, int]] = {}  # and at which byte of its file it starts
        self._read: set[str] = set()
        for entries in manifest.files().values():
            start = len(_header(entries))
            for name, entry in entries.items():
                self._places[name] = (entry, start)
                start += entry.bytes

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as a new one on the CPU.

        Raises:
            KeyError: The checkpoint has no such tensor.
            CheckpointError: Its bytes are not those that were written.
        """
        entry, _ = self._places[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self._fill(name, tensor)
        return tensor

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor into a contiguous one of its dtype and shape, on any device.

        Raises:
            KeyError: The checkpoint has no such tensor.
            CheckpointError: The tensors do not fit, or the bytes are not those that were written. After the
                latter ``tensor`` holds them.
        """
        self.check_fits(name, tensor)
        self._fill(name, tensor)

    def read_rows_into(self, name: str, rows: NDArray[np.int64], tensor: torch.Tensor) -> None:
        """Read some rows of a tensor into a contiguous one that has only those; all its bytes are verified.

        Args:
            name: The checkpoint's tensor [all rows, …].
            rows: Which rows, rising.
            tensor: [row, …], on any device.

        Raises:
            KeyError: The checkpoint has no such tensor.
            CheckpointError: As `read_into`.
        """
        entry, _ = self._places[name]
        fits = (
            tensor.is_contiguous() and len(rows) == len(tensor) and entry.shape[1:] == list(tensor.shape[1:])
        )
        if not fits or tensor.dtype != DTYPES[entry.dtype] or (rows >= entry.shape[0]).any():
            raise CheckpointError(
                f"{self.folder}: of tensor {name!r} {len(rows)} rows must be read into contiguous "
                f"{tensor.dtype} {list(tensor.shape)}, found {DTYPES[entry.dtype]} {entry.shape}; "
                f"{_OTHER_TENSORS}"
            )
        row_bytes = entry.bytes // max(1, entry.shape[0])
        own = tensor.detach().reshape(-1).view(torch.uint8).view(len(rows), row_bytes)
        first = 0
        for chunk in self._verified(name, row_bytes * max(1, CHUNK_BYTES // max(1, row_bytes))):
            whole = torch.frombuffer(chunk, dtype=torch.uint8).view(-1, row_bytes)
            mine = slice(*np.searchsorted(rows, (first, first + len(whole))))
            own[mine] = whole[torch.from_numpy(rows[mine] - first)].to(own.device)
            first += len(whole)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version([tensor])  # written as another dtype, behind its back

    def check_fits(self, name: str, tensor: torch.Tensor) -> None:
        """Check that a tensor can be read into another.

        Raises:
            KeyError: The checkpoint has no such tensor.
            CheckpointError: They do not fit.
        """
        entry, _ = self._places[name]
        dtype = DTYPES[entry.dtype]
        if (tensor.dtype, list(tensor.shape)) != (dtype, entry.shape) or not tensor.is_contiguous():
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} must be read into contiguous {dtype} {entry.shape}, found "
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}; {_OTHER_TENSORS}"
            )

    def check_rest(self) -> None:
        """Verify the tensors that have not been read, without keeping them.

        Raises:
            CheckpointError: The bytes are not those that were written.
        """
        for name in self.shapes.keys() - self._read:
            for _ in self._verified(name, CHUNK_BYTES):
                pass

    def _fill(self, name: str, tensor: torch.Tensor) -> None:
        """Read the bytes of a tensor in place."""
        entry, start = self._places[name]
        path = self.folder / entry.file
        digest = hashlib.sha256()
        with _reading(path), open_regular(path) as stream:
            stream.seek(start)
            _read_bytes(stream, tensor, digest)
        self._check(name, digest.hexdigest())

    def _verified(self, name: str, chunk_bytes: int) -> Iterator[bytearray]:
        """Yield the bytes of a tensor; whoever takes them all knows that they are right."""
        entry, start = self._places[name]
        path = self.folder / entry.file
        digest = hashlib.sha256()
        with _reading(path), open_regular(path) as stream:
            stream.seek(start)
            for first in range(0, entry.bytes, chunk_bytes or 1):
                chunk = bytearray(stream.read(min(chunk_bytes, entry.bytes - first)))
                digest.update(chunk)
                if len(chunk) < min(chunk_bytes, entry.bytes - first):
                    break  # cut short since it was opened: the checksum is another
                yield chunk
        self._check(name, digest.hexdigest())

    def _check(self, name: str, checksum: str) -> None:
        entry, _ = self._places[name]
        if checksum != entry.checksum:
            raise CheckpointError(
                f"{self.folder / entry.file}: tensor {name!r} must have the checksum of {MANIFEST}, found "
                f"another; {_LOAD_ANOTHER}"
            )
        self._read.add(name)


def read_metadata(folder: Path) -> Mapping[str, JsonValue]:
    """Return a checkpoint's metadata without reading its tensors.

    Raises:
        CheckpointError: The folder holds no manifest, one of a newer version, or a damaged one.
    """
    return _read_manifest(folder).metadata


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of one run: ``root/<name>/`` each, and the files ``latest`` and ``best`` that name one.

    ``root`` belongs to this class, and one process at a time may change it. Names sort in the order of saving
    (``step-00001000``).
    """

    root: Path

    def create(self) -> None:
        """Make the folder, so that one without checkpoints differs from one that is gone.

        Raises:
            CheckpointError: The disk refuses.
        """
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)

    def save(self, name: str, tensors: Mapping[str, Storable], metadata: Mapping[str, JsonValue]) -> Path:
        """Write the checkpoint ``name`` and make it the latest, after removing what interrupted writes left.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: As ``write_checkpoint``, or the name is not a plain one. ``latest`` names the
                checkpoint it named before.
        """
        if not _CHECKPOINT_NAME.fullmatch(name) or name in (LATEST, BEST):
            raise CheckpointError(
                f"{self.root}: a checkpoint's name must be of letters, digits and '._-', found {name!r}; "
                "choose one like step-00001000"
            )
        self.create()
        with writing(self.root):
            for folder in self.root.iterdir():
                if not folder.is_symlink():  # what lies elsewhere is not this run's to remove
                    _clean(folder)
            for pointer in (LATEST, BEST):
                temporary_of(self.root / pointer).unlink(missing_ok=True)
        write_checkpoint(self.root / name, tensors, metadata)
        write_atomic(self.root / LATEST, f"{name}\n")
        return self.root / name

    def latest(self) -> Path | None:
        """Return the folder of the checkpoint saved last, or None before the first.

        A single checkpoint needs no naming: a kill may come between the first one and ``latest``.

        Raises:
            CheckpointError: The file ``latest`` names no checkpoint, or is missing beside several.
        """
        names = self.names()
        if (self.root / LATEST).exists() or not names:
            return self._pointed(LATEST)
        if len(names) > 1:
            raise CheckpointError(
                f"{self.root / LATEST}: must name one of the checkpoints beside it, found no such file; "
                f"write one of {names} into it"
            )
        return self.root / names[0]

    def best(self) -> Path | None:
        """Return the folder of the checkpoint marked best, or None if none is.

        Raises:
            CheckpointError: The file ``best`` names no checkpoint.
        """
        return self._pointed(BEST)

    def mark_best(self, name: str) -> None:
        """Make the saved checkpoint ``name`` the best one.

        Raises:
            CheckpointError: There is no such checkpoint, or the disk refuses.
        """
        if name not in self.names():
            raise CheckpointError(
                f"{self.root}: the best checkpoint must be a saved one, found {name!r}; "
                f"choose one of {self.names()}"
            )
        write_atomic(self.root / BEST, f"{name}\n")

    def keep(self, last: int = 1) -> None:
        """Remove all checkpoints but the ``last`` ones by name, the latest and the best.

        Raises:
            CheckpointError: The disk refuses, or ``latest`` or ``best`` names no checkpoint.
        """
        names = self.names()
        protected = {self.latest(), self.best()}
        for folder in (self.root / name for name in names[: max(len(names) - last, 0)]):
            if folder in protected or folder.is_symlink():
                continue
            with writing(folder):
                (folder / MANIFEST).unlink()
                sync(folder)  # a manifest must not outlive its data
                _clean(folder)

    def names(self) -> list[str]:
        """Return the names of the committed checkpoints, sorted."""
        return sorted(path.parent.name for path in self.root.glob(f"*/{MANIFEST}"))

    def _pointed(self, pointer: str) -> Path | None:
        path = self.root / pointer
        if not path.exists():
            return None
        with _reading(path), open_regular(path) as stream:
            name = stream.read(_POINTER_BYTES).decode(errors="replace").strip()
        if name not in self.names():
            raise CheckpointError(
                f"{path}: must name a checkpoint beside it, found {name!r}; "
                f"write one of {self.names()} into it"
            )
        return self.root / name


class _Entry(BaseModel):
    """One tensor in the manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: str
    dtype: str
    shape: list[NonNegativeInt]
    bytes: NonNegativeInt
    checksum: str

    @model_validator(mode="after")
    def _check(self) -> _Entry:
        if not _DATA_FILE.fullmatch(self.file):
            raise ValueError(
                f"file must be tensors-<number>.safetensors in the same folder, found {_brief(self.file)}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, found {_brief(self.dtype)}")
        item_bytes = DTYPES[self.dtype].itemsize
        # torch multiplies sizes up even where one of them is 0.
        if math.prod(max(size, 1) for size in self.shape) * item_bytes >= 2**63 or len(self.shape) > 64:
            raise ValueError(f"shape must have at most 64 sizes and fit 63 bits, found {_brief(self.shape)}")
        needed = math.prod(self.shape) * item_bytes
        if self.bytes != needed:
            raise ValueError(
                f"bytes must be {needed} for {self.dtype} {_brief(self.shape)}, found {self.bytes}"
            )
        return self


class _Manifest(BaseModel):
    """The whole manifest; the order of its tensors is their order in the data file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["xmlc-checkpoint"]
    version: Literal[1]
    checksum: str
    metadata: dict[str, JsonValue]
    tensors: dict[str, _Entry]

    def files(self) -> dict[str, dict[str, _Entry]]:
        """Return the tensors of each data file, in order."""
        files: dict[str, dict[str, _Entry]] = {}
        for name, entry in self.tensors.items():
            files.setdefault(entry.file, {})[name] = entry
        return files


def _check_storable(folder: Path, tensors: Mapping[str, Storable], metadata: Mapping[str, JsonValue]) -> None:
    """Raise CheckpointError before anything is written for what the format cannot hold."""
    for name, tensor in tensors.items():
        if name == _RESERVED_NAME:
            raise CheckpointError(
                f"{folder}: a tensor's name must not be reserved by safetensors, found {name!r}; rename it"
            )
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                f"{folder}: tensor {name!r} must have a dtype among {sorted(DTYPES)}, found {tensor.dtype}; "
                "convert it"
            )
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder}: the metadata must be JSON, found: {error}; "
            "use finite numbers, strings, lists and dictionaries"
        ) from error


def _manifest_text(entries: Mapping[str, _Entry], metadata: Mapping[str, JsonValue]) -> str:
    """Return the text of ``manifest.json``, with the checksum of itself."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "checksum": _BLANK_CHECKSUM,
        "metadata": metadata,
        "tensors": {name: entry.model_dump() for name, entry in entries.items()},
    }
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    return text.replace(_BLANK_CHECKSUM, hashlib.sha256(text.encode()).hexdigest(), 1)


def _read_manifest(folder: Path) -> _Manifest:
    """Read and verify ``manifest.json``; data files are not touched."""
    path = folder / MANIFEST
    with _reading(path), open_regular(path) as stream:
        raw = stream.read()
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise CheckpointError(f"{path}: must be JSON, found: {error}; {_LOAD_ANOTHER}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(
            f'{path}: must say "format": "{FORMAT}", found another file; name a checkpoint\'s folder'
        )
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path}: version must be at most {VERSION}, found {_brief(version)}; upgrade xmlc"
        )
    checksum = str(document.get("checksum"))
    blanked = raw.replace(checksum.encode(errors="replace"), _BLANK_CHECKSUM.encode(), 1)
    if hashlib.sha256(blanked).hexdigest() != checksum:
        raise CheckpointError(f"{path}: must have the checksum it states, found another; {_LOAD_ANOTHER}")
    try:
        return _Manifest.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: {place}: {first['msg']}; {_LOAD_ANOTHER}") from error


def _checked_manifest(folder: Path) -> _Manifest:
    """Read the manifest and check that the data files can hold what it says; the tensors' bytes are not read.

    This comes before memory is taken for the tensors, so a damaged file cannot claim any.
    """
    manifest = _read_manifest(folder)
    for file, entries in manifest.files().items():
        _check_data_file(folder / file, entries)
    return manifest


def _header(entries: Mapping[str, _Entry]) -> bytes:
    """Return the safetensors header of ``entries``, including its 8 bytes of length."""
    fields = {}
    start = 0
    for name, entry in entries.items():
        end = start + entry.bytes
        fields[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_data(path: Path, tensors: Mapping[str, Storable]) -> dict[str, _Entry]:
    """Write a new safetensors file to the disk; return its entries, checksums included, in file order."""
    names = writing_order(tensors)
    entries = {
        name: _Entry(
            file=path.name,
            dtype=_DTYPE_NAMES[tensors[name].dtype],
            shape=list(tensors[name].shape),
            bytes=math.prod(tensors[name].shape) * tensors[name].dtype.itemsize,
            checksum=_BLANK_CHECKSUM,
        )
        for name in names
    }
    with path.open("xb") as stream:
        stream.write(_header(entries))
        for name in names:
            digest = hashlib.sha256()
            for chunk in _chunks_of(tensors[name]):
                data = chunk.cpu().numpy().data
                digest.update(data)
                stream.write(data)
            entries[name] = entries[name].model_copy(update={"checksum": digest.hexdigest()})
        stream.flush()
        os.fsync(stream.fileno())
    return entries


def _check_data_file(path: Path, entries: Mapping[str, _Entry]) -> None:
    """Check names, dtypes, shapes and size of a data file against the manifest; the data is not read."""
    header = _header(entries)
    expected = len(header) + sum(entry.bytes for entry in entries.values())
    with _reading(path), open_regular(path) as stream:
        found = stream.read(len(header))
        size = stream.seek(0, os.SEEK_END)
    if found != header:
        _check_names(f"{path}: the file", set(entries), _names_in(path, set(entries)), _LOAD_ANOTHER)
    if size != expected:
        raise CheckpointError(
            f"{path}: must be {expected} bytes by {MANIFEST}, found {size}; it was cut short or added to, "
            f"{_LOAD_ANOTHER}"
        )
    if found != header:
        raise CheckpointError(
            f"{path}: its header must give the dtypes, shapes and places of {MANIFEST}, found others; "
            f"{_LOAD_ANOTHER}"
        )


def _names_in(path: Path, otherwise: set[str]) -> set[str]:
    """Return the tensors that a safetensors file names, or ``otherwise`` if its header cannot be read."""
    with _reading(path), open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, 100_000_000))  # the library's own limit
    try:
        return set(parse_json(text)) - {_RESERVED_NAME}
    except (ValueError, TypeError):
        return otherwise


def _check_names(where: str, must: set[str], found: set[str], advice: str) -> None:
    """Raise CheckpointError unless the tensors ``found`` are those that ``must`` be there."""
    if must != found:
        raise CheckpointError(
            f"{where} must hold exactly the tensors expected of it, found {sorted(must - found)} missing and "
            f"{sorted(found - must)} extra; {advice}"
        )


def _read_bytes(stream: BufferedReader, tensor: torch.Tensor, digest: Any) -> None:
    """Read a tensor in place from where the stream stands, and update the digest by its bytes."""
    for chunk in _byte_chunks(tensor):
        buffer = torch.empty_like(chunk, device="cpu") if chunk.device.type != "cpu" else chunk
        stream.readinto(buffer.numpy().data)
        digest.update(buffer.numpy().data)
        if buffer is not chunk:
            chunk.copy_(buffer)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version([tensor])  # written past torch, behind its back


def _chunks_of(value: Storable) -> Iterable[torch.Tensor]:
    return value.make() if isinstance(value, Pieces) else _byte_chunks(value)


def _byte_chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the bytes of ``tensor`` as uint8 vectors; they share its memory if it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:  # an empty array of NumPy's has a stride that no other dtype can view
        return ()
    return flat.view(torch.uint8).split(CHUNK_BYTES)


def _clean(folder: Path) -> None:
    """Remove what an interrupted write left: data that the manifest does not name, or a folder without one.

    Where the manifest cannot be trusted everything stays, for somebody to look at.
    """
    if not folder.is_dir():
        return
    committed = (folder / MANIFEST).exists()
    try:
        used = _read_manifest(folder).files() if committed else {}
    except CheckpointError:
        return
    temporary_of(folder / MANIFEST).unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if _DATA_FILE.fullmatch(path.name) and path.name not in used:
            path.unlink()
    if not committed:
        with suppress(OSError):  # files of others keep it
            folder.rmdir()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: must exist, found no such file; name a whole checkpoint's folder"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: must be readable, found: {error}; {_LOAD_ANOTHER}") from error
