"""From the records of a run to charts and tables; what was not recorded is said, not guessed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from xmlc.reports.charts import BarChart, Chart, LineChart, Series
from xmlc.reports.run import Entry, Run

NOT_RECORDED = "Not recorded: the version of xmlc that trained this run did not record it."
NO_VALIDATION = "Not recorded: no instances were held out for validation."
ABSENT = "-"

CURVES = ("P@1", "P@5", "PSP@1", "PSP@5")
TABLED = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
SHARES, RATIOS = ("P@1", "P@5"), ("PSP@5", "coverage@5")  # of deciles: add up over them, do not
PHASE_NAMES = {"output_step": "output step", "dense_update": "dense update"}


@dataclass(frozen=True)
class Figure:
    """Charts under one heading; none where nothing was recorded, and the caption says so."""

    title: str
    charts: tuple[Chart, ...]
    caption: str


@dataclass(frozen=True)
class Table:
    """Figures as text; a long table is folded away until it is asked for."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


def figures(run: Run) -> tuple[Figure, ...]:
    """Return every figure of the report, in the order of the page."""
    return (
        loss_figure(run),
        validation_figure(run),
        decile_figure(run),
        active_figure(run),
        redistribution_figure(run),
        phase_figure(run),
        memory_figure(run),
    )


def loss_figure(run: Run) -> Figure:
    """Return the course of the training loss."""
    chart = _by_epoch(run, "loss per instance", {"loss": lambda entry: entry.loss})
    return Figure("Training loss", (chart,), "Mean over the batches of each epoch.")


def validation_figure(run: Run) -> Figure:
    """Return the course of precision and propensity-scored precision on the held-out instances."""
    if not any(entry.validation for entry in run.entries):
        return Figure("Validation", (), NO_VALIDATION)
    if not any(name in entry.validation for entry in run.entries for name in CURVES):
        return Figure("Validation", (), NOT_RECORDED)
    getters = {name: _validation_percent(name) for name in CURVES}
    return Figure(
        "Validation", (_by_epoch(run, "percent", getters),), f"On {validation_split(run)}, after each epoch."
    )


def decile_figure(run: Run) -> Figure:
    """Return validation metrics by label-frequency decile, of the best epoch."""
    title = "Validation by label frequency"
    entry = decile_entry(run)
    if entry is None:
        validated = any(each.validation for each in run.entries)
        return Figure(title, (), NOT_RECORDED if validated else NO_VALIDATION)
    deciles = entry.validation_deciles
    charts = tuple(
        BarChart(
            "decile of the labels (1: the most frequent)",
            "percent",
            tuple(str(number) for number in range(1, len(deciles) + 1)),
            tuple(
                Series(
                    name,
                    tuple(
                        (place, 100 * decile[name]) for place, decile in enumerate(deciles) if name in decile
                    ),
                )
                for name in names
            ),
        )
        for names in (SHARES, RATIOS)
    )
    return Figure(
        title,
        charts,
        f"On {validation_split(run)}, after epoch {entry.epoch}. Labels by falling training frequency, each "
        "decile about a tenth of the training positives; only its labels count as true. P@1 and P@5 add up "
        "over the deciles to the metric of all labels. PSP@5 and coverage@5 (the share of the decile's "
        "labels that were found at least once) stand for themselves.",
    )


def active_figure(run: Run) -> Figure:
    """Return the share of logits whose gradient is not zero."""
    title = "Share of active gradients"
    if all(entry.active_share is None for entry in run.entries):
        return Figure(title, (), NOT_RECORDED)
    chart = _by_epoch(
        run,
        "percent of instance-label pairs",
        {"active": lambda entry: _percent(entry.active_share)},
    )
    chart = replace(chart, from_zero=True)
    return Figure(title, (chart,), "Pairs of instance and label whose logit has a gradient other than zero.")


