"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracles
import problems
import pytest

from xmlc.data import Dataset
from xmlc.training import trainer
from xmlc.training.trainer import train_into

Train = Callable[..., Path]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Keep torch's many small operations from waiting for each other's threads on a busy machine."""
    with oracles.threads(1):
        yield


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Train a data set of `problems` into a folder below ``tmp_path`` and return it."""

    def run(dataset: Dataset, name: str = "run", resume: bool = False, **sections: dict[str, Any]) -> Path:
        folder = tmp_path / name
        train_into(folder, dataset, problems.config(**sections), resume=resume)
        return folder

    return run


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something while a step of the next training is under way, once."""

    def arrange(chosen: int, act: Callable[[], None]) -> None:
        step_of = trainer.training_step

        def acting(model: Any, batch: Any, optimizers: Any, rate: float, step: int, *others: Any) -> Any:
            if step == chosen:
                monkeypatch.setattr(trainer, "training_step", step_of)
                act()
            return step_of(model, batch, optimizers, rate, step, *others)

        monkeypatch.setattr(trainer, "training_step", acting)

    return arrange
