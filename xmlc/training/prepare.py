"""From a data set and a config to the streams that training reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmlc.config import Config
from xmlc.data import Dataset
from xmlc.data.batches import BatchStream, holdout
from xmlc.data.dataset import Features, feature_columns
from xmlc.data.features import open_text_features
from xmlc.data.rows import CsrRows, Int64, concatenate_rows
from xmlc.data.text import TextVectorizer
from xmlc.errors import ConfigError, DataError
from xmlc.evaluation.evaluator import BATCH
from xmlc.memory.plan import Batches
from xmlc.nn import Problem, Similarity
from xmlc.sparsity import DirectStart, direct_connectivity


@dataclass(frozen=True)
class Prepared:
    """What a trainer reads."""

    problem: Problem
    train: BatchStream
    validation: BatchStream
    """The held-out instances; under the paper protocol the test set; empty where nothing is held out."""
    validation_filter: CsrRows | None
    """[instance of the validation stream, label]"""
    vectorizer: TextVectorizer | None
    direct: DirectStart | None
    """Where the model has direct connections: those it starts with."""
    similarity: Similarity | None
    """Where likeness of texts is added to the logits: the texts."""


def prepare(dataset: Dataset, config: Config, cache: Path | None = None) -> Prepared:
    """Hold out validation instances, fit TF-IDF on the others, and open the streams.

    Raises:
        DataError: There is nothing to train on, or the paper protocol finds no test set.
    """
    split, training = dataset.train, config.training
    if split.labels.rows == 0 or len(split.labels.indices) == 0:
        raise DataError(
            f"{dataset.name}: training needs at least one instance with a label, found {split.labels.rows} "
            f"instances and {len(split.labels.indices)} labels; check the files"
        )
    train_rows, validation_rows = holdout(
        split.instances, 0.0 if training.paper_protocol else config.data.validation_fraction, training.seed
    )
    documents = _label_documents(dataset) if config.data.label_documents else None
    use_words = config.model.direct_fan_in > 0 or config.similarity.used
    if use_words and dataset.kind == "dense":
        raise ConfigError(
            f"{dataset.name}: model.direct_fan_in and similarity need texts or sparse features, found dense "
            "ones; set them to 0"
        )
    of_labels = config.model.direct_fan_in > 0 or config.similarity.text_weight > 0.0
    use_label_texts = documents is not None or (
        of_labels and dataset.kind == "text" and dataset.label_texts is not None
    )
    features, test_features, vectorizer = split.features, None, None
    if dataset.test is not None:
        test_features = dataset.test.features
    if dataset.kind == "text":
        texts = open_text_features(
            dataset,
            config.text,
            train_rows,
            label_documents=use_label_texts,
            cache=cache,
        )
        features, test_features, vectorizer = texts.train, texts.test, texts.vectorizer
    elif documents is not None:
        features = _stack(features, dataset.label_features)
    assert features is not None, "a data set without texts has features"
    feature_count = feature_columns(features)
    if feature_count == 0:
        raise DataError(
            f"{dataset.name}: training needs at least one feature, found {dataset.kind} features of 0 "
            "columns; check the files"
        )

    labels = split.labels
    direct = similarity = None
    if use_words:
        direct, similarity = _of_words(dataset, config, features, train_rows, use_label_texts)
    if use_label_texts and documents is None:
        assert isinstance(features, CsrRows), "text features are sparse"
        features = features.head(split.instances)
    if documents is not None:  # rows behind those of the instances
        labels = concatenate_rows([labels, _identity(dataset.label_count)], dataset.label_count)
        train_rows = np.concatenate([train_rows, split.instances + documents])
    validation = BatchStream(features, labels, validation_rows, BATCH, training.seed)
    validation_filter = None if split.filter_pairs is None else split.filter_pairs.take(validation_rows)
    if training.paper_protocol:
        if dataset.test is None or test_features is None:
            raise DataError(f"{dataset.name}: the paper protocol chooses on the test set, found none")
        validation = whole(test_features, dataset.test.labels)
        validation_filter = dataset.test.filter_pairs
    return Prepared(
        problem=Problem(
            dense_features=dataset.kind == "dense",
            feature_count=feature_count,
            label_count=dataset.label_count,
            instances=split.instances,
            propensity_a=dataset.propensity_a,
            propensity_b=dataset.propensity_b,
            label_instances=np.bincount(split.labels.indices, minlength=dataset.label_count),
        ),
        train=BatchStream(features, labels, train_rows, training.batch_size, training.seed),
        validation=validation,
        validation_filter=validation_filter if config.data.mask_filter_pairs else None,
        vectorizer=vectorizer,
        direct=direct,
        similarity=similarity,
    )


def batches_of(prepared: Prepared) -> Batches:
    """Return what the plan of memory asks of a data set's batches."""
    stream = prepared.train
    words = float(prepared.problem.feature_count)
    if isinstance(stream.features, CsrRows):
        words = len(stream.features.indices) / max(stream.features.rows, 1)
    return Batches(
        len(prepared.validation.rows), words, len(stream.labels.indices) / max(stream.labels.rows, 1)
    )


