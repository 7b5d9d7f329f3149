"""Line, bar and point charts as SVG.

Colour-blind eyes tell the colours apart, and so does a grey print: lines differ in dash and marker as well,
bars in lightness. A pointer that rests on a marker or bar is shown its value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 800, 300
LEFT, RIGHT, TOP, BOTTOM = 72, 784, 24, 244  # of the plot
LEGEND = 550  # right end of a plot with a legend beside it
MOST_MARKERS = 60  # more points than this are a line without markers

# Okabe & Ito 2008; then dash, and marker.
LINES = (
    ("#0072B2", "", "circle"),
    ("#D55E00", "7 3", "square"),
    ("#009E73", "2 3", "triangle"),
    ("#000000", "8 3 2 3", "diamond"),
)
OVER = ("#000000", "#D55E00")  # lines over a ramp
PAIR = ("#0072B2", "#E69F00")  # dark and light
RAMP = ("#440154", "#443983", "#31688E", "#21918C", "#35B779", "#90D743", "#FDE725")  # viridis


@dataclass(frozen=True)
class Series:
    """A name for the legend, and values."""

    name: str
    points: tuple[tuple[float, float], ...]  # x, y; of bars, x is the category's place


@dataclass(frozen=True)
class LineChart:
    """Values over a number line of whole numbers; axis names carry their units."""

    x: str
    y: str
    series: tuple[Series, ...]
    mark: tuple[float, str] | None = None  # an x, and what it is
    from_zero: bool = False  # the vertical axis; else it holds just the values
    stems: bool = (
        False  # lines from zero up to the points instead of from point to point; both axes from zero
    )

    def svg(self, label: str) -> str:
        """Return the chart as an ``<svg>`` element; ``label`` names it to screen readers."""
        xs = [x for series in self.series for x, _ in series.points]
        ys = [y for series in self.series for _, y in series.points]
        right = RIGHT if len(self.series) == 1 else LEGEND
        across = _Axis(LEFT, right, *_widened(0.0 if self.stems else min(xs), max(xs), 0.5), whole=True)
        up = _Axis(BOTTOM, TOP, *_rounded(0.0 if self.stems or self.from_zero else min(ys), max(ys)))
        parts = [_frame(across, up, self.x, self.y)]
        if self.mark is not None:
            x = across.at(self.mark[0])
            parts.append(f'<path d="M{x:.1f} {TOP}V{BOTTOM}" stroke="#777" stroke-dasharray="1 3"/>')
            parts.append(_text(x, TOP - 8, self.mark[1], "middle"))
        for number, series in enumerate(self.series):
            colour, dash, marker = LINES[number % len(LINES)]
            places = [(across.at(x), up.at(y)) for x, y in series.points]
            if self.stems:
                path = "".join(f"M{x:.1f} {BOTTOM}V{y:.1f}" for x, y in places)
            else:
                path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" {_line(dash)}/>')
            if len(places) <= MOST_MARKERS:
                for (x, y), (value_x, value_y) in zip(places, series.points, strict=True):
                    told = f"{series.name}, {self.x} {value_x:g}: {value_y:.6g}"
                    parts.append(_marker(marker, x, y, colour, told))
            if len(self.series) > 1:
                y = TOP + 10 + 22 * number
                parts.append(f'<path d="M{right + 16} {y}h34" stroke="{colour}" {_line(dash)}/>')
                parts.append(_marker(marker, right + 33, y, colour, series.name))
                parts.append(_text(right + 58, y + 4, series.name))
        return _svg(label, parts)


@dataclass(frozen=True)
class BarChart:
    """Values by category, beside each other or stacked."""

    x: str
    y: str
    categories: tuple[str, ...]
    series: tuple[Series, ...]
    stacked: bool = False

    def svg(self, label: str) -> str:
        """Return the chart as an ``<svg>`` element; ``label`` names it to screen readers."""
        colours = RAMP if self.stacked else PAIR
        heights = [0.0] * len(self.categories)
        for series in self.series:
            for place, value in series.points:
                here = heights[int(place)]
                heights[int(place)] = here + value if self.stacked else max(here, value)
        up = _Axis(BOTTOM, TOP, *_rounded(0.0, max(heights)))
        across = _Axis(LEFT, LEGEND, -0.5, len(self.categories) - 0.5, whole=True, names=self.categories)
        room = (LEGEND - LEFT) / len(self.categories)
        slanted = len(self.categories) <= 10 and _LETTER * max(map(len, self.categories)) > room
        beside = 1 if self.stacked else len(self.series)
        width = min(0.8 * room, 70.0) / beside
        edge = "" if room < 4 else ' stroke="#fff" stroke-width="0.7"'
        parts = [_grid(up, LEGEND), _name_up(self.y)] if slanted else [_frame(across, up, self.x, self.y)]
        parts += [_slanted(across.at(place), name) for place, name in enumerate(self.categories) if slanted]
        base = [0.0] * len(self.categories)
        for number, series in enumerate(self.series):
            colour = colours[number % len(colours)]
            for place, value in series.points:
                below = base[int(place)]
                left = across.at(place) - width * beside / 2
                if self.stacked:
                    base[int(place)] += value
                else:
                    left += width * number
                top, bottom = up.at(below + value), up.at(below)
                told = f"{series.name}, {self.x} {self.categories[int(place)]}: {value:.6g}"
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" '
                    f'fill="{colour}"{edge}>{_title(told)}</rect>'
                )
            row = len(self.series) - 1 - number if self.stacked else number  # as the stack stands
            y = TOP + 10 + 22 * row
            parts.append(f'<rect x="{LEGEND + 16}" y="{y - 7}" width="14" height="14" fill="{colour}"/>')
            parts.append(_text(LEGEND + 38, y + 4, series.name))
        return _svg(label, parts, HEIGHT + _SLANTED * slanted)


@dataclass(frozen=True)
class PointChart:
    """Named points over two number lines; the first point is drawn to stand out."""

    x: str
    y: str
    points: tuple[tuple[float, float, str], ...]  # x, y, name

    def svg(self, label: str) -> str:
        """Return the chart as an ``<svg>`` element; ``label`` names it to screen readers."""
        across = _Axis(LEFT, LEGEND, *_rounded(0.0, max(x for x, _, _ in self.points)))
        ys = [y for _, y, _ in self.points]
        up = _Axis(BOTTOM, TOP, *_rounded(min(ys), max(ys)))
        parts = [_frame(across, up, self.x, self.y)]
        for number, (x, y, name) in enumerate(self.points):
            colour, _, marker = LINES[min(number, 1)]
            told = f"{name}, {self.x} {x:g}: {y:.6g}"
            parts.append(_marker(marker, across.at(x), up.at(y), colour, told))
            parts.append(_text(across.at(x) + 9, up.at(y) + 4, name))
        return _svg(label, parts)


@dataclass(frozen=True)
class SpanChart:
    """Layers stacked over spans of equal width, one after the other, and lines over them, level in a span."""

    y: str
    spans: tuple[str, ...]
    layers: tuple[Series, ...]  # x is the place of the span
    lines: tuple[Series, ...] = ()

    def svg(self, label: str) -> str:
        """Return the chart as an ``<svg>`` element; ``label`` names it to screen readers."""
        base = [0.0] * len(self.spans)
        for series in self.layers:
            for place, value in series.points:
                base[int(place)] += value
        tops = [*base, *(y for line in self.lines for _, y in line.points)]
        up = _Axis(BOTTOM, TOP, *_rounded(0.0, max(tops)))
        room = (LEGEND - LEFT) / len(self.spans)
        parts = [_grid(up, LEGEND), _name_up(self.y)]
        base = [0.0] * len(self.spans)
        for number, series in enumerate(self.layers):
            colour = RAMP[number % len(RAMP)]
            for place, value in series.points:
                below = base[int(place)]
                base[int(place)] += value
                top, bottom = up.at(below + value), up.at(below)
                parts.append(
                    f'<rect x="{LEFT + room * place:.1f}" y="{top:.1f}" width="{room:.1f}" '
                    f'height="{bottom - top:.1f}" fill="{colour}">'
                    f"{_title(f'{self.spans[int(place)]}, {series.name}: {value:.6g}')}</rect>"
                )
            y = TOP + 10 + 22 * (len(self.layers) - 1 - number)  # as the stack stands
            parts.append(f'<rect x="{LEGEND + 16}" y="{y - 7}" width="14" height="14" fill="{colour}"/>')
            parts.append(_text(LEGEND + 38, y + 4, series.name))
        for number, series in enumerate(self.lines):
            colour = OVER[number % len(OVER)]
            path = "".join(
                f"M{LEFT + room * place:.1f} {up.at(value):.1f}h{room:.1f}" for place, value in series.points
            )
            told = ", ".join(f"{self.spans[int(place)]} {value:.6g}" for place, value in series.points)
            line = f'stroke="{colour}" stroke-width="2.5"'
            parts.append(f'<path d="{path}" fill="none" {line}>{_title(f"{series.name}: {told}")}</path>')
            y = TOP + 10 + 22 * (len(self.layers) + number)
            parts.append(f'<path d="M{LEGEND + 12} {y}h22" {line}/>')
            parts.append(_text(LEGEND + 38, y + 4, series.name))
        for place, name in enumerate(self.spans):
            x = LEFT + room * (place + 0.5)
            parts.append(_slanted(x, name))
        return _svg(label, parts, HEIGHT + _SLANTED)


_SLANTED = 40  # more height for names that stand slanted
_LETTER = 7.5  # about its width


def _slanted(x: float, name: str) -> str:
    place = f"translate({x + 4:.1f} {BOTTOM + 14}) rotate(-40)"
    return f'<text text-anchor="end" transform="{place}">{escape(name)}</text>'


Chart = LineChart | BarChart | PointChart | SpanChart


@dataclass(frozen=True)
class _Axis:
    """Where values from ``low`` to ``high`` lie between two pixels, and its ticks."""

    first: float
    last: float
    low: float
    high: float
    whole: bool = False
    names: Sequence[str] = ()  # of the whole numbers from 0, instead of themselves

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.first + (value - self.low) / (self.high - self.low) * (self.last - self.first)

    def ticks(self) -> list[tuple[float, str]]:
        """Return pixel and text of each tick."""
        step = tick_step(self.high - self.low, 10 if self.names else 6)
        if self.whole:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        values = [number * step for number in range(first, last + 1)]
        if self.names:
            return [(self.at(value), self.names[int(value)]) for value in values]
        return [(self.at(value), _number(value, step)) for value in values]


def tick_step(span: float, most: int) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that cuts ``span`` into at most ``most`` parts."""
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power * most >= span * (1 - 1e-9))


