"""Charts: marks where the values are, ticks that can be read, text that is escaped."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xmlc.reports.charts import (
    BOTTOM,
    LEFT,
    LEGEND,
    LINES,
    MOST_MARKERS,
    RAMP,
    RIGHT,
    TOP,
    BarChart,
    Chart,
    LineChart,
    PointChart,
    Series,
    SpanChart,
    tick_step,
)

SVG = "{http://www.w3.org/2000/svg}"


def parsed(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg("a chart"))


def texts(chart: Chart) -> list[str]:
    return [element.text or "" for element in parsed(chart).iter(f"{SVG}text")]


def titles(chart: Chart) -> list[str]:
    return [element.text or "" for element in parsed(chart).iter(f"{SVG}title")]


def curve(chart: Chart) -> str:
    """Return the path of the only line."""
    (path,) = [each for each in parsed(chart).iter(f"{SVG}path") if each.get("fill") == "none"]
    return path.attrib["d"]


def rectangles(chart: Chart) -> list[tuple[float, float, float]]:
    """Return top, height and left of every bar, without those of the legend."""
    found = [each.attrib for each in parsed(chart).iter(f"{SVG}rect") if float(each.attrib["x"]) < LEGEND]
    return [(float(each["y"]), float(each["height"]), float(each["x"])) for each in found]


def line(*points: tuple[float, float], **options: object) -> LineChart:
    return LineChart("epoch", "percent", (Series("P@1", points),), **options)  # type: ignore[arg-type]


def test_a_line_runs_through_its_values() -> None:
    chart = line((1, 0.0), (3, 50.0), (5, 100.0))
    middle = f"{(LEFT + RIGHT) / 2:.1f} {(TOP + BOTTOM) / 2:.1f}"
    assert curve(chart) == f"M{LEFT:.1f} {BOTTOM:.1f}L{middle}L{RIGHT:.1f} {TOP:.1f}"


def test_axes_are_named_and_have_round_ticks() -> None:
    assert texts(line((1, 12.0), (5, 57.0))) == [
        *("10", "20", "30", "40", "50", "60"),
        *("1", "2", "3", "4", "5"),
        *("epoch", "percent"),
    ]


@pytest.mark.parametrize("last", [1, 2, 3, 20, 333])
def test_epochs_are_never_broken(last: int) -> None:
    shown = texts(line(*((epoch, 0.0) for epoch in range(1, last + 1))))
    ticks = shown[shown.index("1.0") + 1 : shown.index("epoch")]
    assert ticks
    assert all(tick.isdigit() for tick in ticks)


def test_large_and_small_values_have_short_ticks() -> None:
    assert texts(line((1, 0.0), (2, 2e6)))[:5] == ["0", "0.5 M", "1.0 M", "1.5 M", "2.0 M"]
    assert texts(line((1, 0.0), (2, 4e9)))[:5] == ["0", "1 G", "2 G", "3 G", "4 G"]
    assert texts(line((1, 0.0), (2, 4e-3)))[:5] == ["0", "0.001", "0.002", "0.003", "0.004"]
    assert texts(line((1, 0.0), (2, 4e-9)))[1] == "1e-09"


@pytest.mark.parametrize("value", [0.0, 7.5, -3.0, 1e-40, 1e30])
def test_values_that_are_all_the_same_have_a_range(value: float) -> None:
    assert "nan" not in line((1, value), (2, value)).svg("flat")
    assert "nan" not in line((1, value)).svg("one")


def test_markers_tell_their_values_until_they_are_too_many() -> None:
    assert titles(line((1, 12.0), (2, 57.0))) == ["P@1, epoch 1: 12", "P@1, epoch 2: 57"]
    assert titles(line(*((epoch, 1.0) for epoch in range(MOST_MARKERS + 1)))) == []


def test_stems_stand_on_zero() -> None:
    first = f"M{(LEFT + RIGHT) / 2:.1f} {BOTTOM}V{(TOP + BOTTOM) / 2:.1f}"
    last = f"M{RIGHT:.1f} {BOTTOM}V{TOP:.1f}"
    assert curve(line((50, 10.0), (100, 20.0), stems=True)) == first + last


def test_the_best_epoch_is_marked() -> None:
    assert "best" in texts(line((1, 1.0), (2, 2.0), mark=(2, "best")))


def test_stacked_bars_stand_on_each_other() -> None:
    first, second = Series("a", ((0, 1.0), (1, 3.0))), Series("b", ((0, 3.0), (1, 1.0)))
    chart = BarChart("epoch", "seconds", ("1", "2"), (first, second), stacked=True)
    quarter = (BOTTOM - TOP) / 4
    tops = [(round(top), round(height)) for top, height, _ in rectangles(chart)]
    assert tops == [
        (BOTTOM - quarter, quarter),
        (BOTTOM - 3 * quarter, 3 * quarter),
        (TOP, 3 * quarter),
        (TOP, quarter),
    ]
    assert texts(chart)[-2:] == ["a", "b"]
    places = [float(each.attrib["y"]) for each in list(parsed(chart).iter(f"{SVG}text"))[-2:]]
    assert places[0] > places[1], "the legend stands as the stack does"


def test_bars_of_a_category_stand_beside_each_other() -> None:
    chart = BarChart("decile", "percent", ("1",), (Series("a", ((0, 1.0),)), Series("b", ((0, 2.0),))))
    (_, _, one), (_, _, other) = rectangles(chart)
    assert other > one


def test_names_are_escaped() -> None:
    name = "<script>alert('&')</script>"
    chart = LineChart(name, name, (Series(name, ((1, 1.0),)), Series(name, ((1, 2.0),))), (1, name))
    assert "<script" not in chart.svg(name)
    assert texts(chart).count(name) == 5
    bars = BarChart(name, name, (name,), (Series(name, ((0, 1.0),)),))
    assert "<script" not in bars.svg(name)


@given(st.floats(1e-25, 1e25), st.integers(1, 12))
def test_tick_steps_are_round_and_few(span: float, most: int) -> None:
    step = tick_step(span, most)
    assert span / step <= most * (1 + 1e-6)
    mantissa = step / 10.0 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-6


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour, ITU-R BT.709."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_stacked_colours_grow_lighter_and_lines_differ_without_colour() -> None:
    greys = [luminance(colour) for colour in RAMP]
    assert greys == sorted(greys)
    assert len({dash for _, dash, _ in LINES}) == len({marker for _, _, marker in LINES}) == len(LINES)


def test_named_points_stand_where_their_values_are() -> None:
    chart = PointChart(
        "MB", "P@1, %", ((1000.0, 40.0, "ours & <more>"), (500.0, 30.0, "peer"), (0.0, 30.0, "none"))
    )
    root = parsed(chart)
    names = {element.text: element for element in root.iter(f"{SVG}text")}
    places = {
        name: (float(names[name].get("x", "")), float(names[name].get("y", "")))
        for _, _, name in chart.points
    }
    assert places["none"][0] == pytest.approx(LEFT + 9)
    assert places["peer"][0] == pytest.approx((places["none"][0] + places["ours & <more>"][0]) / 2, abs=0.1)
    assert places["peer"][1] == places["none"][1] > places["ours & <more>"][1]
    assert titles(chart)[0] == "ours & <more>, MB 1000: 40"
    colours = [path.get("fill") for path in root.iter(f"{SVG}path") if path.find(f"{SVG}title") is not None]
    assert colours[0] != colours[1] == colours[2]


def spans(**options: object) -> SpanChart:
    layers = (Series("a", ((0, 1.0), (1, 2.0))), Series("b", ((0, 3.0), (1, 0.0))))
    return SpanChart("MiB", ("load", "step"), layers, **options)  # type: ignore[arg-type]


def test_layers_of_spans_stand_on_each_other_without_gaps() -> None:
    room = (LEGEND - LEFT) / 2
    (top, height, left), (_, second_height, second_left), *others = rectangles(spans())
    assert (left, second_left) == (LEFT, LEFT + room)
    assert top + height == pytest.approx(BOTTOM, abs=0.2)
    assert second_height == pytest.approx(2 * height, abs=0.2)
    assert others[0][0] + others[0][1] == pytest.approx(top, abs=0.2)
    assert "step, a: 2" in titles(spans())


def test_lines_over_spans_are_level_at_their_values_and_fit_the_axis() -> None:
    chart = spans(lines=(Series("process", ((0, 8.0), (1, 4.0))),))
    moves = curve(chart).split("M")[1:]
    heights = [float(move.split()[1].split("h")[0]) for move in moves]
    assert heights == pytest.approx(
        [TOP + (BOTTOM - TOP) * (1 - value / 8.0) for value in (8.0, 4.0)], abs=0.1
    )
    assert "process: load 8, step 4" in titles(chart)


def test_names_that_would_overlap_stand_slanted() -> None:
    short = BarChart("phase", "MiB", ("a", "b"), (Series("x", ((0, 1.0), (1, 1.0))),))
    long = BarChart("phase", "MiB", ("output_step",) * 9, (Series("x", ((0, 1.0),)),))
    assert "rotate(-40)" not in short.svg("")
    assert long.svg("").count("rotate(-40)") == 9
    assert texts(long).count("output_step") == 9
