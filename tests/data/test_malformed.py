"""What a wrong file is called: every way of being wrong, by the message that a user sees."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xmlc.data import open_dataset
from xmlc.data.check import check_data
from xmlc.data.convert import convert
from xmlc.data.reader.files import DataWarning, IndexBase, Reading
from xmlc.data.reader.sparse_text import read_pairs
from xmlc.data.reader.spool import RowsSpool, Scratch
from xmlc.data.reader.xmc import read_xmc_split
from xmlc.data.rows import CsrRows, TextColumn
from xmlc.errors import DataError

Write = Callable[..., Path]

XMC = "1 3 2\n0 0:1\n"
LABELS = '{"title": "A"}\n{"title": "B"}\n'


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    pass


def refused(folder: Path, words: str) -> None:
    """Opening and checking say the same."""
    with pytest.raises(DataError) as raised:
        open_dataset(folder)
    assert words in str(raised.value)
    assert any(words in problem for problem in check_data(folder).problems)


def zipped(text: str, folder: Path) -> bytes:
    with zipfile.ZipFile(folder / "z", "w") as archive:
        archive.writestr("train.txt", text)
    return (folder / "z").read_bytes()


@pytest.mark.parametrize(
    ("pack", "words"),
    [
        (bz2.compress, "train.txt:1: must be text, plain or packed by gzip, found bzip2; unpack it"),
        (lzma.compress, "train.txt:1: must be text, plain or packed by gzip, found xz; unpack it"),
        (
            lambda data: b"\x28\xb5\x2f\xfd" + data,
            "train.txt:1: must be text, plain or packed by gzip, found zstd",
        ),
        (lambda data: data.decode().encode("utf-16"), "train.txt:1: must be text in UTF-8, found UTF-16"),
        (lambda data: data.decode().encode("utf-32"), "train.txt:1: must be text in UTF-8, found UTF-16"),
        (
            lambda data: data.decode().encode("utf-16-le"),
            "train.txt:1: must be text in UTF-8, found a zero byte",
        ),
        (lambda data: data + bytes(10), "train.txt:3: must be text in UTF-8, found a zero byte"),
        (lambda _: b"\x89PNG\r\n\x1a\n" + bytes(10), "train.txt:3: must be text in UTF-8, found a zero byte"),
    ],
)
def test_what_is_no_text_is_called_by_its_name(
    write: Write, pack: Callable[[bytes], bytes], words: str
) -> None:
    refused(write({"train.txt": pack(XMC.encode())}), words)


def test_a_zip_archive_is_called_one(write: Write, tmp_path: Path) -> None:
    refused(write({"train.txt": zipped(XMC, tmp_path)}), "plain or packed by gzip, found zip; unpack it")


def test_a_text_may_begin_like_an_archive(write: Write) -> None:
    folder = write({"train.txt": "1 1 2\n0 0:1\n", "labels.txt": "BZhang\nPK\n"})
    assert list(open_dataset(folder).label_names or []) == ["BZhang", "PK"]


def test_gzip_in_gzip_is_called_so(write: Write) -> None:
    import gzip

    refused(write({"train.txt.gz": gzip.compress(XMC.encode())}), "found gzip in gzip; unpack it once")


def test_a_pipe_or_folder_or_dangling_link_is_no_file(write: Write) -> None:
    folder = write({"train.txt": XMC})
    os.mkfifo(folder / "test.txt")
    refused(folder, "test.txt: must be a regular file, found a pipe; files are read more than once")
    (folder / "test.txt").unlink()
    (folder / "test.txt").mkdir()
    refused(folder, "test.txt: must be a regular file, found a folder")
    (folder / "test.txt").rmdir()
    (folder / "test.txt").symlink_to("nowhere")
    refused(folder, "test.txt: must be a regular file, found a link to nowhere, which is not there")


def test_a_vocabulary_is_no_matrix(write: Write) -> None:
    files = {"trn_X_Xf.txt": "apple\nbanana\n", "trn_X_Y.txt": "1 2\n0:1\n"}
    refused(
        write(files),
        "trn_X_Xf.txt:1: the header must be 2 whole numbers below 2^31, 'rows columns', found 'apple'",
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"title": "T", "target_ind": [0]}]\n', "trn.json:1: must be a JSON object, found"),
        (
            '{\n"title": "T",\n"target_ind": [0]\n}\n',
            "trn.json:1: must be one JSON object in one line, found '{'",
        ),
        ('{"title": "T", "target_ind": [0]', "trn.json:1: must be one JSON object in one line"),
        ("{'title': 'T', 'target_ind': [0]}\n", "trn.json:1: must be one JSON object in one line"),
        ('{"title": "T", "target_ind": ["0"]}\n', "trn.json:1: target_ind must be a list of whole numbers"),
        ('{"title": "T", "target_ind": [0.0]}\n', "trn.json:1: target_ind must be a list of whole numbers"),
        ('{"title": "T", "target_ind": [true]}\n', "trn.json:1: target_ind must be a list of whole numbers"),
        ('{"title": "T", "target_ind": 0}\n', "trn.json:1: target_ind must be a list of whole numbers"),
        ('{"title": "T", "target_ind": [-1]}\n', "trn.json:1: a label must be from 0 to 1, found -1"),
        ('{"title": "T", "target_ind": [4294967296]}\n', "a label must be from 0 to 1, found 4294967296"),
        (f'{{"title": "T", "target_ind": [{2**64}]}}\n', f"a label must be from 0 to 1, found {2**64}"),
        ('{"title": "T", "target_ind": [0], "target_rel": [NaN]}\n', "relevance of a label must be a finite"),
        ('{"title": "T", "target_ind": [0], "target_rel": []}\n', "target_rel must be a list of 1 numbers"),
        ('{"title": null, "target_ind": [0]}\n', "trn.json:1: title must be a string, found 'null'"),
        ('{"titel": "T", "target_ind": [0]}\n', "trn.json:1: title must be a string, found no such key"),
        (
            '{"title": "\\ud800", "target_ind": [0]}\n',
            "title must be valid Unicode, found the lone surrogate",
        ),
        ("[" * 100_000 + "\n", "trn.json:1: must be one JSON object in one line"),
    ],
)
def test_json_that_is_wrong(write: Write, text: str, words: str) -> None:
    refused(write({"trn.json": text, "lbl.json": LABELS}), words)


def test_an_index_beyond_64_bits_is_refused(write: Write) -> None:
    for index in (2**31, 2**32, 2**63, 2**64, 10**30):
        refused(write({"train.txt": f"1 3 2\n0 {index}:1\n"}), f"index must be at most 2, found '{index}'")
        refused(write({"train.txt": f"1 3 2\n{index} 0:1\n"}), f"a label must be at most 1, found '{index}'")


def test_a_file_that_counts_from_one_is_never_shifted_in_silence(write: Write) -> None:
    folder = write({"train.txt": "1 3 2\n1,2 1:1 3:1\n"})
    refused(
        folder, "train.txt:2: a label must be at most 1, found '2'; indices count from 0: correct the line"
    )
    refused(folder, "where they count from 1, pass --index-base 1 to `xmlc data convert`")


def test_a_file_that_may_count_from_one_is_told_of(write: Write, tmp_path: Path) -> None:
    """Where the last label and feature do not occur, no index is out of range; only names are shifted."""
    files = {"train.txt": "2 4 3\n1,2 1:1\n2 3:1\n", "labels.txt": "a\nb\nc\n"}
    told = (
        "neither label 0 nor feature 0 occurs; if the files count from 1, `xmlc data convert --index-base 1`"
    )
    folder = write(files)
    with pytest.warns(DataWarning, match=told):
        open_dataset(folder)
    assert told in check_data(folder).notes[0]
    with pytest.warns(DataWarning, match=told):
        convert(folder, tmp_path / "one", "npz")
    convert(folder, tmp_path / "other", "xmc", IndexBase(1, 1, 1))
    assert open_dataset(tmp_path / "other").train.labels.indices.tolist() == [0, 1, 1]


def test_empty_files_are_refused(write: Write) -> None:
    refused(write({"train.txt": ""}), "train.txt:1: the header must be 3 whole numbers")
    refused(
        write({"trn.json": "", "lbl.json": ""}, "lf"), "lbl.json: must hold one label in each line, found an"
    )
    refused(write({"trn.json": "", "lbl.json": LABELS}, "lf"), "training must hold at least one instance")
    refused(
        write({"trn_X_Y.npz": "", "trn_X_Xf.npy": ""}, "m"), "trn_X_Y.npz: must be a sparse matrix saved by"
    )


def test_a_line_of_a_hundred_megabytes_is_read(write: Write, scratch: Scratch) -> None:
    pair = b"7:1.5 " + b" " * 994  # blanks count as well, and need no memory of their own
    folder = write({"train.txt": b"2 9 2\n0 " + pair * 100_000 + b"\n1 8:2\n"})
    reading = Reading()
    split = read_xmc_split(folder / "train.txt", scratch, reading)
    assert isinstance(split.features, CsrRows)
    assert split.features.values is not None
    assert split.features.values.tolist() == [150_000.0, 2.0]
    assert reading.features == 99_999


def test_sixteen_million_labels_and_more_are_exact(write: Write, scratch: Scratch) -> None:
    labels = 2**24 + 5  # float32 cannot count so far
    folder = write(
        {"train.txt": f"2 1 {labels}\n16777217 0:1\n16777216,16777220 0:1\n", "f.txt": "1 16777217\n"}
    )
    split = read_xmc_split(folder / "train.txt", scratch, Reading())
    assert split.labels.indices.tolist() == [16777217, 16777216, 16777220]
    pairs = read_pairs(folder / "f.txt", 2, labels, Reading())
    assert pairs.indices.tolist() == [16777217]
    dataset = open_dataset(write({"train.txt": f"1 1 {labels}\n16777217 0:1\n"}, "big"))
    assert dataset.label_count == labels


def hole(path: Path, dtype: type[np.generic], entries: int) -> np.ndarray:
    """Map a file of zeros that takes no room on disk."""
    with path.open("wb") as file:
        file.truncate(entries * np.dtype(dtype).itemsize)
    return np.memmap(path, dtype, "r+", shape=(entries,))


def test_more_than_two_thousand_million_values_are_addressed(tmp_path: Path) -> None:
    entries = 2**31 + 10
    indices, values = hole(tmp_path / "i", np.int32, entries), hole(tmp_path / "v", np.float32, entries)
    indices[-3:], values[-3:] = [1, 4, 6], [0.5, 1.5, 2.5]
    rows = CsrRows(np.array([0, entries - 3, entries]), indices, values, 9)
    taken = rows.take(np.array([1]))
    assert taken.indices.tolist() == [1, 4, 6]
    assert taken.values is not None
    assert taken.values.tolist() == [0.5, 1.5, 2.5]


def test_more_than_two_thousand_million_values_are_written(scratch: Scratch) -> None:
    spool = RowsSpool(scratch, 9, with_values=False)
    spool._indices.size = 2**31 + 5  # as if so many had come
    spool.append(CsrRows(np.array([0, 2]), np.array([1, 4], np.int32), None, 9))
    assert spool._offsets.finish().tolist() == [0, 2**31 + 7]


def test_more_than_two_thousand_million_bytes_of_text_are_addressed(tmp_path: Path) -> None:
    entries = 2**31 + 10
    data = hole(tmp_path / "t", np.uint8, entries)
    data[-3:] = list(b"end")
    texts = TextColumn(np.array([0, entries - 3, entries]), data)
    assert texts[1] == "end"
    assert list(texts.take(np.array([1]))) == ["end"]


def test_a_header_that_promises_too_much_takes_no_memory(write: Write) -> None:
    import tracemalloc

    folder = write({"train.txt": f"{2**31 - 1} {2**31 - 1} {2**31 - 1}\n0 0:1\n"})
    tracemalloc.start()
    refused(folder, "train.txt: the header promises 2147483647 rows, found 1 lines after it")
    assert tracemalloc.get_traced_memory()[1] < 1 << 25
    tracemalloc.stop()
    refused(write({"train.txt": f"1 1 {2**31}\n0 0:1\n"}, "more"), "whole numbers below 2^31")


def test_messages_are_json_and_one_line(write: Write) -> None:
    folder = write({"train.txt": b"1 3 2\n0 \x01\x1b[31m:1\n"})
    (problem,) = json.loads(json.dumps(check_data(folder).to_json()))["problems"]
    assert problem.isprintable()
