"""TF-IDF features of a text data set, computed once and memory-mapped."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from xmlc.config import TextConfig
from xmlc.data.dataset import Dataset
from xmlc.data.reader.spool import RowsSpool, Scratch
from xmlc.data.rows import CsrRows, Int64, TextColumn
from xmlc.data.store import Stored, cache_folder, digest_of, open_or_build
from xmlc.data.text import TextVectorizer
from xmlc.errors import DataError


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """A fitted vectorizer and what it makes of both splits."""

    vectorizer: TextVectorizer
    train: CsrRows  # [instance, feature], every training instance; then the label documents, if asked for
    test: CsrRows | None  # [instance, feature]


def open_text_features(
    dataset: Dataset,
    config: TextConfig,
    rows: Int64,
    *,
    label_documents: bool = False,
    cache: Path | None = None,
) -> TextFeatures:
    """Fit TF-IDF on the chosen training texts and transform all texts, or open what an earlier call stored.

    The store is found again by the data set's fingerprint, the settings and the rows.

    Args:
        dataset: Of kind ``text``.
        config: Settings of the vectorizer.
        rows: The training instances to fit on, [chosen].
        label_documents: Fit on the labels' texts as well, and append their rows to the training rows.
        cache: Folder of the stores; None takes `cache_folder`.

    Raises:
        DataError: The data set holds no texts or none with words, or the cache is not writable.
    """
    texts = dataset.train.texts
    if texts is None:
        raise DataError(f"{dataset.name}: text features need texts, found {dataset.kind} features; use those")
    key = {
        "dataset": dataset.fingerprint,
        "text": config.model_dump(mode="json"),
        "label_documents": label_documents,
        "rows": hashlib.blake2b(np.asarray(rows, "<i8").tobytes(), digest_size=16).hexdigest(),
    }

    def build(scratch: Path) -> Stored:
        documents: list[TextColumn] = []
        if label_documents:
            assert dataset.label_texts is not None, "checked by the caller"
            documents.append(dataset.label_texts)
        vectorizer = TextVectorizer.fit(chain((texts[row] for row in rows), *documents), config)
        arrays = vectorizer.to_arrays()
        columns = {"train": [texts, *documents]}
        if dataset.test is not None and dataset.test.texts is not None:
            columns["test"] = [dataset.test.texts]
        for name, parts in columns.items():
            matrix = _transform(vectorizer, parts, scratch)
            assert matrix.values is not None
            arrays |= {
                f"{name}.offsets": matrix.offsets,
                f"{name}.indices": matrix.indices,
                f"{name}.values": matrix.values,
            }
        return Stored(arrays, {"columns": vectorizer.columns})

    stored = open_or_build(cache or cache_folder(), f"text-{digest_of(key)}", key, build)

    def rows_of(name: str) -> CsrRows:
        offsets, indices, values = (
            stored.arrays[f"{name}.{part}"] for part in ("offsets", "indices", "values")
        )
        return CsrRows(offsets, indices, values, stored.facts["columns"])

    return TextFeatures(
        vectorizer=TextVectorizer.from_arrays(stored.arrays, config),
        train=rows_of("train"),
        test=rows_of("test") if "test.offsets" in stored.arrays else None,
    )


def _transform(vectorizer: TextVectorizer, columns: list[TextColumn], folder: Path) -> CsrRows:
    with Scratch(folder) as scratch:
        spool = RowsSpool(scratch, vectorizer.columns, with_values=True)
        for block in vectorizer.transform_blocks(chain.from_iterable(columns)):
            spool.append(block)
        return spool.finish()