def redistribution_figure(run: Run) -> Figure:
    """Return how many connections were pruned and regrown, by step."""
    title = "Connections pruned and regrown"
    if run.settings.get("model.output", "sparse") != "sparse":
        return Figure(title, (), "The output layer of this run is dense: it has no connections to move.")
    if all(entry.redistributions is None for entry in run.entries):
        return Figure(title, (), NOT_RECORDED)
    points = tuple((each.step, each.moved) for entry in run.entries for each in entry.redistributions or ())
    if not points:
        return Figure(title, (), "None has moved so far.")
    chart = LineChart("step", "connections moved", (Series("moved", points),), stems=True)
    total = connections(run)
    of = "" if total is None else f", of {total:,}"
    times = "once" if len(points) == 1 else f"{len(points):,} times"
    moved = sum(moved for _, moved in points)
    return Figure(title, (chart,), f"Redistributed {times}; {moved:,} connections moved in all{of}.")


def phase_figure(run: Run) -> Figure:
    """Return the wall time of each epoch by phase."""
    title = "Time by phase"
    names = phases(run)
    total = sum(sum(entry.phase_seconds.values()) for entry in run.entries)
    if not total > 0.0:
        return Figure(title, (), NOT_RECORDED)
    series = tuple(
        Series(
            f"{phase_name(name)} ({100 * phase_total(run, name) / total:.1f} %)",
            tuple(
                (place, entry.phase_seconds[name])
                for place, entry in enumerate(run.entries)
                if name in entry.phase_seconds
            ),
        )
        for name in names
    )
    categories = tuple(str(entry.epoch) for entry in run.entries)
    chart = BarChart("epoch", "seconds of the epoch", categories, series, stacked=True)
    return Figure(
        title,
        (chart,),
        f"{total:,.1f} s in all. The checkpoint that ends an epoch counts to the next one; that of the last "
        "epoch is not included.",
    )


def memory_figure(run: Run) -> Figure:
    """Return the peak of resident memory, by epoch."""
    title = "Peak memory"
    if all(entry.peak_memory_bytes is None for entry in run.entries):
        return Figure(title, (), NOT_RECORDED)
    chart = replace(_by_epoch(run, "resident memory, MiB", {"peak": _memory_mib}), mark=None, from_zero=True)
    return Figure(title, (chart,), "Most resident memory of the process until the end of each epoch.")


def tables(run: Run) -> tuple[Table, ...]:
    """Return every value of the figures as tables; those that would be empty are left out."""
    made = (epoch_table(run), decile_table(run), phase_table(run), redistribution_table(run))
    return tuple(table for table in made if table.rows)


def epoch_table(run: Run) -> Table:
    """Return a row for each epoch."""
    metric = str(run.settings.get("training.metric", TABLED[0]))
    names = [
        name for name in dict.fromkeys((*TABLED, metric)) if any(name in e.validation for e in run.entries)
    ]
    columns: dict[str, Callable[[Entry], str]] = {
        "epoch": lambda entry: f"{entry.epoch}" + (" *" if entry is run.best else ""),
        "step": lambda entry: f"{entry.step:,}",
        "loss": lambda entry: f"{entry.loss:.5g}",
        "rate factor": lambda entry: _or_absent(entry.learning_rate_factor, "{:.4g}"),
    }
    columns |= {f"{name} %": _percent_cell(name) for name in names}
    columns |= {
        "active %": lambda entry: _or_absent(_percent(entry.active_share), "{:.3f}"),
        "moved": lambda entry: (
            ABSENT if entry.redistributions is None else f"{sum(r.moved for r in entry.redistributions):,}"
        ),
        "training s": lambda entry: _or_absent(entry.train_seconds, "{:,.1f}"),
        "peak MiB": lambda entry: _or_absent(_memory_mib(entry), "{:,.0f}"),
    }
    title = "By epoch" + ("" if run.best is None else " (* the best)")
    rows = tuple(tuple(value(entry) for value in columns.values()) for entry in run.entries)
    return Table(title, tuple(columns), rows)


