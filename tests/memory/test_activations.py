"""Plans of transformers: their activations for any batch, and whole runs beside their plan."""

from __future__ import annotations

import json
from pathlib import Path

import encoders
import numpy as np
import oracles
import pytest
import torch
from runs import xmlc

from xmlc.config import EncoderConfig
from xmlc.errors import XmlcError
from xmlc.memory import activations
from xmlc.memory.activations import EncoderMemory, encoder_memory
from xmlc.nn import TextEncoder
from xmlc.nn.transformer import TOKENS_AT_ONCE, TransformerEncoder

LENGTH = 20
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 3}


def load(folder: Path, **settings: object) -> TransformerEncoder:
    config = EncoderConfig(
        **{"kind": "transformer", "path": str(folder), "max_length": LENGTH, "frozen": False, **settings}  # type: ignore[arg-type]
    )
    return TextEncoder.load(folder, config).transformer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"recompute_activations": True},
        {"compress_activations": True},
        {"frozen_layers": 1},
        {"pooling": "cls", "unit_variance": False},
    ],
)
def test_what_two_small_batches_tell_is_what_a_large_one_takes(
    settings: dict[str, object], tmp_path: Path
) -> None:
    encoder = load(encoders.write(tmp_path), **settings)
    with oracles.threads(1):
        told = encoder_memory(encoder, LENGTH)
        forward, backward, evaluation = activations._trace(encoder, 11, LENGTH)
    assert told.forward_peak(11) == forward.max()
    assert told.kept(11) == forward[-1]
    assert told.backward_peak(11) == backward.max()
    assert told.evaluation_peak(11) == evaluation.max()
    assert told.forward_peak(11) > told.kept(11) > 0


def test_recomputing_keeps_less_and_frozen_layers_have_no_gradient(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path, **WIDE)
    with oracles.threads(1):
        whole, spared, half = (
            encoder_memory(load(folder, **settings), LENGTH)
            for settings in ({}, {"recompute_activations": True}, {"frozen_layers": 2})
        )
    assert spared.kept(32) < whole.kept(32) / 4
    assert half.trained < whole.trained
    assert half.backward_peak(32) < whole.backward_peak(32)
    assert whole.trained == sum(each.nbytes for each in load(folder).parameters())


@pytest.mark.parametrize("settings", [{}, {"autocast": "bfloat16"}])
def test_compressing_keeps_less_than_half(settings: dict[str, object], tmp_path: Path) -> None:
    folder = encoders.write(tmp_path, **WIDE)
    with oracles.threads(1):
        whole, compressed = (
            encoder_memory(load(folder, compress_activations=each, **settings), LENGTH)
            for each in (False, True)
        )
    assert compressed.kept(32) < 0.5 * whole.kept(32)


def test_tracing_leaves_the_encoder_as_it_was(tmp_path: Path) -> None:
    encoder = load(encoders.write(tmp_path))
    before = {name: oracles.bits(value) for name, value in encoder.state_dict().items()}
    state = torch.random.get_rng_state()
    encoder_memory(encoder, LENGTH)
    assert {name: oracles.bits(value) for name, value in encoder.state_dict().items()} == before
    assert all(each.grad is None for each in encoder.parameters())
    assert not encoder.training
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_frozen_encoder_is_not_tried(tmp_path: Path) -> None:
    told = encoder_memory(load(encoders.write(tmp_path), frozen=True), LENGTH)
    assert (told.trained, told.forward_peak(9), told.kept(9), told.backward_peak(9)) == (0, 0, 0, 0)
    assert told.evaluation_peak(9) == 0


def test_long_texts_are_embedded_by_parts() -> None:
    each = activations.Pass(np.array([0, 20]), np.array([0.0, 10.0]))
    told = EncoderMemory(0, 0, 0, TOKENS_AT_ONCE // 4, each, each, each)
    assert told.evaluation_peak(3) == 30
    assert told.evaluation_peak(400) == 40


def test_an_encoder_that_goes_other_ways_for_more_texts_is_refused() -> None:
    message = (
        "an encoder must allocate alike for 2 and 4 texts, found 3 and 2 calls; plan without this encoder"
    )
    with pytest.raises(XmlcError, match=message):
        activations._pass(np.zeros(3, np.int64), np.zeros(2, np.int64))


def write_texts(folder: Path, instances: int = 320) -> Path:
    """Write texts of as many words as an encoder reads."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    with (folder / "trn.json").open("w") as file:
        for words in generator.integers(0, 90, (instances, LENGTH - 2)):
            title = " ".join(f"word{word}" for word in words)
            file.write(json.dumps({"title": title, "target_ind": [int(words.sum() % 1000)]}) + "\n")
    (folder / "lbl.json").write_text("".join(json.dumps({"title": f"label {n}"}) + "\n" for n in range(1000)))
    return folder


def options(folder: Path, *others: str) -> list[str]:
    values = {
        "encoder.kind": "transformer",
        "encoder.path": str(folder),
        "encoder.max_length": str(LENGTH),
        "training.threads": "1",
        "training.batch_size": "64",
        "model.width": "1024",
        "data.validation_fraction": "0.15",
        "training.epochs": "1",
    }
    return [
        part
        for each in (*(f"{key}={value}" for key, value in values.items()), *others)
        for part in ("--set", each)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        ("encoder.frozen=false",),
        ("encoder.frozen=false", "encoder.recompute_activations=true", "encoder.frozen_layers=1"),
        ("encoder.frozen=false", "encoder.compress_activations=true"),
        ("encoder.frozen=true",),
    ],
)
def test_the_plan_of_a_transformer_holds(settings: tuple[str, ...], tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "encoder", **WIDE)
    data = write_texts(tmp_path / "data")
    done = xmlc(tmp_path, "profile", str(data), *options(folder, *settings), "--check", "--json", "--explain")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    names = {term["name"] for term in found["terms"]["output_step"]}
    assert ("activations of the encoder" in names) == (settings[0] == "encoder.frozen=false")
    if "encoder.frozen=false" in settings:
        for phase in found["measured"]:
            if phase["phase"] != "load":  # mapped weights are torch's, but no anonymous memory yet
                assert phase["tracked"] == pytest.approx(phase["planned"], rel=0.03, abs=4 << 20)


def test_a_budget_shrinks_the_batch_of_a_transformer_and_holds_as_a_limit(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "encoder", **WIDE)
    data = write_texts(tmp_path / "data")
    wanted = options(
        folder, "encoder.frozen=false", "model.weight_dtype=bfloat16", "output_optimizer.kind=sgd"
    )
    done = xmlc(tmp_path, "profile", str(data), *wanted, "--budget", "4GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    budget = (4 << 30) - found["available_bytes"] + int(0.8 * found["needed_bytes"])
    run = str(tmp_path / "run")
    done = xmlc(tmp_path, "train", str(data), *wanted, "--out", run, "--budget", str(budget), "--enforce")
    assert done.returncode == 0, done.stderr
    assert "to fit the budget, training.batch_size = 32 (was 64)" in done.stderr
    assert "epoch 1/1" in done.stderr
    done = xmlc(tmp_path, "profile", str(data), *wanted, "--budget", "16MiB")
    assert done.returncode == 2
    assert "the budget must leave at least" in done.stderr
    assert "or set encoder.recompute_activations = true" in done.stderr
