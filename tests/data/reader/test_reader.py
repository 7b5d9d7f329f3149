"""Choice of the layout by what a folder holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xmlc.data.reader import read_folder, source_files
from xmlc.errors import DataError

Write = Callable[..., Path]

XMC = {"train.txt": "1 2 3\n0 0:1\n", "test.txt": "2 2 3\n1 1:1\n 1:1\n"}
LF = {"trn.json": '{"title": "T", "target_ind": [0]}\n', "lbl.json": '{"title": "A"}\n'}
MATRIX = {"trn_X_Xf.txt": "1 2\n0:1\n", "trn_X_Y.txt": "1 3\n0:1\n"}


@pytest.mark.parametrize(
    ("files", "kind", "labels"), [(XMC, "sparse", 3), (LF, "text", 1), (MATRIX, "sparse", 3)]
)
def test_the_files_choose_the_layout(
    write: Write, tmp_path: Path, files: dict[str, str], kind: str, labels: int
) -> None:
    dataset = read_folder(write(files), tmp_path)
    assert (dataset.kind, dataset.label_count) == (kind, labels)


def test_raw_text_goes_before_a_bag_of_words(write: Write, tmp_path: Path) -> None:
    assert read_folder(write({**XMC, **MATRIX, **LF}), tmp_path).kind == "text"


def test_names_of_labels_and_features_are_read(write: Write, tmp_path: Path) -> None:
    dataset = read_folder(write({**XMC, "labels.txt": "a\nb\nc\n", "features.txt": "f\n\n"}), tmp_path)
    assert dataset.label_names is not None
    assert dataset.feature_names is not None
    assert list(dataset.label_names) == ["a", "b", "c"]
    assert list(dataset.feature_names) == ["f", ""]


def test_filter_files_are_read_for_both_splits(write: Write, tmp_path: Path) -> None:
    dataset = read_folder(
        write({**XMC, "filter_labels_train.txt": "0 2\n", "filter_labels_test.txt": "1 0\n"}), tmp_path
    )
    assert dataset.test is not None
    assert dataset.train.filter_pairs is not None
    assert dataset.test.filter_pairs is not None
    assert dataset.train.filter_pairs.indices.tolist() == [2]
    assert dataset.test.filter_pairs.offsets.tolist() == [0, 0, 1]


def test_the_test_split_may_be_absent(write: Write, tmp_path: Path) -> None:
    assert read_folder(write({"train.txt": XMC["train.txt"]}), tmp_path).test is None


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, r"must hold train\.txt .* found an empty folder"),
        ({"data.csv": "1"}, r"must hold train\.txt .* found data\.csv"),
        ({"test.txt": XMC["test.txt"]}, r"must hold train\.txt or train\.txt\.gz, found neither"),
        ({**XMC, "test.txt": "1 2 4\n0 0:1\n"}, r"same labels, found 3 in training and 4 in test"),
        ({**XMC, "test.txt": "1 5 3\n0 0:1\n"}, r"same features, found 2 in training and 5 in test"),
        ({"train.txt": "0 2 3\n"}, r"at least one instance and one label, found 0 instances and 3 labels"),
        ({"train.txt": "1 2 0\n 0:1\n"}, r"at least one instance and one label, found 1 instances and 0"),
        ({**XMC, "labels.txt": "a\n"}, r"labels\.txt: must hold 3 lines"),
        ({**XMC, "train.txt.gz": "1 2 3\n"}, r"must hold one of train\.txt and train\.txt\.gz, found both"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    write: Write, tmp_path: Path, files: dict[str, str], found: str
) -> None:
    with pytest.raises(DataError, match=found):
        read_folder(write(files), tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere: must be a folder with a data set, found none"):
        read_folder(tmp_path / "nowhere", tmp_path)


def test_source_files_are_those_that_a_reader_would_look_at(write: Write) -> None:
    folder = write({**XMC, "notes.md": "", "filter_labels_test.txt.gz": ""})
    assert [path.name for path in source_files(folder)] == [
        "filter_labels_test.txt.gz",
        "test.txt",
        "train.txt",
    ]
