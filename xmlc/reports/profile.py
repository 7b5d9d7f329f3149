"""The memory of a run as one HTML page: what `xmlc profile --json --explain` says, drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xmlc.files import write_atomic
from xmlc.reports.charts import BarChart, Series, SpanChart
from xmlc.reports.figures import Figure, Table
from xmlc.reports.page import document, facts, figure_html, settings_html, table_html, tiles

CATEGORIES = ("weights", "optimizer", "statistics", "batch", "workspace", "temporary")
MIB = 1 << 20
CAPTION = (
    "MiB beyond Python, torch and this package; stacked: what the plan says of each kind. A pointer that "
    "rests on a part is shown its size."
)
DEVICE_CAPTION = (
    "MiB that torch's allocator hands out of the CUDA device; stacked: what the plan says of each kind."
)


def write_profile(found: Mapping[str, Any], file: Path) -> None:
    """Write the page about a profile, by atomic rename.

    Args:
        found: What `xmlc profile --json --explain` prints.
        file: The page.

    Raises:
        CheckpointError: The file cannot be written.
    """
    write_atomic(file, profile_page(found).encode("utf-8", "replace"))


def profile_page(found: Mapping[str, Any]) -> str:
    """Return the whole page; the same profile gives the same text."""
    return document(
        "Memory of a run - xmlc profile",
        [
            "<h1>Memory of a run</h1>",
            tiles(_highlights(found)),
            *(figure_html(figure) for figure in _figures(found)),
            *(table_html(table) for table in _tables(found)),
            "<h2>Settings that are not the defaults</h2>",
            settings_html(_flat(found["settings"])),
            *_budget(found),
        ],
    )


def _highlights(found: Mapping[str, Any]) -> dict[str, str]:
    shown = {
        "planned peak": _mib(found["peak_bytes"]),
        "in phase": found["peak_phase"],
        "largest part": f"{found['binding']['name']}, {_mib(found['binding']['bytes'])}",
    }
    if found["disk_bytes"]:
        shown["on the disk"] = _mib(found["disk_bytes"])
    if "measured" in found:
        shown["measured peak"] = _mib(max(phase["process"] for phase in found["measured"]))
        shown["plan and process"] = "agree" if found["within"] else "differ"
    if "device" in found:
        device = found["device"]
        shown["planned peak on the device"] = _mib(device["peak_bytes"])
        shown["largest part there"] = f"{device['binding']['name']}, {_mib(device['binding']['bytes'])}"
    if "available_bytes" in found:
        shown["budget leaves"] = _mib(found["available_bytes"])
    return shown


def _figures(found: Mapping[str, Any]) -> list[Figure]:
    if "timeline" not in found:
        phases = list(found["terms"])
        chart = SpanChart("MiB", tuple(phases), _layers(found, phases))
        figures = [Figure("Planned memory by phase", (chart,), f"{CAPTION} Nothing was measured.")]
        if "device" in found:
            chart = SpanChart("MiB", tuple(phases), _layers(found["device"], phases))
            caption = f"{DEVICE_CAPTION} Nothing was measured."
            figures.append(Figure("Planned memory of the device by phase", (chart,), caption))
        return figures
    measured = found["measured"]
    phases = [phase["phase"] for phase in measured]
    beside = BarChart(
        "phase",
        "MiB",
        tuple(phases),
        tuple(
            Series(name, tuple((place, phase[key] / MIB) for place, phase in enumerate(measured)))
            for name, key in (("planned", "planned"), ("process", "process"))
        ),
    )
    spans = [span["phase"] for span in found["timeline"]]
    lines = tuple(
        Series(name, tuple((place, span[key] / MIB) for place, span in enumerate(found["timeline"])))
        for name, key in (("measured: process", "process"), ("measured: torch", "tracked"))
    )
    timeline = SpanChart("MiB", tuple(spans), _layers(found, spans), lines)
    device = []
    if "device" in found:
        points = tuple((place, span["device"] / MIB) for place, span in enumerate(found["timeline"]))
        line = (Series("measured: torch", points),)
        chart = SpanChart("MiB", tuple(spans), _layers(found["device"], spans), line)
        device = [Figure("Memory of the device over the run", (chart,), DEVICE_CAPTION)]
    return [
        Figure(
            "Memory over the run",
            (timeline,),
            f"{CAPTION} Lines: the peak of each pass through a phase, of the process and by torch's own "
            "allocator, in the order of the measured run; passes are drawn equally wide, however long.",
        ),
        *device,
        Figure("Plan beside measurement", (beside,), "The highest pass through each phase."),
    ]


def _layers(found: Mapping[str, Any], spans: Sequence[str]) -> tuple[Series, ...]:
    """Return what is planned of each kind in each span."""
    return tuple(
        Series(category, tuple((place, sizes[place] / MIB) for place in range(len(spans))))
        for category in CATEGORIES
        if any(
            sizes := [
                sum(term["bytes"] for term in found["terms"][span] if term["category"] == category)
                for span in spans
            ]
        )
    )


def _tables(found: Mapping[str, Any]) -> list[Table]:
    tables = []
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    if "measured" in found:
        columns = dict(_COLUMNS) | (dict(_DEVICE_COLUMNS) if "device" in found else {})
        header = ("phase", *(f"{name} MiB" for name in columns.values()), "")
        rows = tuple(
            (
                phase["phase"],
                *(_number(phase[key]) for key in columns),
                "" if phase["within"] else "beyond 5 % + 8 MiB",
            )
            for phase in found["measured"]
        )
        tables.append(Table("plan and measurement", header, rows))
        header = ("phase", "from s", "for s", "torch MiB", "process MiB", "scratch MiB")
        rows = tuple(
            (
                span["phase"],
                f"{span['start_seconds']:.3f}",
                f"{span['seconds']:.3f}",
                _number(span["tracked"]),
                _number(span["process"]),
                _number(span["scratch"]),
            )
            for span in found["timeline"]
        )
        tables.append(Table("every pass through a phase", header, rows, folded=True))
    tables.append(_parts("planned parts", found["terms"]))
    if "device" in found:
        tables.append(_parts("planned parts on the device", found["device"]["terms"]))
    if found["disk_terms"]:
        rows = tuple(map(_cells, found["disk_terms"]))
        tables.append(Table("on the disk, not counted", _PART, rows))
    return tables


_COLUMNS = (
    ("planned", "planned"),
    ("tracked", "torch"),
    ("scratch", "scratch"),
    ("process", "process"),
    ("residual", "residual"),
)
_DEVICE_COLUMNS = (
    ("device_planned", "device planned"),
    ("device", "device torch"),
    ("device_residual", "device residual"),
)
_PART = ("part", "kind", "bytes", "formula", "MiB")


def _parts(title: str, terms_of: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return every part, the largest first, and the phases that have it."""
    phases: dict[tuple[str, ...], list[str]] = {}
    for phase, terms in terms_of.items():
        for term in terms:
            phases.setdefault(_cells(term), []).append(phase)
    rows = tuple(
        (*cells, "all phases" if len(held) == len(terms_of) else ", ".join(held))
        for cells, held in sorted(phases.items(), key=lambda each: -int(each[0][2].replace(",", "")))
    )
    return Table(title, (*_PART, "in"), rows)


def _cells(term: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        term["name"],
        term["category"],
        f"{term['bytes']:,}",
        term["formula"],
        _number(term["bytes"]),
    )


def _budget(found: Mapping[str, Any]) -> list[str]:
    """Return what a budget changed."""
    if "changes" not in found:
        return []
    changes = {change["key"]: f"{change['now']} (was {change['before']})" for change in found["changes"]}
    return [
        "<h2>To fit the budget</h2>",
        facts(changes) if changes else '<p class="note">Nothing changed.</p>',
    ]


def _flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, part in settings.items() for key, value in part.items()}


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f} MiB"


def _number(size: float) -> str:
    return f"{size / MIB:,.1f}"
