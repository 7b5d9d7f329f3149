"""The report as one HTML page: no scripts, no other files, no network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from xmlc import __version__
from xmlc.config import Config
from xmlc.errors import CheckpointError
from xmlc.files import write_atomic
from xmlc.reports.figures import ABSENT, Figure, Table, figures, phase_total, phases, tables
from xmlc.reports.run import Run, read_run

REPORT = "report.html"
NUMBER = re.compile(r"-?[\d.,]*( \*)?")  # of a table's cell; a star marks the best row

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 56rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.4rem; }
h1, td, dd { overflow-wrap: anywhere; }
.tiles { display: flex; flex-wrap: wrap; gap: 0.6rem; margin: 1.2rem 0; padding: 0; }
.tiles div { border: 1px solid #ccc; border-radius: 6px; padding: 0.4rem 0.9rem; }
.tiles dt, figcaption, .note, footer { color: #555; font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.25rem; }
figure { margin: 0; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.85rem; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15rem 0.7rem 0.15rem 0; text-align: left;
  vertical-align: top; }
.numbers th, .numbers td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.numbers .text { text-align: left; }
.numbers .text:last-child { white-space: normal; overflow-wrap: break-word; min-width: 16rem; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; font-size: 0.8rem; }
summary { cursor: pointer; }
"""


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run folder, by default into it, by atomic rename; return its file.

    Raises:
        CheckpointError: The folder holds no run with a finished epoch, a file of it is damaged, or the
            report cannot be written.
    """
    file = run / REPORT if out is None else out
    text = page(read_run(run))
    check_target(file)
    write_atomic(file, text.encode("utf-8", "replace"))  # a folder's name may be no Unicode
    return file


def check_target(file: Path) -> None:
    """Check that a report can be a file of this name.

    Raises:
        CheckpointError: It is a folder, or its own folder is not there.
    """
    if file.is_dir():
        raise CheckpointError(f"{file}: the report must be a file, found a folder; name a file in it")
    if not file.parent.is_dir():
        raise CheckpointError(
            f"{file}: the report must lie in a folder, found no {file.parent}; make it first"
        )


def page(run: Run) -> str:
    """Return the whole page; the same files give the same text."""
    parts = [
        f"<h1>Run {escape(run.name)}</h1>",
        tiles(highlights(run)),
        "<h2>Data set</h2>",
        facts(data_facts(run)),
        "<h2>Version and machine</h2>",
        facts(machine_facts(run)),
        "<h2>Settings that are not the defaults</h2>",
        _settings(run),
        *(figure_html(figure) for figure in figures(run)),
        *(table_html(table) for table in tables(run)),
    ]
    return document(f"{run.name} - xmlc report", parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page of its parts, each of them HTML."""
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style></head><body>",
        *parts,
        f"<footer><p>Written by xmlc {escape(__version__)}.</p></footer>",
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def highlights(run: Run) -> dict[str, str]:
    """Return the few figures that a reader looks for first."""
    last, best = run.entries[-1], run.best
    shown = {"epochs": f"{last.epoch}"}
    epochs = run.settings.get("training.epochs")
    if isinstance(epochs, int):
        shown["epochs"] += f" of {epochs}"
    if best is not None:
        shown["best epoch"] = f"{best.epoch}"
        metric = str(run.settings.get("training.metric", "P@1"))
        for name in dict.fromkeys((metric, "P@1", "P@5", "PSP@1", "PSP@5")):
            if name in best.validation:
                shown[f"validation {name}"] = f"{100 * best.validation[name]:.2f} %"
    shown["loss"] = f"{last.loss:.4g}"
    if last.train_seconds is not None:
        shown["training"] = f"{last.train_seconds:,.0f} s"
    memory = [entry.peak_memory_bytes for entry in run.entries if entry.peak_memory_bytes is not None]
    if memory:
        shown["peak memory"] = f"{max(memory) / 2**20:,.0f} MiB"
    seconds = {name: phase_total(run, name) for name in phases(run)}
    if sum(seconds.values()) > 0.0 and "output_step" in seconds:
        shown["output step"] = f"{100 * seconds['output_step'] / sum(seconds.values()):.0f} % of the time"
    return shown


