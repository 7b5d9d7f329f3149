"""Memory-mapped stores: folders of ``.npy`` arrays with a manifest, written once and atomically."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmlc import native
from xmlc.data import card as cards
from xmlc.data.dataset import Dataset, Features, Split, arrays_of, content_fingerprint
from xmlc.data.reader import DataWarning, read_folder, source_files
from xmlc.data.rows import CsrRows, TextColumn
from xmlc.errors import DataError
from xmlc.files import held, parse_json, reason, remove_dead, sync

STORE_VERSION = 1
_MANIFEST = "manifest.json"

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Stored:
    """The content of a store folder."""

    arrays: Arrays
    facts: Mapping[str, Any]
    """What the builder recorded beside the arrays; JSON values."""


def open_dataset(source: str | Path, *, cache: Path | None = None) -> Dataset:
    """Open a data set, memory-mapped; its files are read once and again only after they have changed.

    Args:
        source: A folder with the files of one layout, or the name of a known data set (`card.list_cards`).
        cache: Folder of the stores; None takes `cache_folder`.

    Raises:
        DataError: The source is unknown or malformed (the message names file and line), or the cache is not
            writable.

    Warns:
        DataWarning: Repeated entries were merged (when the files are read), or counts differ from the card's.
    """
    folder = cards.locate(source)
    card = cards.card_of(folder)
    key = {"sources": _stamps(source_files(folder))}
    repaired: list[str] = []

    def build(scratch: Path) -> Stored:
        if card is not None and cards.has_card(folder):
            cards.check_files(card, folder)
        dataset = read_folder(folder, scratch)
        if {"sources": _stamps(source_files(folder))} != key:
            raise DataError(
                f"{folder}: its files must not change while they are read, found a change; try again"
            )
        repaired.extend(dataset.warnings)
        return Stored(arrays_of(dataset), _facts(dataset))

    stored = open_or_build(cache or cache_folder(), _store_name(folder), key, build)
    dataset = _dataset(stored, folder)
    for message in repaired:
        warnings.warn(f"{folder}: {message}", DataWarning, stacklevel=2)
    if card is None:
        return dataset
    differences = cards.disagreements(card, dataset)
    if differences:
        warnings.warn(
            f"{folder}: counts should be those of the card {card.name}, found {'; '.join(differences)}",
            DataWarning,
            stacklevel=2,
        )
    return replace(dataset, name=card.name, propensity_a=card.propensity_a, propensity_b=card.propensity_b)


def cache_folder() -> Path:
    """Return ``$XMLC_CACHE``, else ``$XDG_CACHE_HOME/xmlc``, else ``~/.cache/xmlc``."""
    if own := os.environ.get("XMLC_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "xmlc"
    return Path.home() / ".cache" / "xmlc"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder beside the stores, where there is room for a data set; it goes with the context.

    Raises:
        DataError: The cache is not writable, or has no room for what the context writes there.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            with held(cache):  # between making a folder and holding it, others must not take it for dead
                remove_dead(cache.glob("scratch-*"))
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache, prefix="scratch-")))
                stack.enter_context(held(folder))
            yield folder
    except OSError as error:  # readers and writers of other places have made theirs a DataError
        raise _unwritable(cache, error) from None


def digest_of(key: Mapping[str, Any]) -> str:
    """Return what tells the stores of different keys apart, to be part of their names."""
    return hashlib.blake2b(repr(sorted(key.items())).encode(), digest_size=8).hexdigest()


def open_or_build(cache: Path, name: str, key: Mapping[str, Any], build: Callable[[Path], Stored]) -> Stored:
    """Open the store ``cache/name`` if it is whole and has this key, else build it anew.

    Writers take turns by a lock file; readers never see a half-written store, since it is renamed into place.

    Args:
        cache: Folder of all stores; made if need be.
        name: Name of this one.
        key: JSON values that the content depends on; a store with another key is stale.
        build: Makes the content; gets a scratch folder on the same disk. An ``np.memmap`` array is not
            copied: the manifest refers to its file.

    Raises:
        DataError: The cache is not writable, or from ``build``.
    """
    folder = cache / name
    wanted = json.loads(json.dumps({"version": STORE_VERSION, "key": key}))
    stored = _load(folder, wanted)
    if stored is not None:
        return stored
    try:
        with _locked(cache / f"{name}.lock"):
            stored = _load(folder, wanted)
            if stored is None:
                _write(folder, wanted, build)
                stored = _load(folder, wanted)
    except OSError as error:
        raise _unwritable(cache, error) from None
    if stored is None:
        raise DataError(f"{folder}: the store must be readable once written, found a fault; check the disk")
    return stored


def _unwritable(cache: Path, error: OSError) -> DataError:
    return DataError(
        f"{cache}: the cache must be writable and have room, found: {reason(error)}; set "
        "XMLC_CACHE to a folder that is"
    )


def _store_name(folder: Path) -> str:
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", folder.name)[:40]
    return f"{readable}-{hashlib.blake2b(os.fsencode(folder), digest_size=8).hexdigest()}"


def _stamps(paths: list[Path]) -> dict[str, list[int]]:
    """Return size and time of change of every file."""
    return {str(path): _stamp(path) for path in paths}


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(folder: Path, wanted: dict[str, Any], build: Callable[[Path], Stored]) -> None:
    """Build in a folder beside, then rename; only called under the lock, so leftovers are dead."""
    fresh, old = folder.with_name(f"{folder.name}.new"), folder.with_name(f"{folder.name}.old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir()
    try:
        stored = build(fresh)
        entries = {}
        for name, array in stored.arrays.items():
            mapped = array.filename if isinstance(array, np.memmap) else None
            path = Path(mapped) if mapped else fresh / f"{name}.npy"
            if not mapped:
                with path.open("wb") as file:
                    np.save(file, array, allow_pickle=False)
                    file.flush()
                    os.fsync(file.fileno())
            entries[name] = {
                "file": str(path) if mapped else path.name,
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "stamp": _stamp(path),
            }
        manifest = {**wanted, "arrays": entries, "facts": dict(stored.facts)}
        with (fresh / _MANIFEST).open("w", encoding="utf-8") as text:
            json.dump(manifest, text, indent=1)
            text.flush()
            os.fsync(text.fileno())
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _load(folder: Path, wanted: Mapping[str, Any]) -> Stored | None:
    """Map a store; None where it is absent, stale, of another version, or not what its manifest says."""
    try:
        manifest = parse_json((folder / _MANIFEST).read_bytes())
        if any(manifest[part] != value for part, value in wanted.items()):
            return None
        arrays = {name: _map(folder / entry["file"], entry) for name, entry in manifest["arrays"].items()}
        return Stored(arrays, manifest["facts"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError):
        return None


def _map(path: Path, entry: Mapping[str, Any]) -> NDArray[Any]:
    if _stamp(path) != entry["stamp"]:
        raise ValueError(path)  # it has changed since it was stored
    array = np.load(path, mmap_mode="r" if entry["shape"][0] else None, allow_pickle=False)
    if array.dtype.str != entry["dtype"] or list(array.shape) != entry["shape"]:
        raise ValueError(path)
    plain = np.asarray(array)  # a view: np.memmap makes every slice slow
    if isinstance(array, np.memmap):
        native.watch_pages(
            array.base,
            plain.ctypes.data,
            plain.nbytes,
            f"{path}: must stay whole while it is read, found a part that the disk does not give; see "
            "whether it was cut short or the disk fails, and start again",
        )
    return plain


def _facts(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "kind": dataset.kind,
        "train": dataset.train.instances,
        "test": None if dataset.test is None else dataset.test.instances,
        "labels": dataset.label_count,
        "features": dataset.feature_count,
        "fingerprint": content_fingerprint(dataset),
        "warnings": list(dataset.warnings),
    }


def _dataset(stored: Stored, source: Path) -> Dataset:
    """Undo `arrays_of`."""
    arrays, facts = stored.arrays, stored.facts
    labels, features = facts["labels"], facts["features"]

    def rows(place: str, columns: int) -> CsrRows | None:
        if f"{place}.offsets" not in arrays:
            return None
        return CsrRows(
            arrays[f"{place}.offsets"], arrays[f"{place}.indices"], arrays.get(f"{place}.values"), columns
        )

    def feature_rows(place: str) -> Features | None:
        return arrays[place] if place in arrays else rows(place, features)

    def texts(place: str) -> TextColumn | None:
        if f"{place}.offsets" not in arrays:
            return None
        return TextColumn(arrays[f"{place}.offsets"], arrays[f"{place}.data"])

    def split(place: str) -> Split:
        label_rows = rows(f"{place}.labels", labels)
        assert label_rows is not None
        return Split(
            label_rows,
            feature_rows(f"{place}.features"),
            texts(f"{place}.texts"),
            rows(f"{place}.filter_pairs", labels),
        )

    return Dataset(
        name=facts["name"],
        kind=facts["kind"],
        train=split("train"),
        test=None if facts["test"] is None else split("test"),
        label_count=labels,
        feature_count=features,
        label_names=texts("label_names"),
        label_texts=texts("label_texts"),
        label_features=feature_rows("label_features"),
        feature_names=texts("feature_names"),
        fingerprint=facts["fingerprint"],
        source=source,
        warnings=tuple(facts["warnings"]),
    )
