"""`xmlc.train`: from a data set and settings to a trained run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from xmlc.config import Config, load_config
from xmlc.data import Dataset, open_dataset
from xmlc.data.card import recipe_of
from xmlc.errors import ConfigError
from xmlc.evaluation import Predictor, load
from xmlc.memory.budget import parse_bytes
from xmlc.parallel import joined
from xmlc.training.run_folder import RunFolder
from xmlc.training.trainer import train_into


def train(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    preset: str | None = None,
    recipe: bool = False,
    overrides: Sequence[str] = (),
    resume: bool = False,
    budget: str | int | None = None,
    enforce: bool = False,
) -> Predictor:
    """Train on a data set into the run folder ``out`` and return the best model.

    Under torchrun, or in torch.distributed's default group, all workers call this together, see
    docs/several-workers.md; each returns the whole model.

    Args:
        data: Folder or name of a data set, or a `Dataset`.
        out: Run folder, new or empty; with ``resume``, the folder of the run to continue.
        config: Settings, nested as in config.toml: a `Config`, a mapping, or a TOML file.
        preset: Settings to start from: ``default`` or ``ecml23``.
        recipe: Start from the data set's committed recipe instead of a preset.
        overrides: ``section.key=value`` strings on top.
        resume: Continue from the latest checkpoint with the run's own settings.
        budget: Memory that the process may have, in bytes or as ``4GiB``; settings are made smaller, in
            the order of `xmlc.memory.budget.fit`, until their plan fits.
        enforce: Make the budget a hard limit.

    Raises:
        XmlcError: Data, settings or folder do not fit, or training was interrupted.
    """
    train_run(
        data,
        out=out,
        config=config,
        preset=preset,
        recipe=recipe,
        overrides=overrides,
        resume=resume,
        budget=budget,
        enforce=enforce,
    )
    return load(Path(out))


def train_run(
    data: str | Path | Dataset,
    *,
    out: str | Path,
    config: Config | Mapping[str, Any] | str | Path | None = None,
    preset: str | None = None,
    recipe: bool = False,
    overrides: Sequence[str] = (),
    resume: bool = False,
    budget: str | int | None = None,
    enforce: bool = False,
) -> int:
    """Train as `train` does, load nothing, and return this worker's rank; 0 of a process alone."""
    if sum(choice is not None and choice is not False for choice in (config, preset, recipe)) > 1:
        raise ConfigError(
            "train: only one of config, preset and recipe may be given, found several; choose one"
        )
    budget_bytes = _bytes_of(budget)
    run = Path(out)
    dataset = data if isinstance(data, Dataset) else open_dataset(data)
    source: Path | Mapping[str, Any] | None
    if recipe:
        source = recipe_of(dataset.source, dataset.name)
    elif config is None and preset is None and resume:
        source = RunFolder(run).config_file()
    elif isinstance(config, Config):
        source = config.model_dump()
    else:
        source = Path(config) if isinstance(config, str | Path) else config
    settings = load_config(source, overrides, preset or "default")
    with joined(settings.training.device, settings.training.worker_timeout_seconds) as workers:
        train_into(
            run,
            dataset,
            settings,
            resume=resume,
            budget_bytes=budget_bytes,
            enforce=enforce,
            workers=workers,
        )
    return workers.rank


def _bytes_of(budget: object) -> int | None:
    """Return a budget in bytes.

    Raises:
        ConfigError: It is neither a size nor a number of bytes.
    """
    if budget is None or isinstance(budget, str):
        return None if budget is None else parse_bytes(budget)
    if isinstance(budget, bool) or not isinstance(budget, Integral):
        raise ConfigError(
            f"train: budget must be an integer of bytes or a size such as 4GiB, found {budget!r}; give one"
        )
    return int(budget)
