"""Trains Omikuji and predicts with it: three label trees, Parabel-like (its defaults) or Bonsai-like."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import omikuji
from runner import Job, main

# Regular 100-means and shallow trees, as Omikuji's documentation describes Bonsai (Khandagale et al. 2019).
OVERRIDES: dict[str, dict[str, Any]] = {
    "parabel": {},
    "bonsai": {"cluster_balanced": False, "cluster_k": 100, "max_depth": 3},
}
BEAM_SIZE = 10  # the default


def train(job: Job) -> dict[str, Any]:
    """Train on the text file that is Omikuji's only input, reading it included; it takes no seed."""
    settings = omikuji.Model.default_hyper_param()
    for name, value in OVERRIDES[job.variant].items():
        setattr(settings, name, value)
    with job.timed():
        model = omikuji.Model.train_on_data(str(job.data / "train.txt"), settings, n_threads=job.threads)
    model.save(str(job.model))
    hyper_parameters = {name: getattr(settings, name) for name in dir(settings)}
    return hyper_parameters | {"n_threads": job.threads, "beam_size": BEAM_SIZE}


def predict(job: Job) -> list[list[int]]:
    """Predict instance by instance: the Python package knows no batches."""
    model = omikuji.Model.load(str(job.model))
    model.init_prediction_thread_pool(job.threads)
    features = job.matrix("test.features")
    columns, values, offsets = features.indices.tolist(), features.data.tolist(), features.indptr.tolist()
    ranked = []
    with job.timed():
        for start, end in pairwise(offsets):
            pairs = list(zip(columns[start:end], values[start:end], strict=True))
            found = model.predict(pairs, beam_size=BEAM_SIZE, top_k=job.k)
            ranked.append([label for label, _ in found])
    return ranked


if __name__ == "__main__":
    main(["omikuji"], train, predict)
