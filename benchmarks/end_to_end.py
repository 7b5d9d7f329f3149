#!/usr/bin/env python3
"""Train xmlc and its peers on the same data sets, measure them alike, print a table, append to a CSV.

    benchmarks/end_to_end.py --data bibtex delicious --systems omikuji napkinxc pecos xmlc

Peers are installed from PyPI, each into a virtual environment of its own; xmlc is that of this Python's
environment and runs through scripts/reproduce, by the data set's committed recipe. Data sets are named;
those that are not shipped are looked for in $XMLC_DATA.

Every peer gets the same features: TF-IDF by xmlc's TextVectorizer with default settings, fitted on the
training texts, or the sparse features scaled to unit length. Peers run by their defaults (peers/*_run.py).
Each predicts 5 labels and as many more as an instance can have filter pairs; xmlc.metrics masks and scores.

Seconds in the table are those of whole processes: start, reading or loading, work, saving. TF-IDF is made
beforehand and is in nobody's training time, unless xmlc's recipe holds instances out or changes the text
settings. Predicting, xmlc makes the TF-IDF of the test texts (test_features_seconds) and metrics besides.
The model's size is that of the peer's folder, and for xmlc that of the tensors to predict with.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import platform
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from sklearn.datasets import dump_svmlight_file

from xmlc.config import TextConfig
from xmlc.data import CsrRows, Dataset, cache_folder, open_dataset, unit_length
from xmlc.data.features import open_text_features
from xmlc.errors import XmlcError
from xmlc.metrics import evaluate, inverse_propensity, mask_pairs

ROOT = Path(__file__).resolve().parent.parent
REPRODUCE = ROOT / "scripts" / "reproduce"
RUNNERS = Path(__file__).resolve().parent / "peers"
THREADS = 2
K = 5
METRICS = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
FIELDS = (
    "date", "commit", "processor", "cores", "threads", "data", "system", "repeat", "instances", "labels",
    "masked_pairs", *METRICS, "train_seconds", "train_process_seconds", "train_peak_memory_bytes",
    "model_bytes", "predict_seconds", "predict_process_seconds", "test_features_seconds", "settings",
    "versions", "failed",
)  # fmt: skip
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Peer:
    """A way to run another library."""

    name: str
    requirements: tuple[str, ...]
    """What pip installs, the library itself first."""
    runner: str
    variant: str
    fewest_labels: int = 0
    most_labels: int = sys.maxsize
    """Where it is sensible to run; outside it runs only if it is asked for by its full name."""


OMIKUJI = ("omikuji==0.5.2", "numpy", "scipy")
NAPKINXC = ("napkinxc==0.7.2",)
PECOS = ("libpecos==1.2.8",)
PEERS = (
    Peer("omikuji-parabel", OMIKUJI, "omikuji_run.py", "parabel"),
    # Below a thousand labels its tree of a hundred branches is almost one-versus-rest.
    Peer("omikuji-bonsai", OMIKUJI, "omikuji_run.py", "bonsai", fewest_labels=1_000),
    Peer("napkinxc-plt", NAPKINXC, "napkinxc_run.py", "plt"),
    # Its time grows with labels times instances.
    Peer("napkinxc-br", NAPKINXC, "napkinxc_run.py", "br", most_labels=5_000),
    Peer("pecos-xrlinear", PECOS, "pecos_run.py", "xrlinear"),
)
XMLC = "xmlc"
LIBRARIES = (*dict.fromkeys(peer.name.partition("-")[0] for peer in PEERS), XMLC)
SYSTEMS = (*LIBRARIES, *(peer.name for peer in PEERS))


class RunError(Exception):
    """A command that a system needs has failed; the message is fit for a CSV."""


@dataclass(frozen=True)
class Prepared:
    """A data set as the peers get it."""

    dataset: Dataset
    folder: Path
    """What ``runner.Job.data`` holds."""
    k: int
    """Labels to predict, so that masking leaves ``K``."""
    test_features_seconds: float | str
    """TF-IDF of the test texts; empty where there are no texts."""


def main() -> None:
    """Run every (data set, repeat, peer), repeats outside so that a slow moment hits all peers; then xmlc."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument("--data", nargs="+", default=["bibtex", "delicious"], help="names of data sets")
    arguments.add_argument(
        "--systems", nargs="+", default=LIBRARIES, choices=SYSTEMS, metavar="SYSTEM",
        help=f"of {', '.join(SYSTEMS)};\na library's name stands for its variants that suit the data set",
    )  # fmt: skip
    arguments.add_argument("--repeats", type=int, default=1, help="seeds 0 .. REPEATS-1")
    arguments.add_argument(
        "--environments",
        type=Path,
        default=cache_folder() / "peers",
        help="where the peers are or will be installed; default: xmlc's cache folder",
    )
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "end_to_end.csv")
    chosen = arguments.parse_args()
    common = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": output(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]),
        "processor": runpy.run_path(str(REPRODUCE))["processor"](),
        "cores": len(os.sched_getaffinity(0)),
        "threads": THREADS,
    }
    rows = []
    for name in chosen.data:
        dataset = open_dataset(name)
        peers = peers_for(chosen.systems, dataset.label_count)
        with tempfile.TemporaryDirectory(prefix="xmlc-end-to-end-") as folder:
            prepared = prepare(dataset, Path(folder))
            for repeat in range(chosen.repeats):
                for peer in peers:
                    row = peer_row(peer, prepared, repeat, chosen.environments)
                    rows.append(append(chosen.out, common | row))
            if XMLC in chosen.systems:
                rows += [append(chosen.out, common | row) for row in xmlc_rows(prepared, chosen.repeats)]
    print(table(rows))


