"""Lines of raw input for each kind of model; every error names file and line."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from xmlc.errors import DataError
from xmlc.evaluation import Predictor
from xmlc.evaluation.inputs import parse_lines


def parse(predictors: dict[str, Predictor], kind: str, *lines: bytes | str, first: int = 1) -> Any:
    raw = [line.encode() if isinstance(line, str) else line for line in lines]
    return parse_lines(predictors[kind], raw, "my file", first)


# ---- texts -----------------------------------------------------------------------------------------------


def test_a_line_is_a_text_without_its_line_end(predictors: dict[str, Predictor]) -> None:
    found = parse(predictors, "text", "a dog\n", "a cat\r\n", " a bird", "", "日本 語\n")
    assert found == ["a dog", "a cat", "a bird", "", "日本 語"]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"title": "dog", "content": "an animal"}, "dog an animal"),
        ({"content": "an animal", "title": "dog"}, "dog an animal"),
        ({"title": "dog"}, "dog"),
        ({"title": "dog", "content": ""}, "dog"),
        ({"text": "dog", "uid": 7}, "dog"),
        ({"title": ""}, ""),
    ],
)
def test_an_object_is_read_as_in_training_data(
    record: dict[str, Any], text: str, predictors: dict[str, Predictor]
) -> None:
    assert parse(predictors, "text", json.dumps(record)) == [text]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"caf\xe9", "must be UTF-8 text, found other bytes"),
        ("{not json", "must be a JSON object, found:"),
        ('{"a": 1', "must be a JSON object, found:"),
        ('{"a":' * 100_000, "must be a JSON object, found:"),
        (
            '{"title": "dog", "title": "cat"}',
            "must be a JSON object, found: .* the key 'title' twice; correct it",
        ),
        ("{}", "must hold title, content or text, found no key"),
        ('{"titl\\ne": "dog"}', r'must hold title, content or text, found \["titl\\ne"\]; add one'),
        ('{"name": "dog"}', "must hold title, content or text, found \\[.name.\\]"),
        ('{"title": 5}', "title must be a string of valid Unicode, found 5"),
        ('{"title": 0}', "title must be a string of valid Unicode, found 0"),
        ('{"title": "dog", "content": null}', "content must be a string of valid Unicode, found null"),
        ('{"text": ["dog"]}', r'text must be a string of valid Unicode, found \["dog"\]'),
        ('{"title": "\\ud800"}', r"title must be a string of valid Unicode, found"),
    ],
)
def test_a_line_that_is_no_text_is_refused_by_file_and_line(
    line: bytes | str, found: str, predictors: dict[str, Predictor]
) -> None:
    with pytest.raises(DataError, match=f"^my file:12: .*{found}"):
        parse(predictors, "text", "good", "good", line, first=10)


# ---- sparse features -------------------------------------------------------------------------------------


def test_pairs_become_a_row_each(predictors: dict[str, Predictor]) -> None:
    found = parse(predictors, "sparse", "0:1 95:2.5\n", "", "7:-1e-3\t8:4")
    assert found.shape == (3, 96)
    expected = np.zeros((3, 96), np.float32)
    expected[0, [0, 95]] = 1, 2.5
    expected[2, [7, 8]] = -1e-3, 4
    np.testing.assert_array_equal(found.toarray(), expected)


def test_a_feature_given_twice_is_summed_as_in_training_data(predictors: dict[str, Predictor]) -> None:
    once, twice = (
        predictors["sparse"].predict(parse(predictors, "sparse", line)) for line in ("3:3", "3:1 3:2")
    )
    assert once == twice


@pytest.mark.parametrize(
    "pair",
    [
        *("96:1", "-1:1", "x:1", "1:x", "1", ":1", "1:", "1:nan", "1:inf", "1:1e39", "1:2:3", "1,2", "1.5:1"),
        *("1_0:1", "1:1_0", "\u0661:1", "1:\u0661", "1:0x1", "+1:1", "9" * 5000 + ":1"),
    ],
)
def test_a_wrong_pair_is_refused_by_file_and_line(pair: str, predictors: dict[str, Predictor]) -> None:
    with pytest.raises(DataError, match=r"^my file:2: a (feature|value|feature index) must be .*, found '"):
        parse(predictors, "sparse", "1:1", f"2:2 {pair}")


def test_an_overflow_of_a_repeated_feature_is_refused_by_file_and_line(
    predictors: dict[str, Predictor],
) -> None:
    """The error once named a row of a matrix."""
    with pytest.raises(DataError, match=r"^my file:9: the sum of a repeated feature must be finite"):
        parse(predictors, "sparse", "1:3e38", "1:3e38 1:3e38", first=8)


@pytest.mark.parametrize(
    ("kind", "line"),
    [("text", '{"title": "dog"}'), ("text", "dog"), ("sparse", "1:1"), ("dense", json.dumps([1.0] * 32))],
)
def test_a_byte_order_mark_is_no_part_of_the_first_line(
    kind: str, line: str, predictors: dict[str, Predictor]
) -> None:
    """A JSON object after one was once taken for a text."""
    marked, plain = (parse(predictors, kind, text) for text in ("\ufeff" + line, line))
    assert predictors[kind].predict(marked) == predictors[kind].predict(plain)
    if kind == "text":
        assert marked == ["dog"]


# ---- dense features --------------------------------------------------------------------------------------


def test_a_list_becomes_a_row(predictors: dict[str, Predictor]) -> None:
    row = [0.5, -1, *[0] * 30]
    found = parse(predictors, "dense", json.dumps(row), json.dumps(row))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([row, row], np.float32))


def test_no_lines_become_no_rows(predictors: dict[str, Predictor]) -> None:
    assert parse(predictors, "dense").shape == (0, 32)
    assert parse(predictors, "sparse").shape == (0, 96)
    assert parse(predictors, "text") == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "1 2 3",
        "[1, 2]",
        json.dumps([1.0] * 31),
        json.dumps([1.0] * 31 + ["x"]),
        json.dumps([1.0] * 31 + [True]),
        json.dumps([1.0] * 31 + [None]),
        "[" + "1, " * 31 + "NaN]",
        "[" + "1, " * 31 + "1e39]",
        "[" + "1, " * 31 + "1" * 400 + "]",
        "[" + "1, " * 31 + "1" * 5000 + "]",
        '{"a": 1}',
        "[" * 100_000,
    ],
    ids=lambda line: line[-12:] or "empty",
)
def test_a_wrong_list_is_refused_by_file_and_line(line: str, predictors: dict[str, Predictor]) -> None:
    good = json.dumps([1.0] * 32)
    with pytest.raises(DataError, match=r"^my file:2: must be a JSON list of 32 numbers, finite in float32"):
        parse(predictors, "dense", good, line)
