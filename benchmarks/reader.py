#!/usr/bin/env python3
"""Seconds to read XMC text: xmlc, loops without checks, napkinXC and scikit-learn, on the same file.

    benchmarks/reader.py --repeats 5

Writes a file of --instances instances with --features and --labels drawn from a long tail, reads it once to
warm the page cache, then lets the readers take turns; each must find the same number of values. xmlc reads
into memory-mapped arrays as in the first opening of a data set, without the fingerprint and the final write
of the store. `lenient` is the same reading, block by block into the same arrays, with a compiled loop in the
parser's place that takes the file for right (`lenient_reader.cpp`, about as fast as a plain loop gets): what
xmlc takes longer than it is the price of being strict, and may be 1.3 times at most, or the run ends with
status 1. The others read into memory; `loop` is the plain Python loop (split, int, float) without checks.
Needs a C++ compiler (CXX), and napkinXC (`pip install napkinxc`) or --without napkinxc. Rows are appended to
results/reader.csv.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

FIELDS = (
    *("date", "commit", "processor", "cores", "python", "numpy"),
    *("reader", "megabytes", "instances", "values", "repeat", "seconds"),
)
STRICT = 1.3
RESULTS = Path(__file__).resolve().parent / "results" / "reader.csv"
Reader = Callable[[Path], int]


def main() -> None:
    """Measure every reader in turn and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--instances", type=int, default=50_000)
    parser.add_argument("--features", type=int, default=200_000)
    parser.add_argument("--labels", type=int, default=100_000)
    parser.add_argument("--without", action="append", default=[], choices=list(READERS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    readers = {name: reader for name, reader in READERS.items() if name not in chosen.without}
    if "napkinxc" in readers:
        try:
            import napkinxc  # noqa: F401
        except ImportError:
            sys.exit("reader: napkinxc must be installed, found none; install it or pass --without napkinxc")
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short", "HEAD") + ("-dirty" if git("status", "--porcelain") else ""),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "instances": chosen.instances,
    }
    rows = []
    if "lenient" in readers:
        lenient_library()  # compiled before the clock runs
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.txt")
        facts["values"] = write_file(path, chosen.instances, chosen.features, chosen.labels)
        facts["megabytes"] = round(path.stat().st_size / 1e6, 1)
        path.read_bytes()
        for repeat in range(chosen.repeats):
            for name, reader in readers.items():
                start = time.perf_counter()
                found = reader(path)
                seconds = time.perf_counter() - start
                if found != facts["values"]:
                    sys.exit(f"reader: {name} must find {facts['values']} values, found {found}")
                rows.append({**facts, "reader": name, "repeat": repeat, "seconds": round(seconds, 4)})
    new = not chosen.results.exists()
    with chosen.results.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
    medians = {
        name: statistics.median(row["seconds"] for row in rows if row["reader"] == name) for name in readers
    }
    for name, seconds in medians.items():
        ratio = f"{seconds / medians['xmlc']:6.2f} x xmlc" if "xmlc" in medians else ""
        print(f"{name:12} {seconds:8.3f} s  {facts['megabytes'] / seconds:7.1f} MB/s  {ratio}")
    if {"xmlc", "lenient"} <= medians.keys() and medians["xmlc"] > STRICT * medians["lenient"]:
        sys.exit(f"reader: strict reading must take at most {STRICT} times the lenient loop's time")


def write_file(path: Path, instances: int, features: int, labels: int) -> int:
    """Write XMC text of 20 to 160 features and 1 to 7 labels an instance; return the number of values."""
    rng = np.random.default_rng(0)
    values = 0
    with path.open("w", encoding="ascii") as file:
        file.write(f"{instances} {features} {labels}\n")
        for _ in range(instances):
            columns = np.unique((features * rng.random(rng.integers(20, 160)) ** 2).astype(np.int64))
            own = np.unique((labels * rng.random(rng.integers(1, 8)) ** 2).astype(np.int64))
            pairs = zip(columns.tolist(), rng.random(len(columns)).tolist(), strict=True)
            file.write(",".join(map(str, own.tolist())) + " ")
            file.write(" ".join(f"{column}:{value:.6f}" for column, value in pairs) + "\n")
            values += len(columns)
    return values


def read_xmlc(path: Path) -> int:
    """Read as the first opening of a data set does."""
    from xmlc.data.reader.files import Reading
    from xmlc.data.reader.spool import Scratch
    from xmlc.data.reader.xmc import read_xmc_split
    from xmlc.data.rows import CsrRows

    with tempfile.TemporaryDirectory() as folder, Scratch(Path(folder)) as scratch:
        features = read_xmc_split(path, scratch, Reading()).features
        assert isinstance(features, CsrRows)
        return len(features.indices)


def read_lenient(path: Path) -> int:
    """Read as `read_xmlc`, with a compiled loop without checks in the parser's place."""
    from xmlc.data.reader.files import line_blocks, line_count
    from xmlc.data.reader.spool import RowsSpool, Scratch
    from xmlc.data.rows import CsrRows

    parse = lenient_library().read_lenient
    parse.argtypes, parse.restype = [ctypes.c_void_p] * 7, None
    with tempfile.TemporaryDirectory() as folder, Scratch(Path(folder)) as scratch:
        with path.open("rb") as file:
            _, columns, labels = map(int, file.readline().split())
        features, label_rows = RowsSpool(scratch, columns, True), RowsSpool(scratch, labels, False)
        for line, block in line_blocks(path):
            body = block.partition(b"\n")[2] if line == 1 else block
            offsets, label_offsets = np.empty((2, line_count(body) + 1), np.int64)
            indices, values = np.empty(len(body) // 4 + 1, np.int32), np.empty(len(body) // 4 + 1, np.float32)
            own = np.empty(len(body) // 2 + 1, np.int32)
            text = np.frombuffer(body, np.uint8)
            arrays = (offsets, indices, values, label_offsets, own)
            parse(text.ctypes.data, text.ctypes.data + len(text), *(array.ctypes.data for array in arrays))
            pairs = slice(offsets[-1])
            features.append(CsrRows(offsets, indices[pairs], values[pairs], columns))
            label_rows.append(CsrRows(label_offsets, own[: label_offsets[-1]], None, labels))
        label_rows.finish()
        return len(features.finish().indices)


@cache
def lenient_library() -> ctypes.CDLL:
    """Compile the loop, as the kernels are compiled."""
    source = Path(__file__).with_name("lenient_reader.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "lenient.so")
        command = [os.environ.get("CXX", "g++"), "-O3", "-std=gnu++17", "-shared", "-fPIC", str(source)]
        subprocess.run([*command, "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def read_napkinxc(path: Path) -> int:
    """Read with napkinXC's loader, which takes the header."""
    from napkinxc.datasets import load_libsvm_file

    return int(load_libsvm_file(str(path), labels_format="list")[0].nnz)


def read_sklearn(path: Path) -> int:
    """Read with scikit-learn's loader, which takes no header: the file is opened behind it."""
    from sklearn.datasets import load_svmlight_file

    with path.open("rb") as file:
        columns = int(file.readline().split()[1])
        return int(load_svmlight_file(file, multilabel=True, zero_based=True, n_features=columns)[0].nnz)


def read_loop(path: Path) -> int:
    """Read without any check."""
    indices, values, labels, offsets = array("i"), array("f"), array("i"), array("q", [0])
    with path.open("rb") as file:
        next(file)
        for line in file:
            own, *pairs = line.split(b" ")
            labels.extend(map(int, own.split(b",")))
            for pair in pairs:
                index, value = pair.split(b":")
                indices.append(int(index))
                values.append(float(value))
            offsets.append(len(indices))
    return len(indices)


READERS: dict[str, Reader] = {
    "xmlc": read_xmlc,
    "lenient": read_lenient,
    "napkinxc": read_napkinxc,
    "sklearn": read_sklearn,
    "loop": read_loop,
}


def git(*arguments: str) -> str:
    """Return what git says of the source."""
    command = ["git", "-C", str(RESULTS.parent), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def processor() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