def peers_for(systems: Sequence[str], labels: int) -> list[Peer]:
    """Return the peers named in full, and those of named libraries that suit the number of labels."""
    return [
        peer
        for peer in PEERS
        if peer.name in systems
        or (peer.name.partition("-")[0] in systems and peer.fewest_labels <= labels <= peer.most_labels)
    ]


def prepare(dataset: Dataset, folder: Path) -> Prepared:
    """Write the features and training labels that all peers get.

    Raises:
        SystemExit: The data set has no test split, or dense features.
    """
    if dataset.test is None or dataset.kind == "dense":
        sys.exit(
            f"end_to_end: {dataset.name}: needs a test split and text or sparse features, found "
            f"{dataset.kind} features and {'no ' if dataset.test is None else 'a '}test split; take another"
        )
    train, test = dataset.train, dataset.test
    seconds: float | str = ""
    if dataset.kind == "text":
        assert test.texts is not None, "a text data set has texts"
        # Through the store, where xmlc finds it again, so that training without held-out instances starts
        # from ready features as the peers do.
        made = open_text_features(dataset, TextConfig(), np.arange(train.instances))
        train_features = made.train
        started = time.monotonic()
        test_features = made.vectorizer.transform(test.texts)
        seconds = round(time.monotonic() - started, 2)
    else:
        assert isinstance(train.features, CsrRows), "sparse features are CSR"
        assert isinstance(test.features, CsrRows), "sparse features are CSR"
        train_features, test_features = unit_length(train.features), unit_length(test.features)
    features, labels = train_features.to_scipy(), train.labels.to_scipy()
    scipy.sparse.save_npz(folder / "train.features.npz", features, compressed=False)
    scipy.sparse.save_npz(folder / "train.labels.npz", labels, compressed=False)
    scipy.sparse.save_npz(folder / "test.features.npz", test_features.to_scipy(), compressed=False)
    with (folder / "train.txt").open("wb") as file:
        file.write(f"{features.shape[0]} {features.shape[1]} {labels.shape[1]}\n".encode())
        dump_svmlight_file(features, labels, file, multilabel=True)
    masked = 0 if test.filter_pairs is None else int(np.diff(test.filter_pairs.offsets).max(initial=0))
    return Prepared(dataset, folder, min(K + masked, dataset.label_count), seconds)


