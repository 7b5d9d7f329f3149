"""Stores: the same data mapped again, rebuilt when stale or broken, whole at every moment."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse

from xmlc.data import CsrRows, DataWarning, cache_folder, open_dataset, store
from xmlc.data.dataset import arrays_of
from xmlc.data.store import Stored, open_or_build
from xmlc.errors import DataError

Write = Callable[..., Path]

XMC = {"train.txt": "3 4 3\n0,2 0:1.5\n\n1 3:2\n", "test.txt": "1 4 3\n1 1:1\n", "labels.txt": "a\nb\nc\n"}
LF = {
    "trn.json": '{"title": "one", "target_ind": [0]}\n{"title": "", "target_ind": []}\n',
    "lbl.json": '{"title": "A", "content": "more"}\n',
    "filter_labels_train.txt": "1 0\n",
}


def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Record every reading of a folder."""
    folders: list[Path] = []
    original = store.read_folder

    def read_folder(folder: Path, scratch: Path) -> object:
        folders.append(folder)
        return original(folder, scratch)

    monkeypatch.setattr(store, "read_folder", read_folder)
    return folders


def only_store(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return folder


def dense_set(write: Write) -> Path:
    folder = write({"trn_X_Y.txt": "2 2\n0:1\n1:1\n"}, "dense")
    np.save(folder / "trn_X_Xf.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    return folder


@pytest.mark.parametrize("make", [lambda w: w(XMC, "xmc"), lambda w: w(LF, "lf"), dense_set])
def test_a_store_gives_back_what_was_read(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Write], Path]
) -> None:
    folders = reads(monkeypatch)
    source = make(write)
    first, second = open_dataset(source), open_dataset(str(source))
    assert len(folders) == 1
    ours, theirs = arrays_of(first), arrays_of(second)
    assert sorted(ours) == sorted(theirs)
    for place, array in ours.items():
        assert array.dtype == theirs[place].dtype
        np.testing.assert_array_equal(array, theirs[place])
    scalars = ("name", "kind", "label_count", "feature_count", "fingerprint", "source", "warnings")
    assert [getattr(first, name) for name in scalars] == [getattr(second, name) for name in scalars]


def test_instances_without_anything_survive_the_store(write: Write, cache: Path) -> None:
    dataset = open_dataset(write(XMC))
    assert isinstance(dataset.train.features, CsrRows)
    np.testing.assert_array_equal(
        dataset.train.features.to_scipy().toarray(), [[1.5, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 2]]
    )
    assert dataset.train.labels.offsets.tolist() == [0, 2, 2, 3]


def test_the_fingerprint_does_not_depend_on_place_or_packing(write: Write, cache: Path) -> None:
    plain = open_dataset(write(XMC, "plain"))
    packed = open_dataset(write({f"{name}.gz": text for name, text in XMC.items()}, "packed"))
    assert plain.fingerprint == packed.fingerprint


def test_dense_features_are_mapped_from_their_own_file(write: Write, cache: Path) -> None:
    dataset = open_dataset(dense_set(write))
    assert isinstance(dataset.train.features, np.ndarray)
    assert not list(cache.glob("*/train.features*"))
    np.testing.assert_array_equal(dataset.train.features, [[0, 1, 2], [3, 4, 5]])


def test_a_changed_source_is_read_again(write: Write, cache: Path) -> None:
    source = write(XMC)
    assert open_dataset(source).train.instances == 3
    write({"train.txt": "1 4 3\n0 0:1\n"})
    assert open_dataset(source).train.instances == 1


def test_a_source_touched_without_a_change_of_size_is_read_again(write: Write, cache: Path) -> None:
    source = write(XMC)
    first = open_dataset(source)
    (source / "train.txt").write_text(XMC["train.txt"].replace("1.5", "2.5"))
    os.utime(source / "train.txt", ns=(1, 1))
    assert open_dataset(source).fingerprint != first.fingerprint


def test_a_file_added_later_is_read(write: Write, cache: Path) -> None:
    source = write(XMC)
    assert open_dataset(source).train.filter_pairs is None
    write({"filter_labels_train.txt": "0 0\n"})
    assert open_dataset(source).train.filter_pairs is not None


def corrupt_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def truncate_array(folder: Path) -> None:
    path = folder / "train.features.values.npy"
    path.write_bytes(path.read_bytes()[:-1])


def overwrite_array(folder: Path) -> None:
    path = folder / "train.features.values.npy"
    path.write_bytes(b"\0" * path.stat().st_size)


def remove_array(folder: Path) -> None:
    (folder / "train.labels.offsets.npy").unlink()


def age_version(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 0}))


