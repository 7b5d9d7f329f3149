"""Cards: what a known data set is, how it is licensed, and where to get it."""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import xmlc
from xmlc.config import parse_toml
from xmlc.data.dataset import DEFAULT_PROPENSITY_A, DEFAULT_PROPENSITY_B, Dataset
from xmlc.data.reader.files import is_file
from xmlc.errors import DataError

CARD_NAME = "dataset.toml"
RECIPE_NAME = "recipe.toml"


_FileName = Annotated[str, Field(pattern=r"^[^/\\\x00]+$")]  # none leads out of the folder


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Counts(_Part):
    """Size of a data set; ``features`` is 0 for text."""

    train: int = Field(ge=1)
    test: int = Field(ge=0)
    labels: int = Field(ge=1)
    features: int = Field(default=0, ge=0)


class Card(_Part):
    """One ``datasets/<name>/dataset.toml``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    title: str
    kind: Literal["sparse", "dense", "text"]
    licence: str
    source: str
    """Who made it, and from what."""
    obtain: str
    """How to get the files, in a sentence or two."""
    counts: Counts | None = None
    propensity_a: float = Field(default=DEFAULT_PROPENSITY_A, ge=0, le=100)
    propensity_b: float = Field(default=DEFAULT_PROPENSITY_B, gt=0, le=1e6)
    filters: tuple[str, ...] = ()
    """Those of ``files`` that hold (instance, label) pairs to mask."""
    files: dict[_FileName, str] = Field(min_length=1)
    """File name to SHA-256 in hexadecimal; empty where the files are not fixed byte by byte."""


def cards_folder() -> Path:
    """Return the folder of the cards: inside the installed package, or beside it in a checkout.

    Raises:
        DataError: Neither is there.
    """
    package = Path(xmlc.__file__).parent
    for folder in (package / "datasets", package.parent / "datasets"):
        if folder.is_dir():
            return folder
    raise DataError(
        f"{package / 'datasets'}: must hold the cards of known data sets, found none; install xmlc again"
    )


def list_cards() -> list[Card]:
    """Return every known card, by name.

    Raises:
        DataError: A card is malformed.
    """
    return [read_card(path) for path in sorted(cards_folder().glob(f"*/{CARD_NAME}"))]


def find_card(name: str) -> Card:
    """Return the card of a known data set.

    Raises:
        DataError: No card has this name (the message lists the known ones), or it is malformed.
    """
    known = sorted(path.parent.name for path in cards_folder().glob(f"*/{CARD_NAME}"))
    if name not in known:
        close = difflib.get_close_matches(name.lower(), {each.lower(): each for each in known}, n=1)
        meant = [f"did you mean {each}? " for each in known if each.lower() in close]
        raise DataError(
            f"{name}: must be a folder or the name of a known data set, found neither; {''.join(meant)}"
            f"known are {', '.join(known)}"
        )
    return read_card(cards_folder() / name / CARD_NAME)


def locate(source: str | Path) -> Path:
    """Return the resolved folder of a data set, given it or the name of a known one.

    Raises:
        DataError: There is no such folder or name, or the files of the known data set are not here.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder.resolve()
    if folder.exists() or folder.is_symlink():
        found = "a file" if folder.is_file() else "something else"
        raise DataError(
            f"{source}: must be a folder with a data set, found {found}; name the folder that holds it"
        )
    if isinstance(source, Path) or "/" in source:
        raise DataError(f"{source}: must be a folder with a data set, found none; correct the path")
    return data_folder(find_card(source)).resolve()


def read_card(path: Path) -> Card:
    """Read one card.

    Raises:
        DataError: It is no TOML, or a key is missing, unknown or out of range.
    """
    try:
        return Card.model_validate(parse_toml(path.read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise DataError(
            f"{path}: a card must be a readable file, found: {error.strerror}; check it"
        ) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{path}: {key}: {first['msg']}, found {reprlib.repr(first['input'])}; correct the card"
        ) from None
    except ValueError as error:
        raise DataError(f"{path}: a card must be TOML, found: {error}; correct it") from None


def data_folder(card: Card) -> Path:
    """Return the folder with a card's files: beside the card, where shipped, else ``$XMLC_DATA/<name>``.

    Raises:
        DataError: The files are in neither place; the message says where to get them and where to put them.
    """
    shipped = cards_folder() / card.name
    if all((shipped / name).is_file() for name in card.files):
        return shipped
    home = os.environ.get("XMLC_DATA", "")
    if home and (Path(home) / card.name).is_dir():
        return Path(home) / card.name
    found = f"no folder {Path(home) / card.name}" if home else "XMLC_DATA not set"
    advice = f"put {', '.join(card.files)} into a folder {card.name} and set XMLC_DATA to the folder above it"
    raise DataError(
        f"{card.name}: its files are not part of xmlc and must lie in $XMLC_DATA/{card.name}, found {found}; "
        f"{advice}, or pass the folder's path. To get them: {card.obtain}"
    )


def card_of(folder: Path) -> Card | None:
    """Return the card inside a folder, else the known card that the folder is named after, else None.

    Raises:
        DataError: The card is malformed.
    """
    if has_card(folder):
        return read_card(folder / CARD_NAME)
    known = cards_folder() / folder.name / CARD_NAME
    return read_card(known) if known.is_file() else None


def check_files(card: Card, folder: Path) -> None:
    """Compare the files of a folder with the checksums of its own card, where it has them.

    Raises:
        DataError: A file is missing or differs.
    """
    for problem in wrong_files(card, folder):
        raise DataError(problem)


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_card(folder: Path) -> bool:
    """Return whether a folder holds a card.

    Raises:
        DataError: There is something else in its place.
    """
    return is_file(folder / CARD_NAME)


def wrong_files(card: Card, folder: Path) -> Iterator[str]:
    """Yield everything that `check_files` refuses."""
    for name, expected in card.files.items():
        if not expected:
            continue
        try:
            if not is_file(folder / name):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            found = sha256(folder / name)
        except DataError as error:  # such as a pipe, which might never end
            yield str(error)
            continue
        except OSError as error:
            yield f"{folder / name}: must be readable, found: {error.strerror}; get it again: {card.obtain}"
            continue
        if found != expected:
            yield (
                f"{folder / name}: must have the SHA-256 of {CARD_NAME}, {expected}, found {found}; get "
                "the file again or correct the card"
            )


def disagreements(card: Card, dataset: Dataset) -> list[str]:
    """Return where the data set's counts differ from the card's, in words; features only within one kind."""
    if card.counts is None:
        return []
    found = {
        "train": dataset.train.instances,
        "test": 0 if dataset.test is None else dataset.test.instances,
        "labels": dataset.label_count,
    }
    if dataset.kind == card.kind:
        found["features"] = dataset.feature_count
    return [
        f"{key} {count}, not {getattr(card.counts, key)}"
        for key, count in found.items()
        if count != getattr(card.counts, key)
    ]


def recipe_of(folder: Path | None, name: str) -> Path:
    """Return a data set's committed training settings: in its folder, or beside the card of its name.

    Raises:
        DataError: There is no recipe.
    """
    places = [cards_folder() / name / RECIPE_NAME] if folder is None else [folder / RECIPE_NAME]
    if folder is not None:
        places.append(cards_folder() / folder.name / RECIPE_NAME)
    for place in places:
        if place.is_file():
            return place
    raise DataError(
        f"{name}: must have a {RECIPE_NAME} to train by recipe, found none; use --config or a preset"
    )
