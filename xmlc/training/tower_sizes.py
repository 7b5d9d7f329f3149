"""What the plan of memory asks of a two-tower model's data, read once and by parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from xmlc.config import Config
from xmlc.data import Dataset
from xmlc.data.batches import Span
from xmlc.data.rows import CsrRows, Int64, TokenRows
from xmlc.data.text import TextVectorizer
from xmlc.memory.activations import encoder_memory, tower_passes
from xmlc.memory.pool import Occurrences, TowerTexts, shares_of
from xmlc.memory.terms import Batches
from xmlc.training.prepare import Prepared, batches_of

ROWS_AT_ONCE = 1 << 14


def traced_batches(
    dataset: Dataset, config: Config, prepared: Prepared, mined: CsrRows | None = None
) -> Batches:
    """Return what the plan asks of a data set's batches, transformers tried on a few texts.

    ``mined`` are the negatives of a two-tower model where they are known already, [instance, label]. Without,
    they are taken to be any labels: the pool then is as large as it can be expected to become.
    """
    batches = batches_of(prepared, traced=True)
    if config.model.output != "two_tower":
        return batches
    return replace(batches, towers=_tower_texts(dataset, config, prepared, mined))


def _tower_texts(dataset: Dataset, config: Config, prepared: Prepared, mined: CsrRows | None) -> TowerTexts:
    stream, texts, trained = prepared.train, prepared.label_texts, config.encoder.trained
    settings, problem = config.two_tower, prepared.problem
    assert isinstance(texts, Span) and dataset.label_texts is not None, "of two towers"
    any_label = np.full(problem.label_count, 1.0 / problem.label_count)
    negatives = any_label * min(settings.mined_negatives, problem.label_count)
    if mined is not None:
        negatives = _brought(mined, stream.rows, settings.mined_negatives)
    pool = Occurrences.of(_brought(stream.labels, stream.rows, settings.positives), negatives, any_label)
    words, label_words = Occurrences.of(np.empty(0), np.empty(0)), 0.0
    if isinstance(texts.column, CsrRows):
        assert isinstance(stream.features, CsrRows), "the texts of both are read alike"
        first, end = texts.column.offsets[[texts.first, texts.first + texts.rows]].tolist()
        label_words = (end - first) / texts.rows
        words = Occurrences.of(
            shares_of(stream.features.indices, problem.feature_count, stream.features.rows),
            shares_of(texts.column.indices[first:end], problem.feature_count, texts.rows),
        )
    labels = instance_passes = label_passes = None
    if trained:
        assert isinstance(texts.column, TokenRows), "of a transformer that is trained"
        assert isinstance(stream.features, TokenRows) and prepared.text_encoder is not None
        longest = int(stream.features.lengths.max())
        of_labels = int(np.diff(texts.column.offsets[texts.first : texts.first + texts.rows + 1]).max())
        transformer = prepared.text_encoder.transformer
        labels = encoder_memory(transformer, of_labels)
        instance_passes, label_passes = (tower_passes(transformer, each) for each in (longest, of_labels))
    pairs = dataset.train.filter_pairs
    return TowerTexts(
        pool,
        len(stream.rows),
        label_words,
        words,
        _stored(dataset, prepared.vectorizer),
        0 if pairs is None else stream.labels.indices.nbytes + stream.labels.offsets.nbytes,
        labels,
        instance_passes,
        label_passes,
    )


def _brought(rows: CsrRows, chosen: Int64, most: int) -> NDArray[np.float64]:
    """Return the share of the chosen rows that bring a column, where each brings at most so many. [column]"""
    found = np.zeros(rows.columns)
    for first in range(0, len(chosen), ROWS_AT_ONCE):
        part = rows.take(chosen[first : first + ROWS_AT_ONCE])
        lengths = np.diff(part.offsets)
        weights = np.repeat(np.minimum(1.0, most / np.maximum(lengths, 1)), lengths)
        found += np.bincount(part.indices, weights, minlength=rows.columns)
    return found / max(len(chosen), 1)


def _stored(dataset: Dataset, vectorizer: TextVectorizer | None) -> int:
    """Return the bytes of what a checkpoint copies."""
    columns = [each for each in (dataset.label_texts, dataset.label_names) if each is not None]
    stored = sum(each.offsets.nbytes + each.data.nbytes for each in columns)
    arrays = {} if vectorizer is None else vectorizer.to_arrays()
    return stored + sum(array.nbytes for array in arrays.values())
