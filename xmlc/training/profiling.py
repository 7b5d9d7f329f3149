"""`xmlc profile`: what a run's memory will be, what it is, and what a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmlc import native
from xmlc.config import Config, load_config
from xmlc.data import Dataset, open_dataset
from xmlc.data.card import recipe_of
from xmlc.data.pretrained import locate_encoder
from xmlc.errors import ConfigError
from xmlc.memory.budget import Fit, fit, needed_bytes, parse_bytes
from xmlc.memory.device import device_plan
from xmlc.memory.generated import POSITIVES, generated_dataset, word_shares
from xmlc.memory.plan import plan
from xmlc.memory.pool import Occurrences
from xmlc.memory.process import device_limit, hard_limit, return_large_blocks, usage
from xmlc.memory.tables import mebibytes, plan_table
from xmlc.memory.terms import Batches, Plan
from xmlc.memory.towers import check_plannable
from xmlc.nn import Problem
from xmlc.training.measure import Measured, batches_to_measure, measure
from xmlc.training.prepare import import_libraries, prepare
from xmlc.training.tower_sizes import traced_batches


@dataclass(frozen=True)
class Sizes:
    """A data set by its numbers alone."""

    labels: int
    dim: int = 768
    """Dense features."""
    sparse_features: int = 0
    """Where it is above 0, features are sparse, this many."""
    words: int = 100
    """Sparse features of an instance, if there are as many."""
    instances: int = 1_000_000


@dataclass(frozen=True)
class Profile:
    """What was planned and, where it was asked for, measured."""

    config: Config
    plan: Plan
    """Of the process."""
    device_plan: Plan | None
    """Of the CUDA device, where the run is on one."""
    fitted: Fit | None
    available_bytes: int | None
    measured: Measured | None

    @property
    def limited(self) -> Plan:
        """The plan of what a budget limits."""
        return self.device_plan or self.plan

    @property
    def within(self) -> bool:
        """Whether every measured phase agrees with its plan."""
        return self.measured is None or all(phase.within for phase in self.measured.phases)

    def __str__(self) -> str:
        """Return the tables that `xmlc profile` prints."""
        return as_text(self, explain=False)


def profile(
    data: str | Path | Sizes,
    *,
    config: Path | None = None,
    preset: str | None = None,
    recipe: bool = False,
    overrides: Sequence[str] = (),
    measured: bool = False,
    budget: str | None = None,
    enforce: bool = False,
    snapshot: Path | None = None,
) -> Profile:
    """Plan the memory of a run, fit it into a budget, and measure real steps of it.

    Args:
        data: A data set, or its sizes; measured are then steps on generated data.
        config: TOML file with settings.
        preset: Settings to start from.
        recipe: Start from the data set's committed recipe.
        overrides: ``section.key=value`` strings on top.
        measured: Train a few steps.
        budget: Memory that the process may have, or of a CUDA device torch; settings are made smaller until
            their plan fits.
        enforce: Make the budget a hard limit while steps are measured.
        snapshot: Also write what torch's allocator of the device did, for pytorch.org/memory_viz.

    Raises:
        ConfigError: Settings contradict each other, or nothing fits the budget.
    """
    if enforce and not (budget and measured):
        raise ConfigError("profile: --enforce needs --budget and --measure, found one of them missing")
    dataset = None if isinstance(data, Sizes) else open_dataset(data)
    source: Any = config
    if recipe:
        if dataset is None:
            raise ConfigError("profile: --recipe needs a data set, found sizes; name one")
        source = recipe_of(dataset.source, dataset.name)
    settings = load_config(source, overrides, preset or "default")
    check_plannable(settings)
    on_device = settings.training.device == "cuda"
    if snapshot is not None and not (on_device and measured):
        raise ConfigError(
            "profile: --snapshot needs --measure and --device cuda, whose allocator torch can record, found "
            f"{'no --measure' if on_device else f'training.device = {settings.training.device}'}"
        )
    if on_device and measured:
        native.require_cuda()
    if measured:  # from the start: of free parts of a heap, blocks of any size are taken
        return_large_blocks(settings.encoder.trained)
    if dataset is not None:
        import_libraries(dataset, settings)
    available, taken = None, 0 if on_device else usage().anonymous
    if budget is not None:
        available = parse_bytes(budget) - taken
    encoder = locate_encoder(settings.encoder) if settings.encoder.kind == "transformer" else None
    if isinstance(data, Sizes):
        if encoder is not None:
            raise ConfigError("profile: a transformer needs a data set of texts, found sizes; name one")
        if settings.model.output == "two_tower":
            raise ConfigError("profile: two towers need a data set of texts, found sizes; name one")
        problem, batches = _problem(data), _batches(data)
    else:
        assert dataset is not None, "opened above"
        prepared = prepare(dataset, _on_cpu(settings), encoder=encoder)  # a plan needs no device
        problem, batches = prepared.problem, traced_batches(dataset, settings, prepared)
        del prepared  # a measured run makes its own
    fitted = None if available is None else fit(settings, problem, batches, available, taken)
    settings = settings if fitted is None else fitted.config
    found = None
    if measured:
        if isinstance(data, Sizes):
            dataset, settings = _generated(data, settings)
        assert dataset is not None, "opened or generated"
        limit = device_limit if on_device else hard_limit
        with limit(available) if enforce and available is not None else nullcontext():
            found = measure(dataset, settings, encoder, snapshot)
    if found is not None:
        return Profile(settings, found.plan, found.device_plan, fitted, available, found)
    on_it = device_plan(settings, problem, batches) if on_device else None
    return Profile(settings, plan(settings, problem, batches), on_it, fitted, available, None)


def _on_cpu(config: Config) -> Config:
    return config.model_copy(update={"training": config.training.model_copy(update={"device": "cpu"})})


def _problem(sizes: Sizes) -> Problem:
    return Problem(
        dense_features=not sizes.sparse_features,
        feature_count=sizes.sparse_features or sizes.dim,
        label_count=sizes.labels,
        instances=sizes.instances,
        propensity_a=0.55,
        propensity_b=1.5,
        label_instances=np.empty(0, np.int64),  # the plan reads their number alone
    )


def _batches(sizes: Sizes) -> Batches:
    if not sizes.sparse_features:
        return Batches(sizes.instances, sizes.dim, POSITIVES)
    words = min(sizes.words, sizes.sparse_features)
    distinct = Occurrences.of(word_shares(sizes.sparse_features, words))
    return Batches(sizes.instances, words, POSITIVES, None, distinct)


def _generated(sizes: Sizes, config: Config) -> tuple[Dataset, Config]:
    """Return generated data of these sizes with instances for the steps and one batch of validation."""
    training, validation = batches_to_measure(config)
    share = validation / (training + validation)
    dataset = generated_dataset(
        sizes.labels,
        sizes.sparse_features or sizes.dim,
        sizes.words if sizes.sparse_features else None,
        training + validation,
    )
    return dataset, config.model_copy(
        update={"data": config.data.model_copy(update={"validation_fraction": share})}
    )


def as_json(found: Profile, explain: bool) -> dict[str, Any]:
    """Return a profile as JSON values."""
    planned = found.plan
    result: dict[str, Any] = _plan_json(planned, explain)
    result["disk_bytes"] = sum(term.bytes for term in planned.mapped)
    result["settings"] = found.config.model_dump(mode="json")
    if found.device_plan is not None:
        result["device"] = _plan_json(found.device_plan, explain)
    if explain:
        result["disk_terms"] = [asdict(term) for term in planned.mapped]
    if found.fitted is not None:
        result["available_bytes"] = found.available_bytes
        result["changes"] = [asdict(change) for change in found.fitted.changes]
    if found.measured is not None:
        result["measured"] = [
            asdict(phase)
            | {
                "residual": phase.residual,
                "device_residual": phase.device_residual,
                "within": phase.within,
            }
            for phase in found.measured.phases
        ]
        result["timeline"] = [asdict(span) for span in found.measured.timeline]
        result["before_bytes"] = found.measured.before_bytes
        result["within"] = found.within
    return result


def _plan_json(planned: Plan, explain: bool) -> dict[str, Any]:
    result: dict[str, Any] = {
        "peak_bytes": planned.peak_bytes,
        "peak_phase": planned.peak_phase,
        "needed_bytes": needed_bytes(planned),
        "binding": asdict(planned.binding),
        "phases": {phase: planned.bytes(phase) for phase in planned.added},
    }
    if explain:
        result["terms"] = {phase: [asdict(term) for term in planned.terms(phase)] for phase in planned.added}
    return result


def as_text(found: Profile, explain: bool) -> str:
    """Return a profile as tables for people."""
    lines = [plan_table(found.plan, explain)]
    if found.device_plan is not None:
        lines = ["in the process", *lines, "", "on the device", plan_table(found.device_plan, explain)]
    if found.fitted is not None:
        assert found.available_bytes is not None, "it was fitted to them"
        left = "that the budget leaves beside Python and torch"
        if found.device_plan is not None:
            left = "of the device that the budget gives to torch"
        lines.append(
            f"fits: {mebibytes(needed_bytes(found.limited))} with what the plan may be wrong by, of the "
            f"{mebibytes(found.available_bytes)} {left}"
        )
        lines += [f"    {change}" for change in found.fitted.changes]
    if found.measured is not None:
        columns = _COLUMNS if found.device_plan is None else (*_COLUMNS, *_DEVICE_COLUMNS)
        lines += ["", f"{'phase':16}" + "".join(f"{name.replace('_', ' '):>16}" for name in columns)]
        for phase in found.measured.phases:
            values = [getattr(phase, name) for name in columns]
            lines.append(
                f"{phase.phase:16}"
                + "".join(f"{mebibytes(value):>16}" for value in values)
                + ("" if phase.within else "  beyond 5 % + 8 MiB")
            )
        lines.append(f"beside {mebibytes(found.measured.before_bytes)} of Python, torch and this package")
    return "\n".join(lines)


_COLUMNS = ("planned", "tracked", "scratch", "process", "residual")
_DEVICE_COLUMNS = ("device_planned", "device", "device_residual")
