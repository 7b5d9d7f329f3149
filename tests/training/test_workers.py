"""Runs of several workers: equal to those of one, resumed by any number, whole when a worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import problems
import pytest
import torch
import torch.distributed as distributed
import two_towers
from workers import in_workers

from xmlc.checkpoint import CheckpointFolder, read_checkpoint
from xmlc.config import Config, build_config, dump_config
from xmlc.data import Dataset
from xmlc.errors import ConfigError, WorkerError
from xmlc.evaluation import load
from xmlc.evaluation.evaluator import evaluate_model
from xmlc.parallel import ALONE, Workers
from xmlc.training.prepare import whole
from xmlc.training.trainer import Trainer, train_into

DATA = problems.dataset("sparse", train=198)  # 178 to train on: the last batch has 2, fewer than the workers
DENSE = problems.dataset("dense", train=198)


def settings(epochs: int = 3, **sections: dict[str, Any]) -> Config:
    """Return settings whose runs do not depend on the number of workers but for the order of sums."""
    base: dict[str, dict[str, Any]] = {
        "model": {"direct_fan_in": 3},
        "similarity": {"neighbour_weight": 0.5, "neighbours": 5},
        "redistribution": {"interval_steps": 0},
        "training": {"epochs": epochs, "clip_norm": 0.5},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    return problems.config(**base)


# Adam makes whole steps of gradients that are rounding alone, as those of the keys' biases are.
ENCODER_OPTIMIZER = {"kind": "momentum", "learning_rate": 1e-3}


def over_transformer(encoder: Path) -> Config:
    """Return settings that train a transformer under the sparse output layer."""
    return settings(
        2,
        encoder=encoders.settings(encoder, frozen=False),
        encoder_optimizer=ENCODER_OPTIMIZER,
        model={"direct_fan_in": 0},
        similarity={"neighbour_weight": 0.0},
    )


def towers(encoder: Path | None) -> Config:
    """Return settings of two towers that draw all labels of an instance, and no others."""
    sections: dict[str, dict[str, Any]] = {
        "two_tower": {"learn_scale": True, "positives": problems.LABELS},
        "training": {"epochs": 2, "clip_norm": 0.5},
    }
    if encoder is not None:
        sections["two_tower"] |= {"mini_batch_size": 5, "projection": 0}
        sections["encoder_optimizer"] = ENCODER_OPTIMIZER
    return two_towers.config(encoder, **sections)


TEXTS: dict[str, tuple[Dataset, Callable[[Path], Config]]] = {
    "transformer": (problems.dataset("text", train=60), over_transformer),
    "towers of words": (two_towers.dataset(), lambda _: towers(None)),
    "towers of a transformer": (two_towers.dataset(), towers),
}


def low_bit(config: Config, bits: int, **sections: dict[str, Any]) -> Config:
    made = config.model_dump()
    for name, values in {"training": {"gradient_bits": bits}, **sections}.items():
        made[name] |= values
    return build_config(made)


# One process sends nothing, so that the same settings give it all bits.
LOW_BITS: dict[str, tuple[Dataset, Callable[[Path], Config]]] = {
    "transformer, 8 bits": (TEXTS["transformer"][0], lambda path: low_bit(over_transformer(path), 8)),
    "towers, 4 bits": (
        two_towers.dataset(),
        lambda _: low_bit(towers(None), 4, two_tower={"projection": 32}),
    ),
}


def drawn() -> Config:
    """Return settings under which workers draw other numbers than one process."""
    return settings(
        8,
        model={"direct_fan_in": 0, "input_dropout": 0.1, "weight_dtype": "bfloat16", "group_size": 1},
        similarity={"neighbour_weight": 0.0},
        redistribution={"interval_steps": 10},
        output_optimizer={"state_dtype": "float8_e4m3fn"},
        training={"clip_norm": 0.0, "checkpoint_seconds": 0.0},
    )


def over_all_labels() -> Config:
    """Return settings whose loss needs the sum over all labels, direct connections among what is summed."""
    return settings(2, loss={"kind": "decoupled_softmax", "reduction": "mean"})


def train_together(rank: int, _: int, folder: Path) -> tuple[list[str], list[dict[str, int]], list[int]]:
    """Train as one of three workers, and go on as one of two.

    Returns:
        The errors of what cannot be trained, the collectives of a step under squared hinge and under a
        softmax loss, and how many exchanges of rounded gradients a step of each of `LOW_BITS` takes.
    """
    two = distributed.new_group([0, 1])
    three = Workers()
    trainer = train_into(folder / "three", DATA, settings(), workers=three)
    calls = collectives_of_a_step(trainer)
    spread = train_into(folder / "softmax", DATA, over_all_labels(), workers=three)
    calls_of_softmax = collectives_of_a_step(spread)
    if rank == 1:
        trainer.model.penultimate.linear.weight[3, 5] += 1e-3
    with pytest.raises(WorkerError, match="the same on all workers, found different weights at step 37"):
        trainer.save()
    for name, (dataset, config) in TEXTS.items():
        train_into(folder / name, dataset, config(folder / "encoder"), workers=three)
    exchanges = []
    for name, (dataset, config) in LOW_BITS.items():
        trainer = train_into(folder / name, dataset, config(folder / "encoder"), workers=three)
        exchanges.append(collectives_of_a_step(trainer)["all_to_all"])
    train_into(folder / "handed on", DATA, settings(1), workers=three)
    train_into(folder / "drawn", DENSE, drawn(), workers=three)
    errors = []
    for section, values in (
        ("model", {"output": "bottleneck", "direct_fan_in": 0}),
        ("training", {"batch_size": 2}),
        ("training", {"storage": "disk"}),
    ):
        with pytest.raises(ConfigError) as error:
            config = settings(**{"similarity": {"neighbour_weight": 0.0}, section: values})
            train_into(folder / "refused", DATA, config, workers=three)
        errors.append(str(error.value))
    with pytest.raises(ConfigError, match="a budget is planned for one process, found one given"):
        train_into(folder / "refused", DATA, settings(), budget_bytes=1 << 40, workers=three)
    if rank < 2:
        train_into(folder / "handed on", DATA, settings(2), resume=True, workers=Workers(two))
    return errors, [calls, calls_of_softmax], exchanges


def collectives_of_a_step(trainer: Trainer) -> dict[str, int]:
    workers = trainer.workers
    before = dict(workers.calls)
    trainer.step(next(replace(trainer.prepared.train, part=(workers.rank, workers.size)).epoch(0)))
    return {name: count - before[name] for name, count in workers.calls.items()}


def test_workers_train_what_one_process_trains_and_hand_it_on(tmp_path: Path) -> None:
    train_into(tmp_path / "one", DATA, settings())
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = encoders.write(tmp_path / "encoder", **no_dropout)
    for errors, calls, exchanges in in_workers(3, train_together, tmp_path, tmp_path):
        assert exchanges == [1, 1]
        assert [error.split("found ")[1].split(";")[0].split(",")[0] for error in errors] == [
            "bottleneck",
            "training.batch_size = 2",
            "disk",
        ]
        # Sizes, labels of each row, labels, features, words and their values; the words' embeddings; what
        # clipping needs. The loss, the penultimate layer's bias and weights, which gradients there are. The
        # features' gradient.
        each = {"all_gather": 6 + 3 + 3, "all_reduce": 1 + 2 + 1, "reduce_scatter": 1}
        # The sums over labels; the positives' pull.
        assert calls == [each, each | {"all_gather": 6 + 3 + 3 + 1, "all_reduce": 1 + 2 + 1 + 1}]
    assert not (tmp_path / "refused").exists()
    train_into(tmp_path / "one softmax", DATA, over_all_labels())
    assert_equal_runs(tmp_path / "softmax", tmp_path / "one softmax")
    train_into(tmp_path / "handed on", DATA, settings(), resume=True, workers=ALONE)
    for name in ("three", "handed on"):
        assert_equal_runs(tmp_path / name, tmp_path / "one")
    for name, (dataset, config) in TEXTS.items():
        train_into(tmp_path / f"one {name}", dataset, config(encoder))
        assert_equal_runs(tmp_path / name, tmp_path / f"one {name}")
    for name, (dataset, config) in LOW_BITS.items():
        train_into(tmp_path / f"one {name}", dataset, config(encoder))
        bits = config(encoder).training.gradient_bits
        assert_near_runs(tmp_path / name, tmp_path / f"one {name}", {8: 0.005, 4: 0.1}[bits])
    # What workers draw differs from one process; what holds of every layer does not.
    lines = metrics(tmp_path / "drawn")
    assert [line["epoch"] for line in lines] == list(range(1, 9))
    assert lines[-1]["validation"]["P@1"] > 0.8
    moved = [each["moved"] for line in lines for each in line["redistributions"]]
    assert moved[0] == round(0.1 * problems.LABELS * 16)
    indices = checkpoint(tmp_path / "drawn")["model.output.indices"].int().sort(1).values
    assert (indices.diff(dim=1) > 0).all()
    predictor = load(tmp_path / "drawn", "latest")
    assert DENSE.test is not None
    report = evaluate_model(predictor.model, whole(DENSE.test.features, DENSE.test.labels, None, 32), 5, None)
    assert report.values["P@1"] > 0.8


def assert_equal_runs(run: Path, alone: Path) -> None:
    """Require checkpoints and metrics that differ by no more than the order of sums explains."""
    found, expected = checkpoint(run), checkpoint(alone)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4, msg=f"{run.name}: {key}")
    for line, truth in zip(metrics(run), metrics(alone), strict=True):
        assert line["loss"] == pytest.approx(truth["loss"], rel=1e-4)
        assert line.get("active_share", 0.0) == pytest.approx(truth.get("active_share", 0.0), rel=1e-3)
        for metric, value in truth["validation"].items():
            assert line["validation"][metric] == pytest.approx(value, abs=0.09)  # one of 12 instances


def assert_near_runs(run: Path, alone: Path, most: float) -> None:
    """Require rounded gradients, more than order of sums explains, and weights that they leave near exact."""
    found, expected = checkpoint(run), checkpoint(alone)
    assert found.keys() == expected.keys()
    apart = {key: distance([found[key]], [value]) for key, value in expected.items()}
    assert max(value for key, value in apart.items() if key.startswith("optimizer.")) > 5e-3
    weights = [key for key in expected if key.startswith("model.") and not key.endswith("indices")]
    assert distance([found[key] for key in weights], [expected[key] for key in weights]) < most
    for line, truth in zip(metrics(run), metrics(alone), strict=True):
        assert line["loss"] == pytest.approx(truth["loss"], rel=4 * most)


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the Euclidean distance, as a share of what is expected."""
    pairs = [
        (one.double().flatten(), two.double().flatten()) for one, two in zip(found, expected, strict=True)
    ]
    apart, size = (torch.cat([each[place] for each in pairs]) for place in (0, 1))
    return float((apart - size).norm() / size.norm().clamp_min(1e-30))


