"""The folder of a run: config, environment, data set, metrics, log, checkpoints.

config.toml        every setting; `xmlc train DATA --out OTHER --config config.toml` repeats the run
environment.json   versions, machine, instruction set, git commit
data.json          source, fingerprint and counts of the data set
metrics.jsonl      one line for each epoch, docs/run-folder.md
train.log          what happened, with times
checkpoints/       docs/checkpoint-format.md
encoder/           of a transformer: settings, tokenizer and weights as training found them
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from xmlc import native
from xmlc.checkpoint import CheckpointFolder
from xmlc.config import Config, dump_config, load_config
from xmlc.data.pretrained import copy_encoder, encoder_fingerprint
from xmlc.errors import CheckpointError, ConfigError
from xmlc.evaluation.predict import CHECKPOINTS, ENCODER, check_encoder, fingerprint_of_run
from xmlc.files import check_writable, open_regular, parse_json, reason, sync, temporary_of, write_atomic

CONFIG, ENVIRONMENT, DATA, METRICS, LOG, LOCK = (
    "config.toml",
    "environment.json",
    "data.json",
    "metrics.jsonl",
    "train.log",
    ".lock",
)

CHANGEABLE = frozenset(
    {
        "output_optimizer.learning_rate",
        "dense_optimizer.learning_rate",
        "encoder_optimizer.learning_rate",
        "training.epochs",
        "training.threads",
        "training.storage",
        "training.clip_norm",
        "training.patience",
        "training.on_divergence",
        "training.explosion_factor",
        "training.checkpoint_seconds",
        "training.worker_timeout_seconds",
        "training.keep_last",
        "training.tensorboard",
        "training.device",
    }
)
"""Settings that a resumed run may change: how long, how fast and how safely it goes on. All others say what
its weights and moments mean."""


class RunFolder:
    """One run on disk; every file but the growing ones appears by atomic rename."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None
        self.checkpoints = CheckpointFolder(path / CHECKPOINTS)
        self.encoder = path / ENCODER

    def create(self, config: Config, data: dict[str, Any], encoder: Path | None = None) -> None:
        """Write what describes the run; the config comes last, so that what has one is a run.

        The files of the folder ``encoder`` are copied: the run then needs that folder no more.

        ``checkpoints/`` is there from the start: a run without it has lost it.

        Raises:
            CheckpointError: The folder is not writable.
        """
        self.checkpoints.create()
        write_atomic(self.path / ENVIRONMENT, json.dumps(environment(), indent=2) + "\n")
        if encoder is not None:
            copy_encoder(encoder, self.encoder)
            data = data | {ENCODER: encoder_fingerprint(self.encoder)}
        write_atomic(self.path / DATA, json.dumps(data, indent=2) + "\n")
        write_atomic(self.path / CONFIG, dump_config(config))

    def check_empty(self) -> None:
        """Check that a new run may begin here.

        What `create` left when it was interrupted is no run yet: it begins with an empty ``checkpoints/`` and
        ends with the config.

        Raises:
            CheckpointError: The folder holds something already.
        """
        begun = {LOCK, CHECKPOINTS, ENVIRONMENT, DATA, ENCODER}
        begun |= {temporary_of(self.path / name).name for name in (ENVIRONMENT, DATA, CONFIG, ENCODER)}
        found = {entry.name for entry in self.path.iterdir()}
        root = self.checkpoints.root
        if found <= begun and root.is_dir() and not any(root.iterdir()):
            return
        if found != {LOCK}:
            raise CheckpointError(
                f"{self.path}: a new run needs a new or empty folder, found files in it; "
                "choose another --out, or continue that run with --resume"
            )

    def config_file(self) -> Path:
        """Return the file with the run's settings.

        Raises:
            CheckpointError: The folder holds no run.
        """
        file = self.path / CONFIG
        if not file.is_file():
            raise CheckpointError(
                f"{self.path}: --resume needs the folder of a run, found no {CONFIG} in it; "
                "a run that has not begun starts without --resume"
            )
        return file

    def check_same(self, config: Config, fingerprint: str) -> dict[str, tuple[Any, Any]]:
        """Check that a resumed run goes on as it began; return what may change and does, from and to, by key.

        Raises:
            ConfigError: A setting differs that must not; its key is named.
            CheckpointError: The data set, or the run's own encoder, differs.
        """
        old = load_config(self.config_file()).model_dump(mode="json")
        new = config.model_dump(mode="json")
        changed = {
            f"{section}.{key}": (old[section][key], value)
            for section, settings in new.items()
            for key, value in settings.items()
            if old[section][key] != value
        }
        for key, (began_with, found) in changed.items():
            if key not in CHANGEABLE:
                raise ConfigError(
                    f"{self.path}: a resumed run keeps its settings, found {key} = {found!r} "
                    f"where it began with {began_with!r}; start a new run to change it"
                )
        try:
            with open_regular(self.path / DATA) as stream:
                facts = parse_json(stream.read())
            began = facts["fingerprint"]
            encoder = facts[ENCODER] if config.encoder.kind == "transformer" else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.path / DATA}: must say what data the run began on, found {error!r}; "
                "copy it from a checkpoint's metadata, or start a new run"
            ) from None
        if began != fingerprint:
            raise CheckpointError(
                f"{self.path}: the run began on data with fingerprint {began}, found {fingerprint}; "
                "give the same data set"
            )
        if encoder is not None:
            check_encoder(self.path, encoder, fingerprint_of_run(self.encoder))
        return changed

    def change(self, config: Config) -> None:
        """Keep the settings that a resumed run goes on with.

        Raises:
            CheckpointError: The disk refuses.
        """
        write_atomic(self.path / CONFIG, dump_config(config))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process.

        Raises:
            CheckpointError: Another process trains into it, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            check_writable(self.path / LOCK)
            handle = (self.path / LOCK).open("w")
        except FileExistsError:
            raise CheckpointError(
                f"{self.path}: the run folder must be a folder, found a file; choose another --out"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: the run folder must be writable: {reason(error)}; choose another --out"
            ) from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"{self.path}: one process may train into a run folder, found another at it; "
                    "wait for it or choose another --out"
                ) from None
            if self.checkpoints.root.is_symlink():  # old checkpoints are removed in it
                raise CheckpointError(
                    f"{self.checkpoints.root}: must be a folder, found a link; put the folder there, or link "
                    "the whole run folder"
                )
            self._lock = handle
            try:
                yield
            finally:
                self._lock = None

    def check_held(self) -> None:
        """Check that the folder is still the one that was locked.

        Were it made again where it has vanished, a run would lie there in part, or two in one.

        Raises:
            CheckpointError: It has vanished, or another one has taken its place.
        """
        try:
            there = (self.path / LOCK).stat().st_ino
        except OSError:
            there = None
        if self._lock is not None and there != os.fstat(self._lock.fileno()).st_ino:
            raise CheckpointError(
                f"{self.path}: the run folder must stay while a run trains into it, found it gone or "
                "replaced; put it back and continue with --resume, or start a new run"
            )

    def log(self, message: str) -> None:
        """Append a message with the time to the log.

        Raises:
            CheckpointError: The disk refuses.
        """
        self._append(LOG, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z {message}", flush=False)

    def record(self, entry: dict[str, Any]) -> None:
        """Append one line of metrics, and have it on the disk before the checkpoint that follows it.

        Raises:
            CheckpointError: The disk refuses.
        """
        self.check_held()
        self._append(METRICS, json.dumps(entry), flush=True)

    def _append(self, file: str, line: str, flush: bool) -> None:
        try:
            check_writable(self.path / file)
            with (self.path / file).open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
                if flush:
                    stream.flush()
                    os.fsync(stream.fileno())
            if flush:
                sync(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path / file}: must be writable: {reason(error)}; free space, then --resume"
            ) from None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics so far; without the last where a crash has cut it short.

        Raises:
            CheckpointError: The file cannot be read, or a line is not what `record` writes.
        """
        file = self.path / METRICS
        try:
            with open_regular(file) as stream:
                lines = stream.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"{file}: must be readable: {reason(error)}; put it back from a copy, or start a new run"
            ) from None
        return [_metrics_entry(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]

    def check_nothing_lost(self) -> None:
        """Check that a run without a checkpoint never had one, so that it may start again.

        An epoch's line of metrics comes before its checkpoint, so a kill may leave one line alone.

        Raises:
            CheckpointError: There must have been one.
        """
        if not self.checkpoints.root.is_dir():
            found = f"no folder {CHECKPOINTS}"
        elif len(epochs := self.metrics()) > 1:
            found = f"none though {METRICS} holds {len(epochs)} epochs"
        else:
            return
        raise CheckpointError(
            f"{self.path}: --resume needs the run's checkpoints, found {found}; "
            "put them back, or start a new run in another --out"
        )

    def forget_after(self, epoch: int) -> None:
        """Drop metrics of epochs that a resumed run will finish again.

        Raises:
            CheckpointError: A line of an epoch that is done has been lost.
        """
        kept = [entry for entry in self.metrics() if entry["epoch"] <= epoch]
        found = [entry["epoch"] for entry in kept]
        if found != list(range(1, epoch + 1)):
            raise CheckpointError(
                f"{self.path / METRICS}: must hold a line for each of the {epoch} epochs that are done, "
                f"found {found}; put the lines back, or start a new run"
            )
        write_atomic(self.path / METRICS, "".join(json.dumps(entry) + "\n" for entry in kept))


class FollowedRun(RunFolder):
    """A run that another worker writes: this one reads it, and leaves no trace."""

    def create(self, config: Config, data: dict[str, Any], encoder: Path | None = None) -> None:
        """Write nothing."""

    def check_empty(self) -> None:
        """Leave it to the worker that writes."""

    def change(self, config: Config) -> None:
        """Write nothing."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold nothing: the worker that writes does."""
        yield

    def check_held(self) -> None:
        """Leave it to the worker that writes."""

    def log(self, message: str) -> None:
        """Write nothing."""

    def record(self, entry: dict[str, Any]) -> None:
        """Write nothing."""

    def forget_after(self, epoch: int) -> None:
        """Write nothing."""


def _metrics_entry(line: bytes, where: str) -> dict[str, Any]:
    try:
        entry = parse_json(line)
        if type(entry["epoch"]) is int and type(entry["step"]) is int and type(entry["best"]) is bool:
            return dict(entry)
    except (ValueError, KeyError, TypeError):
        pass
    raise CheckpointError(
        f"{where}: must be a JSON object with epoch, step and best, found {line[:60]!r}; "
        "correct the line or start a new run"
    )


def environment() -> dict[str, Any]:
    """Return versions and machine, as far as results and speed depend on them."""
    packages = ("xmlc", "torch", "numpy", "scipy", "scikit-learn", "safetensors")
    return {
        "command": sys.argv,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "platform": platform.platform(),
        "native": native.describe(),
        "git_commit": _git_commit(),
    }


def _git_commit() -> str | None:
    """Return the commit of the code that runs, where it runs from a checkout; None elsewhere."""
    checkout = Path(__file__).parents[2]
    if not (checkout / ".git").exists():  # installed, maybe below somebody else's checkout
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
