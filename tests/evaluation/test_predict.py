"""A loaded run: what it takes, what it refuses, and checkpoints that cannot be trusted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import scipy.sparse

import xmlc
from xmlc.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from xmlc.data import Dataset, open_dataset
from xmlc.errors import CheckpointError, ConfigError, DataError
from xmlc.evaluation import Prediction, Predictor, load, predict
from xmlc.training.trainer import train_into


def inputs(kind: problems.Kind, instances: int = 30) -> Any:
    return problems.split(kind, instances, 5).features


@pytest.mark.parametrize("kind", problems.KINDS)
def test_predictions_are_the_best_labels_with_names_and_scores(
    kind: problems.Kind, predictors: dict[str, Predictor]
) -> None:
    predictor = predictors[kind]
    assert predictor.takes == kind
    part = problems.split(kind, 30, 5)
    predictions = predictor.predict(part.features, k=3)
    scores, labels = predictor.top_labels(part.features, 3)
    assert predictions == [
        [
            Prediction(label, f"label {label}", score)
            for label, score in zip(row_labels, row_scores, strict=True)
        ]
        for row_labels, row_scores in zip(labels.tolist(), scores.tolist(), strict=True)
    ]
    assert (np.diff(scores, axis=1) <= 0).all()
    hits = part.labels.toarray()[np.arange(30), labels[:, 0]] > 0
    assert hits.mean() > 0.7


@pytest.mark.parametrize("kind", problems.KINDS)
def test_a_loaded_run_is_the_model_that_was_trained(kind: problems.Kind, tmp_path: Path) -> None:
    """Also without its data: all it needs is in the checkpoint. It has no use for the optimizer's state."""
    data = problems.write_folder(tmp_path / "toy", kind)
    trained = train_into(tmp_path / "run", open_dataset(data), problems.config(training={"epochs": 2}))
    shutil.rmtree(data)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    loaded = load(tmp_path / "moved", "latest")
    weights = {name: value for name, value in trained.model.tensors().items() if ".state." not in name}
    assert loaded.model.tensors().keys() == weights.keys() < trained.model.tensors().keys()
    for name, tensor in loaded.model.tensors().items():
        assert tensor.equal(weights[name]), name
    assert len(loaded.predict(inputs(kind))) == 30


@pytest.mark.parametrize("direct", [0, 4])
@pytest.mark.parametrize("kind", ["text", "sparse"])
def test_a_loaded_run_ranks_with_its_similarity(kind: problems.Kind, direct: int, tmp_path: Path) -> None:
    """A trained model ranks alike with and without; what it adds is what stands in the checkpoint."""
    data = open_dataset(problems.write_folder(tmp_path / "toy", kind))
    settings = {"training": {"epochs": 1}, "model": {"direct_fan_in": direct}}
    plain = train_into(tmp_path / "plain", data, problems.config(**settings))
    similar = train_into(
        tmp_path / "run", data, problems.config(similarity={"neighbour_weight": 3.0}, **settings)
    )
    for name, tensor in plain.model.tensors().items():
        assert tensor.equal(similar.model.tensors()[name]), f"{name}: trained differently"
    trained, loaded = similar.model, load(tmp_path / "run", "latest")
    assert loaded.model.similarity is not None
    features = loaded.features(inputs(kind))
    offsets = loaded.model.similarity.offsets(features)  # type: ignore[arg-type]
    scores, labels = loaded.top_labels(inputs(kind), problems.LABELS)
    before, labels_before = load(tmp_path / "plain", "latest").top_labels(inputs(kind), problems.LABELS)
    expected = np.zeros((30, problems.LABELS))
    np.put_along_axis(expected, labels_before, before, 1)
    np.add.at(expected, (offsets.instance.numpy(), offsets.label.numpy()), offsets.value.numpy())
    found = np.zeros((30, problems.LABELS))
    np.put_along_axis(found, labels, scores, 1)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert trained.similarity is not None
    assert trained.similarity.offsets(features).value.equal(offsets.value)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", problems.KINDS)
def test_more_labels_than_there_are_gives_all_of_them(
    kind: problems.Kind, predictors: dict[str, Predictor]
) -> None:
    (row, *_) = predictors[kind].predict(inputs(kind), k=10**9)
    assert sorted(prediction.label for prediction in row) == list(range(problems.LABELS))


@pytest.mark.parametrize("k", [0, -3, 2.5, "x", None])
def test_less_than_one_label_is_refused(k: Any, predictors: dict[str, Predictor]) -> None:
    with pytest.raises(DataError, match=f"k must be a whole number, at least 1, found {k!r}"):
        predictors["text"].predict(["word1"], k=k)


@pytest.mark.parametrize("kind", problems.KINDS)
def test_no_instances_give_no_predictions(kind: problems.Kind, predictors: dict[str, Predictor]) -> None:
    assert predictors[kind].predict(inputs(kind)[:0], k=3) == []


