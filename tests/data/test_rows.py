"""Ragged columns: gathering, scaling, conversion."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from xmlc.data.rows import CsrRows, TextColumn, row_of, segment_sums, unit_length
from xmlc.errors import DataError


def random_rows(seed: int, rows: int, columns: int) -> CsrRows:
    matrix = scipy.sparse.random(
        rows, columns, density=0.2, random_state=np.random.default_rng(seed), format="csr"
    )
    return CsrRows.from_scipy(matrix, "random")


@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 19), max_size=30))
def test_take_gathers_rows_in_order_and_with_repeats(seed: int, chosen: list[int]) -> None:
    rows = random_rows(seed, 20, 15)
    taken = rows.take(np.array(chosen, np.int64))
    np.testing.assert_array_equal(taken.to_scipy().toarray(), rows.to_scipy().toarray()[chosen])
    assert taken.offsets.dtype == np.int64
    assert taken.indices.dtype == np.int32


def test_rows_without_values_are_ones() -> None:
    rows = CsrRows(np.array([0, 0, 2]), np.array([1, 3], np.int32), None, 4)
    np.testing.assert_array_equal(rows.to_scipy().toarray(), [[0, 0, 0, 0], [0, 1, 0, 1]])
    assert rows.take(np.array([1])).values is None


def test_from_scipy_sums_repeats_and_sorts() -> None:
    matrix = scipy.sparse.coo_matrix(([1.0, 2.0, 4.0], ([0, 0, 0], [3, 1, 3])), shape=(2, 5))
    rows = CsrRows.from_scipy(matrix, "m")
    assert rows.indices.tolist() == [1, 3]
    assert rows.values is not None
    assert rows.values.tolist() == [2.0, 5.0]
    assert rows.rows == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_from_scipy_refuses_values_that_float32_cannot_hold(value: float) -> None:
    matrix = scipy.sparse.csr_array(np.array([[0.0, 0.0], [0.0, value]]))
    with pytest.raises(DataError, match=r"m: values must be finite in float32, found .* in row 1"):
        CsrRows.from_scipy(matrix, "m")


def test_from_scipy_refuses_complex_values() -> None:
    with pytest.raises(DataError, match="must be real numbers, found dtype complex128"):
        CsrRows.from_scipy(scipy.sparse.csr_array(np.array([[1j]])), "m")


def test_from_scipy_refuses_indices_out_of_range() -> None:
    matrix = scipy.sparse.csr_array((2, 3))
    matrix.indptr, matrix.indices, matrix.data = np.array([0, 1, 1]), np.array([7]), np.array([1.0])
    with pytest.raises(DataError, match="must be a valid sparse matrix"):
        CsrRows.from_scipy(matrix, "m")


def test_from_scipy_refuses_more_columns_than_an_index_can_name() -> None:
    matrix = scipy.sparse.csr_array((2, 2**31))
    with pytest.raises(DataError, match=r"m: must have at most 2\^31 - 1 columns, found 2147483648"):
        CsrRows.from_scipy(matrix, "m")


def test_unit_length_scales_filled_rows_and_leaves_empty_ones() -> None:
    rows = CsrRows(np.array([0, 2, 2, 3]), np.array([0, 1, 0], np.int32), np.array([3, 4, 0], np.float32), 2)
    np.testing.assert_allclose(
        unit_length(rows).to_scipy().toarray(), [[0.6, 0.8], [0, 0], [0, 0]], rtol=1e-7
    )


def test_unit_length_holds_beside_huge_rows() -> None:
    rows = CsrRows(np.array([0, 1, 2]), np.array([0, 0], np.int32), np.array([1e30, 1e-20], np.float32), 1)
    np.testing.assert_allclose(unit_length(rows).values, [1, 1])


def test_segment_sums_give_zero_for_empty_segments() -> None:
    assert segment_sums(np.array([1.0, 2, 4]), np.array([0, 0, 2, 2, 3, 3])).tolist() == [0, 3, 0, 4, 0]


def test_row_of_skips_empty_rows() -> None:
    assert row_of(np.array([0, 0, 2, 2, 3]), 2) == 3


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.data())
def test_texts_come_back_one_by_one_streamed_and_gathered(texts: list[str], data: st.DataObject) -> None:
    column = TextColumn.from_strings(texts)
    assert list(column) == texts
    assert [column[row] for row in range(len(column))] == texts
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1))) if texts else []
    assert list(column.take(np.array(rows, np.int64))) == [texts[row] for row in rows]


def test_texts_stream_across_blocks() -> None:
    texts = [str(number) for number in range(10_000)]
    assert list(TextColumn.from_strings(texts)) == texts


@pytest.mark.parametrize("row", [-1, 2])
def test_a_text_out_of_range_is_an_index_error(row: int) -> None:
    with pytest.raises(IndexError):
        TextColumn.from_strings(["a", "b"])[row]


def test_entries_are_taken_out_by_row_and_column() -> None:
    rows = CsrRows(np.array([0, 3, 3, 5]), np.array([0, 2, 4, 1, 2], np.int32), None, 5)
    pairs = CsrRows(np.array([0, 2, 3, 4]), np.array([1, 2, 2, 1], np.int32), None, 5)
    left = rows.without(pairs)
    assert left.offsets.tolist() == [0, 2, 2, 3]
    assert left.indices.tolist() == [0, 4, 2]


def test_entries_are_taken_out_with_their_values() -> None:
    rows = CsrRows(np.array([0, 3]), np.array([0, 2, 4], np.int32), np.array([1, 2, 3], np.float32), 5)
    left = rows.without(CsrRows(np.array([0, 1]), np.array([2], np.int32), None, 5))
    assert left.values is not None
    assert left.values.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("offsets", [[0, 2, 0], [0, -5, -1], [0, 1, -2]])
def test_offsets_that_fall_are_refused_even_where_the_last_is_not_above_zero(offsets: list[int]) -> None:
    """SciPy checks them only where the last one is above 0; its products would read outside of memory."""
    matrix = scipy.sparse.csr_array((2, 3))
    matrix.indptr, matrix.indices = np.array(offsets, np.int32), np.array([0, 1], np.int32)
    matrix.data = np.ones(2)
    with pytest.raises(DataError, match="found: index pointer values must not fall; write it anew"):
        CsrRows.from_scipy(matrix, "features")
