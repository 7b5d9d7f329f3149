"""From a data set and a config to the streams that training reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from xmlc.config import Config
from xmlc.data import Dataset
from xmlc.data.batches import BatchStream, Column, Span, holdout, sample
from xmlc.data.dataset import Features, feature_columns
from xmlc.data.features import TextFeatures, open_text_features
from xmlc.data.pretrained import no_texts, transformers
from xmlc.data.rows import CsrRows, Int64, TokenRows, concatenate_rows
from xmlc.data.text import TextVectorizer
from xmlc.data.tokens import open_tokens
from xmlc.errors import ConfigError, DataError
from xmlc.memory.activations import encoder_memory
from xmlc.memory.pool import Occurrences, shares_of
from xmlc.memory.terms import Batches
from xmlc.nn import EncodedTexts, Problem, Similarity, TextEncoder, open_embeddings
from xmlc.nn.approximate import faiss
from xmlc.nn.embeddings import TEXTS_PER_BLOCK
from xmlc.sparsity import DirectStart, direct_connectivity
from xmlc.training import progress

WORD_BYTES = 160
"""Of a word of the vocabulary beside its letters: a string of Python, its place in a dict, an int."""


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
    text_encoder: TextEncoder | None
    """Of ``encoder.kind = "transformer"``."""
    direct: DirectStart | None
    """Where the model has direct connections: those it starts with."""
    similarity: Similarity | None
    """Where likeness of texts is added to the logits: the texts."""
    label_texts: Column | None = None
    """Of a two-tower model: what the labels' texts are to the encoder. [label]"""


Within = Callable[[TextEncoder, int], AbstractContextManager[None]]
"""Makes of an encoder, and of how many texts it is to embed, a context for it."""


def anywhere(_: TextEncoder, __: int) -> AbstractContextManager[None]:
    """Embed without a limit."""
    return nullcontext()


