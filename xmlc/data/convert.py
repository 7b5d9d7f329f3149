"""Writes data sets into new folders, atomically, and proves that they read back as they were."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tomli_w

from xmlc.data import card as cards
from xmlc.data.dataset import Dataset, content_fingerprint
from xmlc.data.reader import DataWarning, IndexBase, Reading, layout_of, lf, read_folder
from xmlc.data.reader.files import GRADED, find
from xmlc.data.store import scratch_folder
from xmlc.data.writer import LF_FILES, PARTS, Format, Records, write_dataset
from xmlc.errors import DataError
from xmlc.files import held, reason, remove_dead, replacing, sync


def convert(
    source: str | Path,
    target: Path,
    layout: Format,
    base: IndexBase | None = None,
    without: Sequence[str] = (),
) -> Dataset:
    """Write a data set in another layout; what is read from it has the same fingerprint.

    From LF raw text to LF raw text every line keeps its ``uid``, its title and content, and all other keys.

    Args:
        source: A folder, or the name of a known data set.
        target: The folder to make.
        layout: As `write_dataset`.
        base: First indices of the source's text files; None takes 0.
        without: Parts to leave out, of `writer.PARTS`. Without ``features`` it is a data set of texts. In
            ``lf``, labels without texts have their names for texts.

    Returns:
        The data set as written, its arrays in memory or memory-mapped.

    Raises:
        DataError: The source is malformed, the layout cannot hold it, or the target is there already or
            cannot be written; then nothing stays behind.

    Warns:
        DataWarning: Something was repaired, or the source's files say more than a data set holds; it counts
            what is not written.
    """
    with scratch_folder() as scratch:
        folder = cards.locate(source)
        reading = Reading(base=base or IndexBase())
        dataset, card = read_source(folder, scratch, reading)
        dataset = _leave_out(dataset, without)
        records = source_records(folder, layout)
        if "label_texts" in without:
            records.pop("labels", None)
        if layout == "lf" and dataset.label_texts is None:  # as it will be read
            dataset = replace(dataset, label_texts=dataset.label_names)
        write_folder(dataset, card, target, layout, scratch, records)
        warn_of_repairs(target, dataset, reading, records)
        return dataset


def read_source(folder: Path, scratch: Path, reading: Reading) -> tuple[Dataset, cards.Card | None]:
    """Read a folder anew, without a store, and its card.

    Raises:
        DataError: The folder is malformed, or does not fit the checksums of its own card.
    """
    card = cards.card_of(folder)
    if card is not None and cards.has_card(folder):
        cards.check_files(card, folder)
    return read_folder(folder, scratch, reading), card


def source_records(folder: Path, layout: Format) -> dict[str, Iterator[dict[str, Any]]]:
    """Return what lines of LF raw text say beside labels, for `write_dataset`; nothing for other layouts.

    Raises:
        DataError: From an iterator: a line is no JSON object.
    """
    if layout != "lf" or layout_of(folder) != "lf":
        return {}
    paths = {part: find(folder, name) for part, name in LF_FILES.items()}
    return {part: lf.read_records(path) for part, path in paths.items() if path is not None}


def warn_of_repairs(target: Path, dataset: Dataset, reading: Reading, records: Records) -> None:
    """Warn of what was repaired in reading the source, and of what its files say and the new ones do not."""
    for message in dataset.warnings:
        warnings.warn(f"{dataset.source}: {message}", DataWarning, stacklevel=3)
    lost = {
        what: count for what, count in reading.unheld.items() if count and (what == GRADED or not records)
    }
    if lost:
        told = ", ".join(f"{what} ({count} times)" for what, count in sorted(lost.items()))
        warnings.warn(f"{target}: not kept from the source: {told}", DataWarning, stacklevel=3)


def write_folder(
    dataset: Dataset,
    card: cards.Card | None,
    target: Path,
    layout: Format,
    scratch: Path,
    records: Records = MappingProxyType({}),
    extra: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Write a data set, its card if it has one, and extra files as a new folder, and read it back.

    Raises:
        DataError: As `convert`.
    """
    with new_folder(target) as fresh:
        write_dataset(dataset, fresh, layout, records)
        if card is not None:
            _write_card(card, dataset, fresh)
        for name, text in extra.items():
            (fresh / name).write_text(text, encoding="utf-8")
        found = content_fingerprint(read_folder(fresh, scratch))
        wanted = content_fingerprint(dataset)
        if found != wanted:
            raise DataError(
                f"{target}: what was written must have the fingerprint {wanted} of the data set, found "
                f"{found} when reading it; nothing was kept: choose another format, and report this"
            )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder that appears, whole and on disk, when the context ends without an error, or not at all.

    Raises:
        DataError: There is something at its place already, or it cannot be written.
    """
    if os.path.lexists(target):
        raise DataError(f"{target}: must not be there yet, found it; choose another place or remove it")
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        remove_dead(path for path in target.parent.iterdir() if _is_unfinished(path, target))
        fresh.mkdir()
        try:
            with held(fresh):
                yield fresh
            for path in fresh.iterdir():
                sync(path)
            sync(fresh)
            fresh.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{target}: must be writable and have room, found: {reason(error)}; choose another place"
        ) from None


def _is_unfinished(path: Path, target: Path) -> bool:
    """Return whether `new_folder` of some process made ``path`` for ``target``."""
    return re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9]+\.new", path.name) is not None


def new_file(path: Path, lines: Iterable[str]) -> None:
    """Write a file of lines that appears whole and on disk.

    Raises:
        DataError: It cannot be written.
    """
    try:
        with replacing(path) as fresh, fresh.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise DataError(
            f"{path}: must be writable and have room, found: {reason(error)}; check its folder"
        ) from None


def _leave_out(dataset: Dataset, parts: Sequence[str]) -> Dataset:
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise DataError(
            f"convert: parts must be of {', '.join(PARTS)}, found {', '.join(unknown)}; correct it"
        )
    in_split: dict[str, Any] = {part: None for part in parts if part in ("features", "texts", "filter_pairs")}
    of_set: dict[str, Any] = {part: None for part in parts if part not in in_split}
    if "features" in in_split:
        dataset = replace(dataset, kind="text", feature_count=0, label_features=None, feature_names=None)
    train = replace(dataset.train, **in_split)
    test = None if dataset.test is None else replace(dataset.test, **in_split)
    if train.features is None and train.texts is None:
        raise DataError(f"{dataset.name}: must keep features or texts, found neither; leave out less")
    return replace(dataset, train=train, test=test, **of_set)


def _write_card(card: cards.Card, dataset: Dataset, folder: Path) -> None:
    files = {path.name: cards.sha256(path) for path in sorted(folder.iterdir())}
    filters = tuple(name for name in files if name.startswith("filter_labels_"))
    counts = cards.Counts(
        train=dataset.train.instances,
        test=0 if dataset.test is None else dataset.test.instances,
        labels=dataset.label_count,
        features=dataset.feature_count,
    )
    written = card.model_copy(
        update={"kind": dataset.kind, "files": files, "filters": filters, "counts": counts}
    )
    text = tomli_w.dumps(written.model_dump(mode="json", exclude_none=True))
    (folder / cards.CARD_NAME).write_text(text, encoding="utf-8")
