"""Runs with ``training.device = cuda`` on a pretended device: nothing mixes devices, same bits."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pretended
import problems
import pytest
import runs
import torch
import two_towers

from xmlc.errors import ConfigError, OutOfMemoryError
from xmlc.evaluation import load
from xmlc.memory.budget import changes, needed_bytes
from xmlc.memory.device import device_plan
from xmlc.memory.exhausted import Facts, explained
from xmlc.memory.terms import Batches
from xmlc.nn import Model, TextEncoder, TwoTower
from xmlc.training.prepare import batches_of, prepare
from xmlc.training.trainer import train_into

Train = Callable[..., Path]

PARTS: dict[str, tuple[problems.Kind, dict[str, dict[str, Any]]]] = {
    "dense features": ("dense", {}),
    "an embedding": ("sparse", {"model": {"input_dropout": 0.2, "hidden_dropout": 0.1}}),
    "texts": ("text", {}),
    "groups": ("sparse", {"model": {"group_size": 16, "weight_dtype": "bfloat16"}}),
    "groups in bfloat16": (
        "sparse",
        {"model": {"group_size": 16, "weight_dtype": "bfloat16", "feature_dtype": "bfloat16"}},
    ),
    "direct connections": ("text", {"model": {"direct_fan_in": 4, "direct_max_frequency": 1.0}}),
    "similarity": ("text", {"similarity": {"neighbour_weight": 0.5, "neighbours": 5}}),
    "both": (
        "sparse",
        {
            "model": {"direct_fan_in": 4, "direct_max_frequency": 1.0},
            "similarity": {"neighbour_weight": 0.5},
        },
    ),
    "a dense output": ("sparse", {"model": {"output": "dense"}}),
    "a dense output with softmax": (
        "dense",
        {"model": {"output": "bottleneck"}, "loss": {"kind": "softmax"}},
    ),
    "softmax": ("sparse", {"loss": {"kind": "softmax", "reduction": "mean"}}),
    "decoupled softmax": ("sparse", {"loss": {"kind": "decoupled_softmax"}, "training": {"clip_norm": 1.0}}),
    "weights of labels": ("sparse", {"loss": {"kind": "bce", "positive_weight_propensity": True}}),
    "label_adam": ("sparse", {"output_optimizer": {"kind": "label_adam"}}),
    "momentum": (
        "dense",
        {"output_optimizer": {"kind": "momentum"}, "dense_optimizer": {"kind": "momentum"}},
    ),
    "a state in bfloat16": ("sparse", {"output_optimizer": {"kind": "momentum", "state_dtype": "bfloat16"}}),
    "a state in float8": ("sparse", {"output_optimizer": {"state_dtype": "float8_e4m3fn"}}),
    "sgd": ("sparse", {"output_optimizer": {"kind": "sgd"}, "dense_optimizer": {"kind": "sgd"}}),
    "redistribution by threshold": (
        "sparse",
        {"redistribution": {"mode": "threshold", "threshold": 0.05, "scope": "group", "new_value": "random"}},
    ),
    "lowered rates": ("sparse", {"training": {"on_divergence": "lower_rate"}}),
}


@pytest.mark.parametrize("part", PARTS)
def test_every_part_trains_on_the_device_as_on_the_cpu(part: str, train: Train) -> None:
    kind, sections = PARTS[part]
    dataset = problems.dataset(kind)
    training = sections.get("training", {}) | {"epochs": 2, "deterministic": True}
    expected = train(dataset, "cpu", **sections | {"training": training})
    with pretended.device():
        found = train(dataset, "cuda", **sections | {"training": training | {"device": "cuda"}})
    if "XMLC_EMULATED" in os.environ:  # the device's own kernels add in another order
        for one, other in zip(runs.metrics(found), runs.metrics(expected), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=0.02)
        return
    assert runs.metrics(found) == runs.metrics(expected)
    assert runs.checkpoint(found)[0] == runs.checkpoint(expected)[0]


@pytest.mark.parametrize("part", ["dense features", "both", "groups in bfloat16", "a dense output"])
def test_a_run_predicts_on_the_device_as_on_the_cpu(part: str, train: Train) -> None:
    kind, sections = PARTS[part]
    dataset = problems.dataset(kind)
    run = train(dataset, **sections)
    assert dataset.test is not None
    inputs = dataset.test.features
    raw = inputs if isinstance(inputs, np.ndarray) else inputs.to_scipy()
    expected = load(run).top_labels(raw, 5)
    with pretended.device():
        found = load(run, device="cuda")
        assert isinstance(found.model, Model) and found.model.output.tensors()["weight"].device.type == "cuda"
        answers = found.top_labels(raw, 5)
    for one, other in zip(answers, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_two_towers_predict_on_the_device_as_on_the_cpu(tmp_path: Path) -> None:
    train_into(tmp_path / "run", two_towers.dataset(), two_towers.config(training={"epochs": 1}))
    texts = ["word1 word2", "word7", ""]
    expected = load(tmp_path / "run").with_labels(["word1 word7"]).top_labels(texts, 3)
    with pretended.device():
        loaded = load(tmp_path / "run", device="cuda")
        assert isinstance(loaded.model, TwoTower) and loaded.model.embed_labels().device.type == "cuda"
        found = loaded.with_labels(["word1 word7"]).top_labels(texts, 3)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1])


def test_a_run_begun_on_the_device_goes_on_on_the_cpu(
    train: Train, at_step: Callable[[int, Callable[[], None]], None]
) -> None:
    def die() -> None:
        raise InterruptedError

    dataset = problems.dataset("sparse")
    training = {"epochs": 3, "deterministic": True}
    expected = train(dataset, "whole", training=training)
    at_step(16, die)  # in the second epoch
    with pretended.device(), pytest.raises(InterruptedError):
        train(dataset, "moved", training=training | {"device": "cuda"})
    found = train(dataset, "moved", resume=True, training=training)
    assert runs.metrics(found) == runs.metrics(expected)
    assert runs.checkpoint(found)[0] == runs.checkpoint(expected)[0]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_transformer_reads_on_the_device_as_on_the_cpu(
    frozen: bool, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = encoders.settings(encoders.write(tmp_path / "encoder"), frozen=frozen)
    dataset = problems.dataset("text", 40, 10)
    sections: dict[str, dict[str, Any]] = {
        "encoder": encoder,
        "model": {"direct_fan_in": 2, "direct_max_frequency": 1.0},
        "training": {"epochs": 1, "deterministic": True},
    }
    expected = train(dataset, "cpu", **sections)
    # Loaded before: the library has a use of its own for the meta device.
    loaded = TextEncoder.load(tmp_path / "encoder", problems.config(encoder=encoder).encoder)
    monkeypatch.setattr(TextEncoder, "load", lambda *_: loaded)
    with pretended.device():
        found = train(dataset, "cuda", **sections | {"training": sections["training"] | {"device": "cuda"}})
    assert loaded.transformer.device.type == "cuda"
    assert runs.metrics(found) == runs.metrics(expected)
    assert runs.checkpoint(found)[0] == runs.checkpoint(expected)[0]


def test_a_deterministic_run_asks_torch_for_one_order_while_it_trains_on_the_device(
    train: Train, at_step: Callable[[int, Callable[[], None]], None]
) -> None:
    asked = []
    for device in ("cpu", "cuda"):
        at_step(1, lambda: asked.append(torch.are_deterministic_algorithms_enabled()))
        with pretended.device():
            train(
                problems.dataset("dense", 40, 10),
                device,
                training={"epochs": 1, "deterministic": True, "device": device},
            )
    assert asked == [False, True] and not torch.are_deterministic_algorithms_enabled()


def test_metrics_record_the_device_s_memory(train: Train) -> None:
    with pretended.device():
        run = train(problems.dataset("dense", 40, 10), training={"epochs": 1, "device": "cuda"})
        entry = json.loads((run / "metrics.jsonl").read_text())
        assert entry["peak_device_memory_bytes"] == torch.cuda.max_memory_allocated() > 0


def test_a_budget_shrinks_settings_until_the_device_holds_them_and_can_be_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = problems.dataset("dense", 40, 10)
    config = problems.config(
        model={"width": 8192, "weight_init": "zero"},
        training={"epochs": 1, "device": "cuda", "batch_size": 64},
    )
    asked: list[float] = []
    with pretended.device():
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", asked.append)
        budget = 72 << 20
        made = train_into(tmp_path / "run", dataset, config, budget_bytes=budget, enforce=True)
        with pytest.raises(ConfigError, match=r"must be at most the device's memory of 17,179,869,184 bytes"):
            train_into(tmp_path / "large", dataset, config, budget_bytes=1 << 40, enforce=True)
    assert asked == [budget / pretended.TOTAL_BYTES, 1.0]
    changed = changes(config, made.config)
    assert changed
    problem, batches = made.prepared.problem, batches_of(made.prepared)
    assert needed_bytes(device_plan(made.config, problem, batches)) <= budget
    assert needed_bytes(device_plan(config, problem, batches)) > budget


def test_memory_that_runs_out_on_the_device_says_what_to_lower(
    train: Train, at_step: Callable[[int, Callable[[], None]], None]
) -> None:
    def run_out() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it")

    at_step(3, run_out)
    with (
        pretended.device(),
        pytest.raises(
            OutOfMemoryError,
            match=r"in phase data, found: CUDA out of memory\. Tried to allocate 20.00 GiB\.; this run "
            r"could have 16,384.0 MiB; the plan says that it would fit: close other programs on the device",
        ),
    ):
        train(problems.dataset("dense", 40, 10), training={"epochs": 1, "batch_size": 8, "device": "cuda"})


def test_memory_that_a_budget_ends_names_the_settings_that_would_fit() -> None:
    config = problems.config(training={"epochs": 1, "device": "cuda", "batch_size": 64})
    problem, batches = prepare(problems.dataset("dense", 200, 10), config).problem, Batches(10, 32.0)
    needed = needed_bytes(device_plan(config, problem, batches))
    facts = Facts(config, problem, batches, 0, device_bytes=needed - 1)
    with (
        pretended.device(),
        pytest.raises(
            OutOfMemoryError, match=r"these settings would fit, in a new run: --set .*; nothing kept"
        ),
        explained(facts, lambda: "forward", lambda: "nothing kept"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 128.00 KiB.")


def test_a_tensor_left_on_the_cpu_is_caught() -> None:
    with pretended.device():
        weight = torch.ones(3, device="cuda")
        assert weight.device.type == "cuda" and float((weight + weight).sum()) == 6.0
        with pytest.raises(AssertionError, match="tensors of both devices"):
            weight + torch.ones(3)
        with pytest.raises(RuntimeError, match="numpy"):
            weight.numpy()
