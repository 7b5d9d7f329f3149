"""The page about a profile of memory: what is drawn and listed, with and without a measurement."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from xmlc.config import Config
from xmlc.errors import CheckpointError
from xmlc.reports import write_profile
from xmlc.reports.profile import _figures, _tables, profile_page

MIB = 1 << 20


def term(name: str, category: str, mebibytes: int) -> dict[str, Any]:
    return {"name": name, "category": category, "bytes": mebibytes * MIB, "formula": f"{mebibytes} * {MIB}"}


HELD = [term("output.weight", "weights", 40), term("adam of <b>", "optimizer", 80)]
PLANNED: dict[str, Any] = {
    "peak_bytes": 128 * MIB,
    "peak_phase": "forward",
    "needed_bytes": 140 * MIB,
    "binding": HELD[1],
    "phases": {"load": 40 * MIB, "forward": 128 * MIB},
    "disk_bytes": 0,
    "terms": {"load": HELD[:1], "forward": [*HELD, term("features", "batch", 8)]},
    "disk_terms": [],
    "settings": Config().model_dump(mode="json") | {"loss": {"kind": "bce"}},
}
MEASURED = PLANNED | {
    "measured": [
        {
            "phase": "forward",
            "planned": 128 * MIB,
            "tracked": 126 * MIB,
            "process": 150 * MIB,
            "residual": 22 * MIB,
            "scratch": 3 * MIB,
            "device_planned": 0,
            "device": 0,
            "device_residual": 0,
            "within": False,
        }
    ],
    "timeline": [
        {
            "phase": phase,
            "start_seconds": 0.5,
            "seconds": 0.25,
            "tracked": 126 * MIB,
            "process": process * MIB,
            "scratch": 3 * MIB,
            "device": 77 * MIB,
        }
        for phase, process in (("load", 41), ("forward", 150), ("forward", 129))
    ],
    "before_bytes": 200 * MIB,
    "within": False,
}


class Cells(HTMLParser):
    """Collects the texts of tables' cells and of the pictures' pointers."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._open = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open = tag in ("td", "dd", "title")
        if self._open:
            self.found.append("")

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._open = False


def test_a_plan_alone_is_drawn_by_phase_and_kind() -> None:
    page = profile_page(PLANNED)
    cells = Cells(page).found
    for told in ("load, weights: 40", "forward, optimizer: 80", "forward, batch: 8"):
        assert told in cells
    assert "Nothing was measured." in page
    assert "Plan beside measurement" not in page


def test_every_part_is_listed_with_its_formula_largest_first() -> None:
    [table] = _tables(PLANNED)
    assert [row[0] for row in table.rows] == ["adam of <b>", "output.weight", "features"]
    assert table.rows[1][1:] == ("weights", "41,943,040", "40 * 1048576", "40.0", "all phases")
    assert table.rows[2][-1] == "forward"


def test_parts_of_one_name_and_two_sizes_are_two_rows() -> None:
    found = copy.deepcopy(PLANNED)
    found["terms"]["load"].append(term("features", "batch", 3))
    [table] = _tables(found)
    assert [row[2:] for row in table.rows if row[0] == "features"] == [
        ("8,388,608", "8 * 1048576", "8.0", "forward"),
        ("3,145,728", "3 * 1048576", "3.0", "load"),
    ]


def test_a_measurement_stands_beside_its_plan_and_over_the_run() -> None:
    over, beside = _figures(MEASURED)
    assert [figure.title for figure in (over, beside)] == ["Memory over the run", "Plan beside measurement"]
    page = profile_page(MEASURED)
    cells = Cells(page).found
    assert "measured: process: load 41, forward 150, forward 129" in cells
    assert "process, phase forward: 150" in cells
    assert "planned, phase forward: 128" in cells
    assert "beyond 5 % + 8 MiB" in cells
    assert "differ" in cells


def test_what_a_budget_changed_and_what_lies_on_the_disk_are_told() -> None:
    found = MEASURED | {
        "available_bytes": 100 * MIB,
        "changes": [{"key": "model.width", "before": 8192, "now": 4096}],
        "disk_bytes": 7 * MIB,
        "disk_terms": [term("output.indices", "weights", 7)],
    }
    cells = Cells(profile_page(found)).found
    assert {"model.width", "4096 (was 8192)", "100.0 MiB", "output.indices", "7.0 MiB"} <= set(cells)


def test_the_page_needs_nothing_else_and_shows_names_as_they_are() -> None:
    page = profile_page(MEASURED)
    for foreign in ("<script", "<link", "<img", "@import", "url(", 'src="', "<b>"):
        assert foreign not in page
    assert "adam of &lt;b&gt;" in page
    assert page == profile_page(MEASURED)


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_profile(PLANNED, tmp_path / "memory.html")
    assert (tmp_path / "memory.html").read_text() == profile_page(PLANNED)
    with pytest.raises(CheckpointError, match="must be writable"):
        write_profile(PLANNED, tmp_path / "none" / "memory.html")
    assert [file.name for file in tmp_path.iterdir()] == ["memory.html"]


DEVICE = {
    "peak_bytes": 99 * MIB,
    "peak_phase": "forward",
    "needed_bytes": 140 * MIB,
    "binding": term("output.bias", "weights", 66),
    "phases": {"load": 66 * MIB, "forward": 99 * MIB},
    "terms": {
        "load": [term("output.bias", "weights", 66)],
        "forward": [term("output.bias", "weights", 66), term("hidden", "batch", 33)],
    },
}


def test_a_device_has_pictures_columns_and_parts_of_its_own() -> None:
    page = profile_page(PLANNED | {"device": DEVICE})
    assert "Planned memory of the device by phase" in page
    assert {"99.0 MiB", "output.bias, 66.0 MiB", "hidden"} <= set(Cells(page).found)
    measured = MEASURED | {"device": DEVICE}
    measured["measured"] = [
        phase | {"device_planned": 99 * MIB, "device": 77 * MIB, "device_residual": -22 * MIB}
        for phase in measured["measured"]
    ]
    page = profile_page(measured)
    assert "Memory of the device over the run" in page
    assert {"99.0", "77.0", "-22.0", "3.0"} <= set(Cells(page).found)
    assert "the device" not in profile_page(MEASURED)
