"""LF raw text: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from xmlc.data.dataset import Dataset
from xmlc.data.reader import read_folder
from xmlc.errors import DataError

Write = Callable[..., Path]

LABELS = '{"uid": "a", "title": "A", "content": "first"}\n{"title": "B"}\n{"title": "C", "content": ""}\n'
GOOD = '{"uid": "x", "title": "T", "content": "c", "target_ind": [2, 0], "target_rel": [1.0, 1.0]}\n'


def read(write: Write, tmp_path: Path, train: str, labels: str = LABELS, **more: str) -> Dataset:
    files = {"trn.json": train, "lbl.json": labels, **{f"{name}.json": text for name, text in more.items()}}
    return read_folder(write(files), tmp_path)


def test_texts_and_labels_are_read(write: Write, tmp_path: Path) -> None:
    dataset = read(write, tmp_path, GOOD, tst='{"title": "only", "target_ind": [1]}\n')
    assert dataset.kind == "text"
    assert dataset.train.texts is not None
    assert dataset.label_names is not None
    assert dataset.label_texts is not None
    assert list(dataset.train.texts) == ["T c"]
    assert dataset.train.labels.indices.tolist() == [0, 2]
    assert list(dataset.label_names) == ["A", "B", "C"]
    assert list(dataset.label_texts) == ["A first", "B", "C"]
    assert dataset.test is not None
    assert dataset.test.texts is not None
    assert list(dataset.test.texts) == ["only"]


def test_packed_files_read_the_same(write: Write, tmp_path: Path) -> None:
    folder = write({"trn.json.gz": GOOD, "lbl.json.gz": LABELS})
    texts = read_folder(folder, tmp_path).train.texts
    assert texts is not None
    assert list(texts) == ["T c"]


def test_instances_without_text_or_labels_keep_their_row(write: Write, tmp_path: Path) -> None:
    empty = '{"title": "", "content": "", "target_ind": []}\n'
    dataset = read(write, tmp_path, empty + GOOD + empty)
    assert dataset.train.texts is not None
    assert list(dataset.train.texts) == ["", "T c", ""]
    assert dataset.train.labels.offsets.tolist() == [0, 0, 2, 2]


@pytest.mark.parametrize(("title", "content", "text"), [("a", "", "a"), ("", "b", "b"), ("a", "b", "a b")])
def test_text_is_title_and_content(write: Write, tmp_path: Path, title: str, content: str, text: str) -> None:
    line = json.dumps({"title": title, "content": content, "target_ind": [0]})
    texts = read(write, tmp_path, line).train.texts
    assert texts is not None
    assert texts[0] == text


def test_relevance_of_zero_is_no_label_and_repeats_are_merged(write: Write, tmp_path: Path) -> None:
    line = '{"title": "T", "target_ind": [2, 1, 2], "target_rel": [1, 0, 0.5]}'
    dataset = read(write, tmp_path, line)
    assert dataset.train.labels.indices.tolist() == [2]
    assert dataset.warnings == ("1 repeated labels merged",)


def test_blank_lines_may_end_a_file_in_any_line_ending(write: Write, tmp_path: Path) -> None:
    dataset = read(write, tmp_path, "\ufeff" + GOOD.replace("\n", "\r\n") + "\r\n\n")
    assert dataset.train.instances == 1


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"title": "T", "target_ind": [3]}', r"a label must be from 0 to 2, found 3"),
        ('{"title": "T", "target_ind": [0, -1]}', r"a label must be from 0 to 2, found -1"),
        (
            '{"title": "T", "target_ind": [1.0]}',
            r"target_ind must be a list of whole numbers, found '\[1.0\]'",
        ),
        ('{"title": "T", "target_ind": [true]}', r"target_ind must be a list of whole numbers"),
        ('{"title": "T", "target_ind": ["1"]}', r"target_ind must be a list of whole numbers"),
        ('{"title": "T", "target_ind": 1}', r"target_ind must be a list of whole numbers, found '1'"),
        ('{"title": "T"}', r"target_ind must be a list of whole numbers, found no such key"),
        ('{"target_ind": [1]}', r"title must be a string, found no such key"),
        ('{"title": null, "target_ind": [1]}', r"title must be a string, found 'null'"),
        ('{"title": "T", "content": 5, "target_ind": [1]}', r"content must be a string, found '5'"),
        ('{"title": "T", "target_ind": [1], "target_rel": [1, 1]}', r"must be a list of 1 numbers"),
        ('{"title": "T", "target_ind": [1], "target_rel": 1}', r"must be a list of 1 numbers"),
        (
            '{"title": "T", "target_ind": [1], "target_rel": [NaN]}',
            r"must be a finite number of 0 or more, found",
        ),
        (
            '{"title": "T", "target_ind": [1], "target_rel": [-1]}',
            r"must be a finite number of 0 or more, found",
        ),
        ('{"title": "T", "target_ind": [1], "target_rel": ["a"]}', r"must be a finite number of 0 or more"),
        ('{"title": "T", "target_ind": [1]', r"must be one JSON object in one line, found .* \(Expecting"),
        (
            '{"title": "T", "target_ind": [1], "target_ind": [2]}',
            r"must be one JSON object in one line, .* \(an object with the key 'target_ind' twice\); c",
        ),
        ('{"title": "T", "target_ind": [1], "x": {"a": 1, "a": 1}}', r"with the key 'a' twice"),
        ('["T"]', r"must be a JSON object, found"),
        ("[" * 100_000, r"must be one JSON object in one line"),
        (
            '{"title": "\\ud800", "target_ind": [1]}',
            r"title must be valid Unicode, found the lone surrogate \\ud800",
        ),
        ("", r"must hold a JSON object, found a blank line"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(write: Write, tmp_path: Path, line: str, found: str) -> None:
    with pytest.raises(DataError, match=rf"trn\.json:2: .*{found}"):
        read(write, tmp_path, GOOD + line + "\n" + GOOD)


def test_a_wrong_label_line_is_refused_by_its_number(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lbl\.json:2: title must be a string, found '5'"):
        read(write, tmp_path, GOOD, labels='{"title": "A"}\n{"title": 5}\n')
    with pytest.raises(DataError, match=r"lbl\.json:1: .*an object with the key 'title' twice"):
        read(write, tmp_path, GOOD, labels='{"title": "A", "title": "B"}\n')


@pytest.mark.parametrize("labels", ["", "\n\n"])
def test_an_empty_file_of_labels_is_refused_by_its_name(write: Write, tmp_path: Path, labels: str) -> None:
    """The instances were blamed once: a label must be from 0 to -1."""
    with pytest.raises(DataError, match=r"lbl\.json: must hold one label .*, found an empty file"):
        read(write, tmp_path, GOOD, labels=labels)


def test_labels_are_needed(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold lbl\.json or lbl\.json\.gz, found neither"):
        read_folder(write({"trn.json": GOOD}), tmp_path)


def test_training_is_needed(write: Write, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must hold trn\.json or trn\.json\.gz, found neither"):
        read_folder(write({"lbl.json": LABELS, "tst.json": GOOD}), tmp_path)
