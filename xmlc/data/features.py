"""TF-IDF features of a text data set, computed once and memory-mapped."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xmlc.config import TextConfig
from xmlc.data.dataset import Dataset
from xmlc.data.reader.spool import RowsSpool, Scratch
from xmlc.data.rows import CsrRows, Int64, TextColumn
from xmlc.data.store import Stored, cache_folder, open_or_build
from xmlc.data.text import TextVectorizer
from xmlc.errors import DataError


@dataclass(frozen=True, eq=False)
class TextFeatures:
    """A fitted vectorizer and what it makes of both splits."""

    vectorizer: TextVectorizer
    train: CsrRows  # [instance, feature], every training instance
    test: CsrRows | None  # [instance, feature]


def open_text_features(
    dataset: Dataset, config: TextConfig, rows: Int64, *, cache: Path | None = None
) -> TextFeatures:
    """Fit TF-IDF on the chosen training texts and transform all texts, or open what an earlier call stored.

    The store is found again by the data set's fingerprint, the settings and the rows.

    Args:
        dataset: Of kind ``text``.
        config: Settings of the vectorizer.
        rows: The training instances to fit on, [chosen].
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
        "rows": hashlib.blake2b(np.asarray(rows, "<i8").tobytes(), digest_size=16).hexdigest(),
    }

    def build(scratch: Path) -> Stored:
        vectorizer = TextVectorizer.fit((texts[row] for row in rows), config)
        arrays = vectorizer.to_arrays()
        for name, split in (("train", dataset.train), ("test", dataset.test)):
            if split is not None and split.texts is not None:
                matrix = _transform(vectorizer, split.texts, scratch)
                assert matrix.values is not None
                arrays |= {
                    f"{name}.offsets": matrix.offsets,
                    f"{name}.indices": matrix.indices,
                    f"{name}.values": matrix.values,
                }
        return Stored(arrays, {"columns": vectorizer.columns})

    digest = hashlib.blake2b(repr(sorted(key.items())).encode(), digest_size=8).hexdigest()
    stored = open_or_build(cache or cache_folder(), f"text-{digest}", key, build)

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


def _transform(vectorizer: TextVectorizer, texts: TextColumn, folder: Path) -> CsrRows:
    with Scratch(folder) as scratch:
        spool = RowsSpool(scratch, vectorizer.columns, with_values=True)
        for block in vectorizer.transform_blocks(texts):
            spool.append(block)
        return spool.finish()
