#!/usr/bin/env python3
"""Measure the peak memory of a whole run on generated data: steps, redistribution, checkpoint, evaluation.

    benchmarks/memory.py --labels 670091 --fan-in 32 --width 32768 --limit 400e6

The data has as many labels as asked for, of power-law frequency, and few instances, since neither they nor
the number of steps decide the peak: dense features of 768 columns, or with --features sparse a bag of words
over 135,909 (both are Amazon-670K's). A child process trains (half-way its connections are redistributed; it
validates, writes a checkpoint, loads the best one), another one evaluates the run on the test set.

A peak is the most anonymous resident memory that a child held beyond an interpreter that has imported torch
and nothing else. Pages of memory-mapped data are not counted. With --limit that many bytes are also a hard
limit (RLIMIT_DATA, counted from the same start) under which the run has to succeed; one that does not is
repeated without, for the peak.
Row by row the figures go to a CSV.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DENSE_FEATURES, WORDS, WORDS_OF_INSTANCE = 768, 135_909, 75
LABELS_OF_INSTANCE, TEST_INSTANCES = 5, 512
FIELDS = (
    "date", "commit", "processor", "threads", "variant", "features", "labels", "fan_in", "width", "batch",
    "steps", "limit_bytes", "peak_bytes", "train_peak_bytes", "evaluate_peak_bytes", "held_under_limit",
    "seconds", "settings", "command", "failed",
)  # fmt: skip
VARIANTS: dict[str, tuple[str, ...]] = {
    "small": (
        "model.weight_dtype=bfloat16", "output_optimizer.kind=sgd", "dense_optimizer.kind=sgd",
    ),
    "per-label": (
        "model.weight_dtype=bfloat16", "output_optimizer.kind=label_adam", "dense_optimizer.kind=sgd",
    ),
    "adam": (
        "model.weight_dtype=float32", "output_optimizer.kind=adam", "dense_optimizer.kind=adam",
    ),
}  # fmt: skip
"""Settings by name: no optimizer state; one value for each label; float32 with Adam everywhere."""


def main() -> None:
    """Measure every (features, variant) and append a row for each."""
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--labels", type=int, default=670_091)
    parser.add_argument("--fan-in", type=int, default=32)
    parser.add_argument("--width", type=int, default=32_768)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--features", nargs="+", choices=("dense", "sparse"), default=["dense"])
    parser.add_argument("--hidden", type=int, default=128, help="of sparse features: width of the embedding")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["small"])
    parser.add_argument("--limit", type=float, help="bytes that the run must do with, as a hard limit")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all variants")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "memory.csv")
    chosen = parser.parse_args()
    failures = 0
    for features in chosen.features:
        with tempfile.TemporaryDirectory(prefix="xmlc-memory-") as folder:
            generate(Path(folder) / "data", features, chosen)
            for variant in chosen.variants:
                row = measure(Path(folder), features, variant, chosen)
                append(chosen.out, row)
                print(json.dumps(row), flush=True)
                failures += bool(row["failed"]) or row["held_under_limit"] == "no"
    sys.exit(1 if failures else 0)


def generate(folder: Path, features: str, chosen: argparse.Namespace) -> None:
    """Write a data set: training instances for the steps and for validation, and test instances."""
    import numpy as np

    generator = np.random.default_rng(0)
    folder.mkdir(parents=True)
    order = generator.permutation(chosen.labels).astype(np.int32)  # frequent labels lie anywhere
    for stem, instances in (("trn", (chosen.steps + 1) * chosen.batch), ("tst", TEST_INSTANCES)):
        # Zipf's law by inversion: rank r with a probability of about 1 / r.
        ranks = chosen.labels ** generator.random((instances, LABELS_OF_INSTANCE)) - 1.0
        labels = order[np.minimum(ranks.astype(np.int64), chosen.labels - 1)]
        save_sparse(folder / f"{stem}_X_Y.npz", labels, chosen.labels)
        if features == "dense":
            dense = generator.standard_normal((instances, DENSE_FEATURES), np.float32)
            np.save(folder / f"{stem}_X_Xf.npy", dense)
        else:
            words = WORDS ** generator.random((instances, WORDS_OF_INSTANCE)) - 1.0
            save_sparse(folder / f"{stem}_X_Xf.npz", words.astype(np.int32), WORDS)


def save_sparse(path: Path, columns: Any, width: int) -> None:
    """Write a matrix [instance, column] that is 1 at the given columns of each row."""
    import numpy as np
    import scipy.sparse

    rows = np.repeat(np.arange(len(columns)), columns.shape[1])
    matrix = scipy.sparse.coo_array(
        (np.ones(columns.size, np.float32), (rows, columns.ravel())), shape=(len(columns), width)
    ).tocsr()
    matrix.data[:] = 1.0
    scipy.sparse.save_npz(path, matrix)


def measure(folder: Path, features: str, variant: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Run the children under the limit; where they fail, or there is none, without one."""
    settings = (
        *VARIANTS[variant],
        f"model.width={chosen.width}",
        f"model.fan_in={chosen.fan_in}",
        *((f"model.hidden={chosen.hidden}",) if features == "sparse" else ()),
        f"training.batch_size={chosen.batch}",
        f"training.threads={chosen.threads}",
        "training.epochs=1",
        "training.patience=0",
        f"data.validation_fraction={1 / (chosen.steps + 1)}",
        f"redistribution.first_step={max(1, chosen.steps // 2)}",
        "redistribution.end=1.0",
        *chosen.set,
    )
    row: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": output(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]),
        "processor": runpy.run_path(str(ROOT / "scripts" / "reproduce"))["processor"](),
        "threads": chosen.threads,
        "variant": variant,
        "features": features,
        "labels": chosen.labels,
        "fan_in": chosen.fan_in,
        "width": chosen.width,
        "batch": chosen.batch,
        "steps": chosen.steps,
        "limit_bytes": "" if chosen.limit is None else int(chosen.limit),
        "held_under_limit": "",
        "settings": " ".join(settings),
        "command": command_line(),
        "failed": "",
    }
    limits = [0] if chosen.limit is None else [int(chosen.limit), 0]
    for limit in limits:
        started = time.monotonic()
        try:
            peaks = whole_run(folder, settings, limit)
        except RunError as error:
            print(f"memory: {error}", file=sys.stderr)
            row |= {"held_under_limit": "no"} if limit else {"failed": str(error)}
            continue
        row |= {
            "peak_bytes": max(peaks.values()),
            "train_peak_bytes": peaks["train"],
            "evaluate_peak_bytes": peaks["evaluate"],
            "seconds": round(time.monotonic() - started, 1),
        }
        row["held_under_limit"] = row["held_under_limit"] or ("yes" if limit else "")
        break
    return row


