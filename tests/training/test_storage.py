"""A run whose output layer lies on the disk: the same bits as one in memory, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import runs

from xmlc.config import load_config
from xmlc.errors import CheckpointError, ConfigError
from xmlc.evaluation import load
from xmlc.nn import scratch
from xmlc.training.trainer import StoppedBySignalError

Train = Callable[..., Path]
DISK = {"storage": "disk"}
SETTINGS: list[tuple[problems.Kind, dict[str, dict[str, Any]]]] = [
    ("sparse", {"model": {"weight_dtype": "bfloat16"}, "output_optimizer": {"kind": "label_adam"}}),
    ("dense", {"model": {"group_size": 16}, "output_optimizer": {"kind": "momentum"}}),
    ("dense", {"output_optimizer": {"kind": "adam", "state_dtype": "float8_e4m3fn"}}),
    ("sparse", {"output_optimizer": {"kind": "sgd"}, "loss": {"kind": "softmax"}}),
    ("text", {"model": {"direct_fan_in": 3}, "redistribution": {"new_value": "random"}}),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page and a thread that never rests: small layers are dropped and read again as well."""
    monkeypatch.setattr(scratch, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(scratch, "SPARE_BLOCKS", 0)
    monkeypatch.setattr(scratch, "LOOK_SECONDS", 1e-4)


def data_of(run: Path) -> dict[str, bytes]:
    """Return the bytes of the checkpoints' data files."""
    root = run / "checkpoints"
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.safetensors"))}


@pytest.mark.parametrize(("kind", "sections"), SETTINGS)
def test_the_checkpoints_are_those_of_a_run_in_memory(
    kind: problems.Kind, sections: dict[str, dict[str, Any]], train: Train
) -> None:
    dataset = problems.dataset(kind, labels=400)
    sections = sections | {"redistribution": sections.get("redistribution", {}) | {"end": 1.0}}
    memory = train(dataset, "memory", **sections, training={"epochs": 2})
    disk = train(dataset, "disk", **sections, training={"epochs": 2} | DISK)
    assert data_of(disk) == data_of(memory)
    assert len(data_of(disk)) >= 1
    assert runs.metrics(disk) == runs.metrics(memory)
    assert any(entry["moved"] for line in runs.metrics(disk) for entry in line["redistributions"])


def test_a_run_leaves_the_files_of_one_in_memory(train: Train) -> None:
    names = [
        {str(path.relative_to(run)) for path in run.rglob("*")}
        for run in (
            train(problems.dataset(), "memory", training={"epochs": 1}),
            train(problems.dataset(), "disk", training={"epochs": 1} | DISK),
        )
    ]
    assert names[0] == names[1]


def test_a_stopped_run_goes_on_in_memory_and_back(train: Train, at_step: Any) -> None:
    dataset = problems.dataset()
    whole = train(dataset, "whole", training={"epochs": 3} | DISK)
    for step, storage, resume in ((7, "disk", False), (19, "memory", True)):
        at_step(step, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(StoppedBySignalError):
            train(dataset, "stopped", resume, training={"epochs": 3, "storage": storage})
    runs.assert_same_run(train(dataset, "stopped", True, training={"epochs": 3} | DISK), whole)


def test_it_predicts_what_a_run_in_memory_does(train: Train) -> None:
    dataset = problems.dataset()
    features = problems.split("sparse", 20, 9).features
    found = [
        load(train(dataset, storage, training={"epochs": 2, "storage": storage})).top_labels(features, 5)
        for storage in ("memory", "disk")
    ]
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_killed_run_leaves_no_scratch_file(tmp_path: Path) -> None:
    code = """
import os, signal, sys
import problems
from xmlc.training import trainer
step_of = trainer.training_step
def step(*arguments):
    if arguments[4] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return step_of(*arguments)
trainer.training_step = step
from pathlib import Path
trainer.train_into(Path(sys.argv[1]), problems.dataset(), problems.config(training={"storage": "disk"}))
"""
    tests = str(Path(problems.__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((tests, *sys.path))}
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(run)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert {path.name for path in run.iterdir()} == {
        ".lock",
        "checkpoints",
        "config.toml",
        "data.json",
        "environment.json",
        "train.log",
    }
    assert list((run / "checkpoints").iterdir()) == []


def test_a_full_disk_is_told_and_a_run_may_begin_there_again(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            CheckpointError, match=r"bytes of room there .* No space left on device; free space"
        ):
            train(problems.dataset(), training=DISK)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    train(problems.dataset(), training={"epochs": 1} | DISK)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.device=cuda"], r"training\.storage = disk needs training\.device = cpu, found cuda"),
        (["model.output=dense"], r"training\.storage = disk needs output = sparse, found dense"),
        (["model.output=bottleneck"], r"training\.storage = disk needs output = sparse, found bottleneck"),
    ],
)
def test_what_cannot_lie_on_the_disk_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["training.storage=disk", *overrides])