def prepare(
    dataset: Dataset,
    config: Config,
    cache: Path | None = None,
    encoder: Path | None = None,
    within: Within = anywhere,
) -> Prepared:
    """Hold out validation instances, fit TF-IDF on the others or encode all texts, and open the streams.

    Args:
        dataset: What to train on.
        config: Every setting.
        cache: Folder of the stores; None takes the usual one.
        encoder: Folder of the transformer, where the config asks for one.
        within: What texts are embedded in, where it is frozen.

    Raises:
        DataError: There is nothing to train on, or the paper protocol finds no test set.
        ConfigError: The encoder, or a setting, does not fit.
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
    train_rows = sample(train_rows, config.data.training_fraction, training.seed)
    documents = _label_documents(dataset) if config.data.label_documents else None
    use_words = _uses_words(config)
    if use_words and dataset.kind == "dense":
        raise ConfigError(
            f"{dataset.name}: model.direct_fan_in and similarity need texts or sparse features, found dense "
            "ones; set them to 0"
        )
    of_labels = config.model.direct_fan_in > 0 or config.similarity.text_weight > 0.0
    two_tower = config.model.output == "two_tower"
    if two_tower:
        _check_label_texts(dataset)
    use_label_texts = (
        documents is not None
        or two_tower
        or (of_labels and dataset.kind == "text" and dataset.label_texts is not None)
    )
    inputs = _inputs(dataset, config, train_rows, use_words, use_label_texts, encoder, cache, within)
    features, words = inputs.train, inputs.train_words

    labels = trained_labels = split.labels
    skipped = split.filter_pairs if config.data.skip_filter_pairs or two_tower else None
    if skipped is not None:
        trained_labels = labels.without(skipped)
    label_texts = None
    if two_tower:
        assert not isinstance(features, np.ndarray), "of texts, which were checked"
        label_texts = Span(features, split.instances, dataset.label_count)
        features = _head(features, split.instances)
        train_rows = train_rows[np.diff(trained_labels.offsets)[train_rows] > 0]  # others have loss 0
        if len(train_rows) == 0:
            raise DataError(
                f"{dataset.name}: two-tower training needs an instance with a label that is no filter pair, "
                "found none; check the filter file"
            )
    direct = similarity = None
    if use_words:
        seen = features if words is None else words
        assert isinstance(seen, CsrRows), "dense features were refused"
        direct, similarity = _of_words(dataset, config, seen, train_rows, use_label_texts)
    if use_label_texts and documents is None and not two_tower:
        if words is not None:
            words = words.head(split.instances)
        else:
            assert isinstance(features, CsrRows), "text features are sparse"
            features = features.head(split.instances)
    if documents is not None:  # rows behind those of the instances
        own = _identity(dataset.label_count)
        labels, trained_labels = (
            concatenate_rows([each, own], dataset.label_count) for each in (labels, trained_labels)
        )
        if skipped is not None:
            none = CsrRows.empty(own.rows, own.columns)
            skipped = concatenate_rows([skipped, none], dataset.label_count)
        train_rows = np.concatenate([train_rows, split.instances + documents])
    validation = BatchStream(
        features, labels, validation_rows, training.evaluation_batch, training.seed, words=words
    )
    validation_filter = None if split.filter_pairs is None else split.filter_pairs.take(validation_rows)
    if training.paper_protocol:
        if dataset.test is None or inputs.test is None:
            raise DataError(f"{dataset.name}: the paper protocol chooses on the test set, found none")
        validation = whole(inputs.test, dataset.test.labels, inputs.test_words, training.evaluation_batch)
        validation_filter = dataset.test.filter_pairs
    return Prepared(
        problem=Problem(
            dense_features=dataset.kind == "dense" or inputs.text_encoder is not None,
            feature_count=inputs.feature_count,
            label_count=dataset.label_count,
            instances=split.instances,
            propensity_a=dataset.propensity_a,
            propensity_b=dataset.propensity_b,
            label_instances=_instances_of(split.labels),
            word_count=0 if words is None else words.columns,
        ),
        train=BatchStream(
            features, trained_labels, train_rows, training.batch_size, training.seed, skipped, words
        ),
        validation=validation,
        validation_filter=validation_filter if config.data.mask_filter_pairs else None,
        vectorizer=inputs.vectorizer,
        text_encoder=inputs.text_encoder,
        direct=direct,
        similarity=similarity,
        label_texts=label_texts,
    )


def import_libraries(dataset: Dataset, config: Config) -> None:
    """Import what `prepare` will, so that it counts as the process's own and not as what the run takes."""
    transformer = config.encoder.kind == "transformer"
    if transformer:
        transformers()
    mined = config.model.output == "two_tower" and config.two_tower.mined_negatives > 0
    if mined and config.two_tower.mining_search == "approximate":
        faiss()
    if dataset.kind == "text" and (not transformer or _uses_words(config)):
        import_module("sklearn.feature_extraction.text")


def _uses_words(config: Config) -> bool:
    """Return whether the model sees words beside what its encoder reads."""
    return config.model.direct_fan_in > 0 or config.similarity.used


def _instances_of(labels: CsrRows) -> Int64:
    """Return the instances of every label, [label]; by blocks, since NumPy counts a copy in int64."""
    counts = np.zeros(labels.columns, np.int64)
    for first in range(0, len(labels.indices), step := max(_ENTRIES_AT_ONCE, labels.columns)):
        counts += np.bincount(labels.indices[first : first + step], minlength=labels.columns)
    return counts


_ENTRIES_AT_ONCE = 1 << 20


def _check_label_texts(dataset: Dataset) -> None:
    """Check that a two-tower model has something to read.

    Raises:
        DataError: It has not.
    """
    if dataset.kind != "text" or dataset.label_texts is None:
        found = "none of the labels" if dataset.kind == "text" else f"{dataset.kind} features"
        raise DataError(
            f"{dataset.name}: model.output = two_tower needs texts of instances and labels, found {found}; "
            "use another output, or a data set with both"
        )
    empty = int((np.diff(dataset.label_texts.offsets) == 0).sum())
    if empty == dataset.label_count:
        raise DataError(
            f"{dataset.name}: the labels must have texts, found {empty} empty ones; check the files"
        )
    if empty:
        progress.say(f"{dataset.name}: {empty:,} of {dataset.label_count:,} labels have an empty text")