class RunError(Exception):
    """A child has failed; the message is fit for a CSV."""


def whole_run(folder: Path, settings: tuple[str, ...], limit_bytes: int) -> dict[str, int]:
    """Train and evaluate in a child each; return their peaks.

    Raises:
        RunError: One of them failed.
    """
    peaks = {}
    with tempfile.TemporaryDirectory(dir=folder) as run:
        for part in ("train", "evaluate"):
            job = {
                "part": part,
                "data": str(folder / "data"),
                "run": f"{run}/run",
                "settings": settings,
                "limit_bytes": limit_bytes,
            }
            done = subprocess.run(
                [sys.executable, "-P", __file__, "--child",
                 json.dumps(job)],
                env=os.environ | {"XMLC_CACHE": str(folder / "cache")},
                stdout=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            if done.returncode != 0:
                raise RunError(f"{part} ended with status {done.returncode}")
            peaks[part] = int(json.loads(done.stdout.splitlines()[-1])["peak_bytes"])
    return peaks


def child(job: dict[str, Any]) -> None:
    """Do one part of a run and print the peak; the start is an interpreter that has imported torch alone."""
    import torch  # noqa: F401

    start = {
        line.split(":")[0]: int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("RssAnon:", "VmData:"))
    }
    if job["limit_bytes"]:
        limit = start["VmData"] + job["limit_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    from xmlc.errors import XmlcError
    from xmlc.memory.process import PeakWatch

    with PeakWatch() as watch:
        try:
            work(job)
        except XmlcError as error:
            sys.exit(str(error))
        peak = watch.take()
    print(json.dumps({"peak_bytes": peak - start["RssAnon"]}))


def work(job: dict[str, Any]) -> None:
    """Train, or evaluate on the test set."""
    if job["part"] == "train":
        from xmlc.training.api import train

        train(job["data"], out=job["run"], overrides=job["settings"])
    else:
        from xmlc.evaluation.run import evaluate_run

        evaluate_run(job["run"], job["data"], deciles=True)


def append(path: Path, row: dict[str, Any], fields: tuple[str, ...] = FIELDS) -> None:
    """Append one row."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def command_line() -> str:
    """Return this process's command, less where its rows go: that says nothing of them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out")
    return " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *parser.parse_known_args()[1]])


def output(command: list[str]) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