def checkpoint(run: Path) -> dict[str, torch.Tensor]:
    path = CheckpointFolder(run / "checkpoints").latest()
    assert path is not None
    return dict(read_checkpoint(path).tensors)


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("sent", "timeout_seconds", "told"),
    [
        (signal.SIGKILL, 300.0, "another worker has stopped or failed"),
        (
            signal.SIGSTOP,
            10.0,
            "2 workers, worker 0 waited [0-9]+ s for another one in [a-z_ ]+ of step [0-9]+; it hangs or",
        ),
    ],
    ids=["killed", "hangs"],
)
def test_workers_of_the_command_line_stop_when_one_is_killed_or_hangs(
    sent: signal.Signals, timeout_seconds: float, told: str, tmp_path: Path
) -> None:
    """Processes as torchrun starts them, by their environment."""
    data = problems.write_folder(tmp_path / "data", "sparse")
    config = settings(
        100_000,
        model={"direct_fan_in": 0},
        similarity={"neighbour_weight": 0.0},
        training={"worker_timeout_seconds": timeout_seconds},
    )
    (tmp_path / "config.toml").write_text(dump_config(config))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "xmlc.cli", "train", str(data), "--out", str(tmp_path / "run")]
    workers = [
        subprocess.Popen(
            [*command, "--config", str(tmp_path / "config.toml")],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        until = time.monotonic() + 90
        latest = tmp_path / "run" / "checkpoints" / "latest"
        while not latest.exists() and time.monotonic() < until:
            assert all(each.poll() is None for each in workers), workers[0].communicate()
            time.sleep(0.05)
        workers[1].send_signal(sent)
        _, message = workers[0].communicate(timeout=60)
    finally:
        for each in workers:
            each.kill()
            each.communicate()
    assert workers[0].returncode == 2
    assert re.search(told, message.splitlines()[-1])
    assert "Traceback" not in message
    assert load(tmp_path / "run").model.problem.label_count == problems.LABELS
