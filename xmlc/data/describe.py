"""What a data set holds, in figures."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from xmlc.data.dataset import Dataset, Split
from xmlc.data.rows import CsrRows, Int64


def describe(dataset: Dataset) -> dict[str, Any]:
    """Return counts, label distribution, gaps and overlap of a data set as plain values, ready for JSON.

    ``labels.training_instances`` counts training instances per label; ``share_with_*`` are shares of all
    labels, ``share_of_positives_in_tenth`` is the part of all training positives that the most frequent tenth
    of the labels holds. ``train.repeated`` counts training instances whose text or features, if not empty,
    occurred before to the last bit, ``test.seen_in_training`` test instances for which they occur there,
    ``test.labels_without_training`` labels that only test instances have.
    """
    trained, per_label = np.unique(dataset.train.labels.indices, return_counts=True)  # of labels that occur
    contents = list(_contents(dataset.train))
    seen = set(contents)
    absent = dataset.label_count - len(per_label)  # a header may promise 2^31 - 1 labels
    described: dict[str, Any] = {
        "name": dataset.name,
        "kind": dataset.kind,
        "source": None if dataset.source is None else str(dataset.source),
        "fingerprint": dataset.fingerprint,
        "propensity_a": dataset.propensity_a,
        "propensity_b": dataset.propensity_b,
        **({} if dataset.kind == "text" else {"features": dataset.feature_count}),
        "labels": {
            "count": dataset.label_count,
            "training_instances": _spread(per_label, absent),
            "share_with_0": absent / dataset.label_count,
            "share_with_1": np.count_nonzero(per_label == 1) / dataset.label_count,
            "share_with_at_most_5": (absent + np.count_nonzero(per_label <= 5)) / dataset.label_count,
            "share_of_positives_in_tenth": _head(per_label, math.ceil(dataset.label_count / 10)),
        },
        "train": {**_describe_split(dataset.train), "repeated": len(contents) - len(seen)},
        "warnings": list(dataset.warnings),
    }
    if dataset.test is not None:
        described["test"] = {
            **_describe_split(dataset.test),
            "seen_in_training": sum(content in seen for content in _contents(dataset.test)),
            "labels_without_training": len(np.setdiff1d(dataset.test.labels.indices, trained)),
        }
    return described


def _describe_split(split: Split) -> dict[str, Any]:
    described: dict[str, Any] = {
        "instances": split.instances,
        "labels_per_instance": _spread(np.diff(split.labels.offsets)),
        "without_labels": _empty_rows(split.labels.offsets),
    }
    if isinstance(split.features, CsrRows):
        described["features_per_instance"] = _spread(np.diff(split.features.offsets))
        described["without_features"] = _empty_rows(split.features.offsets)
    if split.texts is not None:
        described["text_bytes_per_instance"] = _spread(np.diff(split.texts.offsets))
        described["without_text"] = _empty_rows(split.texts.offsets)
    if split.filter_pairs is not None:
        described["filter_pairs"] = len(split.filter_pairs.indices)
    return described


def _spread(counts: Int64, zeros: int = 0) -> dict[str, float]:
    """Return mean, median and maximum of the counts and as many zeros; of no counts, zeros."""
    total = len(counts) + zeros
    if not len(counts):
        return {"mean": 0.0, "median": 0.0, "max": 0}
    middle = [place - zeros for place in ((total - 1) // 2, total // 2)]  # in the sorted counts
    ordered = np.sort(counts)
    median = sum(float(ordered[place]) for place in middle if place >= 0) / 2
    return {"mean": float(counts.sum() / total), "median": median, "max": int(ordered[-1])}


def _head(per_label: Int64, labels: int) -> float:
    """Return the share of all positives that the most frequent labels hold."""
    total = int(per_label.sum())
    return float(np.sort(per_label)[::-1][:labels].sum() / total) if total else 0.0


def _empty_rows(offsets: Int64) -> int:
    return int(np.count_nonzero(np.diff(offsets) == 0))


def _contents(split: Split) -> Iterator[bytes]:
    """Yield a digest of every instance that has a text or features."""
    for content in row_bytes(split):
        if content:
            yield hashlib.blake2b(content, digest_size=16).digest()


def row_bytes(split: Split) -> Iterator[bytes]:
    """Yield what every instance is, its text or its features; two are equal where these bytes are."""
    if split.texts is not None:
        yield from split.texts.blobs()
    elif isinstance(split.features, CsrRows):
        offsets, indices, values = split.features.offsets, split.features.indices, split.features.values
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            yield indices[start:end].tobytes() + (b"" if values is None else values[start:end].tobytes())
    elif split.features is not None:
        for row in split.features:
            yield row.tobytes()
