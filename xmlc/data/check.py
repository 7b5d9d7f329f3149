"""Checks a data set and lists everything that is wrong with it, not only the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xmlc.data import card as cards
from xmlc.data.dataset import Dataset
from xmlc.data.reader import IndexBase, Reading, layout_of, read_folder, source_files
from xmlc.data.reader.alone import read_alone
from xmlc.data.reader.spool import Scratch
from xmlc.data.store import scratch_folder
from xmlc.errors import DataError


@dataclass(frozen=True)
class Checked:
    """What a check found."""

    folder: Path
    problems: tuple[str, ...]
    """Each with file and line; the data set can be opened where there is none."""
    notes: tuple[str, ...]
    """What is accepted, and may still surprise."""
    complete: bool
    """Whether everything was looked at; a check stops at the largest number of problems."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "data": str(self.folder),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "complete": self.complete,
        }

    def to_lines(self) -> list[str]:
        """Return it for a person."""
        count = len(self.problems)
        more = "" if self.complete else ", and stopped there; --limit lists more"
        return [
            *self.problems,
            *(f"note: {note}" for note in self.notes),
            f"{self.folder}: {count or 'no'} problem{'s' * (count != 1)}{more}",
        ]


def check_data(source: str | Path, limit: int = 100, base: IndexBase | None = None) -> Checked:
    """Read every file of a data set and collect what is wrong.

    Of a line, the first problem counts; a file whose header, compression or number of lines is wrong counts
    once, after the problems of the lines before, and the other files are then each checked for themselves.

    Args:
        source: A folder, or the name of a known data set.
        limit: The check stops at so many problems; at least 1.
        base: First indices of text files; None takes 0.

    Raises:
        DataError: There is no such folder or name, or the cache is not writable.
    """
    folder = cards.locate(source)
    noting = _Noting(base=base or IndexBase(), limit=limit)
    notes: list[str] = []
    complete = True
    try:
        with scratch_folder() as scratch:
            dataset = _read(folder, scratch, noting)
            notes += _surprises(folder, dataset, noting)
    except _LimitReached:
        complete = False
    return Checked(folder, tuple(noting.problems), tuple(notes), complete)


class _LimitReached(Exception):  # noqa: N818, no error: it ends the reading
    pass


@dataclass
class _Noting(Reading):
    """Notes problems and reads on."""

    limit: int = 100
    problems: dict[str, None] = field(default_factory=dict)  # in the order found, each once

    def refuse(self, error: DataError) -> None:
        self.problems[str(error)] = None
        if len(self.problems) >= self.limit:
            raise _LimitReached


def _read(folder: Path, scratch_folder: Path, noting: _Noting) -> Dataset | None:
    """Read the folder as one data set; where that ends early, read each file for itself."""
    try:
        card = cards.read_card(folder / cards.CARD_NAME) if cards.has_card(folder) else None
        for problem in () if card is None else cards.wrong_files(card, folder):
            noting.refuse(DataError(problem))
    except DataError as error:
        noting.refuse(error)
    try:
        return read_folder(folder, scratch_folder, noting)
    except DataError as error:
        noting.refuse(error)
    try:
        layout = layout_of(folder)
    except DataError as error:
        noting.refuse(error)
        return None
    with Scratch(scratch_folder) as scratch:
        for path in source_files(folder, noting):
            try:
                read_alone(path, layout, scratch, noting)
            except DataError as error:
                noting.refuse(error)
    return None


def _surprises(folder: Path, dataset: Dataset | None, noting: _Noting) -> Iterator[str]:
    for message in noting.messages() if dataset is None or noting.problems else dataset.warnings:
        yield f"{folder}: {message}"
    if dataset is None or noting.problems:
        return
    card = cards.card_of(folder)
    for difference in [] if card is None else cards.disagreements(card, dataset):
        yield f"{folder}: counts should be those of the card, found {difference}"
