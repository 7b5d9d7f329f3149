"""A check lists every problem, once, in the order of the files, and never stops at the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from xmlc.data import IndexBase, open_dataset
from xmlc.data.check import Checked, check_data
from xmlc.errors import DataError

Write = Callable[..., Path]

XMC = {"train.txt": "2 3 2\n0 0:1\n1 2:1\n", "test.txt": "1 3 2\n1 1:1\n"}


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    pass


def problems(folder: Path, **settings: object) -> list[str]:
    checked = check_data(folder, **settings)  # type: ignore[arg-type]
    return [problem.replace(f"{folder}/", "").partition(", found")[0] for problem in checked.problems]


@pytest.mark.parametrize(
    "files",
    [
        XMC,
        {"trn.json": '{"title": "T", "target_ind": [0]}\n', "lbl.json": '{"title": "A"}\n'},
        {"trn_X_Xf.txt": "1 2\n0:1\n", "trn_X_Y.txt": "1 3\n0:1\n"},
    ],
)
def test_a_right_data_set_has_no_problem(write: Write, files: dict[str, str]) -> None:
    folder = write(files)
    assert check_data(folder) == Checked(folder, (), (), True)


def test_all_wrong_lines_of_all_files_are_listed(write: Write) -> None:
    folder = write(
        {
            "train.txt": "4 3 2\n2 0:1\n0 0:nan\n0 1:1\n1 1:3e38 1:3e38\n",
            "test.txt": "2 3 2\n0 0:1\n0 x\n",
            "labels.txt": b"a\n\xff\n",
            "filter_labels_test.txt": "0 0\n2 0\n0 7\n",
        }
    )
    assert problems(folder) == [
        "train.txt:2: a label must be at most 1",
        "train.txt:3: a value must be a number finite in float32",
        "train.txt:5: the sum of a repeated feature must be finite in float32",
        "test.txt:3: a feature must be index:value after labels joined by commas without blanks",
        "labels.txt:2: must be text in UTF-8",
        "filter_labels_test.txt:2: an instance must be at most 1",
        "filter_labels_test.txt:3: a label must be at most 1",
    ]
    with pytest.raises(DataError, match=r"train\.txt:2: a label must be at most 1"):
        open_dataset(folder)


def test_all_wrong_lines_of_json_are_listed(write: Write) -> None:
    folder = write(
        {
            "trn.json": '{"title": "T", "target_ind": [5]}\n\n[]\n{"title": "T", "target_ind": [-1]}\n\n',
            "tst.json": b'{"title": 3, "target_ind": []}\n{"title": "\xff"}\nx\n',
            "lbl.json": '{"title": "A"}\n{"titel": "B"}\n',
        }
    )
    assert problems(folder) == [
        "lbl.json:2: title must be a string",
        "trn.json:1: a label must be from 0 to 1",
        "trn.json:2: must hold a JSON object",
        "trn.json:3: must be a JSON object",
        "trn.json:4: a label must be from 0 to 1",
        "tst.json:1: title must be a string",
        "tst.json:2: must be text in UTF-8",
        "tst.json:3: must be one JSON object in one line",
    ]


def test_all_wrong_lines_of_matrices_are_listed(write: Write) -> None:
    folder = write({"trn_X_Xf.txt": "3 2\n0:1\n2:1\n0:inf\n", "trn_X_Y.txt": "3 2\n0:-1\n1\n1:-2\n"})
    assert problems(folder) == [
        "trn_X_Y.txt:3: a label must be index:value",
        "trn_X_Y.txt:2: the relevance of a label must be 0 or more",
        "trn_X_Y.txt:4: the relevance of a label must be 0 or more",
        "trn_X_Xf.txt:3: a feature index must be at most 1",
        "trn_X_Xf.txt:4: a value must be a number finite in float32",
    ]


def test_a_file_that_cannot_be_read_on_does_not_hide_the_others(write: Write) -> None:
    folder = write(
        {
            "train.txt": "3 3 2\n0 0:x\n1 2:1\n",
            "test.txt": "no header\n",
            "labels.txt": b"a\n\xff\n",
            "filter_labels_train.txt": "0 0 0\n",
        }
    )
    assert sorted(problems(folder)) == [
        "filter_labels_train.txt:1: must be a pair 'instance label'",
        "labels.txt:2: must be text in UTF-8",
        "test.txt:1: the header must be 3 whole numbers below 2^31, 'instances features labels'",
        "train.txt: the header promises 3 rows",
        "train.txt:2: a value must be a number finite in float32",
    ]


def test_parts_that_do_not_fit_are_all_listed(write: Write) -> None:
    folder = write({**XMC, "test.txt": "1 4 3\n2 3:1\n"})
    assert problems(folder) == [
        f"{folder}: training and test must have the same labels",
        f"{folder}: training and test must have the same features",
    ]


def test_files_that_differ_from_their_card_are_listed(write: Write) -> None:
    card = 'name = "s"\ntitle = "S"\nkind = "sparse"\nlicence = "x"\nsource = "x"\nobtain = "Get it"\n'
    folder = write(
        {**XMC, "dataset.toml": card + f'[files]\n"train.txt" = "{"0" * 64}"\n"gone" = "{"1" * 64}"\n'}
    )
    assert problems(folder) == [
        f"train.txt: must have the SHA-256 of dataset.toml, {'0' * 64}",
        "gone: must be readable",
    ]


def test_the_list_is_bounded(write: Write) -> None:
    folder = write({"train.txt": "50 3 2\n" + "0 9:1\n" * 50})
    checked = check_data(folder, limit=7)
    assert len(checked.problems) == 7
    assert not checked.complete
    assert checked.to_lines()[-1] == f"{folder}: 7 problems, and stopped there; --limit lists more"


def test_repairs_and_a_suspicious_base_are_notes(write: Write) -> None:
    folder = write({"train.txt": "2 4 3\n1,1 1:1\n2 3:1\n"})
    assert check_data(folder).notes == (
        f"{folder}: 1 repeated labels merged",
        f"{folder}: neither label 0 nor feature 0 occurs; if the files count from 1, "
        "`xmlc data convert --index-base 1` makes ones that count from 0",
    )


def test_files_that_count_from_one_are_checked_as_such(write: Write) -> None:
    folder = write(
        {
            "train.txt": "3 2 2\n1,2 1:1 2:1\n0 1:1\n1 0:1\n",
            "filter_labels_train.txt": "3 2\n0 1\n1 3\n",
        }
    )
    assert problems(folder, base=IndexBase(1, 1, 1)) == [
        "train.txt:3: a label must be at least 1",
        "train.txt:4: a feature index must be at least 1",
        "filter_labels_train.txt:2: an instance must be at least 1",
        "filter_labels_train.txt:3: a label must be at most 2",
    ]


def test_an_empty_folder_is_one_problem(write: Write) -> None:
    folder = write({})
    assert len(problems(folder)) == 1
    with pytest.raises(DataError, match="must be a folder with a data set, found none"):
        check_data(folder / "none")


def test_a_damaged_array_is_a_problem(write: Write) -> None:
    folder = write({"trn_X_Y.txt": "1 2\n0:5:1\n", "trn_X_Xf.npz": b"junk"})
    np.save(folder / "lbl_X_Xf.npy", np.full((2, 2), np.nan))
    assert sorted(problems(folder)) == [
        "lbl_X_Xf.npy: features must be finite in float32",
        "trn_X_Xf.npz: must be a sparse matrix saved by scipy.sparse.save_npz without pickled objects",
        "trn_X_Y.txt:2: a value must be a number finite in float32",
    ]
