"""Small multi-label problems that can be learnt, in memory or as folders of files.

Every label has a prototype: three words of its own, or a direction. An instance is the sum of its labels'
prototypes and noise, so that a model that trains at all ranks the labels almost perfectly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import scipy.sparse

from xmlc.config import Config, load_config
from xmlc.data import Dataset

Kind = Literal["text", "sparse", "dense"]
KINDS: tuple[Kind, ...] = ("text", "sparse", "dense")

LABELS = 24
FEATURES = 96  # of a sparse problem: three words for each label, and as many again that say nothing
HIDDEN = 32  # of a dense problem


every_output = pytest.mark.parametrize(
    ("output", "width"), [("sparse", 64), ("sparse", 0), ("dense", 64), ("bottleneck", 64)]
)
"""Every output layer; the sparse one with a penultimate layer and without."""


@dataclass(frozen=True)
class Split:
    """Instances in the form that `Dataset.from_arrays` takes, and their labels."""

    features: Any
    labels: scipy.sparse.csr_array  # [instance, label]


def split(kind: Kind, instances: int, seed: int = 0, labels: int = LABELS) -> Split:
    """Draw instances of one to three labels; every tenth has none."""
    rng = np.random.default_rng([seed, labels])
    rows = [
        [] if number % 10 == 9 else sorted(rng.choice(labels, min(labels, 1 + number % 3), replace=False))
        for number in range(instances)
    ]
    indptr = np.cumsum([0, *map(len, rows)])
    columns = np.array([label for row in rows for label in row], np.int32)
    truth = scipy.sparse.csr_array((np.ones(len(columns)), columns, indptr), shape=(instances, labels))
    if kind == "dense":
        prototypes = np.random.default_rng(7).standard_normal((labels, HIDDEN))
        noise = 0.1 * rng.standard_normal((instances, HIDDEN))
        return Split((truth @ prototypes + noise).astype(np.float32), truth)
    words = [[3 * label + word for label in row for word in range(3)] for row in rows]
    noise_words = rng.integers(3 * labels, 4 * labels, (instances, 2))
    words = [[*row, *extra] for row, extra in zip(words, noise_words.tolist(), strict=True)]
    if kind == "text":
        return Split([" ".join(f"word{word}" for word in row) for row in words], truth)
    features = scipy.sparse.lil_array((instances, 4 * labels), dtype=np.float32)
    for number, row in enumerate(words):
        features[number, row] = 1.0
    return Split(features.tocsr(), truth)


def dataset(kind: Kind = "sparse", train: int = 200, test: int = 50, labels: int = LABELS) -> Dataset:
    """Return a learnable data set in memory."""
    first, second = split(kind, train, 1, labels), split(kind, test, 2, labels)
    return Dataset.from_arrays(
        first.features,
        first.labels,
        test_features=second.features,
        test_labels=second.labels,
        label_names=[f"label {number}" for number in range(labels)],
        name=f"toy-{kind}",
    )


def write_folder(folder: Path, kind: Kind = "text", train: int = 200, test: int = 50) -> Path:
    """Write a learnable data set in a layout that fits its kind, and return its folder."""
    folder.mkdir(parents=True)
    for prefix, seed, instances in (("trn", 1, train), ("tst", 2, test)):
        part = split(kind, instances, seed)
        if kind == "text":
            lines = [
                json.dumps({"title": text, "target_ind": part.labels[[row]].indices.tolist()})
                for row, text in enumerate(part.features)
            ]
            (folder / f"{prefix}.json").write_text("\n".join(lines) + "\n")
        else:
            scipy.sparse.save_npz(folder / f"{prefix}_X_Y.npz", scipy.sparse.csr_matrix(part.labels))
            if kind == "dense":
                np.save(folder / f"{prefix}_X_Xf.npy", part.features)
            else:
                scipy.sparse.save_npz(folder / f"{prefix}_X_Xf.npz", scipy.sparse.csr_matrix(part.features))
    names = [f"label {number}" for number in range(LABELS)]
    if kind == "text":
        (folder / "lbl.json").write_text("".join(json.dumps({"title": name}) + "\n" for name in names))
    else:
        (folder / "Yf.txt").write_text("".join(f"{name}\n" for name in names))
    return folder


def config(**sections: dict[str, Any]) -> Config:
    """Return settings that learn a problem of this module in a second; every section can be overridden.

    What a result depends on stands here, so that a change of the defaults changes no test.
    """
    optimizer = {"kind": "adam", "learning_rate": 0.01, "momentum": 0.9, "beta1": 0.9, "beta2": 0.999}
    optimizer |= {"eps": 1e-8, "weight_decay": 0.0}
    base: dict[str, dict[str, Any]] = {
        "data": {"validation_fraction": 0.1, "mask_filter_pairs": True, "unit_length": True},
        "text": {"word_ngrams": [1, 1], "character_ngrams": [0, 0], "min_document_frequency": 1},
        "model": {
            "output": "sparse",
            "hidden": 32,
            "width": 64,
            "fan_in": 16,
            "group_size": 1,
            "bottleneck": 16,
            "weight_dtype": "float32",
            "weight_init": "fan_in",
            "bias_init": "auto",
            "penultimate_init": "he",
            "input_dropout": 0.0,
            "hidden_dropout": 0.0,
            "hidden_activation": "none",
        },
        "loss": {
            "kind": "squared_hinge",
            "reduction": "sum",
            "gradient_cutoff": 0.0,
            "positive_weight": 1.0,
            "positive_weight_propensity": False,
        },
        "output_optimizer": optimizer,
        "dense_optimizer": optimizer,
        "redistribution": {
            "interval_steps": 10,
            "first_step": 5,
            "fraction": 0.1,
            "decay": "cosine",
            "end": 0.5,
            "mode": "fraction",
            "scope": "layer",
            "new_value": "zero",
        },
        "schedule": {"kind": "constant", "warmup_steps": 0, "final_fraction": 0.0, "min_delta": 1e-3},
        "training": {
            "epochs": 8,
            "batch_size": 16,
            "seed": 3,
            "threads": 0,
            "clip_norm": 0.0,
            "metric": "P@1",
            "patience": 0,
            "min_delta": 5e-5,
        },
    }
    for section, settings in sections.items():
        base[section] = base.get(section, {}) | settings
    return load_config(base)
