"""TF-IDF: hand-computed weights, tokens, n-grams, round trip, errors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xmlc.config import TextConfig
from xmlc.data.text import TextVectorizer
from xmlc.errors import DataError

TEXTS = ["The C language", "the cat", "", "Python 3 language, python 3"]
CHARACTERS = TextConfig(character_ngrams=(2, 4))


def toarray(vectorizer: TextVectorizer, texts: list[str]) -> np.ndarray:
    return vectorizer.transform(texts).to_scipy().toarray()


def terms(vectorizer: TextVectorizer, block: str) -> list[str]:
    return list(vectorizer.blocks[block].terms)


def test_words_are_lower_cased_runs_with_single_characters_and_digits() -> None:
    vectorizer = TextVectorizer.fit(TEXTS, TextConfig())
    assert terms(vectorizer, "words") == ["3", "c", "cat", "language", "python", "the"]


@pytest.mark.parametrize("sublinear", [True, False])
def test_weights_are_those_of_the_formula(sublinear: bool) -> None:
    vectorizer = TextVectorizer.fit(TEXTS, TextConfig(sublinear_tf=sublinear))
    language = math.log(5 / 3) + 1
    rare = math.log(5 / 2) + 1
    twice = 1 + math.log(2) if sublinear else 2
    row = np.array([twice * rare, 0, 0, language, twice * rare, 0])
    np.testing.assert_allclose(toarray(vectorizer, TEXTS[3:])[0], row / np.linalg.norm(row), rtol=1e-6)


@pytest.mark.parametrize("config", [TextConfig(), CHARACTERS, TextConfig(word_ngrams=(1, 2))])
def test_rows_have_length_one_or_are_empty(config: TextConfig) -> None:
    rows = TextVectorizer.fit(TEXTS, config).transform([*TEXTS, "unknown", "?"])
    lengths = np.linalg.norm(rows.to_scipy().toarray(), axis=1)
    np.testing.assert_allclose(lengths[[0, 1, 3]], 1, rtol=1e-6)
    assert lengths[2] == lengths[5] == 0
    assert rows.values is not None
    assert rows.values.dtype == np.float32
    assert (np.diff(rows.indices)[rows.offsets[1] - 1 : rows.offsets[1]] < 0).all()


def test_words_and_character_ngrams_weigh_the_same() -> None:
    vectorizer = TextVectorizer.fit(TEXTS, CHARACTERS)
    words = len(terms(vectorizer, "words"))
    row = toarray(vectorizer, TEXTS[:1])[0]
    np.testing.assert_allclose(np.linalg.norm(row[:words]), math.sqrt(0.5), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(row[words:]), math.sqrt(0.5), rtol=1e-6)


def test_a_text_of_unknown_words_keeps_its_character_ngrams() -> None:
    vectorizer = TextVectorizer.fit(TEXTS, CHARACTERS)
    assert np.linalg.norm(toarray(vectorizer, ["cats"])[0]) == pytest.approx(1)


def test_columns_do_not_depend_on_the_order_of_texts() -> None:
    first, second = (TextVectorizer.fit(texts, CHARACTERS) for texts in (TEXTS, TEXTS[::-1]))
    np.testing.assert_array_equal(toarray(first, TEXTS), toarray(second, TEXTS))


def test_rare_terms_are_left_out() -> None:
    assert terms(TextVectorizer.fit(TEXTS, TextConfig(min_document_frequency=2)), "words") == [
        "language",
        "the",
    ]


def test_the_most_frequent_terms_stay_and_ties_go_by_code_point() -> None:
    assert terms(TextVectorizer.fit(TEXTS, TextConfig(max_features=3)), "words") == ["3", "language", "the"]


@given(st.lists(st.text(), min_size=1, max_size=5), st.lists(st.text(), max_size=5))
@settings(max_examples=50)
def test_a_vectorizer_comes_back_from_its_arrays_to_the_bit(train: list[str], texts: list[str]) -> None:
    first = TextVectorizer.fit([*train, "word"], CHARACTERS)
    second = TextVectorizer.from_arrays(first.to_arrays(), CHARACTERS)
    assert first.columns == second.columns
    for rows, again in ((first.transform(texts), second.transform(texts)),):
        np.testing.assert_array_equal(rows.offsets, again.offsets)
        np.testing.assert_array_equal(rows.indices, again.indices)
        np.testing.assert_array_equal(rows.values, again.values)


def test_texts_across_blocks_are_all_transformed() -> None:
    vectorizer = TextVectorizer.fit(TEXTS, TextConfig())
    rows = vectorizer.transform(TEXTS * 5000)
    assert rows.rows == 20_000
    np.testing.assert_array_equal(
        rows.take(np.arange(19_996, 20_000)).to_scipy().toarray(), toarray(vectorizer, TEXTS)
    )


def test_no_text_gives_no_row() -> None:
    assert TextVectorizer.fit(TEXTS, TextConfig()).transform([]).rows == 0


@pytest.mark.parametrize("texts", [[], ["", " ", "..."]])
def test_a_corpus_without_words_is_refused(texts: list[str]) -> None:
    with pytest.raises(
        DataError, match=rf"text: training must hold words .* found none in {len(texts)} texts"
    ):
        TextVectorizer.fit(texts, TextConfig())


def test_arrays_of_other_settings_are_refused() -> None:
    arrays = TextVectorizer.fit(TEXTS, TextConfig()).to_arrays()
    with pytest.raises(DataError, match=r"must hold the array 'characters.offsets', found words.offsets, .*"):
        TextVectorizer.from_arrays(arrays, CHARACTERS)


def test_arrays_that_disagree_are_refused() -> None:
    arrays: dict[str, Any] = TextVectorizer.fit(TEXTS, TextConfig()).to_arrays()
    with pytest.raises(DataError, match=r"words.idf must have one value for each of 6 terms, found 5"):
        TextVectorizer.from_arrays({**arrays, "words.idf": arrays["words.idf"][:5]}, TextConfig())