def _number(value: float, step: float) -> str:
    """Return a tick's text: short, and with the digits that tell ticks a ``step`` apart."""
    if value == 0.0:
        return "0"
    if 1e-4 <= step < 2e5:
        return f"{value:,.{_digits(step)}f}"
    for size, unit in ((1e6, " M"), (1e9, " G")):
        if 2e5 <= step < 1e3 * size:
            return f"{value / size:,.{_digits(step / size)}f}{unit}"
    return f"{value:.3g}"


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _widened(low: float, high: float, by: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - by, high + by)


def _rounded(low: float, high: float) -> tuple[float, float]:
    """Return a range between two ticks that holds all values."""
    size = max(abs(low), abs(high))
    if size < 1e-30:
        low, high = 0.0, 1.0
    elif high - low < 1e-9 * size:  # all the same: in the middle
        low, high = low - 0.1 * size, high + 0.1 * size
    step = tick_step(high - low, 5)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _frame(across: _Axis, up: _Axis, x: str, y: str) -> str:
    parts = [_grid(up, across.last)]
    for place, text in across.ticks():
        parts.append(f'<path d="M{place:.1f} {BOTTOM}v5" stroke="#1a1a1a"/>')
        parts.append(_text(place, BOTTOM + 20, text, "middle"))
    parts.append(_text((across.first + across.last) / 2, BOTTOM + 44, x, "middle"))
    parts.append(_name_up(y))
    return "\n".join(parts)