def peer_row(peer: Peer, prepared: Prepared, repeat: int, environments: Path) -> dict[str, Any]:
    """Install, train, predict and score; a failure becomes a row too."""
    row = {**facts(prepared), "system": peer.name, "repeat": repeat}
    say(f"{prepared.dataset.name}: {peer.name}, repeat {repeat}")
    model = prepared.folder / "model"
    model.mkdir()
    try:
        python = environment(environments, peer.requirements)
        job = {
            "variant": peer.variant,
            "data": str(prepared.folder),
            "model": str(model),
            "k": prepared.k,
            "threads": THREADS,
            "seed": repeat,
        }
        trained, train_process_seconds = run_peer(python, peer, "train", job, prepared.folder)
        model_bytes = sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
        predicted, predict_process_seconds = run_peer(python, peer, "predict", job, prepared.folder)
        row |= {
            **scores(prepared.dataset, np.load(prepared.folder / "predictions.npy")),
            "train_seconds": round(trained["seconds"], 2),
            "train_process_seconds": round(train_process_seconds, 2),
            "train_peak_memory_bytes": trained["peak_memory_bytes"],
            "model_bytes": model_bytes,
            "predict_seconds": round(predicted["seconds"], 2),
            "predict_process_seconds": round(predict_process_seconds, 2),
            "settings": json.dumps(trained["settings"]),
            "versions": described(trained["versions"]),
        }
    except RunError as error:
        row["failed"] = str(error)
        say(f"{prepared.dataset.name}: {peer.name} FAILED: {error}")
    finally:
        shutil.rmtree(model)
    return row


def environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Return the Python of the virtual environment with the requirements, made at the first call.

    Raises:
        RunError: It cannot be made.
    """
    home = folder.resolve() / requirements[0]
    python, whole = home / "bin" / "python", home / "installed.txt"
    if not whole.exists():
        say(f"installing {' '.join(requirements)}")
        run([sys.executable, "-m", "venv", "--clear", str(home)])
        run([str(python), "-m", "pip", "install", "--quiet", *requirements])
        whole.write_text(output([str(python), "-m", "pip", "freeze"]))
    return python


def run_peer(
    python: Path, peer: Peer, verb: str, job: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Any], float]:
    """Return what the runner reports of ``train`` or ``predict``, and the seconds of its whole process.

    Raises:
        RunError: It failed.
    """
    job_file, result_file = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job))
    started = time.monotonic()
    run([str(python), str(RUNNERS / peer.runner), verb, str(job_file), str(result_file)])
    return json.loads(result_file.read_text()), time.monotonic() - started


def scores(dataset: Dataset, predicted: NDArray[np.int64]) -> dict[str, float]:
    """Return the metrics in percent of ranked labels, [instance, k], with filter pairs masked."""
    assert dataset.test is not None, "prepare has checked it"
    if dataset.test.filter_pairs is not None:
        predicted = mask_pairs(predicted, scipy.sparse.csr_array(dataset.test.filter_pairs.to_scipy()), K)
    train_counts = np.bincount(dataset.train.labels.indices, minlength=dataset.label_count)
    report = evaluate(
        scipy.sparse.csr_array(dataset.test.labels.to_scipy()),
        predicted,
        K,
        inverse_propensity=inverse_propensity(
            train_counts, dataset.train.instances, dataset.propensity_a, dataset.propensity_b
        ),
    )
    return {name: round(100 * report.values[name], 3) for name in METRICS}


def xmlc_rows(prepared: Prepared, repeats: int) -> list[dict[str, Any]]:
    """Train and evaluate by the recipe, with seeds 0 .. repeats - 1; a failure ends them and is a row too."""
    name = prepared.dataset.name
    versions = {package: importlib.metadata.version(package) for package in (XMLC, "torch", "numpy", "scipy")}
    versions["python"] = platform.python_version()
    shared = {**facts(prepared), "system": XMLC, "versions": described(versions)}
    say(f"{name}: {XMLC}, {repeats} repeats")
    measured = prepared.folder / "reproduce.csv"
    rows = []
    failed = ""
    try:
        run([sys.executable, str(REPRODUCE), name, "--seeds", str(repeats), "--out", str(measured)])
    except RunError as error:
        failed = str(error)
        say(f"{name}: {XMLC} FAILED: {error}")
    if measured.exists():
        with measured.open(newline="") as file:
            for found in csv.DictReader(file):
                rows.append(
                    shared
                    | {metric: float(found[metric]) for metric in METRICS}
                    | {
                        "repeat": int(found["seed"]),
                        "train_seconds": float(found["train_seconds"]),
                        "train_process_seconds": float(found["whole_seconds"]),
                        "train_peak_memory_bytes": int(found["train_peak_memory_bytes"]),
                        "model_bytes": int(found["model_bytes"]),
                        "predict_process_seconds": float(found["eval_seconds"]),
                        "settings": found["command"],
                    }
                )
    return rows if not failed else [*rows, shared | {"repeat": len(rows), "failed": failed}]


def facts(prepared: Prepared) -> dict[str, Any]:
    """Return what every row says of the data set."""
    dataset = prepared.dataset
    assert dataset.test is not None, "prepare has checked it"
    pairs = dataset.test.filter_pairs
    return {
        "data": dataset.name,
        "instances": dataset.test.instances,
        "labels": dataset.label_count,
        "masked_pairs": 0 if pairs is None else len(pairs.indices),
        "test_features_seconds": prepared.test_features_seconds,
    }


def described(versions: Mapping[str, str]) -> str:
    """Return versions in one line."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def run(command: Sequence[str]) -> None:
    """Run a command on ``THREADS`` threads.

    Raises:
        RunError: Its status is not 0; the end of what it printed is on stderr.
    """
    threads = {f"{library}_NUM_THREADS": str(THREADS) for library in ("OMP", "OPENBLAS", "MKL", "RAYON")}
    process = subprocess.run(
        command,
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if process.returncode:
        print(process.stdout[-4000:], file=sys.stderr)
        lines = [line.strip() for line in process.stdout.splitlines() if line.strip()]
        raise RunError(f"status {process.returncode}: {without_places('; '.join(lines[-2:]))}")


def without_places(text: str) -> str:
    """Return text without the addresses and folders of this machine, cut short."""
    text = re.sub(r"\w+://\S+", "…", text)
    return re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)+", "…/", text)[:300]


