"""What a trainer reads: the hold-out, TF-IDF of training texts alone, the test set nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import scipy.sparse

from xmlc.data import CsrRows, Dataset, TextColumn
from xmlc.data.text import TextVectorizer
from xmlc.errors import ConfigError, DataError
from xmlc.training.prepare import Prepared, prepare


def prepared(dataset: Dataset, **sections: dict[str, Any]) -> Prepared:
    return prepare(dataset, problems.config(**sections))


def trained_rows(parts: Prepared, epochs: int = 3) -> set[int]:
    return {
        int(row) for epoch in range(epochs) for batch in parts.train.epoch(epoch) for row in batch.instances
    }


@pytest.mark.parametrize("kind", problems.KINDS)
def test_held_out_instances_are_never_in_a_training_batch(kind: problems.Kind) -> None:
    parts = prepared(problems.dataset(kind), data={"validation_fraction": 0.25})
    held_out = set(parts.validation.rows.tolist())
    assert len(held_out) == 50
    assert trained_rows(parts) == set(range(200)) - held_out


def test_nothing_is_held_out_on_request() -> None:
    parts = prepared(problems.dataset(), data={"validation_fraction": 0.0})
    assert len(parts.validation.rows) == 0
    assert trained_rows(parts) == set(range(200))


def test_the_seed_decides_what_is_held_out() -> None:
    one, again, other = (
        prepared(problems.dataset(), training={"seed": seed}).validation.rows.tolist() for seed in (1, 1, 2)
    )
    assert one == again != other


def test_a_share_of_the_training_instances_is_trained_on_and_the_same_held_out() -> None:
    share = {"validation_fraction": 0.25, "training_fraction": 0.3}
    dataset = problems.dataset()
    whole = prepared(dataset, data={"validation_fraction": 0.25})
    parts = prepared(dataset, data=share)
    assert len(parts.train.rows) == 45 and (np.diff(parts.train.rows) > 0).all()
    assert trained_rows(parts) == set(parts.train.rows.tolist()) < set(whole.train.rows.tolist())
    assert np.array_equal(parts.validation.rows, whole.validation.rows)
    assert np.array_equal(parts.problem.label_instances, whole.problem.label_instances)
    other = prepared(dataset, data=share, training={"seed": 5})
    assert set(other.train.rows.tolist()) != set(parts.train.rows.tolist())
    least = prepared(dataset, data={"training_fraction": 1e-9})
    assert len(least.train.rows) == 1


def test_tf_idf_is_fitted_on_the_texts_that_are_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fit = TextVectorizer.fit.__func__  # type: ignore[attr-defined]

    def recording(cls: Any, texts: Iterator[str], config: Any) -> TextVectorizer:
        seen.extend(texts)
        return fit(cls, seen, config)

    monkeypatch.setattr(TextVectorizer, "fit", classmethod(recording))
    dataset = problems.dataset("text", train=100)
    parts = prepared(dataset, data={"validation_fraction": 0.3})
    assert dataset.train.texts is not None
    texts = list(dataset.train.texts)
    assert seen == [texts[row] for row in parts.train.rows]
    assert len(seen) == 70


def test_a_word_of_the_held_out_texts_alone_is_no_feature() -> None:
    dataset = problems.dataset("text", train=100)
    held_out = prepared(dataset).validation.rows
    assert dataset.train.texts is not None
    texts = [f"{text} secret" if row in held_out else text for row, text in enumerate(dataset.train.texts)]
    marked = replace(
        dataset, fingerprint="marked", train=replace(dataset.train, texts=TextColumn.from_strings(texts))
    )
    vectorizer = prepared(marked).vectorizer
    assert vectorizer is not None
    assert "secret" not in list(vectorizer.blocks["words"].terms)
    assert vectorizer.transform(["secret"]).offsets.tolist() == [0, 0]


def test_labels_are_counted_before_any_are_held_out() -> None:
    """Propensities are a fact of the data set, not of the split."""
    dataset = problems.dataset()
    counts = np.bincount(dataset.train.labels.indices, minlength=dataset.label_count)
    problem = prepared(dataset, data={"validation_fraction": 0.5}).problem
    assert problem.label_instances.tolist() == counts.tolist()
    assert problem.instances == 200


@pytest.mark.parametrize("kind", problems.KINDS)
def test_under_the_paper_protocol_all_is_trained_on_and_the_test_set_validates(kind: problems.Kind) -> None:
    dataset = problems.dataset(kind)
    assert dataset.test is not None
    parts = prepared(dataset, training={"paper_protocol": True})
    assert trained_rows(parts) == set(range(200))
    assert len(parts.validation.rows) == 50
    assert parts.validation.labels is dataset.test.labels


def test_the_paper_protocol_needs_a_test_set() -> None:
    with pytest.raises(DataError, match="the paper protocol chooses on the test set, found none"):
        prepared(replace(problems.dataset(), test=None), training={"paper_protocol": True})


def with_filter(dataset: Dataset) -> Dataset:
    """Mask label 3 everywhere."""

    def pairs(instances: int) -> CsrRows:
        return CsrRows(np.arange(instances + 1), np.full(instances, 3, np.int32), None, dataset.label_count)

    assert dataset.test is not None
    return replace(
        dataset,
        train=replace(dataset.train, filter_pairs=pairs(dataset.train.instances)),
        test=replace(dataset.test, filter_pairs=pairs(dataset.test.instances)),
    )


def test_the_filter_of_the_held_out_instances_goes_with_them() -> None:
    parts = prepared(with_filter(problems.dataset()))
    assert parts.validation_filter is not None
    assert parts.validation_filter.rows == len(parts.validation.rows)


def test_the_paper_protocol_masks_by_the_filter_of_the_test_set() -> None:
    parts = prepared(with_filter(problems.dataset()), training={"paper_protocol": True})
    assert parts.validation_filter is not None
    assert parts.validation_filter.rows == 50


def test_masking_can_be_switched_off() -> None:
    parts = prepared(with_filter(problems.dataset()), data={"mask_filter_pairs": False})
    assert parts.validation_filter is None


def test_training_without_a_single_label_is_refused() -> None:
    nothing = scipy.sparse.csr_array((20, 4))
    dataset = Dataset.from_arrays(np.ones((20, 3), np.float32), nothing, name="mine")
    with pytest.raises(DataError, match="mine: training needs at least one instance with a label, found 20"):
        prepared(dataset)


def test_training_without_a_single_feature_is_refused() -> None:
    labels = scipy.sparse.csr_array(np.ones((20, 4)))
    dataset = Dataset.from_arrays(np.ones((20, 0), np.float32), labels, name="mine")
    with pytest.raises(
        DataError, match="mine: training needs at least one feature, found dense features of 0"
    ):
        prepared(dataset)


def test_texts_are_vectorised_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = problems.dataset("text", train=60)
    first = prepare(dataset, problems.config(), tmp_path)
    monkeypatch.setattr(TextVectorizer, "fit", None)
    again = prepare(dataset, problems.config(), tmp_path)
    assert isinstance(first.train.features, CsrRows)
    assert isinstance(again.train.features, CsrRows)
    np.testing.assert_array_equal(first.train.features.indices, again.train.features.indices)


def with_documents(kind: problems.Kind) -> Dataset:
    """Labels with a text (or features) each, but label 3 an empty one where that is possible."""
    made = problems.dataset(kind)
    if kind == "text":
        texts = ["" if label == 3 else f"word{3 * label} own{label}" for label in range(problems.LABELS)]
        return replace(made, label_texts=TextColumn.from_strings(texts))
    if kind == "dense":
        return replace(made, label_features=np.eye(problems.LABELS, problems.HIDDEN, dtype=np.float32))
    rows = scipy.sparse.lil_array((problems.LABELS, problems.FEATURES), dtype=np.float32)
    for label in range(problems.LABELS):
        if label != 3:
            rows[label, 3 * label] = 2.0
    return replace(made, label_features=CsrRows.from_scipy(rows, "labels"))


@pytest.mark.parametrize("kind", problems.KINDS)
def test_label_documents_are_trained_on_with_their_own_label(kind: problems.Kind) -> None:
    dataset = with_documents(kind)
    parts = prepared(dataset, data={"label_documents": True, "validation_fraction": 0.25})
    held_out = set(parts.validation.rows.tolist())
    assert max(held_out) < 200
    documents = set(range(200, 200 + problems.LABELS)) - (set() if kind == "dense" else {203})
    assert trained_rows(parts) == (set(range(200)) - held_out) | documents
    for batch in parts.train.epoch(0):
        for row, instance in enumerate(batch.instances.tolist()):
            labels = batch.labels.take(np.array([row])).indices.tolist()
            if instance >= 200:
                assert labels == [instance - 200]
            else:
                assert labels == dataset.train.labels.take(np.array([instance])).indices.tolist()
    assert parts.problem.label_instances.sum() == len(dataset.train.labels.indices), "propensities"
    assert parts.problem.instances == 200


def test_the_words_of_label_documents_are_in_the_vocabulary_and_reach_the_encoder() -> None:
    parts = prepared(with_documents("text"), data={"label_documents": True})
    assert parts.vectorizer is not None
    own = parts.vectorizer.transform(["own7"])
    assert len(own.indices) == 1
    features = parts.train.features
    assert isinstance(features, CsrRows)
    assert own.indices[0] in features.take(np.array([207])).indices
    without = prepared(with_documents("text"))
    assert without.vectorizer is not None
    assert len(without.vectorizer.transform(["own7"]).indices) == 0


def test_label_features_are_stacked_below_those_of_the_instances() -> None:
    dataset = with_documents("sparse")
    parts = prepared(dataset, data={"label_documents": True})
    features = parts.train.features
    assert isinstance(features, CsrRows)
    assert features.take(np.array([205])).indices.tolist() == [15]
    assert features.take(np.array([205])).values == [2.0]
    dense = prepared(with_documents("dense"), data={"label_documents": True}).train.features
    assert isinstance(dense, np.ndarray)
    assert dense[201].argmax() == 1


@pytest.mark.parametrize("kind", problems.KINDS)
def test_label_documents_need_a_text_or_features(kind: problems.Kind) -> None:
    with pytest.raises(DataError, match=r"toy-.*label_documents needs .* of the labels, found none"):
        prepared(problems.dataset(kind), data={"label_documents": True})


def test_label_features_of_another_space_are_refused() -> None:
    dataset = with_documents("sparse")
    wider = CsrRows.from_scipy(scipy.sparse.eye_array(problems.LABELS, 200), "labels")
    with pytest.raises(DataError, match=r"found sparse ones of 96 columns and sparse ones of 200 columns"):
        prepared(replace(dataset, label_features=wider), data={"label_documents": True})
    dense = np.zeros((problems.LABELS, problems.FEATURES), np.float32)
    with pytest.raises(DataError, match=r"found sparse ones of 96 columns and dense ones of 96 columns"):
        prepared(replace(dataset, label_features=dense), data={"label_documents": True})


# ---- direct connections ----------------------------------------------------------------------------------

DIRECT = {"direct_fan_in": 6, "direct_max_frequency": 1.0}


@pytest.mark.parametrize("kind", ["text", "sparse"])
def test_direct_connections_start_at_the_words_of_the_prototypes(kind: problems.Kind) -> None:
    """Every label has three words of its own; of six connections, these three are the strongest."""
    parts = prepared(problems.dataset(kind), model=DIRECT)
    assert parts.direct is not None
    assert parts.direct.indices.shape == (problems.LABELS, 6)
    features = parts.train.features
    assert isinstance(features, CsrRows)
    assert features.rows == 200
    if kind == "sparse":
        own = [set(row[:3]) for row in parts.direct.indices.tolist()]
        assert own == [{3 * label, 3 * label + 1, 3 * label + 2} for label in range(problems.LABELS)]


def test_held_out_instances_choose_no_direct_connections() -> None:
    """Each instance has a word that no other has; words of held-out instances must connect to no label."""
    matrix = scipy.sparse.csr_array(np.eye(40, dtype=np.float32))
    labels = scipy.sparse.csr_array((np.ones(40), np.arange(40) % 4, np.arange(41)), shape=(40, 4))
    parts = prepared(
        Dataset.from_arrays(matrix, labels, name="own words"),
        model=DIRECT | {"direct_fan_in": 12},
        data={"validation_fraction": 0.25},
    )
    assert parts.direct is not None
    connected = set(parts.direct.indices.ravel().tolist()) - {-1}
    assert connected == set(range(40)) - set(parts.validation.rows.tolist())


def test_label_texts_choose_direct_connections_and_are_no_instances() -> None:
    data = problems.dataset("text")
    texts = TextColumn.from_strings(f"unheard{label}" for label in range(problems.LABELS))
    parts = prepared(replace(data, label_texts=texts, fingerprint="texts"), model=DIRECT)
    assert parts.direct is not None
    assert parts.vectorizer is not None
    assert len(np.unique(parts.direct.indices[:, 0])) == problems.LABELS  # its text's word outweighs all
    assert trained_rows(parts) <= set(range(200))


def test_direct_connections_refuse_dense_features() -> None:
    with pytest.raises(
        ConfigError, match=r"direct_fan_in and similarity need texts or sparse features, found dense"
    ):
        prepared(problems.dataset("dense"), model=DIRECT)


def test_similarity_holds_label_texts_and_the_instances_trained_on() -> None:
    data = problems.dataset("text")
    texts = TextColumn.from_strings(f"unheard{label}" for label in range(problems.LABELS))
    parts = prepared(
        replace(data, label_texts=texts, fingerprint="texts"),
        data={"validation_fraction": 0.25},
        similarity={"text_weight": 0.5, "neighbour_weight": 0.5},
    )
    assert parts.similarity is not None
    assert parts.direct is None
    assert parts.vectorizer is not None
    offsets = parts.similarity.offsets(parts.vectorizer.transform(TextColumn.from_strings(["unheard3"])))
    assert (offsets.label.tolist(), offsets.value.tolist()) == ([3], [0.5])
    assert parts.similarity.labels.rows == 150
    assert trained_rows(parts) <= set(range(200))


def test_similarity_refuses_what_has_no_words() -> None:
    with pytest.raises(ConfigError, match=r"similarity\.text_weight needs texts of the labels, found none"):
        prepared(problems.dataset("text"), similarity={"text_weight": 0.5})
    with pytest.raises(ConfigError, match=r"and similarity need texts or sparse features, found dense"):
        prepared(problems.dataset("dense"), similarity={"neighbour_weight": 0.5})


# ---- pairs that are skipped in training ------------------------------------------------------------------


def test_filter_pairs_can_be_skipped_in_training_alone() -> None:
    dataset = with_filter(problems.dataset())
    parts = prepared(dataset, data={"skip_filter_pairs": True})
    assert (dataset.train.labels.indices == 3).any()
    for batch in parts.train.epoch(0):
        assert 3 not in batch.labels.indices
        assert batch.skipped is not None
        assert batch.skipped.indices.tolist() == [3] * len(batch.instances)
    truth = dataset.train.labels.take(parts.validation.rows)
    assert parts.validation.labels.take(parts.validation.rows).indices.tolist() == truth.indices.tolist()
    assert parts.problem.label_instances[3] > 0


def test_without_asking_filter_pairs_are_trained_on() -> None:
    parts = prepared(with_filter(problems.dataset()))
    assert all(batch.skipped is None for batch in parts.train.epoch(0))


def test_label_documents_keep_the_label_that_instances_skip() -> None:
    dataset = with_filter(problems.dataset("text"))
    texts = TextColumn.from_strings([f"word{3 * label}" for label in range(dataset.label_count)])
    dataset = replace(dataset, label_texts=texts, fingerprint="label texts and filter")
    parts = prepared(dataset, data={"skip_filter_pairs": True, "label_documents": True})
    documents = 0
    for batch in parts.train.epoch(0):
        assert batch.skipped is not None
        for row, instance in enumerate(batch.instances):
            chosen = np.array([row])
            is_document = instance >= dataset.train.instances
            documents += is_document
            assert batch.skipped.take(chosen).indices.tolist() == ([] if is_document else [3])
            if is_document:
                assert batch.labels.take(chosen).indices.tolist() == [instance - dataset.train.instances]
    assert documents == dataset.label_count