def _grid(up: _Axis, right: float) -> str:
    """Return the ticks and lines of the vertical axis, and the line at the bottom."""
    parts = []
    for place, text in up.ticks():
        parts.append(f'<path d="M{LEFT} {place:.1f}H{right:.0f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, place + 4, text, "end"))
    parts.append(f'<path d="M{LEFT} {BOTTOM}H{right:.0f}" stroke="#1a1a1a"/>')
    return "\n".join(parts)


def _name_up(y: str) -> str:
    """Return the name of the vertical axis."""
    middle = (TOP + BOTTOM) / 2
    return f'<g transform="translate(16 {middle:.0f}) rotate(-90)">{_text(0, 0, y, "middle")}</g>'


def _line(dash: str) -> str:
    return 'stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _marker(kind: str, x: float, y: float, colour: str, told: str) -> str:
    shape = {
        "circle": f"M{x - 3.5:.1f} {y:.1f}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
        "square": f"M{x - 3.2:.1f} {y - 3.2:.1f}h6.4v6.4h-6.4z",
        "triangle": f"M{x:.1f} {y - 4.4:.1f}l4.2 7.4h-8.4z",
        "diamond": f"M{x:.1f} {y - 4.6:.1f}l4.6 4.6l-4.6 4.6l-4.6 -4.6z",
    }[kind]
    return f'<path d="{shape}" fill="{colour}" stroke="#fff" stroke-width="0.8">{_title(told)}</path>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _svg(label: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}" font-family="system-ui, sans-serif" font-size="13" fill="#1a1a1a">'
    )
    return "\n".join([head, *parts, "</svg>"])
