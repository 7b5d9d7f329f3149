"""Split matrices: text, SciPy and NumPy files in any mixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from xmlc.data.reader import read_folder
from xmlc.data.reader.files import Reading
from xmlc.data.reader.matrix import read_labels
from xmlc.data.reader.spool import Scratch
from xmlc.data.rows import CsrRows
from xmlc.errors import DataError

Write = Callable[..., Path]

FEATURES = np.array([[1.5, 0, 0], [0, 0, 0], [0, 2, 0.25]], np.float32)
LABELS = np.array([[0, 1], [0, 0], [1, 1]], np.float32)
TEXT = {"trn_X_Xf.txt": "3 3\n0:1.5\n\n2:0.25 1:2\n", "trn_X_Y.txt": "3 2\n1:1.0\n\n0:1 1:1\n"}


def toarray(rows: object) -> np.ndarray:
    assert isinstance(rows, CsrRows)
    return rows.to_scipy().toarray()


def test_text_matrices_keep_empty_rows(write: Write, tmp_path: Path) -> None:
    dataset = read_folder(write(TEXT), tmp_path)
    assert dataset.kind == "sparse"
    np.testing.assert_array_equal(toarray(dataset.train.features), FEATURES)
    np.testing.assert_array_equal(toarray(dataset.train.labels), LABELS)


def test_empty_rows_at_the_end_need_no_line_of_their_own_only_where_lines_are_blank(
    write: Write, tmp_path: Path
) -> None:
    folder = write({"trn_X_Xf.txt": "3 3\n0:1\n\n\n", "trn_X_Y.txt": "3 2\n\n\n1:1\n\n"})
    assert read_folder(folder, tmp_path).train.instances == 3
    with pytest.raises(DataError, match=r"trn_X_Xf\.txt: the header promises 3 rows, found 2 lines"):
        read_folder(write({"trn_X_Xf.txt": "3 3\n0:1\n\n"}), tmp_path)


def test_all_parts_are_read(write: Write, tmp_path: Path) -> None:
    folder = write(
        {
            **TEXT,
            "tst_X_Xf.txt.gz": "1 3\n2:1\n",
            "tst_X_Y.txt": "1 2\n0:1\n",
            "lbl_X_Xf.txt": "2 3\n0:1\n\n",
            "Yf.txt": "first\nsecond\n",
            "Xf.txt": "a\nb\nc\n",
            "lbl_raw_texts.txt": "the first\nthe second\n",
            "trn_raw_texts.txt": "one\n\nthree\n",
            "tst_raw_texts.txt": "four\n",
            "trn_filter_labels.txt": "2 0\n",
            "tst_filter_labels.txt": "0 1\n",
        }
    )
    dataset = read_folder(folder, tmp_path)
    assert dataset.test is not None
    assert dataset.train.texts is not None
    assert dataset.train.filter_pairs is not None
    assert dataset.test.filter_pairs is not None
    np.testing.assert_array_equal(toarray(dataset.test.features), [[0, 0, 1]])
    np.testing.assert_array_equal(toarray(dataset.label_features), [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(toarray(dataset.train.filter_pairs), [[0, 0], [0, 0], [1, 0]])
    np.testing.assert_array_equal(toarray(dataset.test.filter_pairs), [[0, 1]])
    assert [
        list(texts or []) for texts in (dataset.label_names, dataset.label_texts, dataset.feature_names)
    ] == [
        ["first", "second"],
        ["the first", "the second"],
        ["a", "b", "c"],
    ]
    assert list(dataset.train.texts) == ["one", "", "three"]


def test_texts_without_features_make_a_text_data_set(write: Write, tmp_path: Path) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"], "trn_raw_texts.txt": "one\ntwo\nthree\n"})
    dataset = read_folder(folder, tmp_path)
    assert dataset.kind == "text"
    assert dataset.feature_count == 0


def test_sparse_npz_reads_like_text(write: Write, tmp_path: Path) -> None:
    folder = write({})
    scipy.sparse.save_npz(folder / "trn_X_Xf.npz", scipy.sparse.csc_matrix(FEATURES))
    scipy.sparse.save_npz(folder / "trn_X_Y.npz", scipy.sparse.coo_matrix(LABELS.astype(bool)))
    dataset = read_folder(folder, tmp_path)
    assert dataset.kind == "sparse"
    np.testing.assert_array_equal(toarray(dataset.train.features), FEATURES)
    np.testing.assert_array_equal(toarray(dataset.train.labels), LABELS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ">f4"])
def test_dense_npy_features_stay_in_their_file(write: Write, tmp_path: Path, dtype: str) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    np.save(folder / "trn_X_Xf.npy", FEATURES.astype(dtype))
    dataset = read_folder(folder, tmp_path)
    assert dataset.kind == "dense"
    assert dataset.feature_count == 3
    assert isinstance(dataset.train.features, np.memmap)
    np.testing.assert_array_equal(dataset.train.features, FEATURES)


def test_a_stored_zero_is_no_label(write: Write, tmp_path: Path) -> None:
    dataset = read_folder(write({**TEXT, "trn_X_Y.txt": "3 2\n0:0 1:1\n0:0\n\n"}), tmp_path)
    assert dataset.train.labels.offsets.tolist() == [0, 1, 1, 1]
    assert dataset.train.labels.indices.tolist() == [1]


def test_a_negative_label_is_refused_by_its_line(write: Write, scratch: Scratch) -> None:
    folder = write({"trn_X_Y.txt": "3 2\n1:1\n\n0:-1\n"})
    with pytest.raises(
        DataError, match=r"trn_X_Y\.txt:4: the relevance of a label must be 0 or more, found -1"
    ):
        read_labels(folder / "trn_X_Y.txt", scratch, Reading())


def test_a_label_without_a_value_is_refused_by_its_line(write: Write, scratch: Scratch) -> None:
    folder = write({"trn_X_Y.txt": "3 2\n1:1\n1\n0:1\n"})
    with pytest.raises(DataError, match=r"trn_X_Y\.txt:3: a label must be index:value, found '1'"):
        read_labels(folder / "trn_X_Y.txt", scratch, Reading())


def test_repeats_count_as_labels_in_a_label_matrix(write: Write, tmp_path: Path) -> None:
    dataset = read_folder(write({**TEXT, "trn_X_Y.txt": "3 2\n1:1 1:1\n\n0:1\n"}), tmp_path)
    assert dataset.warnings == ("1 repeated labels merged",)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"tst_X_Y.txt": "1 3\n0:1\n", "tst_X_Xf.txt": "1 3\n0:1\n"},
            r"same labels, found 2 in training and 3",
        ),
        (
            {"tst_X_Y.txt": "1 2\n0:1\n", "tst_X_Xf.txt": "1 4\n0:1\n"},
            r"same features, found 3 in training and 4",
        ),
        (
            {"tst_X_Y.txt": "2 2\n0:1\n\n", "tst_X_Xf.txt": "1 3\n0:1\n"},
            r"each of the 2 rows of labels, found 1",
        ),
        ({"tst_X_Y.txt": "1 2\n0:1\n"}, r"must hold tst_X_Xf\.txt, \.npz or \.npy, or tst_raw_texts\.txt"),
        ({"tst_X_Xf.txt": "1 3\n0:1\n"}, r"must hold the labels tst_X_Y\.txt"),
        ({"lbl_X_Xf.txt": "3 3\n\n\n\n"}, r"label_features must have 2 rows, one for each label, found 3"),
        ({"Yf.txt": "a\n"}, r"Yf\.txt: must hold 2 lines, one per row, found 1"),
        ({"Yf.txt": "a\nb\nc\n"}, r"Yf\.txt:3: must hold 2 lines, one per row, found one more: 'c'"),
        ({"Yf.txt": "a\n\xe4\n".encode("latin-1")}, r"Yf\.txt:2: must be text in UTF-8"),
        ({"trn_X_Xf.npz": b""}, r"must hold one of trn_X_Xf\.txt and trn_X_Xf\.npz, found both"),
        ({"trn_filter_labels.txt": "3 0\n"}, r"trn_filter_labels\.txt:1: an instance must be at most 2"),
        (
            {"trn_filter_labels.txt": "0 0\n", "filter_labels_train.txt": "0 0\n"},
            r"must hold one of filter_labels_train\.txt and trn_filter_labels\.txt, found both",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    write: Write, tmp_path: Path, files: dict[str, str | bytes], found: str
) -> None:
    with pytest.raises(DataError, match=found):
        read_folder(write({**TEXT, **files}), tmp_path)


def test_a_pickled_npz_is_refused_unopened(write: Write, tmp_path: Path) -> None:
    folder = write({"trn_X_Xf.txt": TEXT["trn_X_Xf.txt"]})
    np.savez(
        folder / "trn_X_Y.npz", format=np.array(["csr"], dtype=object), data=np.array([{}], dtype=object)
    )
    with pytest.raises(DataError, match=r"trn_X_Y\.npz: must be a sparse matrix saved by .* without pickled"):
        read_folder(folder, tmp_path)


def test_a_pickled_npy_is_refused_unopened(write: Write, tmp_path: Path) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    np.save(folder / "trn_X_Xf.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(
        DataError, match=r"trn_X_Xf\.npy: must be an array saved by numpy\.save without pickled"
    ):
        read_folder(folder, tmp_path)


@pytest.mark.parametrize("name", ["trn_X_Xf.npz", "trn_X_Xf.npy"])
@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04junk", b"\x93NUMPY\x01\x00"])
def test_a_damaged_array_file_is_refused(write: Write, tmp_path: Path, name: str, content: bytes) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"], name: content})
    with pytest.raises(DataError, match=rf"{name}: must be "):
        read_folder(folder, tmp_path)


PARTS: dict[str, Any] = {
    "format": np.array(b"csr"),
    "shape": np.array([3, 3]),
    "data": np.ones(2),
    "indices": np.array([0, 1]),
    "indptr": np.array([0, 1, 1, 2]),
}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"format": np.array(3)}, ""),
        ({"format": np.array([b"csr", b"csr"])}, ""),
        ({"shape": np.array([3.0, 3.0])}, ""),
        ({"shape": np.array([10**13, 3])}, ""),
        ({"indices": np.array([0.0, 1.5])}, ".*found: indices of dtype float64, not of integers"),
        ({"indptr": np.array([0.0, 1, 1, 2])}, ".*found: indptr of dtype float64, not of integers"),
        ({"data": np.ones((2, 2))}, ""),
    ],
    ids=str,
)
def test_a_sparse_file_of_other_arrays_is_refused(
    write: Write, tmp_path: Path, change: dict[str, Any], found: str
) -> None:
    """They once ended in an AttributeError or TypeError; of float indices, the fractions were cut off."""
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    np.savez(folder / "trn_X_Xf.npz", **PARTS)
    assert read_folder(folder, tmp_path).feature_count == 3
    np.savez(folder / "trn_X_Xf.npz", **{**PARTS, **change})
    with pytest.raises(DataError, match=rf"trn_X_Xf\.npz: must be a {found}"):
        read_folder(folder, tmp_path)


def test_a_sparse_file_of_one_axis_is_refused(write: Write, tmp_path: Path) -> None:
    """It once ended in an IndexError."""
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    one_axis = {"format": b"coo", "shape": [3], "data": np.ones(1), "coords": [[1]], "_is_array": True}
    np.savez(folder / "trn_X_Xf.npz", **one_axis)
    with pytest.raises(DataError, match=r"trn_X_Xf\.npz: must "):
        read_folder(folder, tmp_path)
    matrix = scipy.sparse.coo_array(np.ones(3))
    with pytest.raises(DataError, match=r"here: must have two axes, \[row, column\], found shape \[3\]"):
        CsrRows.from_scipy(matrix, "here")


def test_a_byte_changed_anywhere_in_an_array_file_is_refused_or_harmless(
    write: Write, tmp_path: Path
) -> None:
    """zlib, tokenize and OverflowErrors once came through."""
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    refused = set()
    for name in ("trn_X_Xf.npz", "trn_X_Xf.npy"):
        path = folder / name
        if name.endswith("z"):
            scipy.sparse.save_npz(path, scipy.sparse.csr_array(FEATURES))
        else:
            np.save(path, FEATURES)
        whole = path.read_bytes()
        for place in range(0, min(len(whole), 500), 3):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            try:
                read_folder(folder, tmp_path)
            except DataError as error:
                assert name in str(error) or "rows of labels" in str(error)
                refused.add(name)
        path.unlink()
    assert refused == {"trn_X_Xf.npz", "trn_X_Xf.npy"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"(3, 3)", b"(9**9**9, 3)"),
        (b"(3, 3)", b"(-3, 3)"),
        (b"{'descr'", b"[[[[[[[["),
        (b"'<f4'", b"'<q9'"),
        (b"(3, 3)", b"(3\0, 3)"),
    ],
)
def test_a_damaged_header_of_an_array_is_refused(
    write: Write, tmp_path: Path, old: bytes, new: bytes
) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    path = folder / "trn_X_Xf.npy"
    np.save(path, FEATURES)
    padding = b" " * (len(new) - len(old))
    content = path.read_bytes()
    path.write_bytes(content.replace(padding + b"\n", b"\n", 1).replace(old, new))
    with pytest.raises(DataError, match=r"trn_X_Xf\.npy: must be an array"):
        read_folder(folder, tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_dense_values_beyond_float32_are_refused_by_their_place(
    write: Write, tmp_path: Path, value: float
) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    features = FEATURES.astype(np.float64)
    features[2, 1] = value
    np.save(folder / "trn_X_Xf.npy", features)
    with pytest.raises(DataError, match=r"trn_X_Xf\.npy: features must be finite .* in row 2, column 1"):
        read_folder(folder, tmp_path)


@pytest.mark.parametrize("array", [np.zeros(3), np.zeros((3, 2, 2)), np.zeros((3, 2), complex)])
def test_dense_features_of_another_shape_are_refused(write: Write, tmp_path: Path, array: np.ndarray) -> None:
    folder = write({"trn_X_Y.txt": TEXT["trn_X_Y.txt"]})
    np.save(folder / "trn_X_Xf.npy", array)
    with pytest.raises(DataError, match=r"must be a real matrix \[instance, hidden\], found dtype"):
        read_folder(folder, tmp_path)


def test_dense_labels_are_refused(write: Write, tmp_path: Path) -> None:
    folder = write({"trn_X_Xf.txt": TEXT["trn_X_Xf.txt"]})
    np.save(folder / "trn_X_Y.npy", LABELS)
    with pytest.raises(DataError, match=r"labels must be sparse, \.txt or \.npz, found \.npy"):
        read_folder(folder, tmp_path)