def _of_words(
    dataset: Dataset, config: Config, features: Features, train_rows: Int64, use_label_texts: bool
) -> tuple[DirectStart | None, Similarity | None]:
    """Make what the config asks for of the training instances' words and, where there are some, the labels'.

    ``features`` are those of all training instances and behind them, with ``use_label_texts``, the labels'.

    Raises:
        ConfigError: The label texts have a weight, and there are none.
    """
    assert isinstance(features, CsrRows), "checked by the caller"
    texts = dataset.label_features if isinstance(dataset.label_features, CsrRows) else None
    if use_label_texts and dataset.kind == "text":
        texts = features.take(np.arange(dataset.train.instances, features.rows))
    if texts is None and config.similarity.text_weight > 0.0:
        raise ConfigError(
            f"{dataset.name}: similarity.text_weight needs texts of the labels, found none; set it to 0"
        )
    instances, labels = features.take(train_rows), dataset.train.labels.take(train_rows)
    direct = similarity = None
    if config.model.direct_fan_in:
        direct = direct_connectivity(
            instances,
            labels,
            texts,
            config.model.direct_fan_in,
            config.model.direct_text,
            config.model.direct_positives,
            config.model.direct_max_frequency,
        )
    if config.similarity.used:
        similarity = Similarity.of(config.similarity, texts, instances, labels)
    return direct, similarity


def _label_documents(dataset: Dataset) -> Int64:
    """Return the labels that have a text (or features) to train on.

    Raises:
        DataError: The data set has neither.
    """
    documents = dataset.label_texts if dataset.kind == "text" else dataset.label_features
    if documents is None:
        needed = "texts" if dataset.kind == "text" else "features"
        raise DataError(
            f"{dataset.name}: data.label_documents needs {needed} of the labels, found none; set it to false"
        )
    if isinstance(documents, np.ndarray):
        return np.arange(len(documents))
    return np.flatnonzero(np.diff(documents.offsets))


def _identity(labels: int) -> CsrRows:
    """Return label i as the one label of row i."""
    return CsrRows(np.arange(labels + 1), np.arange(labels, dtype=np.int32), None, labels)


def _stack(features: Features | None, documents: Features | None) -> Features:
    """Return the rows of both, one below the other."""
    columns = feature_columns(features)
    if columns == feature_columns(documents):
        if isinstance(features, CsrRows) and isinstance(documents, CsrRows):
            return concatenate_rows([features, documents], columns)
        if isinstance(features, np.ndarray) and isinstance(documents, np.ndarray):
            return np.concatenate([features, documents])
    raise DataError(
        "data.label_documents: instances and labels must have features of one kind and equally many columns, "
        f"found {_described(features)} and {_described(documents)}; set it to false"
    )


def _described(features: Features | None) -> str:
    kind = "sparse" if isinstance(features, CsrRows) else "dense"
    return f"{kind} ones of {feature_columns(features)} columns"


def whole(features: Features, labels: CsrRows) -> BatchStream:
    """Return a stream over all instances of a split, for evaluation."""
    return BatchStream(features, labels, np.arange(labels.rows), BATCH, seed=0)
