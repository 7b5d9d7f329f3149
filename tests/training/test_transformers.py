"""Training under a transformer, from texts to a run folder that needs nothing else."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import problems
import pytest
import runs
import torch
from click.testing import CliRunner

from xmlc.checkpoint import CheckpointFolder, read_checkpoint
from xmlc.cli import main
from xmlc.config import Config, dump_config, load_config
from xmlc.data import Dataset, TextColumn, open_dataset
from xmlc.data.dataset import content_fingerprint
from xmlc.data.rows import TokenRows
from xmlc.errors import CheckpointError, ConfigError, DataError
from xmlc.evaluation import Predictor, load
from xmlc.evaluation.run import evaluate_run
from xmlc.nn.transformer import TransformerEncoder
from xmlc.training.prepare import prepare
from xmlc.training.profiling import Sizes, profile
from xmlc.training.trainer import StoppedBySignalError, train_into

Settings = Callable[..., Config]
WORDS: dict[str, dict[str, Any]] = {
    "model": {"direct_fan_in": 4, "direct_max_frequency": 1.0},
    "similarity": {"neighbour_weight": 0.5, "neighbours": 5},
}
WAYS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"frozen": False},
    "cls in bfloat16": {"frozen": False, "pooling": "cls", "autocast": "bfloat16"},
    "first layer frozen": {"frozen": False, "frozen_layers": 1},
    "compressed": {"frozen": False, "compress_activations": True},
    "recomputed": {"frozen": False, "recompute_activations": True},
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.write(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def settings(encoder: Path) -> Settings:
    """Return a config with this section ``encoder``; others may follow."""

    def call(way: dict[str, Any], **sections: dict[str, Any]) -> Config:
        sections = {"encoder_optimizer": {"learning_rate": 3e-3}, **sections}
        return problems.config(encoder=encoders.settings(encoder, **way), **sections)

    return call


def trained(predictor: Predictor) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in predictor.model.tensors().items() if "encoder." in name}


# ---- learning --------------------------------------------------------------------------------------------


def test_a_trained_encoder_learns_and_predicts(settings: Settings, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text")
    config = settings({"frozen": False}, training={"epochs": 25})
    train_into(tmp_path / "run", open_dataset(data), config)
    assert evaluate_run(tmp_path / "run")["metrics"]["P@1"] > 0.7
    [best], nothing = load(tmp_path / "run").predict(["word15 word16 word17", ""], k=1)
    assert best.name == "label 5"
    assert len(nothing) == 1


def test_a_frozen_encoder_stays_and_the_layers_above_it_learn(settings: Settings, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text")
    train_into(tmp_path / "run", open_dataset(data), settings({}, training={"epochs": 25}))
    assert evaluate_run(tmp_path / "run")["metrics"]["P@1"] > 0.4  # a random encoder; chance is 0.08
    predictor = load(tmp_path / "run")
    assert not trained(predictor)
    assert predictor.takes == "text"


def test_only_what_is_not_frozen_moves(settings: Settings, encoder: Path, tmp_path: Path) -> None:
    config = settings({"frozen": False, "frozen_layers": 1}, training={"epochs": 1})
    train_into(tmp_path / "run", problems.dataset("text", train=40), config)
    before = encoders.bert().state_dict()
    moved = {
        name
        for name, value in trained(load(tmp_path / "run")).items()
        if not torch.equal(value, before[name.removeprefix("encoder.encoder.")])
    }
    assert moved
    assert all("encoder.layer.1." in name for name in moved)


def test_the_encoders_rate_is_its_own_and_warms_up(settings: Settings, tmp_path: Path) -> None:
    optimizer = {"learning_rate": 0.5, "weight_decay": 0.0, "warmup_steps": 10, "kind": "sgd"}
    config = settings({"frozen": False}, encoder_optimizer=optimizer, training={"epochs": 1})
    made = train_into(tmp_path / "run", problems.dataset("text", train=100), config)
    steps = made.position.step
    assert 1 < steps < 10
    assert made.optimizers._parts["transformer"].rate == pytest.approx(0.5 * steps / 10)
    assert made.optimizers._parts["penultimate"].rate == 0.01


def test_a_rate_of_zero_leaves_the_encoder_as_it_was(settings: Settings, tmp_path: Path) -> None:
    config = settings({"frozen": False}, encoder_optimizer={"learning_rate": 0.0}, training={"epochs": 1})
    train_into(tmp_path / "run", problems.dataset("text", train=40), config)
    before = encoders.bert().state_dict()
    for name, value in trained(load(tmp_path / "run")).items():
        assert torch.equal(value, before[name.removeprefix("encoder.encoder.")]), name


def test_clipping_bounds_the_encoder_as_well(settings: Settings, tmp_path: Path) -> None:
    optimizer = {"kind": "sgd", "learning_rate": 1.0, "weight_decay": 0.0}
    config = settings(
        {"frozen": False},
        encoder_optimizer=optimizer,
        training={"epochs": 1, "batch_size": 64, "clip_norm": 1e-3},
        data={"validation_fraction": 0.0},
    )
    made = train_into(tmp_path / "run", problems.dataset("text", train=60), config)
    assert made.position.step == 1
    before = encoders.bert().state_dict()
    square = sum(
        float((value - before[name.removeprefix("encoder.encoder.")]).double().square().sum())
        for name, value in trained(load(tmp_path / "run")).items()
    )
    assert 0.0 < square**0.5 <= 1.01e-3


# ---- the same bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_goes_on_to_the_same_bits(
    way: str, settings: Settings, tmp_path: Path, at_step: Any
) -> None:
    dataset, config = problems.dataset("text", train=80), settings(WAYS[way], training={"epochs": 2})
    train_into(tmp_path / "whole", dataset, config)
    at_step(7, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        train_into(tmp_path / "stopped", dataset, config)
    torch.manual_seed(99)  # of no account
    train_into(tmp_path / "stopped", dataset, config, resume=True)
    runs.assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_goes_on_without_the_folder_that_it_began_with(
    settings: Settings, encoder: Path, tmp_path: Path, at_step: Any
) -> None:
    moved = shutil.copytree(encoder, tmp_path / "encoder")
    dataset = problems.dataset("text", train=80)
    config = settings({"frozen": False, "path": str(moved)}, training={"epochs": 1})
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        train_into(tmp_path / "run", dataset, config)
    shutil.rmtree(moved)
    train_into(tmp_path / "run", dataset, config, resume=True)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    assert len(load(tmp_path / "elsewhere").predict(["word1"], k=3)[0]) == 3


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_from_its_copy(
    settings: Settings, tmp_path: Path, at_step: Any
) -> None:
    dataset, config = problems.dataset("text", train=80), settings({"frozen": False}, training={"epochs": 1})
    train_into(tmp_path / "whole", dataset, config)

    def die() -> None:
        raise KeyboardInterrupt

    at_step(3, die)
    with pytest.raises(KeyboardInterrupt):
        train_into(tmp_path / "run", dataset, config)
    train_into(tmp_path / "run", dataset, config, resume=True)
    runs.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_that_was_killed_while_it_copied_its_encoder_can_begin(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, config = problems.dataset("text", train=40), settings({}, training={"epochs": 1})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train_into(tmp_path / "run", dataset, config)
    (tmp_path / "run" / ".encoder.tmp").mkdir()  # a kill leaves it
    train_into(tmp_path / "run", dataset, config)
    assert not (tmp_path / "run" / ".encoder.tmp").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_an_encoder_of_the_run_that_is_not_its_own_is_refused(
    file: str, damage: str, settings: Settings, tmp_path: Path
) -> None:
    dataset, config = problems.dataset("text", train=40), settings({}, training={"epochs": 1})
    train_into(tmp_path / "run", dataset, config)
    path = tmp_path / "run" / "encoder" / file
    if damage == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="folder encoder must have the fingerprint"):
        load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="folder encoder must have the fingerprint"):
        train_into(tmp_path / "run", dataset, config, resume=True)


def test_a_run_without_its_encoder_says_so(settings: Settings, tmp_path: Path) -> None:
    dataset, config = problems.dataset("text", train=40), settings({}, training={"epochs": 1})
    train_into(tmp_path / "run", dataset, config)
    shutil.rmtree(tmp_path / "run" / "encoder")
    with pytest.raises(CheckpointError, match="must hold the encoder of the run, found no such folder"):
        load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="must hold the encoder of the run, found no such folder"):
        train_into(tmp_path / "run", dataset, config, resume=True)


# ---- what a run keeps ------------------------------------------------------------------------------------


def test_checkpoints_hold_a_trained_encoder_and_of_a_frozen_one_its_fingerprint(
    settings: Settings, encoder: Path, tmp_path: Path
) -> None:
    for name, way in (("frozen", {}), ("trained", {"frozen": False})):
        train_into(tmp_path / name, problems.dataset("text", train=40), settings(way, training={"epochs": 1}))
        path = CheckpointFolder(tmp_path / name / "checkpoints").latest()
        assert path is not None
        checkpoint = read_checkpoint(path)
        assert any(key.startswith("model.encoder.") for key in checkpoint.tensors) == (name == "trained")
        assert isinstance(checkpoint.metadata["encoder"], str)
        copied = sorted(each.name for each in (tmp_path / name / "encoder").iterdir())
        assert copied == sorted(each.name for each in encoder.iterdir())


def test_evaluation_predicts_what_the_loaded_run_predicts(settings: Settings, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text", train=80)
    for name, way in WAYS.items():
        run = tmp_path / name
        train_into(run, open_dataset(data), settings(way, training={"epochs": 1}))
        test = open_dataset(data).test
        assert test is not None
        assert test.texts is not None
        ranked = load(run).top_labels(list(test.texts), 1)[1][:, 0]
        truth = test.labels.to_scipy()
        hits = np.mean([truth[row, label] > 0 for row, label in enumerate(ranked)])
        assert evaluate_run(run)["metrics"]["P@1"] == pytest.approx(hits)


def test_a_frozen_encoder_reads_each_text_once_whatever_is_trained(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    embed = TransformerEncoder.embed

    def counting(encoder: TransformerEncoder, tokens: TokenRows) -> torch.Tensor:
        read.append(len(tokens))
        return embed(encoder, tokens)

    monkeypatch.setattr(TransformerEncoder, "embed", counting)
    data = open_dataset(problems.write_folder(tmp_path / "data", "text", train=83, test=31))
    for epochs in (1, 3):
        train_into(tmp_path / f"{epochs}", data, settings({}, training={"epochs": epochs}))
        evaluate_run(tmp_path / f"{epochs}")
    assert sum(read) == 83 + 31


# ---- labels' texts ---------------------------------------------------------------------------------------


def with_label_texts(dataset: Dataset) -> Dataset:
    texts = [f"word{3 * label} word{3 * label + 1}" for label in range(dataset.label_count)]
    made = replace(dataset, label_texts=TextColumn.from_strings(texts))
    return replace(made, fingerprint=content_fingerprint(made))


@pytest.mark.parametrize("frozen", [True, False])
def test_label_documents_are_read_by_the_encoder(frozen: bool, settings: Settings, encoder: Path) -> None:
    dataset = with_label_texts(problems.dataset("text", train=50))
    config = settings({"frozen": frozen}, data={"label_documents": True, "validation_fraction": 0.1})
    parts = prepare(dataset, config, encoder=encoder)
    assert len(parts.train.rows) == 45 + dataset.label_count
    assert parts.problem.instances == 50
    assert (
        parts.problem.label_instances.tolist()
        == np.bincount(dataset.train.labels.indices, minlength=dataset.label_count).tolist()
    )
    assert parts.text_encoder is not None
    assert dataset.label_texts is not None
    for batch in parts.train.epoch(0):
        for row, instance in enumerate(batch.instances):
            if instance >= 50:
                label = int(instance) - 50
                assert batch.labels.take(np.array([row])).indices.tolist() == [label]
                wanted = parts.text_encoder.rows(dataset.label_texts.take(np.array([label])))
                if isinstance(batch.features, TokenRows):
                    assert isinstance(wanted, TokenRows)
                    assert batch.features.take(np.array([row])).ids.tolist() == wanted.ids.tolist()
                else:
                    np.testing.assert_allclose(batch.features[row], wanted[0], atol=0.01)  # type: ignore[index]


def test_the_paper_protocol_validates_on_the_test_texts(settings: Settings, tmp_path: Path) -> None:
    for name, way in (("frozen", {}), ("trained", {"frozen": False})):
        config = settings(way, training={"epochs": 1, "paper_protocol": True})
        data = problems.write_folder(tmp_path / f"{name} data", "text", train=40)
        train_into(tmp_path / name, open_dataset(data), config)
        recorded = runs.metrics(tmp_path / name)[0]["validation"]["P@1"]
        assert evaluate_run(tmp_path / name)["metrics"]["P@1"] == pytest.approx(recorded)


# ---- words beside the encoder ----------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [True, False])
def test_direct_connections_and_similarity_see_the_words_beside_the_encoder(
    frozen: bool, settings: Settings, encoder: Path
) -> None:
    dataset = problems.dataset("text", train=50)
    words = prepare(dataset, problems.config(**WORDS))
    parts = prepare(dataset, settings({"frozen": frozen}, **WORDS), encoder=encoder)
    assert parts.problem.feature_count == encoders.HIDDEN
    assert parts.problem.words == parts.problem.word_count == words.problem.feature_count
    assert parts.direct is not None
    assert words.direct is not None
    assert np.array_equal(parts.direct.indices, words.direct.indices)
    for batch in parts.train.epoch(0):
        assert batch.words is not None
        assert isinstance(words.train.features, type(batch.words))
        wanted = words.train.features.take(batch.instances)
        assert np.array_equal(batch.words.to_scipy().toarray(), wanted.to_scipy().toarray())


@pytest.mark.parametrize("frozen", [True, False])
def test_a_model_with_words_beside_its_encoder_goes_on_evaluates_and_predicts(
    frozen: bool, settings: Settings, tmp_path: Path, at_step: Any
) -> None:
    dataset = with_label_texts(open_dataset(problems.write_folder(tmp_path / "data", "text", train=80)))
    config = settings(
        {"frozen": frozen},
        **WORDS,
        data={"label_documents": True, "skip_filter_pairs": True},
        training={"epochs": 3},
    )
    train_into(tmp_path / "whole", dataset, config)
    at_step(7, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        train_into(tmp_path / "run", dataset, config)
    train_into(tmp_path / "run", dataset, config, resume=True)
    runs.assert_same_run(tmp_path / "run", tmp_path / "whole")

    test = dataset.test
    assert test is not None
    assert test.texts is not None
    ranked = load(tmp_path / "run").top_labels(list(test.texts), 1)[1][:, 0]
    hits = np.mean([test.labels.to_scipy()[row, label] > 0 for row, label in enumerate(ranked)])
    assert hits > 0.7
    assert evaluate_run(tmp_path / "run")["metrics"]["P@1"] == pytest.approx(hits)


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_data_set_without_texts_is_refused(kind: problems.Kind, settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"transformer needs texts, found {kind} features"):
        train_into(tmp_path / "run", problems.dataset(kind), settings({}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"encoder": {"kind": "transformer"}}, "path must name an encoder"),
        ({"encoder": {"path": "x"}}, "path needs kind = transformer, found features"),
        ({"encoder": {"kind": "transformer", "path": "x", "frozen_layers": 2}}, "needs frozen = false"),
        ({"encoder": {"kind": "bert"}}, "'features' or 'transformer'"),
        ({"encoder": {"kind": "transformer", "path": "x", "max_length": 0}}, "max_length"),
        ({"encoder_optimizer": {"kind": "label_adam"}}, "sgd, momentum or adam"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(sections)


def test_a_profile_of_sizes_says_that_a_transformer_needs_texts(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_config(settings({})))
    with pytest.raises(ConfigError, match="a transformer needs a data set of texts, found sizes; name one"):
        profile(Sizes(100, 8, 0, 3, 50), config=tmp_path / "config.toml")


def test_naming_the_optimizer_keeps_the_encoders_own_rate() -> None:
    config = load_config({"encoder_optimizer": {"kind": "sgd"}})
    assert config.encoder_optimizer.learning_rate == 5e-5


@pytest.mark.parametrize("broken", ["path", "folder", "tokenizer", "length"])
def test_the_command_line_names_what_is_wrong_and_writes_nothing(
    broken: str, settings: Settings, encoder: Path, tmp_path: Path
) -> None:
    data = problems.write_folder(tmp_path / "data", "text", train=40)
    path, length, words = str(encoder), 12, ""
    if broken == "path":
        path, words = str(tmp_path / "no such folder"), "must be a folder with an encoder, found nothing"
    elif broken == "folder":
        path, words = str(data), "must hold config.json and weights in safetensors"
    elif broken == "tokenizer":
        path, words = str(tmp_path / "encoder"), "must have a pad token, found none"
        encoders.write(tmp_path / "encoder")
        encoders.tokenizer(pad=None).save_pretrained(tmp_path / "encoder")
    else:
        length, words = 99, "encoder.max_length: must be at most the 24 positions"
    (tmp_path / "config.toml").write_text(dump_config(problems.config()))
    result = CliRunner().invoke(
        main,
        [
            *("train", str(data), "--out", str(tmp_path / "run"), "--config", str(tmp_path / "config.toml")),
            *("--set", "encoder.kind=transformer", "--set", f"encoder.path={path}"),
            *("--set", f"encoder.max_length={length}"),
        ],
    )
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert {each.name for each in (tmp_path / "run").iterdir()} == {".lock"}


def test_the_command_line_trains_evaluates_and_predicts(encoder: Path, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text", train=60)
    config = problems.config(training={"epochs": 1})
    (tmp_path / "config.toml").write_text(dump_config(config))
    run = str(tmp_path / "run")
    overrides = ("encoder.kind=transformer", f"encoder.path={encoder}", "encoder.max_length=12")
    options = [part for each in overrides for part in ("--set", each)]

    def call(*arguments: str, stdin: bytes = b"") -> str:
        result = CliRunner().invoke(main, arguments, input=stdin)
        assert result.exit_code == 0, result.stderr or result.exception
        return result.stdout

    call("train", str(data), "--out", run, "--config", str(tmp_path / "config.toml"), *options)
    assert 0.0 <= json.loads(call("eval", run, "--json"))["metrics"]["P@1"] <= 1.0
    lines = call("predict", run, "-k", "2", stdin=b'word1 word2\n{"title": "word4"}\n\n').splitlines()
    assert [len(json.loads(line)["labels"]) for line in lines] == [2, 2, 2]
