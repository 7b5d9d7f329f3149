"""What the system refuses, for want of rights or room, ends with a line and leaves nothing half-written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from disk import ordinary_rights, small_files

Xmlc = Callable[..., Result]


def refused(result: Result) -> str:
    """Return the line that a refused command said."""
    assert result.exit_code == 2, (result.exit_code, result.exception)
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XMLC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(home: Path, tmp_path: Path, cache: Path) -> Callable[[str], Path]:
    """Copy a data set, so that its rights may change."""
    return lambda kind: shutil.copytree(home / f"{kind} data", tmp_path / "data")


# ---- no rights -------------------------------------------------------------------------------------------


def test_files_that_may_not_be_read_are_named(
    xmlc: Xmlc, data: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = data("text")
    (folder / "tst.json").chmod(0o000)
    with ordinary_rights():
        for verb in (["info"], ["convert", "--to", "lf"]):
            arguments = [verb[0], folder, *([tmp_path / "made"] if verb[1:] else []), *verb[1:]]
            line = refused(xmlc("data", *arguments))
            assert line.endswith(
                "tst.json: must be a readable file, found: Permission denied; check its rights"
            )
        checked = xmlc("data", "check", folder)
    assert checked.exit_code == 2
    assert "tst.json: must be a readable file, found: Permission denied" in checked.stdout
    assert not (tmp_path / "made").exists()


def test_a_data_folder_that_may_not_be_entered_is_named(
    xmlc: Xmlc, data: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = data("text")
    folder.chmod(0o000)
    with ordinary_rights():
        line = refused(xmlc("data", "info", folder))
    folder.chmod(0o755)
    assert f"{folder}" in line
    assert "Permission denied" in line


def test_a_folder_that_may_not_be_written_takes_nothing(
    xmlc: Xmlc, data: Callable[[str], Path], home: Path, tmp_path: Path
) -> None:
    folder = data("text")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    folder.chmod(0o555)
    with ordinary_rights():
        assert "made: must be writable and have room, found: Permission denied" in refused(
            xmlc("data", "convert", folder, closed / "made", "--to", "npz")
        )
        assert "made: must be writable and have room, found: Permission denied" in refused(
            xmlc("data", "split", folder, closed / "made", "--pool")
        )
        assert "filter_labels_train.txt: must be writable and have room, found: Permission denied" in refused(
            xmlc("data", "filter", folder)
        )
        assert "run: the run folder must be writable: Permission denied" in refused(
            xmlc("train", folder, "--out", closed / "run")
        )
        assert "report.html: must be writable, found: [Errno 13] Permission denied" in refused(
            xmlc("report", home / "text run", "--out", closed / "report.html")
        )
    folder.chmod(0o755)
    assert not list(closed.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == ["lbl.json", "trn.json", "tst.json"]


def test_a_cache_that_may_not_be_written_is_named(
    xmlc: Xmlc, data: Callable[[str], Path], cache: Path
) -> None:
    cache.mkdir(mode=0o555)
    with ordinary_rights():
        for verb in ("info", "check"):
            line = refused(xmlc("data", verb, data("sparse") if verb == "info" else cache.parent / "data"))
            assert "cache: the cache must be writable and have room, found: Permission denied" in line
            assert line.endswith("set XMLC_CACHE to a folder that is")


def test_a_run_that_may_not_be_read_or_gone_on_with_is_named(
    xmlc: Xmlc, home: Path, tmp_path: Path, cache: Path
) -> None:
    run = shutil.copytree(home / "text run", tmp_path / "run")
    best = (run / "checkpoints" / "best").read_text().strip()
    manifest = run / "checkpoints" / best / "manifest.json"
    manifest.chmod(0o000)
    with ordinary_rights():
        line = refused(xmlc("predict", run))
    assert "manifest.json: must be readable, found: [Errno 13] Permission denied" in line
    manifest.chmod(0o644)
    (run / "checkpoints").chmod(0o000)
    with ordinary_rights():
        line = refused(xmlc("predict", run))
    (run / "checkpoints").chmod(0o755)
    assert "Permission denied" in line
    (run / ".lock").chmod(0o444)
    with ordinary_rights():
        line = refused(xmlc("train", home / "text data", "--out", run, "--resume"))
    assert "the run folder must be writable: Permission denied" in line


# ---- no room ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "sparse", "dense"])
@pytest.mark.parametrize("room", [0, 600])
def test_no_room_leaves_neither_a_new_folder_nor_a_store(
    xmlc: Xmlc, data: Callable[[str], Path], kind: str, room: int, tmp_path: Path, cache: Path
) -> None:
    """NumPy tells of a full disk without a reason or a name, which once read: found: None (None)."""
    folder = data(kind)
    before = sorted(folder.iterdir())
    commands = [
        ("info", folder),
        ("convert", folder, tmp_path / "made", "--to", "npz"),
        ("split", folder, tmp_path / "made", "--pool"),
    ]
    if kind == "text":
        commands.append(("filter", folder))
    for command in commands:
        with small_files(room):
            line = refused(xmlc("data", *command))
        assert "must be writable and have room, found: " in line
        assert "None" not in line
    assert not (tmp_path / "made").exists()
    assert sorted(folder.iterdir()) == before
    assert all(path.suffix == ".lock" for path in cache.iterdir())
    assert xmlc("data", "convert", folder, tmp_path / "made", "--to", "npz").exit_code == 0
