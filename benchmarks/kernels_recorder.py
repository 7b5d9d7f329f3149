"""Times ways to compute, and records every repeat with what it depends on."""

from __future__ import annotations

import csv
import ctypes
import itertools
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kernels_limits import Cost, Limits

from xmlc import native

FIELDS = (
    *("date", "commit", "processor", "cores", "torch", "wait_policy", "threads", "isa", "way", "op", "loss"),
    *("optimizer", "labels", "inputs", "batch", "fan_in", "group_size", "weight_dtype", "index_dtype"),
    *("wanted_active", "active_logits", "active_tiles", "gather_bytes", "memory_bytes", "flop", "beside"),
    *("repeat", "seconds", "roofline_seconds", "scratch_bytes"),
)
COLUMNS = {
    **{
        "way": 39,
        "op": 12,
        "loss, optimizer": 22,
        "isa": 8,
        "threads": 7,
        "labels x inputs x batch x fan-in": 32,
    },
    **{
        "group, dtype": 13,
        "active": 8,
        "median ms": 10,
        "from": 10,
        "to": 10,
        "roofline": 8,
        "x xmlc": 7,
        "scratch MiB": 11,
    },
}
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Way:
    """One thing to time."""

    name: str
    op: str
    call: Callable[[], object]
    threads: int
    isa: str = ""
    cost: Cost = field(default_factory=Cost)
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorder:
    """Times ways, appends a row for each repeat to a CSV file and prints the medians."""

    out: Path
    repeats: int
    machine: Mapping[str, Any]
    limits: Mapping[int, Limits] = field(default_factory=dict)
    """By number of threads."""

    def measure(self, ways: Sequence[Way], beside: str = "") -> list[list[float]]:
        """Warm up every way, measure its memory, time all in turn; return the seconds of each way.

        With ``beside``, the first way is what the others are compared with.
        """
        scratch_bytes = [scratch_of(way) for way in ways]
        rows, seconds = [], [[0.0] * self.repeats for _ in ways]
        for repeat, (number, way) in itertools.product(range(self.repeats), enumerate(ways)):
            seconds[number][repeat] = timed(way)
            row: dict[str, Any] = {name: f"{value:.0f}" for name, value in vars(way.cost).items() if value}
            row |= {"threads": way.threads, "isa": way.isa, "way": way.name, "op": way.op, "beside": beside}
            row |= {"repeat": repeat, "seconds": f"{seconds[number][repeat]:.6f}"}
            if way.name == "xmlc":
                row["roofline_seconds"] = f"{self.limits[way.threads].seconds(way.cost):.6f}"
            rows.append({**self.machine, **way.facts, **row, "scratch_bytes": scratch_bytes[number]})
        self.append(rows)
        for way, times, scratch in zip(ways, seconds, scratch_bytes, strict=True):
            roofline = self.limits[way.threads].seconds(way.cost) if way.name == "xmlc" else 0.0
            print(summary(way, times, roofline, seconds[0] if beside else [], scratch), flush=True)
        return seconds

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write after every group of ways, so that an interrupted run keeps what it has."""
        self.out.parent.mkdir(parents=True, exist_ok=True)
        new = not self.out.exists()
        with self.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)


def timed(way: Way) -> float:
    """Return the seconds of one call."""
    torch.set_num_threads(way.threads)
    if way.isa:
        native.cpu.set_isa(way.isa)
    start = time.perf_counter()
    way.call()
    return time.perf_counter() - start


def scratch_of(way: Way) -> int:
    """Return the bytes by which resident memory rises during a second call, results included (glibc)."""
    timed(way)
    ctypes.CDLL(None).malloc_trim(0)  # or the call would take from what is free but still resident
    CLEAR_REFS.write_text("5")  # sets the peak, VmHWM, back to what is resident
    before = memory_bytes("VmRSS")
    timed(way)
    return memory_bytes("VmHWM") - before


def memory_bytes(name: str) -> int:
    """Return one of the process's memory figures."""
    return 1024 * int(STATUS.read_text().partition(f"{name}:")[2].split(maxsplit=1)[0])


def describe_machine(root: Path) -> dict[str, Any]:
    """Return what every row says of this run; a commit with changes on top ends in -dirty."""
    git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=9"]
    processors = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in text]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "processor": processors[0].partition(": ")[2] if processors else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "wait_policy": os.environ["OMP_WAIT_POLICY"],
    }


def summary(way: Way, seconds: Sequence[float], roofline: float, ours: Sequence[float], scratch: int) -> str:
    """Return one line of the printed table: roofline as a share of the median, and the median over ours."""
    facts, median = way.facts, statistics.median(seconds)
    return table_line(
        way.name,
        way.op,
        f"{facts.get('loss', '')} {facts.get('optimizer', '')}",
        way.isa,
        way.threads,
        " x ".join(str(facts.get(name, "")) for name in ("labels", "inputs", "batch", "fan_in")),
        f"{facts.get('group_size', '')} {facts.get('weight_dtype', '')}",
        f"{facts['active_tiles']:.4f}" if "active_tiles" in facts else "",
        *(f"{value * 1e3:10.2f}" for value in (median, min(seconds), max(seconds))),
        f"{roofline / median:8.0%}" if roofline else "",
        f"{median / statistics.median(ours):7.2f}" if ours else "",
        f"{scratch / (1 << 20):11.0f}",
    )


def table_line(*values: object) -> str:
    """Fill the columns of the printed table."""
    return " ".join(f"{value!s:{width}}" for value, width in zip(values, COLUMNS.values(), strict=True))
