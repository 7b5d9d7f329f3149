"""Trains napkinXC and predicts with it: a probabilistic label tree or binary relevance, by its defaults."""

from __future__ import annotations

from typing import Any

from napkinxc.models import BR, PLT
from runner import Job, main


def train(job: Job) -> dict[str, Any]:
    """Train on matrices; the model is written to its folder while it is trained."""
    features, labels = job.matrix("train.features"), job.matrix("train.labels")
    model = _model(job)
    with job.timed():
        model.fit(features, labels)
    return {name: value for name, value in model.get_params().items() if name != "output"}


def predict(job: Job) -> list[list[int]]:
    """Load the model and predict all instances at once."""
    features = job.matrix("test.features")
    model = _model(job)
    model.load()
    with job.timed():
        return model.predict(features, top_k=job.k)


def _model(job: Job) -> BR | PLT:
    """Return the untrained model of the variant; binary relevance takes no seed."""
    if job.variant == "br":
        return BR(str(job.model), threads=job.threads)
    return PLT(str(job.model), threads=job.threads, seed=job.seed)


if __name__ == "__main__":
    main(["napkinxc", "numpy", "scipy"], train, predict)
