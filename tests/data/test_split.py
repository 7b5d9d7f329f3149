"""Splits: seeded, fair to rare labels, groups kept whole; and nothing of an instance is lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from xmlc.data import Dataset, Split, open_dataset
from xmlc.data.reader import DataWarning
from xmlc.data.rows import CsrRows
from xmlc.data.self_labels import write_filters
from xmlc.data.split import _units, split_dataset, stratified
from xmlc.errors import DataError

Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    pass


def labels_of(rows: list[list[int]], count: int) -> CsrRows:
    offsets = np.cumsum([0, *map(len, rows)])
    return CsrRows(offsets, np.array([label for row in rows for label in row], np.int32), None, count)


def long_tail(instances: int, labels: int, seed: int = 0) -> CsrRows:
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, labels + 1) ** 1.2
    rows = [
        sorted(set(rng.choice(labels, 1 + number % 4, p=weights / weights.sum()).tolist()))
        if number % 9
        else []
        for number in range(instances)
    ]
    return labels_of(rows, labels)


def test_every_label_is_shared_out_in_proportion() -> None:
    labels = long_tail(3000, 400)
    in_test = stratified(labels, np.arange(3000), 0.25, seed=1)
    matrix = labels.to_scipy()
    total, test = np.asarray(matrix.sum(0))[0], np.asarray(matrix[in_test].sum(0))[0]
    assert abs(in_test.mean() - 0.25) < 0.02
    assert (total[total > 0] - test[total > 0]).min() >= 1
    assert np.abs(test - 0.25 * total).max() <= 2.0
    random = np.random.default_rng(0).permutation(3000) < 750
    at_random = np.asarray(matrix[random].sum(0))[0]
    assert np.abs(at_random - 0.25 * total).max() > 5  # what chance alone does


def test_the_seed_decides() -> None:
    labels = long_tail(500, 60)
    first, again, other = (stratified(labels, np.arange(500), 0.3, seed) for seed in (4, 4, 5))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), min_size=2, max_size=12),
    st.sampled_from([0.1, 0.2, 0.5, 0.9]),
    st.integers(0, 3),
    st.data(),
)
@settings(max_examples=150)
def test_groups_stay_whole_and_no_label_loses_all_training_instances(
    rows: list[list[int]], fraction: float, seed: int, data: st.DataObject
) -> None:
    labels = labels_of([sorted(row) for row in rows], 6)
    groups = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    units = np.unique(groups, return_inverse=True)[1]
    in_test = stratified(labels, units, fraction, seed)
    for group in set(groups):
        assert len({bool(chosen) for chosen, each in zip(in_test, groups, strict=True) if each == group}) == 1
    trained = {label for row, chosen in zip(rows, in_test, strict=True) if not chosen for label in row}
    assert trained == {label for row in rows for label in row}


def test_units_are_joined_by_chains_of_keys() -> None:
    assert _units([], 3).tolist() == [0, 1, 2]
    assert _units([np.array([0, 0, 1, 2])], 4).tolist() == [0, 0, 1, 2]
    assert _units([np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2])], 4).tolist() == [0, 0, 0, 1]


XMC = "6 4 3\n0 0:1\n1 1:1\n0,1 2:0.1\n 3:1\n0 0:1\n2\n"


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()]


@pytest.mark.parametrize("layout", ["xmc", "matrix", "npz"])
def test_every_instance_comes_along_with_all_it_has(write: Write, tmp_path: Path, layout: Any) -> None:
    source = write({"train.txt": XMC, "filter_labels_train.txt": "2 1\n5 2\n", "labels.txt": "a\nb\nc\n"})
    made = tmp_path / "made"
    split_dataset(source, made, fraction=0.3, seed=0, layout=layout)
    whole, found = open_dataset(source), open_dataset(made)
    assert found.test is not None
    rows = {"train": lines(made / "train_rows.txt"), "test": lines(made / "test_rows.txt")}
    assert sorted(rows["train"] + rows["test"]) == list(range(6))
    for split, name in ((found.train, "train"), (found.test, "test")):
        for part in ("labels", "features", "filter_pairs"):
            mine, theirs = getattr(split, part), getattr(whole.train, part)
            np.testing.assert_array_equal(mine.to_scipy().toarray(), theirs.to_scipy().toarray()[rows[name]])
    assert list(found.label_names or []) == ["a", "b", "c"]


def test_instances_of_one_group_or_of_one_content_stay_together(write: Write, tmp_path: Path) -> None:
    source = write({"train.txt": XMC})
    (tmp_path / "groups").write_text("a\nb\n\na\n\nc\n")
    for seed in range(8):
        made = tmp_path / f"made {seed}"
        split_dataset(source, made, fraction=0.4, seed=seed, groups=tmp_path / "groups", identical=True)
        test = set(lines(made / "test_rows.txt"))
        assert len({row in test for row in (0, 3, 4)}) == 1  # 0 and 3 by group, 0 and 4 by features


def test_lines_of_lf_keep_all_that_they_say(tmp_path: Path, write: Write) -> None:
    """The uid was lost, so that `xmlc data filter --by uid` had nothing to go by."""

    def uids(name: str, rows: range) -> str:
        return "".join(
            json.dumps({"uid": f"{name}{row}", "title": "t", "target_ind": [0]}) + "\n" for row in rows
        )

    labels = '{"uid": "b1", "title": "A", "content": "c"}\n'
    source = write({"trn.json": uids("a", range(4)), "tst.json": uids("b", range(6)), "lbl.json": labels})
    split_dataset(source, tmp_path / "made", fraction=0.4, seed=3, pool=True)
    known = [f"a{row}" for row in range(4)] + [f"b{row}" for row in range(6)]
    for file, rows in (("trn.json", "train_rows.txt"), ("tst.json", "test_rows.txt")):
        found = [json.loads(line)["uid"] for line in (tmp_path / "made" / file).read_text().splitlines()]
        assert found == [known[row] for row in lines(tmp_path / "made" / rows)]
    assert json.loads((tmp_path / "made" / "lbl.json").read_text()) == json.loads(labels)
    assert sum(write_filters(tmp_path / "made", "uid").values()) == 1
    with pytest.warns(
        DataWarning, match=r"not kept from the source: border .* \(1 times\), uid \(11 times\)"
    ):
        split_dataset(source, tmp_path / "npz", fraction=0.4, seed=3, pool=True, layout="npz")


def test_texts_and_dense_features_are_split(tmp_path: Path, write: Write) -> None:
    texts = write(
        {
            "trn.json": "".join(
                json.dumps({"title": f"t{row}", "target_ind": [row % 2]}) + "\n" for row in range(8)
            ),
            "lbl.json": '{"title": "A"}\n{"title": "B"}\n',
        }
    )
    split_dataset(texts, tmp_path / "texts", fraction=0.25, seed=3)
    found = open_dataset(tmp_path / "texts")
    assert found.test is not None
    assert found.test.texts is not None
    assert [f"t{row}" for row in lines(tmp_path / "texts" / "test_rows.txt")] == list(found.test.texts)

    dense = write({"trn_X_Y.txt": "4 1\n" + "0:1\n" * 4}, "dense")
    np.save(dense / "trn_X_Xf.npy", np.arange(8, dtype=">f8").reshape(4, 2))
    split_dataset(dense, tmp_path / "made", fraction=0.5, seed=0)
    test = open_dataset(tmp_path / "made").test
    assert test is not None
    assert isinstance(test.features, np.ndarray)
    assert test.features.dtype == ">f8"
    np.testing.assert_array_equal(test.features[:, 0] // 2, lines(tmp_path / "made" / "test_rows.txt"))


def test_a_test_split_is_kept_unless_it_is_pooled(write: Write, tmp_path: Path) -> None:
    source = write({"train.txt": XMC, "test.txt": "2 4 3\n1 1:2\n0 0:3\n", "filter_labels_test.txt": "1 0\n"})
    with pytest.raises(
        DataError, match=r"must have no test split yet, found one of 2 instances; pass --pool"
    ):
        split_dataset(source, tmp_path / "made", fraction=0.5, seed=0)
    split_dataset(source, tmp_path / "made", fraction=0.5, seed=0, pool=True)
    found = open_dataset(tmp_path / "made")
    assert found.test is not None
    splits: list[tuple[Split, str]] = [(found.train, "train_rows.txt"), (found.test, "test_rows.txt")]
    seen = {}
    for split, name in splits:
        assert isinstance(split.features, CsrRows)
        assert split.filter_pairs is not None
        values = split.features.to_scipy().sum(1).A1
        pairs = np.diff(split.filter_pairs.offsets)
        seen |= dict(zip(lines(tmp_path / "made" / name), zip(values, pairs, strict=True), strict=True))
    assert seen[6] == (2, 0)
    assert seen[7] == (3, 1)
    assert len(seen) == 8


@pytest.mark.parametrize(
    ("settings_", "found"),
    [
        ({"fraction": 0.0}, "the fraction must be above 0 and below 1, found 0.0"),
        ({"fraction": float("nan")}, "the fraction must be above 0 and below 1, found nan"),
        ({"fraction": 0.2, "groups": "a\nb\n"}, "groups: must hold 6 lines, one per row, found 2"),
        ({"fraction": 0.2, "groups": "a\n" * 6}, "both sides must hold an instance, found 0 of 6 for test"),
    ],
)
def test_what_cannot_be_split_is_refused(
    write: Write, tmp_path: Path, settings_: dict[str, Any], found: str
) -> None:
    if "groups" in settings_:
        (tmp_path / "groups").write_text(settings_["groups"])
        settings_ = settings_ | {"groups": tmp_path / "groups"}
    with pytest.raises(DataError, match=found):
        split_dataset(write({"train.txt": XMC}), tmp_path / "made", seed=0, **settings_)
    assert not (tmp_path / "made").exists()


def test_a_data_set_from_arrays_is_not_needed_for_labels_without_instances() -> None:
    dataset = Dataset.from_arrays(np.ones((4, 1)), scipy.sparse.csr_array((4, 3)))
    assert stratified(dataset.train.labels, np.arange(4), 0.5, 0).sum() == 2