def output(command: Sequence[str]) -> str:
    """Return what a command prints."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def say(message: str) -> None:
    """Print progress to stderr."""
    print(f"end_to_end: {message}", file=sys.stderr, flush=True)


def append(out: Path, row: dict[str, Any]) -> dict[str, Any]:
    """Append a row to the CSV and return it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = not out.exists()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the medians over repeats, with the range of the seconds where there are several."""
    lines: list[tuple[str, ...]] = [
        ("data", "system", *METRICS, "train s", "train MiB", "model MiB", "predict s")
    ]
    for data, system in dict.fromkeys((row["data"], row["system"]) for row in rows):
        all_runs = [row for row in rows if (row["data"], row["system"]) == (data, system)]
        runs = [row for row in all_runs if not row.get("failed")]
        if runs:
            lines.append(
                (
                    data,
                    system,
                    *(f"{median(runs, metric):.2f}" for metric in METRICS),
                    with_range(runs, "train_process_seconds"),
                    f"{median(runs, 'train_peak_memory_bytes') / MEBIBYTE:.0f}",
                    f"{median(runs, 'model_bytes') / MEBIBYTE:.1f}",
                    with_range(runs, "predict_process_seconds"),
                )
            )
        lines += [(data, system, f"FAILED: {row['failed']}") for row in all_runs if row.get("failed")]
    measured = [line for line in lines if len(line) == len(lines[0])]
    widths = [max(map(len, column)) for column in zip(*measured, strict=True)]
    widths[:2] = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 or len(line) == 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )


def median(runs: Sequence[Mapping[str, Any]], field: str) -> float:
    """Return the median of a field."""
    return statistics.median(row[field] for row in runs)


def with_range(runs: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return the median and, of several runs, the least and the most."""
    values = [row[field] for row in runs]
    spread = f" ({min(values):.1f}-{max(values):.1f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.1f}{spread}"


if __name__ == "__main__":
    try:
        main()
    except XmlcError as error:
        sys.exit(f"end_to_end: {error}")
