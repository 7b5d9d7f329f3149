"""Deterministic runs repeat bit by bit whatever the threads do, on each instruction set of this machine.

Between instruction sets the last bits may differ (docs/numerics.md), so nothing is compared there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracles
import problems
import pytest
import runs
import torch

from xmlc import native
from xmlc.training import trainer
from xmlc.training.trainer import train_into

THREADS = (1, 2, 3, 3)  # the last one again: with more threads than processors no two runs have one order


@pytest.mark.parametrize("isa", native.cpu.available_isas())
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_deterministic_run_has_the_same_bits_for_any_number_of_threads(
    isa: str, clip_norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the setting, torch's products of the last, smaller batch differ between 2 and 3 threads."""
    used = []
    step_of = trainer.training_step

    def watching(*arguments: Any) -> Any:
        used.append((native.threads_for(2000 * 32 * 64), torch.get_num_threads()))
        return step_of(*arguments)

    monkeypatch.setattr(trainer, "training_step", watching)
    dataset = problems.dataset("sparse", train=400, labels=2000)
    model = {"width": 512, "hidden": 64, "fan_in": 32, "input_dropout": 0.2, "weight_dtype": "bfloat16"}
    for number, count in enumerate(THREADS):
        training = {"epochs": 2, "batch_size": 64, "threads": count, "clip_norm": clip_norm}
        config = problems.config(
            model=model, training=training | {"deterministic": True}, redistribution={"new_value": "random"}
        )
        with oracles.isa(isa), oracles.threads(1):
            train_into(tmp_path / str(number), dataset, config)
        runs.assert_same_metrics_and_tensors(tmp_path / str(number), tmp_path / "0")
    assert set(used) == {(count, 1) for count in THREADS}
