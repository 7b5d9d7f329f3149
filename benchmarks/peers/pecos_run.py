"""Trains PECOS XR-Linear and predicts with it: hierarchical k-means on PIFA label features, by default."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from pecos.xmc import Indexer, LabelEmbeddingFactory
from pecos.xmc.base import HierarchicalKMeans
from pecos.xmc.xlinear.model import XLinearModel
from runner import Job, main

PREDICTION = {"beam_size": 10, "post_processor": "l3-hinge"}  # the defaults


def train(job: Job) -> dict[str, Any]:
    """Train as ``python -m pecos.xmc.xlinear.train`` does, label features and clustering included."""
    features, labels = job.matrix("train.features"), job.matrix("train.labels").tocsc()
    given = {"threads": job.threads, "seed": job.seed}
    indexing = HierarchicalKMeans.TrainParams.from_dict(given)
    training = XLinearModel.TrainParams.from_dict(given, recursive=True)
    settings = {"indexer": indexing.to_dict(with_meta=False), "train": training.to_dict(with_meta=False)}
    with job.timed():
        label_features = LabelEmbeddingFactory.create(labels, features, method="pifa", threads=job.threads)
        clusters = Indexer.gen(label_features, train_params=indexing)
        model = XLinearModel.train(features, labels, C=clusters, train_params=training)
    model.save(str(job.model))
    return settings | {"label_features": "pifa", "prediction": PREDICTION}


def predict(job: Job) -> list[list[int]]:
    """Predict all instances at once with the model loaded for prediction only."""
    features = job.matrix("test.features")
    model = XLinearModel.load(str(job.model), is_predict_only=True)
    with job.timed():
        scores = model.predict(features, only_topk=job.k, threads=job.threads, **PREDICTION)
    rows = [slice(start, end) for start, end in pairwise(scores.indptr)]
    return [scores.indices[row][np.argsort(-scores.data[row], kind="stable")].tolist() for row in rows]


if __name__ == "__main__":
    main(["libpecos", "numpy", "scipy"], train, predict)
