"""What is written in any layout reads back as the same data set, to the bit, or nothing is written."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xmlc.data import Dataset, IndexBase, find_card, open_dataset
from xmlc.data import convert as convert_module
from xmlc.data.convert import convert, new_folder
from xmlc.data.dataset import content_fingerprint
from xmlc.data.reader import DataWarning, read_folder
from xmlc.data.rows import CsrRows
from xmlc.data.writer import FORMATS, PARTS, decimals, write_dataset
from xmlc.errors import DataError
from xmlc.files import held

Write = Callable[..., Path]

XMC = {
    "train.txt": "5 3 4\n0,3 0:0.1 2:-1e-30\n 1:16777217\n2\n\n1 0:0 1:-0.0\n",
    "test.txt": "1 3 4\n1 1:1\n",
    "labels.txt": "a\nb b\n\nä\n",
    "features.txt": "f\ng\nh\n",
    "filter_labels_train.txt": "0 3\n4 1\n",
    "filter_labels_test.txt": "",
}
LF = {
    "trn.json": '{"uid": "u", "title": "T", "content": "a\\nb", "target_ind": [0, 1]}\n'
    '{"title": "", "target_ind": []}\n',
    "tst.json": '{"title": "x\\u2028\\u0000", "target_ind": [1]}\n',
    "lbl.json": '{"title": "A", "content": "first"}\n{"title": ""}\n{"title": "", "content": " c"}\n',
}
TEXT = {
    "trn.json": '{"title": "T", "content": "a b", "target_ind": [0, 1]}\n{"title": "", "target_ind": []}\n',
    "lbl.json": '{"title": "A", "content": "first"}\n{"title": "B"}\n',
    "filter_labels_train.txt": "0 1\n",
}


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    pass


def make_everything(folder: Path, *, dense: bool) -> Path:
    """A data set with every part that there is."""
    features = np.array([[1.5, 0], [0, 0], [0.1, -2]], np.float32)
    if dense:
        np.save(folder / "trn_X_Xf.npy", features.astype(">f8"))
        np.save(folder / "lbl_X_Xf.npy", np.asfortranarray(features[:2]))
    else:
        scipy.sparse.save_npz(folder / "trn_X_Xf.npz", scipy.sparse.csr_array(features))
        scipy.sparse.save_npz(folder / "lbl_X_Xf.npz", scipy.sparse.csr_array(features[1:]))
    scipy.sparse.save_npz(folder / "trn_X_Y.npz", scipy.sparse.csr_array([[1, 1], [0, 0], [0, 1]]))
    for name, text in (
        ("trn_raw_texts", "one\n\nthree\n"),
        ("lbl_raw_texts", "first\nsecond\n"),
        ("Yf", "1\n2\n"),
        ("Xf", "f\ng\n"),
        ("trn_filter_labels", "0 1\n"),
    ):
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.mark.parametrize(("first", "second"), list(itertools.product(["xmc", "matrix", "npz"], repeat=2)))
def test_sparse_data_survive_every_way(write: Write, tmp_path: Path, first: Any, second: Any) -> None:
    source = write(XMC)
    convert(source, tmp_path / "one", first)
    convert(tmp_path / "one", tmp_path / "two", second)
    assert open_dataset(tmp_path / "two").fingerprint == open_dataset(source).fingerprint
    convert(tmp_path / "two", tmp_path / "three", "xmc")
    assert (tmp_path / "three" / "filter_labels_train.txt").read_text() == XMC["filter_labels_train.txt"]
    assert (tmp_path / "three" / "labels.txt").read_text() == XMC["labels.txt"]


@pytest.mark.parametrize("between", ["matrix", "npz", "lf"])
def test_texts_survive_every_way(write: Write, tmp_path: Path, between: Any) -> None:
    source = write(TEXT)
    with nullcontext() if between == "lf" else unkept("border between title and content (2 times)"):
        convert(source, tmp_path / "one", between)
    convert(tmp_path / "one", tmp_path / "two", "lf")
    assert open_dataset(tmp_path / "two").fingerprint == open_dataset(source).fingerprint


def unkept(what: str) -> Any:
    return pytest.warns(DataWarning, match=re.escape(f"one: not kept from the source: {what}") + "$")


def test_lf_keeps_every_line_but_for_the_labels(write: Write, tmp_path: Path) -> None:
    """The uid was lost, and title and content were joined to a title."""
    lines = [
        {"uid": "7", "title": "T", "content": "a b", "target_ind": [0, 1], "x": {"\ud800": 1.50}},
        {"title": "", "target_ind": [], "content": "c"},
    ]
    labels = [{"title": "A", "uid": "ä", "content": ""}, {"title": "", "content": "B"}]
    files = {"trn.json": lines, "tst.json": lines[1:], "lbl.json": labels}
    source = write({name: "".join(json.dumps(line) + "\n" for line in each) for name, each in files.items()})
    convert(source, tmp_path / "one", "lf")
    for name, expected in files.items():
        found = (tmp_path / "one" / name).read_text().splitlines()
        assert list(map(json.loads, found)) == expected
    convert(source, tmp_path / "short", "lf", without=["label_texts"])
    assert (tmp_path / "short" / "lbl.json").read_text() == '{"title": "A"}\n{"title": ""}\n'


def test_what_other_formats_do_not_keep_is_counted(write: Write, tmp_path: Path) -> None:
    text = (
        '{"uid": "u", "title": "T", "content": "c", "target_ind": [0, 1], "target_rel": [0.5, 1], "x": 1}\n'
    )
    source = write({"trn.json": text * 3, "lbl.json": '{"uid": "u", "title": "A"}\n' * 2})
    graded = "relevance of a label other than 0 and 1 (3 times)"
    title = "border between title and content (3 times)"
    with unkept(f"{title}, key unknown to xmlc (3 times), {graded}, uid (5 times)"):
        convert(source, tmp_path / "one", "matrix")
    shutil.rmtree(tmp_path / "one")
    with unkept(graded):
        convert(source, tmp_path / "one", "lf")
    shutil.rmtree(tmp_path / "one")
    for name, content in (("trn_X_Y.txt", "2 2\n0:1 1:0.5\n1:0\n"), ("trn_X_Y.npz", None)):
        folder = write({"trn_X_Xf.txt": "2 1\n0:1\n\n"} | ({name: content} if content else {}), name)
        if content is None:
            scipy.sparse.save_npz(folder / name, scipy.sparse.csr_array([[2.0, 1.0], [0.0, 0.0]]))
        with unkept("relevance of a label other than 0 and 1 (1 times)"):
            convert(folder, tmp_path / "one", "npz")
        shutil.rmtree(tmp_path / "one")


def test_any_text_fits_into_lf(write: Write, tmp_path: Path) -> None:
    source = write(LF)
    convert(source, tmp_path / "lf", "lf")
    assert open_dataset(tmp_path / "lf").fingerprint == open_dataset(source).fingerprint
    with pytest.raises(
        DataError,
        match=r"trn_raw_texts\.txt: a text must fit into one line, found 'T a\\nb' in row 0; choose lf",
    ):
        convert(source, tmp_path / "npz", "npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "lf", "set"]


@pytest.mark.parametrize("dense", [False, True])
def test_every_part_survives(tmp_path: Path, write: Write, dense: bool) -> None:
    source = make_everything(write({}), dense=dense)
    for layout in ("npz",) if dense else ("npz", "matrix"):
        convert(source, tmp_path / layout, layout)  # type: ignore[arg-type]
        found = open_dataset(tmp_path / layout)
        assert found.fingerprint == open_dataset(source).fingerprint
        assert all(getattr(found, part) is not None for part in PARTS[3:])


def test_what_a_format_cannot_hold_is_refused_or_left_out_by_name(tmp_path: Path, write: Write) -> None:
    source = make_everything(write({}), dense=False)
    with pytest.raises(
        DataError,
        match=r"xmc must hold every part .*, found texts, label_texts, label_features, .* --without texts",
    ):
        convert(source, tmp_path / "xmc", "xmc")
    convert(source, tmp_path / "xmc", "xmc", without=["texts", "label_texts", "label_features"])
    assert open_dataset(tmp_path / "xmc").train.filter_pairs is not None
    with pytest.raises(
        DataError, match=r"lf holds texts that begin with the label's name, found the name '1'"
    ):
        convert(source, tmp_path / "lf", "lf", without=["features"])
    convert(source, tmp_path / "lf", "lf", without=["features", "label_texts"])
    assert open_dataset(tmp_path / "lf").kind == "text"
    with pytest.raises(DataError, match="must keep features or texts, found neither"):
        convert(source, tmp_path / "none", "npz", without=["features", "texts"])
    with pytest.raises(DataError, match="lf needs label_names, found none; choose another format"):
        convert(source, tmp_path / "none", "lf", without=["features", "label_names", "label_texts"])
    with pytest.raises(DataError, match=r"parts must be of features, .* found feature"):
        convert(source, tmp_path / "none", "npz", without=["feature"])
    assert not (tmp_path / "none").exists()


def test_dense_features_need_npz(tmp_path: Path, write: Write) -> None:
    source = make_everything(write({}), dense=True)
    with pytest.raises(
        DataError, match=r"matrix holds sparse features, found dense features and label_feat.*npz"
    ):
        convert(source, tmp_path / "matrix", "matrix")


@pytest.mark.parametrize("layout", ["matrix", "npz", "lf"])
def test_the_card_comes_along(tmp_path: Path, layout: Any) -> None:
    with (
        nullcontext()
        if layout == "lf"
        else pytest.warns(DataWarning, match=r"border .*, uid \([0-9]+ times\)")
    ):
        convert("wordnet-mini", tmp_path / "made", layout)
    made, known = open_dataset(tmp_path / "made"), open_dataset("wordnet-mini")
    assert made.fingerprint == known.fingerprint
    assert (made.name, made.propensity_a) == (known.name, find_card("wordnet-mini").propensity_a)
    file = next(
        path for path in (tmp_path / "made").iterdir() if path.suffix == ".json" or "texts" in path.name
    )
    file.write_text(file.read_text() + "\n")
    with pytest.raises(DataError, match=r"must have the SHA-256 of dataset\.toml"):
        open_dataset(tmp_path / "made")


def test_files_that_count_from_one_become_ones_that_count_from_zero(tmp_path: Path, write: Write) -> None:
    zero = write(XMC)
    one = write(
        {
            **XMC,
            "train.txt": "5 3 4\n1,4 1:0.1 3:-1e-30\n 2:16777217\n3\n\n2 1:0 2:-0.0\n",
            "test.txt": "1 3 4\n2 2:1\n",
            "filter_labels_train.txt": "1 4\n5 2\n",
        },
        "one",
    )
    with pytest.raises(
        DataError, match=r"train\.txt:2: a label must be at most 3, found '4'; .*--index-base 1"
    ):
        open_dataset(one)
    convert(one, tmp_path / "made", "xmc", IndexBase(1, 1, 1))
    assert open_dataset(tmp_path / "made").fingerprint == open_dataset(zero).fingerprint
    with pytest.raises(DataError, match=r"train\.txt:2: a label must be at least 1, found '0'"):
        convert(zero, tmp_path / "other", "xmc", IndexBase(1, 1, 1))


def test_json_and_matrices_may_count_from_one(tmp_path: Path, write: Write) -> None:
    lf = write({**TEXT, "trn.json": TEXT["trn.json"].replace("[0, 1]", "[1, 2]")}, "lf1")
    (lf / "filter_labels_train.txt").write_text("0 2\n")
    convert(lf, tmp_path / "lf", "lf", IndexBase(labels=1))
    assert open_dataset(tmp_path / "lf").fingerprint == open_dataset(write(TEXT)).fingerprint
    matrix = write({"trn_X_Xf.txt": "1 2\n0:1\n", "trn_X_Y.txt": "1 3\n3:1\n"}, "matrix1")
    assert convert(matrix, tmp_path / "m", "xmc", IndexBase(labels=1)).train.labels.indices.tolist() == [2]


def test_nothing_is_overwritten(tmp_path: Path, write: Write) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(DataError, match="taken: must not be there yet, found it"):
        convert(write(XMC), tmp_path / "taken", "npz")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DataError, match=r"made: must be writable and have room, found: No such file"):
        convert(write(XMC), tmp_path / "none" / "made", "npz")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_folder(tmp_path / "made") as fresh:
        (fresh / "file").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "made") as fresh:
        (fresh / "file").write_text("whole")
        assert not (tmp_path / "made").exists()
    assert (tmp_path / "made" / "file").read_text() == "whole"
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_full_disk_leaves_nothing(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(convert_module, "write_dataset", full)
    with pytest.raises(DataError, match=r"made: must be writable and have room, found: No space left"):
        convert(write(XMC), tmp_path / "made", "npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "set"]
    assert not list((tmp_path / "cache").iterdir())


def test_what_does_not_read_back_is_not_kept(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(dataset: Dataset, folder: Path, layout: Any, records: Any) -> None:
        write_dataset(dataset, folder, layout, records)
        text = (folder / "train.txt").read_text()
        (folder / "train.txt").write_text(text.replace("1.6777216e+07", "16777218"))

    monkeypatch.setattr(convert_module, "write_dataset", wrong)
    with pytest.raises(DataError, match=r"must have the fingerprint [0-9a-f]+ of the data set, found"):
        convert(write(XMC), tmp_path / "made", "xmc")
    assert not (tmp_path / "made").exists()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=50))
@settings(max_examples=300)
def test_decimals_read_back_to_the_bit(values: list[float]) -> None:
    array = np.array(values, np.float32)
    found = np.array(decimals(array), np.float64).astype(np.float32)
    assert found.tobytes() == array.tobytes()


def test_decimals_are_short() -> None:
    assert decimals(np.array([1, 0.1, -0.0, 1e-30, 16777216], np.float32)) == [
        "1",
        "0.1",
        "-0",
        "1e-30",
        "1.6777216e+07",
    ]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def datasets(draw: st.DrawFn) -> Dataset:
    rows, columns, labels = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)

    def matrix(height: int, width: int, values: st.SearchStrategy[float]) -> scipy.sparse.csr_array:
        cells = draw(
            st.dictionaries(st.tuples(st.integers(0, height - 1), st.integers(0, width - 1)), values)
        )
        places = np.array(list(cells), np.int64).reshape(-1, 2).T
        return scipy.sparse.csr_array(
            (np.array(list(cells.values()), np.float32), tuple(places)), (height, width)
        )

    truth = matrix(rows, labels, st.just(1.0))
    if draw(st.booleans()):
        return Dataset.from_arrays(matrix(rows, columns, numbers), truth)
    return Dataset.from_arrays(
        draw(st.lists(names, min_size=rows, max_size=rows)),
        truth,
        label_names=draw(st.lists(names, min_size=labels, max_size=labels)),
    )


@given(datasets(), st.sampled_from(FORMATS))
@settings(
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_data_set_reads_back_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, dataset: Dataset, layout: Any
) -> None:
    folder = tmp_path_factory.mktemp("made")
    if dataset.kind == "text" and layout != "lf":
        try:
            write_dataset(dataset, folder, layout)
        except DataError:
            return
    elif (dataset.kind == "text") != (layout == "lf"):
        with pytest.raises(DataError):
            write_dataset(dataset, folder, layout)
        return
    else:
        write_dataset(dataset, folder, layout)
    found = read_folder(folder, folder)
    assert isinstance(found.train.labels, CsrRows)
    if layout == "lf":  # which always has texts of labels
        assert list(found.label_texts or []) == list(dataset.label_names or [])
        assert list(found.train.texts or []) == list(dataset.train.texts or [])
    else:
        assert content_fingerprint(found) == dataset.fingerprint


def test_a_killed_conversion_leaves_nothing_that_lasts(tmp_path: Path, write: Write, cache: Path) -> None:
    """At random moments: the new folder is not there or whole, and the next try removes what was left."""
    rows = "".join(f"{row % 4} {row % 3}:1.5\n" for row in range(40_000))
    source = write({"train.txt": f"40000 3 4\n{rows}"})
    before = (source / "train.txt").read_bytes()
    convert(source, tmp_path / "whole", "npz")
    expected = sorted(path.name for path in (tmp_path / "whole").iterdir())
    moments = random.Random(time.time_ns())
    for _ in range(8):
        child = os.fork()
        if not child:
            with suppress(BaseException):
                convert(source, tmp_path / "made", "npz")
            os._exit(0)
        time.sleep(moments.uniform(0, 0.4))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (tmp_path / "made").exists():
            assert sorted(path.name for path in (tmp_path / "made").iterdir()) == expected
            shutil.rmtree(tmp_path / "made")
    convert(source, tmp_path / "made", "npz")
    assert (source / "train.txt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "made", "set", "whole"]
    assert not list(cache.iterdir())
    assert open_dataset(tmp_path / "made").fingerprint == open_dataset(source).fingerprint


def test_what_another_process_still_writes_is_left_alone(tmp_path: Path, write: Write, cache: Path) -> None:
    for folder in (dead := tmp_path / ".made.1.new", alive := tmp_path / ".made.2.new", cache / "scratch-x"):
        folder.mkdir(parents=True)
    others = tmp_path / ".made.2.new.mine"
    others.mkdir()
    with held(alive), held(cache / "scratch-x"):
        convert(write(XMC), tmp_path / "made", "npz")
        assert (cache / "scratch-x").is_dir()
    assert (dead.exists(), alive.exists(), others.exists()) == (False, True, True)
