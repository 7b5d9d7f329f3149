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
from xmlc.errors import OutOfMemoryError, XmlcError
from xmlc.memory import activations
from xmlc.memory.activations import EncoderMemory, encoder_memory
from xmlc.memory.encoding import encoding
from xmlc.memory.terms import Plan
from xmlc.nn import TextEncoder
from xmlc.nn.embeddings import TEXTS_PER_BLOCK
from xmlc.nn.transformer import TOKENS_AT_ONCE, TransformerEncoder
from xmlc.training.encoding import within_budget

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


def test_a_frozen_encoder_is_tried_for_what_embeds_its_texts(tmp_path: Path) -> None:
    encoder = load(encoders.write(tmp_path), frozen=True)
    with oracles.threads(1):
        told = encoder_memory(encoder, LENGTH, vocabulary=100)
        embedding = activations._trace_evaluation(encoder, 9, LENGTH)
    assert (told.trained, told.forward_peak(9), told.kept(9), told.backward_peak(9)) == (0, 0, 0, 0)
    assert told.evaluation_peak(9) == embedding.max() > 0
    assert told.hidden == encoder.hidden
    assert told.tokenizer == 100 * (activations.TOKEN_BYTES + activations.KEPT_BYTES)


@pytest.mark.parametrize("embedding_dtype", ["float16", "float32"])
def test_embedding_is_a_phase_of_its_own(embedding_dtype: str) -> None:
    each = activations.Pass(np.array([7]), np.array([2.0]))
    frozen = EncoderMemory(5, 0, 0, TOKENS_AT_ONCE // 4, None, None, each, all=50, hidden=64, tokenizer=3)
    config = EncoderConfig(kind="transformer", path="x", embedding_dtype=embedding_dtype)  # type: ignore[arg-type]
    itemsize = {"float16": 2, "float32": 4}[embedding_dtype]
    stored = 10 * 64 * (8 + 2 * itemsize)  # more than 4 texts' 11 bytes and the embeddings themselves
    assert Plan((), encoding(frozen, config, 10)).bytes("encoding") == 5 + stored + 3
    assert Plan((), encoding(frozen, config, 10, on_device=True)).bytes("encoding") == 50 + 11 + 10 * 64 * 4
    many = encoding(frozen, config, 10**6)
    assert Plan((), many).bytes("encoding") == 5 + TEXTS_PER_BLOCK * 64 * (8 + 2 * itemsize) + 3
    trained = EncoderMemory(5, 0, 9, 4, each, each, each, all=50, hidden=64, tokenizer=3)
    assert encoding(trained, config, 10) == encoding(None, config, 10) == {}


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
    assert ("encoding" in found["phases"]) == ("encoder.frozen=true" in settings)
    if "encoder.frozen=true" in settings:
        assert found["measured"][0]["phase"] == found["peak_phase"] == "encoding"  # checked above
    else:
        for phase in found["measured"]:
            if phase["phase"] != "load":  # mapped weights are torch's, but no anonymous memory yet
                assert phase["tracked"] == pytest.approx(phase["planned"], rel=0.03, abs=4 << 20)


def test_texts_are_embedded_within_an_enforced_budget(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "encoder", **{**WIDE, "intermediate_size": 4096})
    data = write_texts(tmp_path / "data", instances=TOKENS_AT_ONCE // LENGTH)
    wanted = options(folder, "model.width=64", "model.hidden=8")
    done = xmlc(tmp_path, "profile", str(data), *wanted, "--budget", "4GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_phase"] == "encoding"
    before = (4 << 30) - found["available_bytes"]
    fresh = tmp_path / "fresh"  # whose cache has no embeddings yet
    for share, code in ((0.7, 2), (1.1, 0)):
        budget = str(before + int(share * found["needed_bytes"]))
        run = str(tmp_path / f"run-{code}")
        done = xmlc(fresh, "train", str(data), *wanted, "--out", run, "--budget", budget, "--enforce")
        assert done.returncode == code, done.stderr
        assert ("the budget must leave at least" in done.stderr) == (code == 2)
        assert f"to embed texts of up to {LENGTH} tokens" in done.stderr or code == 0
        assert ("epoch 1/1" in done.stderr) == (code == 0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            MemoryError(),
            "the budget must suffice to embed texts, found no memory left within the 1,000.0 MiB",
        ),
        (
            RuntimeError("can't allocate memory: you tried to allocate 8 bytes"),
            "you tried to allocate 8 bytes",
        ),
    ],
)
def test_running_out_while_texts_are_embedded_says_so(error: Exception, message: str, tmp_path: Path) -> None:
    folder = encoders.write(tmp_path)
    config = EncoderConfig(kind="transformer", path=str(folder), max_length=LENGTH)
    within = within_budget(1000 << 20, 0, on_device=False, enforce=False)
    encoder = TextEncoder.load(folder, config)
    with pytest.raises(OutOfMemoryError, match=message), within(encoder, 9):
        raise error
    with pytest.raises(RuntimeError, match="something else"), within(encoder, 9):
        raise RuntimeError("something else")


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