def data_facts(run: Run) -> dict[str, Any]:
    """Return what is known of the data set."""
    data = run.data
    return {
        "name": data.name,
        "kind": data.kind,
        "training instances": data.instances,
        "labels": data.labels,
        "fingerprint": data.fingerprint,
    }


def machine_facts(run: Run) -> dict[str, Any]:
    """Return what the run was made with."""
    environment, native = run.environment, run.environment.native
    packages = (f"{name} {version}" for name, version in environment.packages.items() if name != "xmlc")
    return {
        "xmlc": environment.packages.get("xmlc"),
        "git commit": environment.git_commit,
        "started": environment.started,
        "machine": native.machine,
        "processors": native.processors,
        "platform": environment.platform,
        "CPU kernels": native.cpu_kernels_in_use,
        "CUDA kernels": native.cuda_kernels,
        "python": environment.python,
        "packages": ", ".join(packages) or None,
    }


def changed_settings(settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return key, value and default of every setting that is not this version's default."""
    sections = Config().model_dump(mode="json")
    defaults = {
        f"{section}.{key}": value for section, part in sections.items() for key, value in part.items()
    }
    return [
        (key, _value(value), _value(defaults[key]) if key in defaults else "unknown to this version")
        for key, value in settings.items()
        if key not in defaults or value != defaults[key]
    ]


def _settings(run: Run) -> str:
    return (
        settings_html(run.settings)
        + f"<details><summary>All settings</summary><pre>{escape(run.config)}</pre></details>"
    )


def settings_html(settings: Mapping[str, Any]) -> str:
    """Return those that are not the defaults as a table."""
    changed = changed_settings(settings)
    rows = _rows(changed) if changed else ""
    head = "<tr><th>setting</th><th>value</th><th>default</th></tr>"
    return f"<table>{head}{rows}</table>" if changed else '<p class="note">None.</p>'


def tiles(values: Mapping[str, str]) -> str:
    """Return the few figures that stand out."""
    boxes = (f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="tiles">{"".join(boxes)}</dl>'


def facts(values: Mapping[str, Any]) -> str:
    """Return names and values as a table; those that are None are named below it."""
    known = [(name, _value(value)) for name, value in values.items() if value is not None]
    missing = [name for name, value in values.items() if value is None]
    table = f"<table>{_rows(known)}</table>" if known else ""
    note = f'<p class="note">Not recorded: {escape(", ".join(missing))}.</p>' if missing else ""
    return table + note


def figure_html(figure: Figure) -> str:
    """Return charts with heading and caption."""
    charts = "".join(chart.svg(figure.title) for chart in figure.charts)
    return (
        f"<h2>{escape(figure.title)}</h2><figure>{charts}"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def table_html(table: Table) -> str:
    """Return a table with its heading."""
    columns = zip(*table.rows, strict=True)
    styles = ["" if all(map(NUMBER.fullmatch, column)) else ' class="text"' for column in columns]
    lines = [_row(table.header, styles, "th"), *(_row(cells, styles) for cells in table.rows)]
    body = f'<div class="wide"><table class="numbers">{"".join(lines)}</table></div>'
    if table.folded:
        body = f"<details><summary>{len(table.rows):,} rows</summary>{body}</details>"
    return f"<h2>Table: {escape(table.title)}</h2>{body}"


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "".join(map(_row, rows))


def _row(cells: Sequence[str], styles: Sequence[str] = (), tag: str = "td") -> str:
    styled = zip(cells, styles or [""] * len(cells), strict=True)
    return f"<tr>{''.join(f'<{tag}{style}>{escape(cell)}</{tag}>' for cell, style in styled)}</tr>"


def _value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, bool):
        return str(value).lower()
    return ABSENT if value is None else str(value)
