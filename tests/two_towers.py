"""Data sets with texts of instances and labels, and settings of small two-tower models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import problems

from xmlc.config import Config
from xmlc.data import Dataset
from xmlc.data.dataset import content_fingerprint
from xmlc.data.rows import CsrRows, offsets_of


def label_texts(labels: int = problems.LABELS) -> list[str]:
    """Return two of the three words of every label."""
    return [f"word{3 * label} word{3 * label + 1}" for label in range(labels)]


def dataset(train: int = 120, test: int = 40, filtered: bool = False) -> Dataset:
    """Return a learnable data set; ``filtered``: with filter pairs, of which some are labels."""
    first, second = problems.split("text", train, 1), problems.split("text", test, 2)
    made = Dataset.from_arrays(
        first.features,
        first.labels,
        test_features=second.features,
        test_labels=second.labels,
        label_names=[f"label {number}" for number in range(problems.LABELS)],
        label_texts=label_texts(),
        name="toy-texts",
    )
    if filtered:
        assert made.test is not None
        splits = [replace(each, filter_pairs=_pairs(each.labels)) for each in (made.train, made.test)]
        made = replace(made, train=splits[0], test=splits[1])
    return replace(made, fingerprint=content_fingerprint(made))


def _pairs(labels: CsrRows) -> CsrRows:
    """Return for every instance its first label, where it has two, and the label of its number."""
    rows = []
    for row in range(labels.rows):
        own = labels.take(np.array([row])).indices.tolist()
        rows.append(sorted({row % labels.columns, *(own[:1] if len(own) > 1 else [])}))
    return CsrRows(
        offsets_of(np.array([len(row) for row in rows])),
        np.array([label for row in rows for label in row], np.int32),
        None,
        labels.columns,
    )


def config(encoder: Path | None = None, frozen: bool = False, /, **sections: dict[str, Any]) -> Config:
    """Return settings; with an encoder, of a transformer."""
    made: dict[str, dict[str, Any]] = {"model": {"output": "two_tower"}, "training": {"batch_size": 16}}
    if encoder is not None:
        made["encoder"] = encoders.settings(encoder, frozen=frozen)
        made["encoder_optimizer"] = {"learning_rate": 3e-3}
        made["two_tower"] = {"projection": encoders.HIDDEN if frozen else 0}
    for section, settings in sections.items():
        made[section] = made.get(section, {}) | settings
    return problems.config(**made)
