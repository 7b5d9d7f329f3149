"""XMC text and matrix text: what is accepted, what is refused at which line, and both parsers alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmlc.data.dataset import Dataset, Split
from xmlc.data.reader import read_folder, sparse_text
from xmlc.data.reader.files import Reading
from xmlc.data.reader.sparse_text import Layout, _parse_block, _parse_line, read_pairs
from xmlc.data.reader.spool import Scratch
from xmlc.data.reader.xmc import read_xmc_split
from xmlc.data.rows import CsrRows
from xmlc.errors import DataError

Write = Callable[..., Path]


def dense(rows: object) -> np.ndarray:
    assert isinstance(rows, CsrRows)
    return rows.to_scipy().toarray()


def read(write: Write, scratch: Scratch, text: str | bytes, name: str = "train.txt") -> Split:
    return read_xmc_split(write({name: text}) / name, scratch, Reading())


def test_labels_and_features_are_read(write: Write, scratch: Scratch) -> None:
    split = read(write, scratch, "2 4 3\n0,2 0:1.5 3:-2\n1 1:1e-3\n")
    np.testing.assert_array_equal(dense(split.labels), [[1, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(dense(split.features), np.float32([[1.5, 0, 0, -2], [0, 1e-3, 0, 0]]))
    assert split.labels.values is None


def test_instances_without_labels_or_features_keep_their_row(write: Write, scratch: Scratch) -> None:
    split = read(write, scratch, "5 4 3\n 1:1\n2\n\n3:1 2:1\n0,1 0:1\n")
    np.testing.assert_array_equal(
        dense(split.labels), [[0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 1, 0]]
    )
    np.testing.assert_array_equal(
        dense(split.features), [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1], [1, 0, 0, 0]]
    )


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("2 4 3\r\n0,2 0:1 3:2\r\n1 1:1\r\n", id="CRLF"),
        pytest.param("\ufeff2 4 3\n0,2 0:1 3:2\n1 1:1\n", id="byte order mark"),
        pytest.param("2\t4  3\n0,2\t0:1   3:2 \n1 \t 1:1\t\n", id="tabs and repeated blanks"),
        pytest.param("2 4 3\n0,2 0:1 3:2\n1 1:1", id="no final newline"),
        pytest.param("2 4 3\n0,2 0:1 3:2\n1 1:1\n\n \n", id="blank lines at the end"),
        pytest.param("2 4 3\n2,0 3:2 0:1\n1 1:1\n", id="unsorted"),
        pytest.param("2 4 3\n00,2 0:+1e0 003:.2E+1\n1 1:1.\n", id="number formats"),
        pytest.param("2 4 3\n0,2 0:1 00000000000000003:2\n1 1:1\n", id="many leading zeros"),
    ],
)
def test_harmless_variety_is_accepted(write: Write, scratch: Scratch, text: str) -> None:
    split = read(write, scratch, text)
    np.testing.assert_array_equal(dense(split.labels), [[1, 0, 1], [0, 1, 0]])
    np.testing.assert_array_equal(dense(split.features), [[1, 0, 0, 2], [0, 1, 0, 0]])


def test_repeats_are_summed_and_merged_and_counted(write: Write, scratch: Scratch) -> None:
    reading = Reading()
    folder = write({"train.txt": "2 4 3\n1,0,1 3:1 0:1 3:2.5\n2,2,2 1:1\n"})
    split = read_xmc_split(folder / "train.txt", scratch, reading)
    np.testing.assert_array_equal(dense(split.labels), [[1, 1, 0], [0, 0, 1]])
    np.testing.assert_array_equal(dense(split.features), [[1, 0, 0, 3.5], [0, 1, 0, 0]])
    assert reading.messages() == ("1 repeated features summed, 3 repeated labels merged",)


@pytest.mark.parametrize(
    ("body", "line", "found"),
    [
        ("0 0:1\n1 4:1\n", 3, "a feature index must be at most 3, found '4'"),
        ("0 0:1\n1 99999999999999999999:1\n", 3, "must be at most 3"),
        ("0 0:1\n1 -1:1\n", 3, "must be a whole number from 0 to 3, found '-1'"),
        ("0 1.0:1\n1 1:1\n", 2, "must be a whole number from 0 to 3, found '1.0'"),
        ("0 0:1\n3 1:1\n", 3, "a label must be at most 2, found '3'"),
        ("0 0:1\n-1 1:1\n", 3, "a label must be a whole number from 0 to 2, found '-1'"),
        ("0 0:1\n1.5 1:1\n", 3, "a label must be a whole number from 0 to 2, found '1.5'"),
        ("0 0:1\n0,,1 1:1\n", 3, "a label must be a whole number from 0 to 2, found ''"),
        ("0 0:1\n0, 1:1\n", 3, "a label must be a whole number from 0 to 2, found ''"),
        ("0 0:nan\n1 1:1\n", 2, "a value must be a number finite in float32, found '0:nan'"),
        ("0 0:1\n1 1:inf\n", 3, "finite in float32, found '1:inf'"),
        ("0 0:1\n1 1:1e39\n", 3, "finite in float32, found '1:1e39'"),
        ("0 0:1\n1 1:1.5.5\n", 3, "finite in float32, found '1:1.5.5'"),
        ("0 0:1\n1 1:1_0\n", 3, "finite in float32, found '1:1_0'"),
        ("0 0:1\n1 1:0x1\n", 3, "finite in float32, found '1:0x1'"),
        ("0 0:1\n1 1:e5\n", 3, "finite in float32, found '1:e5'"),
        ("0 0:1\n1 1;1\n", 3, "a feature must be index:value after labels .*, found '1;1'"),
        ("0 0:1\n1 1:1 2:\n", 3, "a feature must be index:value .*, found '2:'"),
        ("0 0:1\n1 :1\n", 3, "a feature must be index:value .*, found ':1'"),
        ("0 0:1\n1 1:2:3\n", 3, "finite in float32, found '1:2:3'"),
        ("0 0:1\n0, 1 1:1\n", 3, "a label must be a whole number from 0 to 2, found ''"),
        ("0 0:1\n 1 1:1\n", 3, "a feature must be index:value .*, found '1'"),
        ("0 0:1\n1 1:3e38 1:3e38\n", 3, "the sum of a repeated feature must be finite in float32"),
        ("0 0:1\n1 1:1\n2 2:1\n", 4, "the header promises 2 rows, found more: '2 2:1'"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(
    write: Write, scratch: Scratch, body: str, line: int, found: str
) -> None:
    with pytest.raises(DataError, match=rf"train\.txt:{line}: .*{found}"):
        read(write, scratch, f"2 4 3\n{body}")


def test_the_line_is_right_far_into_a_file(write: Write, scratch: Scratch) -> None:
    line = "1,2 " + " ".join(f"{index}:0.123456" for index in range(100)) + "\n"
    text = "5000 100 3\n" + line * 3000 + "1 1:x\n" + line * 1999
    with pytest.raises(DataError, match=r"train\.txt\.gz:3002: a value must be a number"):
        read(write, scratch, text, "train.txt.gz")


def test_a_file_of_many_blocks_is_read_whole(write: Write, scratch: Scratch) -> None:
    line = "1,2 " + " ".join(f"{index}:0.5" for index in range(100)) + "\n"
    split = read(write, scratch, "5000 100 3\n" + line * 5000)
    assert split.instances == 5000
    assert isinstance(split.features, CsrRows)
    assert len(split.features.indices) == 500_000


def test_fewer_lines_than_promised_are_refused(write: Write, scratch: Scratch) -> None:
    with pytest.raises(DataError, match=r"train\.txt: the header promises 3 rows, found 1 lines after it"):
        read(write, scratch, "3 4 3\n0 0:1\n")


@pytest.mark.parametrize(
    "header", ["2 4", "2 4 3 1", "a b c", "-1 4 3", "2 4.0 3", "2 4 9999999999", "", "0,1 2:1"]
)
def test_a_wrong_header_is_refused(write: Write, scratch: Scratch, header: str) -> None:
    with pytest.raises(
        DataError, match=r"train\.txt:1: the header must be 3 whole numbers .*'instances features"
    ):
        read(write, scratch, f"{header}\n0 0:1\n")


def test_an_empty_file_is_refused(write: Write, scratch: Scratch) -> None:
    with pytest.raises(DataError, match=r"train\.txt:1: the header must be 3 whole numbers"):
        read(write, scratch, "")


def test_indices_of_many_digits_are_exact(write: Write, scratch: Scratch) -> None:
    # Once, on NumPy 1, the digits were summed in uint8 and 42537 became 42281.
    split = read(write, scratch, "1 2147483647 2147483647\n42537,2147483646 256:1 1234567890:2\n")
    assert split.labels.indices.tolist() == [42537, 2147483646]
    assert isinstance(split.features, CsrRows)
    assert split.features.indices.tolist() == [256, 1234567890]


class Noting(Reading):
    def __init__(self, refused: list[str]) -> None:
        super().__init__()
        self._refused = refused

    def refuse(self, error: DataError) -> None:
        self._refused.append(str(error))


numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rows, columns, labels = draw(st.integers(1, 8)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    features = draw(st.lists(numbers | st.just(0.0), min_size=rows * columns, max_size=rows * columns))
    truth = draw(st.lists(st.booleans(), min_size=rows * labels, max_size=rows * labels))
    return (
        np.array(features, np.float32).reshape(rows, columns),
        np.array(truth, np.float32).reshape(rows, labels),
    )


def pairs(row: np.ndarray) -> str:
    return " ".join(f"{column}:{float(row[column])!r}" for column in np.flatnonzero(row))


@given(problems())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_xmc_text_comes_back_as_written(
    write: Write, scratch: Scratch, problem: tuple[np.ndarray, np.ndarray]
) -> None:
    features, labels = problem
    body = [
        ",".join(map(str, np.flatnonzero(truth))) + " " + pairs(row)
        for truth, row in zip(labels, features, strict=True)
    ]
    header = f"{len(features)} {features.shape[1]} {labels.shape[1]}"
    split = read(write, scratch, "\n".join([header, *body]) + "\n")
    np.testing.assert_array_equal(dense(split.features), features)
    np.testing.assert_array_equal(dense(split.labels), labels)


@given(problems())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_matrix_text_comes_back_as_written(
    write: Write, tmp_path: Path, problem: tuple[np.ndarray, np.ndarray]
) -> None:
    features, labels = problem
    files = {
        name: "\n".join([f"{matrix.shape[0]} {matrix.shape[1]}", *map(pairs, matrix)]) + "\n"
        for name, matrix in (("trn_X_Xf.txt", features), ("trn_X_Y.txt", labels))
    }
    dataset: Dataset = read_folder(write(files, "matrix"), tmp_path)
    np.testing.assert_array_equal(dense(dataset.train.features), features)
    np.testing.assert_array_equal(dense(dataset.train.labels), labels)


fragments = st.sampled_from(
    [
        b"0",
        b"1",
        b"12",
        b",",
        b":",
        b" ",
        b"\t",
        b"\r",
        b"-",
        b"+",
        b".",
        b"e",
        b"1:2",
        b"0,2 ",
        b" 3:.5",
        b"nan",
        b"x",
    ]
)


@given(st.lists(st.lists(fragments, max_size=8).map(b"".join), min_size=1, max_size=4), st.booleans())
@settings(max_examples=500)
def test_both_parsers_agree_on_any_lines(lines: list[bytes], labelled: bool) -> None:
    body = b"".join(line + b"\n" for line in lines)
    layout = Layout(Path("f"), len(lines), 20, 20 if labelled else None)
    refused: list[str] = []
    reading = Noting(refused)
    features, label_rows, _ = _parse_block(body, 2, body.count(b"\n"), layout, reading)
    for number, line in enumerate(lines):
        try:
            expected = _parse_line(line, f"f:{number + 2}", layout)
        except DataError as error:
            assert refused.pop(0) == str(error)
            expected = ([], [], [])
        start, end = features.offsets[number : number + 2]
        assert features.values is not None
        np.testing.assert_array_equal(features.indices[start:end], expected[1])
        np.testing.assert_array_equal(features.values[start:end], np.array(expected[2], np.float32))
        if label_rows is not None:
            start, end = label_rows.offsets[number : number + 2]
            np.testing.assert_array_equal(label_rows.indices[start:end], expected[0])
    assert not refused


decimal_texts = st.from_regex(
    r"[+-]?([0-9]{1,22}\.?[0-9]{0,22}|\.[0-9]{1,22})([eE][+-]?[0-9]{1,3})?", fullmatch=True
)


@given(st.lists(decimal_texts, min_size=1, max_size=20))
@settings(max_examples=400)
def test_numbers_are_rounded_to_double_and_then_to_float(texts: list[str]) -> None:
    refused: list[str] = []
    layout = Layout(Path("f"), len(texts), 1, None)
    body = "".join(f"0:{text}\n" for text in texts).encode()
    features, _, _ = _parse_block(body, 2, body.count(b"\n"), layout, Noting(refused))
    with np.errstate(over="ignore"):
        expected = np.array([float(text) for text in texts], np.float64).astype(np.float32)
    assert len(refused) == np.count_nonzero(~np.isfinite(expected))
    assert features.values is not None
    assert features.values.tobytes() == expected[np.isfinite(expected)].tobytes()


@given(problems())
def test_plain_lines_never_need_the_slow_parser(problem: tuple[np.ndarray, np.ndarray]) -> None:
    features, labels = problem
    body = "".join(
        ",".join(map(str, np.flatnonzero(truth))) + " " + pairs(row) + "\n"
        for truth, row in zip(labels, features, strict=True)
    )
    layout = Layout(Path("f"), len(features), features.shape[1], labels.shape[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_text, "_parse_line", None)
        _parse_block(body.encode(), 2, body.count("\n"), layout, Reading())


def test_filter_pairs_are_sorted_and_merged(write: Write) -> None:
    reading = Reading()
    folder = write({"f.txt": "2 1\n0 3\r\n\n2\t0 \n2 1"})
    rows = read_pairs(folder / "f.txt", 4, 5, reading)
    assert rows.offsets.tolist() == [0, 1, 1, 3, 3]
    assert rows.indices.tolist() == [3, 0, 1]
    assert reading.messages() == ("1 repeated filter pairs merged",)


def test_an_empty_filter_file_holds_no_pair(write: Write) -> None:
    rows = read_pairs(write({"f.txt": ""}) / "f.txt", 4, 5, Reading())
    assert rows.rows == 4
    assert not len(rows.indices)


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("0 1\n4 0\n", 2, "an instance must be at most 3, found '4'"),
        ("0 1\n1 5\n", 2, "a label must be at most 4, found '5'"),
        ("-1 1\n1 1\n", 1, "an instance must be a whole number from 0 to 3, found '-1'"),
        ("0 1\n\n1 1.0\n", 3, "a label must be a whole number from 0 to 4, found '1.0'"),
        ("0 1\n1\n", 2, "must be a pair 'instance label', found '1'"),
        ("0 1\n1 1 1\n", 2, "must be a pair 'instance label', found '1 1 1'"),
    ],
)
def test_a_wrong_filter_pair_is_refused_by_its_line(write: Write, text: str, line: int, found: str) -> None:
    with pytest.raises(DataError, match=rf"f\.txt:{line}: {found}"):
        read_pairs(write({"f.txt": text}) / "f.txt", 4, 5, Reading())


def test_scipy_and_the_reader_mean_the_same_matrix(write: Write, tmp_path: Path) -> None:
    matrix = scipy.sparse.random(30, 40, density=0.1, random_state=np.random.default_rng(0), format="csr")
    body = [pairs(row) for row in matrix.toarray().astype(np.float32)]
    folder = write({"trn_X_Y.txt": "30 2\n" + "1:1\n" * 30, "trn_X_Xf.txt": "\n".join(["30 40", *body])})
    dataset = read_folder(folder, tmp_path)
    np.testing.assert_array_equal(dense(dataset.train.features), matrix.toarray().astype(np.float32))
