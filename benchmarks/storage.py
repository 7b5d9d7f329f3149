#!/usr/bin/env python3
"""Speed and memory of training with the output layer on the disk (training.storage), beside in memory.

    benchmarks/storage.py --labels 670091 --fan-in 32 --width 32768 --optimizer adam

Both train the same generated data from the same seed, in turn, each in a process of its own, and must end
with the same bits; what is compared is the seconds by phase, as the run's metrics have them.
The pages of the files stay in the kernel's cache as far as there is room: `cached` says whether the machine
had more free memory than the files take, which is the best that a disk can look. Peaks are anonymous memory
beyond an interpreter that has imported torch, and the most pages of files (libraries among them).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORAGES = ("memory", "disk")
TIMED = ("output_step", "redistribution", "validation")
DENSE_FEATURES = 768


def main() -> None:
    """Measure both storages by turns and append a row for each repeat."""
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        print(json.dumps(child(json.loads(sys.argv[2]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--labels", type=int, default=670_091)
    parser.add_argument("--fan-in", type=int, default=32)
    parser.add_argument("--width", type=int, default=32_768)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adam", "label_adam"), default="adam")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the usual temporary one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "storage.csv")
    chosen = parser.parse_args()
    memory = runpy.run_path(str(ROOT / "benchmarks" / "memory.py"))
    reproduce = runpy.run_path(str(ROOT / "scripts" / "reproduce"))
    for repeat in range(chosen.repeats):
        found = {storage: in_child(storage, chosen) for storage in STORAGES}
        if found["memory"]["checkpoint"] != found["disk"]["checkpoint"]:
            sys.exit("storage: the runs must end with the same bits, found others")
        row: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "commit": memory["output"](
                ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
            ),
            "processor": reproduce["processor"](),
            "threads": chosen.threads,
            "labels": chosen.labels,
            "fan_in": chosen.fan_in,
            "width": chosen.width,
            "batch": chosen.batch,
            "steps": chosen.steps,
            "dtype": chosen.dtype,
            "optimizer": chosen.optimizer,
            "repeat": repeat,
            "disk_bytes": found["disk"]["disk_bytes"],
            "cached": "yes" if found["disk"]["disk_bytes"] < found["disk"]["available_bytes"] else "no",
        }
        for storage in STORAGES:
            for phase in TIMED:
                row[f"{storage}_{phase}_seconds"] = round(found[storage]["seconds"][phase], 4)
            row[f"{storage}_anonymous_bytes"] = found[storage]["anonymous_bytes"]
            row[f"{storage}_file_bytes"] = found[storage]["file_bytes"]
        row["output_step_ratio"] = round(
            found["disk"]["seconds"]["output_step"] / found["memory"]["seconds"]["output_step"], 3
        )
        row["command"] = memory["command_line"]()
        memory["append"](chosen.out, row, tuple(row))
        print(json.dumps(row), flush=True)


def in_child(storage: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train in a process of its own."""
    job = {**vars(chosen), "storage": storage, "folder": chosen.folder and str(chosen.folder), "out": ""}
    command = [sys.executable, "-P", __file__, "--child", json.dumps(job)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)  # type: ignore[no-any-return]


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Train one epoch and return seconds by phase, peaks, and a digest of the checkpoint's tensors."""
    import torch  # noqa: F401

    from xmlc.memory.process import usage

    start = usage()
    from xmlc.config import load_config
    from xmlc.memory.generated import generated_dataset
    from xmlc.memory.plan import plan
    from xmlc.memory.process import PeakWatch
    from xmlc.nn.scratch import before_drop
    from xmlc.training.prepare import batches_of
    from xmlc.training.trainer import train_into

    class Watch(PeakWatch):
        file = 0

        def _note(self, now: Any) -> None:
            super()._note(now)
            Watch.file = max(Watch.file, now.file)

    config = load_config(
        None,
        [
            f"model.width={job['width']}",
            f"model.fan_in={job['fan_in']}",
            f"model.weight_dtype={job['dtype']}",
            f"output_optimizer.kind={job['optimizer']}",
            "dense_optimizer.kind=sgd",
            f"training.batch_size={job['batch']}",
            f"training.threads={job['threads']}",
            "training.epochs=1",
            f"training.storage={job['storage']}",
            f"data.validation_fraction={1 / (job['steps'] + 1)}",
            f"redistribution.first_step={max(1, job['steps'] // 2)}",
            "redistribution.end=1.0",
        ],
    )
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    dataset = generated_dataset(job["labels"], DENSE_FEATURES, None, (job["steps"] + 1) * job["batch"])
    with (
        tempfile.TemporaryDirectory(prefix="xmlc-storage-", dir=job["folder"]) as folder,
        Watch() as watch,
        before_drop(watch.sample),
    ):
        run = Path(folder) / "run"
        trainer = train_into(run, dataset, config)
        prepared = trainer.prepared
        planned = plan(config, prepared.problem, batches_of(prepared))
        del trainer
        [line] = (run / "metrics.jsonl").read_text().splitlines()
        peak = watch.take()
        digest = hashlib.sha256()
        for file in sorted(run.rglob("*.safetensors")):
            digest.update(file.read_bytes())
        return {
            "seconds": json.loads(line)["phase_seconds"],
            "anonymous_bytes": peak - start.anonymous,
            "file_bytes": Watch.file,
            "disk_bytes": sum(term.bytes for term in planned.mapped),
            "available_bytes": available,
            "checkpoint": digest.hexdigest(),
        }


if __name__ == "__main__":
    main()