def _head(features: Features | Column, rows: int) -> Features | Column:
    """Return the first rows."""
    if isinstance(features, CsrRows | TokenRows):
        return features.head(rows)
    assert not isinstance(features, np.ndarray), "of texts"
    return Span(features, 0, rows)


def batches_of(prepared: Prepared, traced: bool = False) -> Batches:
    """Return what the plan of memory asks of a data set's batches.

    With ``traced`` a transformer is tried on a few texts, and words are counted; without, the plan knows
    nothing of the one nor of the vocabulary, and takes the words of a batch for distinct.
    """
    stream = prepared.train
    words, distinct, direct = float(prepared.problem.feature_count), None, 0.0
    if isinstance(stream.features, CsrRows):
        words = len(stream.features.indices) / max(stream.features.rows, 1)
        if traced:
            shares = shares_of(stream.features.indices, stream.features.columns, stream.features.rows)
            distinct = Occurrences.of(shares)
            if prepared.direct is not None:
                connected = prepared.direct.indices[prepared.direct.indices >= 0]
                direct = float(shares @ np.bincount(connected, minlength=len(shares)))
    encoder = None
    if traced and prepared.text_encoder is not None:
        tokens = prepared.text_encoder.config.max_length
        if isinstance(stream.features, TokenRows):
            tokens = int(stream.features.lengths.max())
        encoder = encoder_memory(
            prepared.text_encoder.transformer, tokens, prepared.text_encoder.tokenizer.vocabulary
        )
    positives = len(stream.labels.indices) / max(stream.labels.rows, 1)
    vocabulary = _vocabulary_bytes(prepared.vectorizer) if traced else 0
    return Batches(len(prepared.validation.rows), words, positives, encoder, distinct, direct, vocabulary)


def _vocabulary_bytes(vectorizer: TextVectorizer | None) -> int:
    if vectorizer is None:
        return 0
    return sum(array.nbytes for array in vectorizer.to_arrays().values()) + WORD_BYTES * vectorizer.columns


@dataclass(frozen=True)
class _Inputs:
    """What instances are to the encoder, and beside it to direct connections and similarity."""

    train: Features | Column
    """Training instances; below them the labels', where their texts or features are asked for."""
    feature_count: int
    test: Features | Column | None = None
    train_words: CsrRows | None = None
    """[instance, word], as ``train``, where that is not what direct connections see."""
    test_words: CsrRows | None = None
    vectorizer: TextVectorizer | None = None
    text_encoder: TextEncoder | None = None


def _inputs(
    dataset: Dataset,
    config: Config,
    train_rows: Int64,
    use_words: bool,
    use_label_texts: bool,
    encoder: Path | None,
    cache: Path | None,
    within: Within,
) -> _Inputs:
    """Open or make what the encoder, direct connections and similarity read.

    Raises:
        DataError: There is nothing for the encoder to read.
        ConfigError: The folder ``encoder`` holds none, or a setting does not fit it.
    """
    words: TextFeatures | None = None
    transformer = config.encoder.kind == "transformer"
    if transformer:  # before words, whose vocabulary stays
        assert encoder is not None, "located by the caller"
        train, test, text_encoder = _encoded(dataset, config, encoder, cache, within)
        made = _Inputs(train, text_encoder.transformer.hidden, test, text_encoder=text_encoder)
    if dataset.kind == "text" and (use_words or not transformer):
        words = open_text_features(
            dataset, config.text, train_rows, label_documents=use_label_texts, cache=cache
        )
    if transformer:
        if words is None:
            return made
        return replace(made, train_words=words.train, test_words=words.test, vectorizer=words.vectorizer)
    features = dataset.train.features
    test_features = None if dataset.test is None else dataset.test.features
    if words is not None:
        features, test_features = words.train, words.test
    elif config.data.label_documents:
        features = _stack(features, dataset.label_features)
    assert features is not None, "a data set without texts has features"
    count = feature_columns(features)
    if count == 0:
        raise DataError(
            f"{dataset.name}: training needs at least one feature, found {dataset.kind} features of 0 "
            "columns; check the files"
        )
    return _Inputs(features, count, test_features, vectorizer=None if words is None else words.vectorizer)


