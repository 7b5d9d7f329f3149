"""Filter files from identical texts or ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xmlc.data import open_dataset, self_labels
from xmlc.data.convert import new_file
from xmlc.data.self_labels import write_filters
from xmlc.errors import DataError

Write = Callable[..., Path]

LF = {
    "trn.json": '{"uid": "2", "title": "b", "target_ind": [0]}\n{"uid": "", "title": "", "target_ind": [1]}\n'
    '{"uid": "1", "title": "A", "content": "x", "target_ind": []}\n',
    "tst.json": '{"uid": "9", "title": "c", "target_ind": [1]}\n',
    "lbl.json": '{"uid": "1", "title": "b"}\n{"uid": "2", "title": "A", "content": "x"}\n'
    '{"uid": "", "title": "b"}\n',
}


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    pass


def test_equal_texts_are_pairs(write: Write) -> None:
    folder = write(LF)
    train, test = folder / "filter_labels_train.txt", folder / "filter_labels_test.txt"
    assert write_filters(folder, "text") == {train: 3, test: 0}
    assert train.read_text() == "0 0\n0 2\n2 1\n"
    assert test.read_text() == ""
    assert sorted(path.name for path in folder.iterdir()) == sorted([*LF, train.name, test.name])
    pairs = open_dataset(folder).train.filter_pairs
    assert pairs is not None
    assert pairs.indices.tolist() == [0, 2, 1]


def test_equal_uids_are_pairs(write: Write) -> None:
    folder = write(LF)
    write_filters(folder, "uid")
    assert (folder / "filter_labels_train.txt").read_text() == "0 1\n2 0\n"


def test_equal_ids_are_pairs(write: Write) -> None:
    folder = write({"train.txt": "2 1 3\n0 0:1\n1 0:1\n", "trn_ids.txt": "x\n\n", "lbl_ids.txt": "\ny\nx\n"})
    write_filters(folder, "ids")
    assert (folder / "filter_labels_train.txt").read_text() == "0 2\n"
    assert not (folder / "filter_labels_test.txt").exists()


def test_names_stand_for_texts_that_labels_lack(write: Write) -> None:
    folder = write({"trn_X_Y.txt": "1 2\n0:1\n", "trn_raw_texts.txt": "b\n", "Yf.txt": "a\nb\n"})
    write_filters(folder, "text")
    assert (folder / "filter_labels_train.txt").read_text() == "0 1\n"


@pytest.mark.parametrize(
    ("change", "by", "found"),
    [
        (
            {"filter_labels_test.txt": ""},
            "text",
            r"must have no filter files yet, found filter_labels_test\.txt",
        ),
        (
            {"lbl.json": '{"title": "b"}\n{"title": "c"}\n'},
            "uid",
            r"lbl\.json:1: uid must be a string, found no",
        ),
        ({}, "ids", r"must hold lbl_ids\.txt or lbl_ids\.txt\.gz, found neither"),
        ({"lbl_ids.txt": "a\n"}, "ids", r"lbl_ids\.txt: must hold 3 lines"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    write: Write, change: dict[str, str], by: str, found: str
) -> None:
    folder = write({**LF, **change})
    with pytest.raises(DataError, match=found):
        write_filters(folder, by)  # type: ignore[arg-type]
    assert not (folder / "filter_labels_train.txt").exists()


def test_features_cannot_be_compared_with_labels(write: Write) -> None:
    files = {"train.txt": "1 1 1\n0 0:1\n"}
    with pytest.raises(DataError, match="labels must have texts or names to compare, found neither; use ids"):
        write_filters(write(files), "text")
    with pytest.raises(DataError, match="instances must have texts to compare, found features; use ids"):
        write_filters(write({**files, "labels.txt": "a\n"}), "text")


def test_a_second_file_that_cannot_be_written_leaves_no_first(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one stayed, and stood in the way of the next try."""

    def failing(path: Path, lines: Any) -> None:
        if "test" in path.name:
            raise DataError("no room")
        new_file(path, lines)

    folder = write(LF)
    monkeypatch.setattr(self_labels, "new_file", failing)
    with pytest.raises(DataError, match="no room"):
        write_filters(folder, "text")
    assert sorted(path.name for path in folder.iterdir()) == sorted(LF)