def decile_table(run: Run) -> Table:
    """Return a row for each label-frequency decile of the best epoch."""
    entry = decile_entry(run)
    deciles = () if entry is None else entry.validation_deciles
    counts = ("labels", "training_positives")
    names = [
        name for name in dict.fromkeys(name for decile in deciles for name in decile) if name not in counts
    ]
    rows = tuple(
        (
            str(number),
            *(_or_absent(decile.get(name), "{:,.0f}") for name in counts),
            *(_or_absent(_percent(decile.get(name)), "{:.2f}") for name in names),
        )
        for number, decile in enumerate(deciles, 1)
    )
    title = "By label-frequency decile" + ("" if entry is None else f", epoch {entry.epoch}")
    return Table(title, ("decile", "labels", "training positives", *(f"{name} %" for name in names)), rows)


def phase_table(run: Run) -> Table:
    """Return the seconds of each epoch by phase, and of all."""
    names = phases(run)
    header = ("epoch", *(f"{phase_name(name)} s" for name in names))
    rows = [
        (str(entry.epoch), *(_or_absent(entry.phase_seconds.get(name), "{:,.3f}") for name in names))
        for entry in run.entries
        if entry.phase_seconds
    ]
    total = ("all", *(f"{phase_total(run, name):,.3f}" for name in names))
    return Table("Seconds by phase", header, (*rows, total) if rows else ())


def redistribution_table(run: Run) -> Table:
    """Return a row for each redistribution."""
    total = connections(run)
    rows = tuple(
        (
            f"{each.step:,}",
            str(entry.epoch),
            f"{each.moved:,}",
            ABSENT if not total else f"{100 * each.moved / total:.3f}",
        )
        for entry in run.entries
        for each in entry.redistributions or ()
    )
    header = ("step", "epoch", "connections moved", "% of all")
    return Table("Connections pruned and regrown", header, rows, folded=True)


def validation_split(run: Run) -> str:
    """Return what the validation metrics were measured on."""
    if run.settings.get("training.paper_protocol") is True:
        return "the test set, which chose the epoch (paper protocol)"
    return "the held-out training instances"


def decile_entry(run: Run) -> Entry | None:
    """Return the best epoch where its deciles were recorded, else the last whose were."""
    if run.best is not None and run.best.validation_deciles:
        return run.best
    return next((entry for entry in reversed(run.entries) if entry.validation_deciles), None)


def connections(run: Run) -> int | None:
    """Return the connections that can move, [group, fan_in]; None where files do not say."""
    labels = run.data.labels
    fan_in, group_size = (run.settings.get(f"model.{name}") for name in ("fan_in", "group_size"))
    if labels is None or not isinstance(fan_in, int) or not isinstance(group_size, int) or group_size < 1:
        return None
    return -(-labels // group_size) * fan_in


def phases(run: Run) -> tuple[str, ...]:
    """Return the phases that were recorded, in their order."""
    return tuple(dict.fromkeys(name for entry in run.entries for name in entry.phase_seconds))


def phase_name(name: str) -> str:
    """Return a phase's name for people."""
    return PHASE_NAMES.get(name, name.replace("_", " "))


def phase_total(run: Run, name: str) -> float:
    """Return the seconds of a phase over all epochs."""
    return sum(entry.phase_seconds.get(name, 0.0) for entry in run.entries)


def _by_epoch(run: Run, y: str, getters: dict[str, Callable[[Entry], float | None]]) -> LineChart:
    series = []
    for name, get in getters.items():
        values = [(entry.epoch, get(entry)) for entry in run.entries]
        points = tuple((float(epoch), value) for epoch, value in values if value is not None)
        if points:
            series.append(Series(name, points))
    return LineChart("epoch", y, tuple(series), None if run.best is None else (run.best.epoch, "best"))


def _validation_percent(name: str) -> Callable[[Entry], float | None]:
    return lambda entry: _percent(entry.validation.get(name))


def _percent_cell(name: str) -> Callable[[Entry], str]:
    return lambda entry: _or_absent(_percent(entry.validation.get(name)), "{:.2f}")


def _memory_mib(entry: Entry) -> float | None:
    return None if entry.peak_memory_bytes is None else entry.peak_memory_bytes / 2**20


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _or_absent(value: float | None, form: str) -> str:
    return ABSENT if value is None else form.format(value)
