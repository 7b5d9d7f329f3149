"""The table of memory, its first row and one in small: whole runs under a hard limit, one that it stops."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def reproduce(out: Path, *options: str, row: str = "small") -> tuple[int, dict[str, str]]:
    """Run a row and return exit status and what it found."""
    command = [
        sys.executable,
        "-P",
        ROOT / "scripts" / "reproduce_memory",
    ]
    done = subprocess.run(
        [*command, row, "--threads", "1", "--out", out, *options], capture_output=True, text=True
    )
    with out.open(newline="") as file:
        [found] = csv.DictReader(file)
    print(done.stdout, done.stderr)  # shown where a test fails
    return done.returncode, found


@pytest.mark.parametrize("name", ["small", "670k-32"])
def test_a_whole_run_holds_under_its_limit(name: str, tmp_path: Path) -> None:
    status, row = reproduce(tmp_path / "memory.csv", row=name)
    assert status == 0
    assert (row["held_under_limit"], row["failed"]) == ("yes", "")
    assert 0 < int(row["peak_bytes"]) < int(row["limit_bytes"])


def test_a_limit_that_is_too_low_is_told(tmp_path: Path) -> None:
    status, row = reproduce(tmp_path / "memory.csv", "--limit", "60e6")
    assert status == 1
    assert (row["held_under_limit"], row["failed"]) == ("no", "")
    assert int(row["peak_bytes"]) > 0  # of the run without a limit