def test_more_instances_than_a_batch_keep_their_order(predictors: dict[str, Predictor]) -> None:
    texts = inputs("text", 600)
    _, labels = predictors["text"].top_labels(texts, 2)
    for rows in (slice(255, 258), slice(599, 600)):
        np.testing.assert_array_equal(predictors["text"].top_labels(texts[rows], 2)[1], labels[rows])


# ---- texts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "  ", "!?", "unheardof", "日本語", "word0 " * 10_000, "a\x00b"])
def test_any_text_gets_predictions(text: str, predictors: dict[str, Predictor]) -> None:
    (row,) = predictors["text"].predict([text], k=4)
    assert len(row) == 4
    assert all(np.isfinite(prediction.score) for prediction in row)


def test_a_text_without_known_words_scores_like_an_empty_one(predictors: dict[str, Predictor]) -> None:
    one, other = predictors["text"].predict(["", "unheardof"], k=4)
    assert one == other


def test_texts_may_come_in_any_container(predictors: dict[str, Predictor]) -> None:
    """A generator once gave no prediction: the check of its items had used it up."""
    predictor, texts = predictors["text"], inputs("text")
    expected = predictor.predict(texts)
    for container in (tuple(texts), np.array(texts), (text for text in texts)):
        assert predictor.predict(container) == expected


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("one text", "found str; pass a list"),
        (None, "found NoneType; pass a list"),
        (5, "found int; pass a list"),
        (["good", 5], "found int in row 1"),
        ({5: "text"}, "found int in row 0"),
        ([b"bytes"], "found bytes in row 0"),
        (["\ud800"], "must be valid Unicode"),
        (np.ones((2, 3)), "found ndarray in row 0"),
        (scipy.sparse.csr_array((2, 3)), "predict: texts must be strings"),
    ],
)
def test_what_is_no_list_of_texts_is_refused(
    wrong: Any, found: str, predictors: dict[str, Predictor]
) -> None:
    with pytest.raises(DataError, match=found):
        predictors["text"].predict(wrong)


# ---- features --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [scipy.sparse.csr_array, scipy.sparse.coo_matrix, scipy.sparse.lil_array])
def test_sparse_features_may_have_any_format(form: Any, predictors: dict[str, Predictor]) -> None:
    features = inputs("sparse")
    assert predictors["sparse"].predict(form(features)) == predictors["sparse"].predict(features)


@pytest.mark.parametrize("form", [np.float64, np.float16, "list"])
def test_dense_features_may_have_any_real_form(form: Any, predictors: dict[str, Predictor]) -> None:
    features = np.round(inputs("dense"), 1).astype(np.float16)
    given = features.tolist() if form == "list" else features.astype(form)
    expected = predictors["dense"].predict(features.astype(np.float32))
    assert predictors["dense"].predict(given) == expected


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (np.ones((2, 31), np.float32), r"an array \[instance, 32\], found ndarray \[2, 31\]"),
        (np.ones(32, np.float32), r"found ndarray \[32\]"),
        ([[1.0]], r"found list \[\]"),
        (scipy.sparse.csr_array((2, 32)), r"found csr_array \[2, 32\]"),
        (["text"], "found list"),
        (np.full((2, 32), np.nan), r"must be finite in float32, found nan in row 0, column 0"),
        (np.full((2, 32), 1e300), r"must be finite in float32, found 1e\+300"),
        (np.full((2, 32), "x"), "must be a real matrix"),
        (np.full((2, 32), 1j), "must be a real matrix"),
    ],
)
def test_dense_features_that_do_not_fit_are_refused(
    wrong: Any, found: str, predictors: dict[str, Predictor]
) -> None:
    with pytest.raises(DataError, match=found):
        predictors["dense"].predict(wrong)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        (scipy.sparse.csr_array((2, 95)), r"a sparse matrix \[instance, 96\], found csr_array \[2, 95\]"),
        (scipy.sparse.coo_array(np.ones(96)), r"found coo_array \[96\]"),
        (np.ones((2, 96)), r"found ndarray \[2, 96\]"),
        (["text"], "found list"),
        (scipy.sparse.csr_array(np.full((1, 96), np.nan)), "must be finite in float32, found nan in row 0"),
        (scipy.sparse.csr_array(np.full((1, 96), 1j)), "must be real numbers"),
    ],
)
def test_sparse_features_that_do_not_fit_are_refused(
    wrong: Any, found: str, predictors: dict[str, Predictor]
) -> None:
    with pytest.raises(DataError, match=found):
        predictors["sparse"].predict(wrong)


# ---- names -----------------------------------------------------------------------------------------------