@pytest.mark.parametrize(
    "damage",
    [corrupt_manifest, remove_manifest, truncate_array, overwrite_array, remove_array, age_version],
)
def test_a_damaged_or_old_store_is_rebuilt(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    source = write(XMC)
    first = open_dataset(source)
    fingerprint = first.fingerprint
    del first
    damage(only_store(cache))
    folders = reads(monkeypatch)
    assert open_dataset(source).fingerprint == fingerprint
    assert open_dataset(source).fingerprint == fingerprint
    assert len(folders) == 1


def test_a_data_set_in_use_outlives_a_rebuild(write: Write, cache: Path) -> None:
    source = write(XMC)
    first = open_dataset(source)
    write({"train.txt": "1 4 3\n0 0:1\n"})
    open_dataset(source)
    assert isinstance(first.train.features, CsrRows)
    assert first.train.features.values is not None
    assert first.train.features.values.tolist() == [1.5, 2]


def test_a_failed_reading_leaves_no_store_and_no_leftovers(write: Write, cache: Path) -> None:
    source = write({**XMC, "train.txt": "3 4 3\n0 0:1\n0 0:x\n\n"})
    with pytest.raises(DataError, match=r"train\.txt:3"):
        open_dataset(source)
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    write(XMC)
    assert open_dataset(source).train.instances == 3


def test_leftovers_of_a_killed_writer_are_cleared(write: Write, cache: Path) -> None:
    source = write(XMC)
    open_dataset(source)
    folder = only_store(cache)
    folder.rename(folder.with_name(f"{folder.name}.new"))
    assert open_dataset(source).train.instances == 3
    assert only_store(cache) == folder


def test_a_source_that_changes_while_it_is_read_is_refused(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(XMC)
    original = store.read_folder

    def read_folder(folder: Path, scratch: Path) -> object:
        dataset = original(folder, scratch)
        (source / "test.txt").write_text("1 4 3\n1 1:1 2:2\n")
        return dataset

    monkeypatch.setattr(store, "read_folder", read_folder)
    with pytest.raises(DataError, match="its files must not change while they are read"):
        open_dataset(source)


def test_repairs_are_told_once_and_kept(write: Write, cache: Path) -> None:
    source = write({**XMC, "train.txt": "3 4 3\n0,0 0:1 0:1\n1,1 1:1\n\n"})
    with pytest.warns(DataWarning) as caught:
        first = open_dataset(source)
    assert [str(warning.message) for warning in caught] == [
        f"{source}: 1 repeated features summed, 2 repeated labels merged"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = open_dataset(source)
    assert first.warnings == second.warnings == ("1 repeated features summed, 2 repeated labels merged",)


def test_a_cache_that_cannot_be_written_is_a_clear_error(write: Write, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"the cache must be writable and have room, found: Not a directory"):
        open_dataset(write(XMC), cache=tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [("/a", "/b", "/a"), ("", "/b", "/b/xmlc"), ("", "", "HOME/.cache/xmlc")],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, own: str, shared: str, expected: str
) -> None:
    monkeypatch.setenv("XMLC_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert cache_folder() == Path(expected.replace("HOME", str(Path.home())))


@pytest.mark.parametrize("source", [Path("no-such-set"), "./no-such-set"])
def test_a_missing_folder_is_refused(source: str | Path) -> None:
    with pytest.raises(DataError, match="no-such-set: must be a folder with a data set, found none"):
        open_dataset(source)


def test_a_folder_goes_before_a_known_name(
    write: Write, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(XMC, "corel5k")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(DataWarning, match="counts should be those of the card corel5k"):
        assert open_dataset("corel5k").train.instances == 3


def test_concurrent_writers_read_the_source_once(
    write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The lock belongs to an open file, so threads take turns as processes do.
    source = write(XMC)
    folders = reads(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        datasets = list(pool.map(open_dataset, [source] * 8))
    assert {dataset.train.instances for dataset in datasets} == {3}
    assert len(folders) == 1


def test_a_store_with_another_key_is_built_anew(tmp_path: Path) -> None:
    def build(value: int) -> Callable[[Path], Stored]:
        return lambda scratch: Stored({"a": np.full(3, value)}, {"value": value})

    assert open_or_build(tmp_path, "s", {"key": 1}, build(1)).arrays["a"].tolist() == [1, 1, 1]
    assert open_or_build(tmp_path, "s", {"key": 1}, build(2)).facts["value"] == 1
    assert open_or_build(tmp_path, "s", {"key": 2}, build(2)).facts["value"] == 2


def test_stored_arrays_are_read_only_maps(tmp_path: Path) -> None:
    def build(scratch: Path) -> Stored:
        return Stored({"full": np.arange(3), "empty": np.empty(0, np.int32)}, {})

    arrays = open_or_build(tmp_path, "s", {}, build).arrays
    assert not arrays["full"].flags.writeable
    assert type(arrays["full"]) is np.ndarray
    assert arrays["empty"].dtype == np.int32


def test_large_npz_labels_survive_the_store(write: Write, cache: Path) -> None:
    folder = write({})
    rng = np.random.default_rng(0)
    labels = scipy.sparse.random(200, 70_000, density=1e-4, random_state=rng, format="csr")
    scipy.sparse.save_npz(folder / "trn_X_Y.npz", labels)
    scipy.sparse.save_npz(folder / "trn_X_Xf.npz", scipy.sparse.random(200, 9, density=0.5, random_state=rng))
    dataset = open_dataset(folder)
    np.testing.assert_array_equal(dataset.train.labels.to_scipy().toarray() > 0, labels.toarray() > 0)
