#!/usr/bin/env python3
"""Train variants of a recipe and append their validation metrics to a CSV. The test set stays unseen.

    benchmarks/ablations.py wordnet-related --set training.epochs=3 \\
        --variant recipe --variant "no direct connections: model.direct_fan_in=0"

    benchmarks/ablations.py bibtex --set data.validation_fraction=0.2 --variant recipe \\
        --rank "10 neighbours: neighbour_weight=0.4 neighbours=10"

A variant is a name and, behind a colon, overrides of the recipe. Runs the `xmlc` of this environment.
A rank is a name and settings of `similarity`: one more row, of the same checkpoint ranked with these instead.
The row holds the best epoch by the recipe's own metric. docs/ablations.md says what followed from them.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import runpy
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xmlc.config import SimilarityConfig
from xmlc.data import open_dataset
from xmlc.evaluation import evaluate_model, load
from xmlc.training.prepare import prepare

ROOT = Path(__file__).resolve().parent.parent
REPRODUCE = runpy.run_path(str(ROOT / "scripts" / "reproduce"))
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
FIELDS = (
    "date", "commit", "processor", "cores", "data", "variant", "command", *METRICS, "best_epoch", "epochs",
    "train_seconds", "train_peak_memory_bytes",
)  # fmt: skip


def main() -> None:
    """Run every variant and append one row for each."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("data", help="name of a data set with a recipe")
    arguments.add_argument("--variant", action="append", required=True, metavar="NAME[: KEY=VALUE ...]")
    arguments.add_argument("--rank", action="append", default=[], metavar="NAME: KEY=VALUE ...")
    arguments.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all variants")
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "ablations.csv")
    chosen = arguments.parse_args()
    for variant in chosen.variant:
        name, _, overrides = variant.partition(":")
        for row in ablation(chosen.data, name.strip(), [*chosen.set, *overrides.split()], chosen.rank):
            new = not chosen.out.exists()
            with chosen.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)
            print(json.dumps(row), flush=True)


def ablation(data: str, name: str, overrides: list[str], ranks: list[str]) -> Iterator[dict[str, Any]]:
    """Train one variant in a temporary folder and give its row, then those of the ranks."""
    options = [option for override in overrides for option in ("--set", override)]
    shown = ["xmlc", "train", data, "--recipe", *options]
    with tempfile.TemporaryDirectory(prefix="xmlc-ablation-") as folder:
        run = Path(folder) / "run"
        _, _, peak = REPRODUCE["timed"]([*shown, "--out", str(run)])
        epochs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        best = [epoch for epoch in epochs if epoch["best"]][-1]
        row = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": REPRODUCE["output"](["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]),
            "processor": REPRODUCE["processor"](),
            "cores": len(os.sched_getaffinity(0)),
            "data": data,
            "variant": name,
            "command": " ".join(shown),
            **{metric: round(100 * best["validation"][metric], 3) for metric in METRICS},
            "best_epoch": best["epoch"],
            "epochs": epochs[-1]["epoch"],
            "train_seconds": epochs[-1]["train_seconds"],
            "train_peak_memory_bytes": peak,
        }
        yield row
        for rank in ranks:
            rank_name, _, settings = rank.partition(":")
            values = ranked(run, data, dict(setting.split("=") for setting in settings.split()))
            yield (
                row
                | {
                    "variant": f"{name}, ranked with {rank_name}",
                    "command": f"{row['command']}, then {settings}",
                }
                | values
            )


def ranked(run: Path, data: str, settings: dict[str, str]) -> dict[str, float]:
    """Return the validation metrics of a run's best checkpoint with other likeness of texts than it had."""
    model = load(run).model
    config = model.config.model_copy(update={"similarity": SimilarityConfig.model_validate_strings(settings)})
    prepared = prepare(open_dataset(data), config)
    model.similarity = prepared.similarity
    report = evaluate_model(model, prepared.validation, 5, prepared.validation_filter)
    return {metric: round(100 * report.values[metric], 3) for metric in METRICS}


if __name__ == "__main__":
    main()