def test_a_label_without_a_name_is_called_by_its_number(tmp_path: Path) -> None:
    part = problems.split("dense", 30)
    dataset = Dataset.from_arrays(part.features, part.labels)
    train_into(tmp_path / "run", dataset, problems.config(training={"epochs": 1}))
    ((best,),) = load(tmp_path / "run").predict(part.features[:1], k=1)
    assert best.name == str(best.label)


# ---- runs and checkpoints --------------------------------------------------------------------------------


def test_xmlc_load_is_load(runs_by_kind: dict[str, Path]) -> None:
    assert xmlc.load(runs_by_kind["text"]).predict(["word1"]) == load(runs_by_kind["text"]).predict(["word1"])


def test_a_device_that_is_none_is_refused(runs_by_kind: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="device must be cpu or cuda, found 'gpu'; choose one"):
        load(runs_by_kind["sparse"], device="gpu")


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be the folder of a run, found no checkpoints in it"):
        load(tmp_path)


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="the run has no checkpoint yet"):
        load(tmp_path)


@pytest.fixture
def copied(runs_by_kind: dict[str, Path], tmp_path: Path) -> Path:
    shutil.copytree(runs_by_kind["text"], tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "whole")
    return tmp_path / "run"


def checkpoint_of(run: Path) -> Path:
    path = CheckpointFolder(run / "checkpoints").best()
    assert path is not None
    return path


def test_without_a_best_checkpoint_the_latest_is_taken(copied: Path) -> None:
    (copied / "checkpoints" / "best").unlink()
    assert load(copied).metadata["position"]["epoch"] == 8


def test_a_flipped_bit_is_refused(copied: Path) -> None:
    (data,) = checkpoint_of(copied).glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="must have the checksum of manifest"):
        load(copied)


def test_a_file_cut_short_is_refused(copied: Path) -> None:
    (data,) = checkpoint_of(copied).glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="it was cut short or added to"):
        load(copied)


@pytest.mark.parametrize("part", ["config", "problem", "tensor"])
def test_a_checkpoint_of_another_program_is_refused(part: str, copied: Path) -> None:
    path = checkpoint_of(copied)
    old = read_checkpoint(path)
    metadata, tensors = json.loads(json.dumps(dict(old.metadata))), dict(old.tensors)
    if part == "tensor":
        del tensors["model.output.weight"]
    else:
        metadata[part] = "another"
    write_checkpoint(path, tensors, metadata)
    with pytest.raises(CheckpointError, match="must hold a model of this version, found"):
        load(copied)


def changed(run: Path, place: tuple[str, ...], value: Any) -> None:
    """Put a value into the metadata of the best checkpoint, under valid checksums."""
    old = read_checkpoint(checkpoint_of(run))
    metadata = json.loads(json.dumps(dict(old.metadata)))
    target = metadata
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    write_checkpoint(checkpoint_of(run), old.tensors, metadata)


@pytest.mark.parametrize(
    ("place", "tensor"),
    [
        (("config", "model", "width"), "penultimate.weight"),
        (("config", "model", "hidden"), "encoder.embedding"),
        (("problem", "label_count"), "output.indices"),
        (("problem", "feature_count"), "encoder.embedding"),
    ],
)
def test_no_memory_is_taken_for_more_than_the_checkpoint_holds(
    place: tuple[str, ...], tensor: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(copied, place, 10**9)
    monkeypatch.setattr(predict, "Model", None)  # it must not come to that
    with pytest.raises(CheckpointError, match=rf"{tensor} must have the shape"):
        load(copied)


def leaves(value: Any, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, dict):
        return [place]
    return [leaf for key, inner in value.items() for leaf in leaves(inner, (*place, key))]


def test_any_value_in_the_metadata_loads_or_is_refused(copied: Path) -> None:
    metadata = dict(read_checkpoint(checkpoint_of(copied)).metadata)
    places = [place for place in leaves(metadata) if place[0] in ("config", "problem")]
    assert len(places) > 60
    refused = 0
    for place in places:
        for value in (None, -1, 2.5, 10**30, "x", [], [[]], {"x": 1}, True):
            shutil.rmtree(checkpoint_of(copied).parent)
            shutil.copytree(copied.parent / "whole", copied / "checkpoints")
            changed(copied, place, value)
            try:
                load(copied)
            except xmlc.errors.XmlcError as error:
                refused += 1
                assert len(str(error)) < 2000
    assert refused > 5 * len(places)


def test_settings_of_another_version_are_refused_by_key(copied: Path) -> None:
    path = checkpoint_of(copied)
    old = read_checkpoint(path)
    metadata = json.loads(json.dumps(dict(old.metadata)))
    metadata["config"]["model"]["depth"] = 7
    write_checkpoint(path, old.tensors, metadata)
    with pytest.raises(xmlc.errors.ConfigError, match=r"its config: unknown key model\.depth"):
        load(copied)
