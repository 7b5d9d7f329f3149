"""Reads what a run folder records; an error names the file, and the line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xmlc.config import Fraction, parse_toml
from xmlc.errors import CheckpointError
from xmlc.files import open_regular, parse_json, reason

CONFIG, ENVIRONMENT, DATA, METRICS = "config.toml", "environment.json", "data.json", "metrics.jsonl"

Count = Annotated[int, Field(ge=0, le=10**15)]
Seconds = Annotated[float, Field(ge=0.0, le=1e12)]


class Record(BaseModel):
    """Part of a file; keys that the report does not know are left alone, newer versions may write them."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Redistribution(Record):
    """Connections that moved after a step."""

    step: Count
    moved: Count


class Entry(Record):
    """A line of ``metrics.jsonl``: one epoch. What is None or empty was not recorded."""

    epoch: Annotated[int, Field(ge=1, le=10**12)]
    step: Count
    loss: Annotated[float, Field(ge=-1e30, le=1e30)]
    learning_rate_factor: float | None = None
    validation: dict[str, Fraction] = {}
    validation_deciles: tuple[dict[str, Annotated[float, Field(ge=0.0, le=1e15)]], ...] = ()
    """Most frequent labels first."""
    best: bool = False
    redistributions: tuple[Redistribution, ...] | None = None
    active_share: Fraction | None = None
    train_seconds: Seconds | None = None
    """In training steps since the run began."""
    phase_seconds: dict[str, Seconds] = {}
    """Since the line before."""
    peak_memory_bytes: Count | None = None


class Native(Record):
    """The machine and its kernels, of ``environment.json``."""

    machine: str | None = None
    processors: int | None = None
    cpu_kernels_in_use: str | None = None
    cuda_kernels: str | None = None


class Environment(Record):
    """``environment.json``."""

    started: str | None = None
    python: str | None = None
    packages: dict[str, str] = {}
    platform: str | None = None
    native: Native = Native()
    git_commit: str | None = None


class Data(Record):
    """``data.json``."""

    name: str | None = None
    fingerprint: str | None = None
    kind: str | None = None
    instances: Count | None = None
    labels: Count | None = None


@dataclass(frozen=True)
class Run:
    """What a report tells of."""

    name: str
    settings: Mapping[str, Any]
    """By ``section.key``."""
    config: str
    """The text of ``config.toml``."""
    environment: Environment
    data: Data
    entries: tuple[Entry, ...]
    """At least one, by rising epoch."""

    @property
    def best(self) -> Entry | None:
        """The epoch that the validation chose; None without validation."""
        return next((entry for entry in reversed(self.entries) if entry.best and entry.validation), None)


def read_run(folder: Path) -> Run:
    """Read a run folder, also one whose run is not finished.

    ``environment.json`` and ``data.json`` may be absent. A last line of metrics without a line feed is being
    written, or a crash has cut it short: it is left out.

    Raises:
        CheckpointError: The folder holds no run, the run has not finished an epoch, or a file is damaged.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: must be the folder of a run, found no {CONFIG} in it; give what `xmlc train` made"
        )
    config = _text(folder / CONFIG)
    return Run(
        name=folder.resolve().name,
        settings=_settings(folder / CONFIG, config),
        config=config,
        environment=_optional(folder / ENVIRONMENT, Environment),
        data=_optional(folder / DATA, Data),
        entries=_entries(folder / METRICS),
    )


def _entries(file: Path) -> tuple[Entry, ...]:
    lines = _text(file).split("\n")[:-1] if file.exists() else []
    entries: list[Entry] = []
    for number, line in enumerate(lines, 1):
        where = f"{file}:{number}"
        entry = _parsed(where, Entry, line)
        if entries and entry.epoch <= entries[-1].epoch:
            raise CheckpointError(
                f"{where}: epochs must rise from line to line, found {entry.epoch} after "
                f"{entries[-1].epoch}; restore the file or drop the line"
            )
        entries.append(entry)
    if not entries:
        raise CheckpointError(
            f"{file}: a report needs at least one finished epoch, found none; let the run train on"
        )
    return tuple(entries)


def _settings(file: Path, text: str) -> dict[str, Any]:
    """Return settings by ``section.key``, also those of other versions, which `load_config` would refuse."""
    try:
        sections = parse_toml(text)
    except ValueError as error:
        raise CheckpointError(f"{file}: must be TOML, found: {error}; restore the file") from None
    return {
        f"{section}.{key}": value
        for section, settings in sections.items()
        if isinstance(settings, dict)
        for key, value in settings.items()
    }


R = TypeVar("R", bound=Record)


def _optional(file: Path, kind: type[R]) -> R:
    return _parsed(str(file), kind, _text(file)) if file.exists() else kind()


def _parsed(where: str, kind: type[R], text: str) -> R:
    try:
        record = kind.model_validate_json(text)
        parse_json(text)  # refuses a key that stands twice, of which pydantic takes the last
        return record
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        found = f"{place + ': ' if place else ''}{first['msg']}"
    except ValueError as error:
        found = str(error)
    raise CheckpointError(f"{where}: must be what a run records, found {found}; restore the file from a copy")


def _text(file: Path) -> str:
    try:
        with open_regular(file) as stream:  # in a stranger's folder a link could lead anywhere
            return stream.read().decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CheckpointError(
            f"{file}:{line}: must be UTF-8 text, found other bytes; restore the file"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{file}: must be readable: {reason(error)}; check the folder") from None
