"""What the runners of all peers share: job, matrices, time and memory. Runs in a peer's environment."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Job:
    """One training or prediction, as ``benchmarks/end_to_end.py`` describes it, and what came of it."""

    variant: str
    data: Path
    """Folder with ``train.txt`` (XMC text) and ``{train,test}.features.npz``, ``train.labels.npz`` (CSR)."""
    model: Path
    """Folder of the model; empty before training."""
    k: int
    """Labels to predict for each instance."""
    threads: int
    seed: int
    results: dict[str, Any] = field(default_factory=dict)

    def matrix(self, name: str) -> Any:
        """Return the ``scipy.sparse.csr_matrix`` of this name, float32."""
        import scipy.sparse  # not at the top: a peer that trains on text needs no SciPy in its memory

        return scipy.sparse.load_npz(self.data / f"{name}.npz")

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Record the seconds of the block: training or prediction alone, with data and model at hand."""
        started = time.monotonic()
        yield
        self.results["seconds"] = time.monotonic() - started


def main(
    packages: Sequence[str],
    train: Callable[[Job], Mapping[str, Any]],
    predict: Callable[[Job], Sequence[Sequence[int]]],
) -> None:
    """Carry out ``RUNNER.py train|predict JOB.json RESULT.json``.

    Args:
        packages: Distributions whose versions are recorded.
        train: Fits and saves a model; returns its settings.
        predict: Returns up to k label ids of every test instance, best first; they go to ``predictions.npy``,
            int64 [instance, k] with -1 for "no prediction", in the data folder.
    """
    verb, job_file, result_file = sys.argv[1:]
    fields = json.loads(Path(job_file).read_text())
    job = Job(**fields | {"data": Path(fields["data"]), "model": Path(fields["model"])})
    if verb == "train":
        job.results["settings"] = dict(train(job))
    else:
        save_predictions(job, predict(job))
    job.results["peak_memory_bytes"] = peak_memory_bytes()
    job.results["versions"] = {name: importlib.metadata.version(name) for name in packages}
    job.results["versions"]["python"] = platform.python_version()
    Path(result_file).write_text(json.dumps(job.results))


def save_predictions(job: Job, predictions: Sequence[Sequence[int]]) -> None:
    """Write the ranked labels of all instances as one padded array."""
    import numpy as np

    ranked = np.full((len(predictions), job.k), -1, np.int64)
    for row, labels in enumerate(predictions):
        ranked[row, : len(labels)] = labels
    np.save(job.data / "predictions.npy", ranked)


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process.

    Linux's ``ru_maxrss`` survives exec: a small process started by a large one reports the large one's
    memory. ``VmHWM`` starts anew, so it is taken where there is one.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024)