def _encoded(
    dataset: Dataset, config: Config, folder: Path, cache: Path | None, within: Within
) -> tuple[Column, Column | None, TextEncoder]:
    """Load a transformer and let it read the training texts, below them those of the labels if asked for.

    Returns:
        What training instances are: tokens, or embeddings of a frozen encoder; what test instances are, under
        the paper protocol; and the encoder.

    Raises:
        DataError: There are no texts.
        ConfigError: The folder holds no encoder, or a setting does not fit it.
    """
    texts = dataset.train.texts
    if texts is None:
        raise no_texts(dataset.name, dataset.kind)
    encoder = _loaded(config, folder)
    columns = {f"{dataset.fingerprint} train": texts}
    if config.data.label_documents or config.model.output == "two_tower":
        assert dataset.label_texts is not None, "checked by the caller"
        columns[f"{dataset.fingerprint} labels"] = dataset.label_texts
    test = None
    if dataset.test is not None and config.training.paper_protocol:
        test = dataset.test.texts
    if config.encoder.trained:
        tokens = open_tokens(encoder.tokenizer, list(columns.values()), " + ".join(columns), cache)
        return tokens, None if test is None else EncodedTexts(test, encoder), encoder
    count = sum(map(len, columns.values()))
    progress.say(f"{dataset.name}: {count:,} embeddings of {config.encoder.path}, kept in the cache")
    of_test = None
    with within(encoder, count):
        rows = open_embeddings(encoder, columns, progress.embedding_bar, cache)
        if test is not None:
            of_test = open_embeddings(encoder, {f"{dataset.fingerprint} test": test}, cache=cache)
    return rows, of_test, encoder


def _loaded(config: Config, folder: Path) -> TextEncoder:
    """Load a transformer to where the model is trained.

    Raises:
        ConfigError: The folder holds none, or a setting does not fit it.
    """
    encoder = TextEncoder.load(folder, config.encoder)
    encoder.transformer.to(config.training.device)
    return encoder


def embed_block(dataset: Dataset, config: Config, folder: Path) -> None:
    """Embed as many training texts as are stored at a time, and keep nothing: for who measures it.

    Raises:
        ConfigError: The folder holds no encoder, or a setting does not fit it.
    """
    assert dataset.train.texts is not None, "checked by the caller"
    texts = dataset.train.texts.take(np.arange(min(len(dataset.train.texts), TEXTS_PER_BLOCK)))
    with TemporaryDirectory(prefix="xmlc-profile-") as cache:
        open_embeddings(_loaded(config, folder), {"block": texts}, cache=Path(cache))


def _of_words(
    dataset: Dataset, config: Config, features: CsrRows, train_rows: Int64, use_label_texts: bool
) -> tuple[DirectStart | None, Similarity | None]:
    """Make what the config asks for of the training instances' words and, where there are some, the labels'.

    ``features`` are those of all training instances and behind them, with ``use_label_texts``, the labels'.

    Raises:
        ConfigError: The label texts have a weight, and there are none.
    """
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


def whole(features: Features | Column, labels: CsrRows, words: CsrRows | None, batch: int) -> BatchStream:
    """Return a stream over all instances of a split, for evaluation."""
    return BatchStream(features, labels, np.arange(labels.rows), batch, seed=0, words=words)
