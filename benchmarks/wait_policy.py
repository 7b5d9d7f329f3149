#!/usr/bin/env python3
"""Seconds per epoch by OpenMP wait policy, beside one other busy process: why `import xmlc` asks for PASSIVE.

    benchmarks/wait_policy.py --repeats 3

Trains wordnet-mini for two epochs with each policy in turn, and appends to results/wait_policy.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EPOCHS = 2
FIELDS = ("date", "cores", "other_processes", "policy", "repeat", "seconds_per_epoch")
RESULTS = Path(__file__).resolve().parent / "results" / "wait_policy.csv"
BUSY = "while True: pass"


def main() -> None:
    """Measure every policy, interleaved, so that a slow moment of the machine hits all."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--repeats", type=int, default=3)
    chosen = arguments.parse_args()
    rows = []
    for repeat in range(chosen.repeats):
        for policy in ("ACTIVE", "default", "PASSIVE"):
            for others in (0, 1):
                rows.append(
                    {
                        "date": time.strftime("%Y-%m-%d"),
                        "cores": len(os.sched_getaffinity(0)),
                        "other_processes": others,
                        "policy": policy,
                        "repeat": repeat,
                        "seconds_per_epoch": round(seconds_per_epoch(policy, others), 2),
                    }
                )
                print(rows[-1], flush=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def seconds_per_epoch(policy: str, others: int) -> float:
    """Train in a process of its own; torch comes before xmlc where its own default is to be measured."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if policy != "default":
        environment["OMP_WAIT_POLICY"] = policy
    code = f"""
import torch
import xmlc
xmlc.train("wordnet-mini", out="run", overrides=["training.epochs={EPOCHS}", "model.width=4096"])
"""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(others)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True
            )
            lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return float(json.loads(lines[-1])["train_seconds"]) / EPOCHS


if __name__ == "__main__":
    main()
