"""`xmlc profile`: what a run's memory will be, what it is, and what a budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xmlc.config import Config, load_config
from xmlc.data import Dataset, open_dataset
from xmlc.data.card import recipe_of
from xmlc.data.pretrained import locate_encoder
from xmlc.errors import ConfigError
from xmlc.memory.budget import Fit, fit, needed_bytes, parse_bytes
from xmlc.memory.generated import POSITIVES, generated_dataset
from xmlc.memory.plan import PHASES, Batches, Plan, check_plannable, plan
from xmlc.memory.process import hard_limit, usage
from xmlc.memory.tables import mebibytes, plan_table
from xmlc.nn import Problem
from xmlc.training.measure import Measured, batches_to_measure, measure
from xmlc.training.prepare import batches_of, import_libraries, prepare


@dataclass(frozen=True)
class Sizes:
    """A data set by its numbers alone."""

    labels: int
    dim: int
    """Dense features."""
    sparse_features: int
    """Where it is above 0, features are sparse, this many."""
    words: int
    """Sparse features of an instance."""
    instances: int


@dataclass(frozen=True)
class Profile:
    """What was planned and, where it was asked for, measured."""

    config: Config
    plan: Plan
    fitted: Fit | None
    available_bytes: int | None
    measured: Measured | None

    @property
    def within(self) -> bool:
        """Whether every measured phase agrees with its plan."""
        return self.measured is None or all(phase.within for phase in self.measured.phases)


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
) -> Profile:
    """Plan the memory of a run, fit it into a budget, and measure real steps of it.

    Args:
        data: A data set, or its sizes; measured are then steps on generated data.
        config: TOML file with settings.
        preset: Settings to start from.
        recipe: Start from the data set's committed recipe.
        overrides: ``section.key=value`` strings on top.
        measured: Train a few steps.
        budget: Memory that the process may have; settings are made smaller until their plan fits.
        enforce: Make the budget a hard limit while steps are measured.

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
    if dataset is not None:
        import_libraries(dataset, settings)
    available = None if budget is None else parse_bytes(budget) - usage().anonymous
    encoder = locate_encoder(settings.encoder) if settings.encoder.kind == "transformer" else None
    if isinstance(data, Sizes):
        if encoder is not None:
            raise ConfigError("profile: a transformer needs a data set of texts, found sizes; name one")
        problem, batches = _problem(data), _batches(data)
    else:
        assert dataset is not None, "opened above"
        prepared = prepare(dataset, settings, encoder=encoder)
        problem, batches = prepared.problem, batches_of(prepared, traced=True)
        del prepared  # a measured run makes its own
    fitted = None if available is None else fit(settings, problem, batches, available)
    settings = settings if fitted is None else fitted.config
    found = None
    if measured:
        if isinstance(data, Sizes):
            dataset, settings = _generated(data, settings)
        assert dataset is not None, "opened or generated"
        with hard_limit(available) if enforce and available is not None else nullcontext():
            found = measure(dataset, settings, encoder)
    planned = plan(settings, problem, batches) if found is None else found.plan
    return Profile(settings, planned, fitted, available, found)


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
    return Batches(sizes.instances, sizes.words if sizes.sparse_features else sizes.dim, POSITIVES)


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
    result: dict[str, Any] = {
        "peak_bytes": planned.peak_bytes,
        "peak_phase": planned.peak_phase,
        "needed_bytes": needed_bytes(planned),
        "binding": asdict(planned.binding),
        "phases": {phase: planned.bytes(phase) for phase in PHASES},
        "disk_bytes": sum(term.bytes for term in planned.mapped),
        "settings": found.config.model_dump(mode="json"),
    }
    if explain:
        result["terms"] = {phase: [asdict(term) for term in planned.terms(phase)] for phase in PHASES}
        result["disk_terms"] = [asdict(term) for term in planned.mapped]
    if found.fitted is not None:
        result["available_bytes"] = found.available_bytes
        result["changes"] = [asdict(change) for change in found.fitted.changes]
    if found.measured is not None:
        result["measured"] = [
            asdict(phase) | {"residual": phase.residual, "within": phase.within}
            for phase in found.measured.phases
        ]
        result["timeline"] = [asdict(span) for span in found.measured.timeline]
        result["before_bytes"] = found.measured.before_bytes
        result["within"] = found.within
    return result


def as_text(found: Profile, explain: bool) -> str:
    """Return a profile as tables for people."""
    lines = [plan_table(found.plan, explain)]
    if found.fitted is not None:
        assert found.available_bytes is not None, "it was fitted to them"
        lines.append(
            f"fits: {mebibytes(needed_bytes(found.plan))} with what the plan may be wrong by, of the "
            f"{mebibytes(found.available_bytes)} that the budget leaves beside Python and torch"
        )
        lines += [f"    {change}" for change in found.fitted.changes]
    if found.measured is not None:
        lines += ["", f"{'phase':16}" + "".join(f"{name:>14}" for name in _COLUMNS)]
        for phase in found.measured.phases:
            values = (phase.planned, phase.tracked, phase.process, phase.residual)
            lines.append(
                f"{phase.phase:16}"
                + "".join(f"{mebibytes(value):>14}" for value in values)
                + ("" if phase.within else "  beyond 5 % + 8 MiB")
            )
        lines.append(f"beside {mebibytes(found.measured.before_bytes)} of Python, torch and this package")
    return "\n".join(lines)


_COLUMNS = ("planned", "tracked", "process", "residual")
