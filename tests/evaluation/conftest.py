"""Trained runs of every kind, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import oracles
import problems
import pytest

from xmlc.data import open_dataset
from xmlc.evaluation import Predictor, load
from xmlc.training.trainer import train_into


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Keep torch's many small operations from waiting for each other's threads on a busy machine."""
    with oracles.threads(1):
        yield


@pytest.fixture(scope="package")
def runs_by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run for each kind, in ``<kind>/run``, trained on the files in ``<kind>/toy``, with a filter file."""
    folders: dict[str, Path] = {}
    for kind in problems.KINDS:
        folder = tmp_path_factory.mktemp(kind)
        data = problems.write_folder(folder / "toy", kind)
        (data / "filter_labels_test.txt").write_text("0 3\n0 4\n7 1\n")
        train_into(folder / "run", open_dataset(data), problems.config())
        folders[kind] = folder / "run"
    return folders


@pytest.fixture(scope="package")
def predictors(runs_by_kind: dict[str, Path]) -> dict[str, Predictor]:
    """The loaded models by kind."""
    return {kind: load(run) for kind, run in runs_by_kind.items()}
