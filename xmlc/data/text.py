"""TF-IDF of texts: words and, optionally, character n-grams, learnt from training texts alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from xmlc.config import TextConfig
from xmlc.data.rows import CsrRows, Float32, TextColumn, concatenate_rows, unit_length
from xmlc.errors import DataError

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import CountVectorizer

# Every run of letters, digits and underscores is a word, single characters too: in a title "C" or "5" may be
# the very thing that it is about.
_WORD = r"\w+"
_TEXTS_PER_BLOCK = 8192


@dataclass(frozen=True, eq=False)
class _Block:
    """The terms of one analyzer, sorted by code point, and their inverse document frequencies."""

    counter: CountVectorizer
    terms: TextColumn  # [term]
    idf: Float32  # [term]
    sublinear: bool

    def transform(self, texts: list[str]) -> scipy.sparse.csr_matrix:
        """Return float32 [text, term], each row of length 1 or empty."""
        if not len(self.terms):
            return scipy.sparse.csr_matrix((len(texts), 0), dtype=np.float32)
        counts = self.counter.transform(texts)
        values = counts.data.astype(np.float32)
        if self.sublinear:
            values = np.log(values) + np.float32(1)
        rows = CsrRows(counts.indptr.astype(np.int64), counts.indices, values * self.idf[counts.indices], 0)
        counts.data = unit_length(rows).values
        return counts


@dataclass(frozen=True, eq=False)
class TextVectorizer:
    """Maps texts to TF-IDF rows of Euclidean length 1.

    A word is a run of letters, digits or underscores, lower-cased. The weight of term t in a text is
    ``tf * idf`` with ``tf`` its count (or ``1 + ln count``, sublinear) and
    ``idf = ln((1 + texts) / (1 + texts with t)) + 1``. Words and character n-grams are each scaled to length
    1, so that they weigh the same, then both together. Columns: words, then character n-grams, each sorted by
    code point.
    """

    config: TextConfig
    blocks: Mapping[str, _Block]

    @classmethod
    def fit(cls, texts: Iterable[str], config: TextConfig) -> TextVectorizer:
        """Learn vocabulary and document frequencies, one text in memory at a time.

        Args:
            texts: The training texts; passed over once.
            config: ``min_document_frequency`` and ``max_features`` hold for words and for character n-grams
                apart; where terms are too many, those in the most texts stay (ties: the first by code point).

        Raises:
            DataError: No term is left.
        """
        analyzers = {name: _counter(name, config, None).build_analyzer() for name in _block_names(config)}
        frequencies: dict[str, Counter[str]] = {name: Counter() for name in analyzers}
        count = 0
        for text in texts:
            count += 1
            for name, analyze in analyzers.items():
                frequencies[name].update(set(analyze(text)))
        blocks = {}
        for name, frequency in frequencies.items():
            terms = _choose(frequency, config)
            in_texts = np.array([frequency[term] for term in terms], np.float64)
            idf = np.log((1 + count) / (1 + in_texts)) + 1
            blocks[name] = _block(name, config, terms, idf.astype(np.float32))
        if not any(len(block.terms) for block in blocks.values()):
            raise DataError(
                f"text: training must hold words in at least {config.min_document_frequency} texts, found "
                f"none in {count} texts; check that texts are not empty, or lower text.min_document_frequency"
            )
        return cls(config, blocks)

    @property
    def columns(self) -> int:
        """Number of features."""
        return sum(len(block.terms) for block in self.blocks.values())

    def transform(self, texts: Iterable[str]) -> CsrRows:
        """Return float32 [text, term], rows of length 1; a text without known terms gives an empty row."""
        return concatenate_rows(list(self.transform_blocks(texts)), self.columns)

    def transform_blocks(self, texts: Iterable[str]) -> Iterator[CsrRows]:
        """Yield `transform`'s rows in consecutive blocks of a few thousand."""
        iterator = iter(texts)
        while block := list(islice(iterator, _TEXTS_PER_BLOCK)):
            parts = [part.transform(block) for part in self.blocks.values()]
            matrix = (
                scipy.sparse.hstack(parts, format="csr", dtype=np.float32) if len(parts) > 1 else parts[0]
            )
            rows = CsrRows(
                matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32), matrix.data, self.columns
            )
            yield unit_length(rows) if len(parts) > 1 else rows

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return vocabulary and frequencies as arrays, for a checkpoint or a store."""
        return {
            f"{name}.{part}": array
            for name, block in self.blocks.items()
            for part, array in (
                ("offsets", block.terms.offsets),
                ("data", block.terms.data),
                ("idf", block.idf),
            )
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], config: TextConfig) -> TextVectorizer:
        """Undo `to_arrays`; the result transforms every text to the same bits.

        Raises:
            DataError: An array is missing, or two disagree.
        """
        blocks = {}
        for name in _block_names(config):
            try:
                offsets, data, idf = (arrays[f"{name}.{part}"] for part in ("offsets", "data", "idf"))
            except KeyError as error:
                raise DataError(
                    f"text: a vectorizer must hold the array {error}, found {', '.join(arrays) or 'none'}; "
                    "use the settings that it was fitted with"
                ) from None
            terms = TextColumn(np.asarray(offsets, np.int64), np.asarray(data, np.uint8))
            if len(terms) != len(idf):
                raise DataError(
                    f"text: {name}.idf must have one value for each of {len(terms)} terms, found "
                    f"{len(idf)}; the file is damaged"
                )
            blocks[name] = _block(name, config, list(terms), np.asarray(idf, np.float32))
        return cls(config, blocks)


def _block_names(config: TextConfig) -> tuple[str, ...]:
    return ("words", "characters") if config.character_ngrams[1] else ("words",)


def _counter(name: str, config: TextConfig, vocabulary: dict[str, int] | None) -> CountVectorizer:
    # Imported here: it takes 40 MB, which runs on features need not have.
    from sklearn.feature_extraction.text import CountVectorizer

    if name == "words":
        return CountVectorizer(
            token_pattern=_WORD, ngram_range=config.word_ngrams, vocabulary=vocabulary, dtype=np.int32
        )
    return CountVectorizer(
        analyzer="char_wb", ngram_range=config.character_ngrams, vocabulary=vocabulary, dtype=np.int32
    )


def _choose(frequency: Counter[str], config: TextConfig) -> list[str]:
    terms = sorted(term for term, texts in frequency.items() if texts >= config.min_document_frequency)
    if config.max_features is not None and len(terms) > config.max_features:
        terms = sorted(sorted(terms, key=lambda term: -frequency[term])[: config.max_features])
    return terms


def _block(name: str, config: TextConfig, terms: list[str], idf: Float32) -> _Block:
    vocabulary = {term: column for column, term in enumerate(terms)}
    counter = _counter(name, config, vocabulary)
    return _Block(counter, TextColumn.from_strings(terms), idf, config.sublinear_tf)
