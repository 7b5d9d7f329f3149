"""What tests compare of runs: the bits of checkpoints, metrics without times and memory, the test set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import oracles

from xmlc.checkpoint import CheckpointFolder, read_checkpoint

WHOLE: dict[str, Any] = {
    "k": 5, "split": "test", "propensity_a": None, "propensity_b": None, "mask_filter_pairs": True,
    "deciles": False, "progress": lambda batches, _: batches,
}  # fmt: skip
"""Arguments of `evaluate_predictor`: the test set as a user has it evaluated."""
PASSING = ("train_seconds", "phase_seconds", "peak_memory_bytes", "peak_device_memory_bytes")


def xmlc(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command line in a process of its own, with a cache in ``tmp_path``."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "xmlc.cli", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"XMLC_CACHE": str(tmp_path / "cache")},
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``, without what differs from run to run."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in PASSING} for line in lines]


def checkpoint(run: Path, which: str = "latest") -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the bits of every tensor by name, and the metadata without the times."""
    folder = CheckpointFolder(run / "checkpoints")
    path = folder.latest() if which == "latest" else folder.best()
    assert path is not None, f"{run} has no {which} checkpoint"
    read = read_checkpoint(path)
    tensors = {name: oracles.bits(value) for name, value in read.tensors.items()}
    passing = ("seconds", "phase_seconds")
    return tensors, {key: value for key, value in read.metadata.items() if key not in passing}


def assert_same_metrics_and_tensors(run: Path, other: Path) -> None:
    """Require what two runs of different settings may share."""
    assert metrics(run) == metrics(other)
    for which in ("latest", "best"):
        assert checkpoint(run, which)[0] == checkpoint(other, which)[0]


def assert_same_run(run: Path, other: Path) -> None:
    """Require the same metrics, and the same bits in the latest and the best checkpoint."""
    assert metrics(run) == metrics(other)
    for which in ("latest", "best"):
        (tensors, facts), (expected, expected_facts) = checkpoint(run, which), checkpoint(other, which)
        assert facts == expected_facts
        assert tensors.keys() == expected.keys()
        differing = [name for name in tensors if tensors[name] != expected[name]]
        assert not differing, f"{which}: {differing}"
