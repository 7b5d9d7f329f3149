"""Reading a run folder: what is taken, and what is refused by file and line."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import entry, old_entry

from xmlc.errors import CheckpointError
from xmlc.reports.page import page
from xmlc.reports.run import Environment, read_run

Write = Callable[..., Path]


def test_a_run_is_read_whole(write: Write) -> None:
    run = read_run(write(entry(1), entry(2), settings=("model.fan_in=7",)))
    assert run.name == "run"
    assert run.settings["model.fan_in"] == 7
    assert (run.data.name, run.data.labels) == ("toy", 24)
    assert run.environment.native.cpu_kernels_in_use == "avx2"
    assert [each.epoch for each in run.entries] == [1, 2]
    assert [each.moved for each in run.entries[0].redistributions or ()] == [50, 30]


def test_what_older_versions_did_not_record_is_absent(write: Write) -> None:
    (first,) = read_run(write(old_entry(1))).entries
    assert first.redistributions is None
    assert first.active_share is None
    assert first.phase_seconds == {}
    assert first.validation_deciles == ()


def test_what_newer_versions_record_is_left_alone(write: Write) -> None:
    run = write(entry(1, temperature=[3]), data={"colour": {"deep": 1}})
    (run / "config.toml").write_text("[model]\nfan_in = 3\nwings = 2\n[tomorrow]\nx = 1\n")
    assert read_run(run).settings == {"model.fan_in": 3, "model.wings": 2, "tomorrow.x": 1}


def test_the_best_epoch_is_the_last_that_gained(write: Write) -> None:
    run = read_run(write(entry(1), entry(2), entry(3, best=False)))
    assert run.best is run.entries[1]
    assert read_run(write(entry(1, validation=None), name="without")).best is None


def test_a_last_line_that_is_being_written_is_left_out(write: Write) -> None:
    run = write(entry(1))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "st')
    assert len(read_run(run).entries) == 1


def test_machine_and_data_may_be_unknown(write: Write) -> None:
    run = write(entry(1))
    (run / "environment.json").unlink()
    (run / "data.json").unlink()
    read = read_run(run)
    assert read.environment == Environment()
    assert read.data.labels is None


# ---- refusals --------------------------------------------------------------------------------------------


def refusal(run: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_run(run)
    return str(caught.value)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "none", tmp_path / "file"):
        assert refusal(place).startswith(f"{place}: must be the folder of a run, found no config.toml in it")


@pytest.mark.parametrize("content", [None, "", '{"epoch": 1'])
def test_a_run_without_a_finished_epoch_is_refused(content: str | None, write: Write) -> None:
    run = write()
    (run / "metrics.jsonl").unlink()
    if content is not None:
        (run / "metrics.jsonl").write_text(content)
    assert "metrics.jsonl: a report needs at least one finished epoch, found none" in refusal(run)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Invalid JSON"),
        ("", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"epoch": 2, "step": 3}', "loss: Field required"),
        (json.dumps(entry(2, step=-1)), "step: Input should be greater than or equal to 0"),
        (json.dumps(entry(2, loss=float("nan"))), "loss: Input should be a finite number"),
        (json.dumps(entry(2, validation={"P@1": 1.5})), "validation.P@1: Input should be less than"),
        (json.dumps(entry(2, validation="good")), "validation: Input should be an object"),
        (json.dumps(entry(2, phase_seconds={"data": -1})), "phase_seconds.data: Input should be greater"),
        (json.dumps(entry(2, redistributions=[{"step": 1}])), "redistributions.0.moved: Field required"),
        (json.dumps(entry(2))[:-1] + ', "loss": 0}', "found an object with the key 'loss' twice; restore"),
        (json.dumps(entry(1)), "epochs must rise from line to line, found 1 after 1"),
    ],
)
def test_a_damaged_line_is_named_by_file_and_number(line: str, words: str, write: Write) -> None:
    run = write(entry(1))
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    message = refusal(run)
    assert message.startswith(f"{run / 'metrics.jsonl'}:2: ")
    assert words in message


def test_bytes_that_are_no_text_are_named_by_file_and_line(write: Write) -> None:
    run = write(entry(1))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"epoch": \xff}\n')
    assert f"{run / 'metrics.jsonl'}:2: must be UTF-8 text" in refusal(run)


@pytest.mark.parametrize("file", ["environment.json", "data.json"])
@pytest.mark.parametrize("content", ["", "{", "3", '{"packages": 1, "labels": "many"}'])
def test_a_damaged_description_is_named(file: str, content: str, write: Write) -> None:
    run = write(entry(1))
    (run / file).write_text(content)
    assert refusal(run).startswith(f"{run / file}: must be what a run records")


def test_a_damaged_config_is_named(write: Write) -> None:
    run = write(entry(1))
    (run / "config.toml").write_text("[model\n")
    assert refusal(run).startswith(f"{run / 'config.toml'}: must be TOML")


def test_a_file_that_is_a_folder_is_named(write: Write) -> None:
    run = write(entry(1))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: must be readable: metrics.jsonl is a link, a folder or a device" in refusal(run)


@pytest.mark.parametrize("file", ["config.toml", "metrics.jsonl", "environment.json", "data.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_link_or_pipe_in_the_place_of_a_file_is_refused_at_once(file: str, kind: str, write: Write) -> None:
    """A stranger's folder could lead to any file of its reader, or never end."""
    run = write(entry(1))
    content = (run / file).read_text() if (run / file).exists() else "{}"
    (run / file).unlink(missing_ok=True)
    if kind == "link":
        (run / "elsewhere").write_text(content)
        (run / file).symlink_to("elsewhere")
    else:
        os.mkfifo(run / file)
    assert "must be" in refusal(run)


# ---- anything --------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.sampled_from([0, 0.0, 1, 1.0, 0.5, 5e-324, 1e-30, 1e12, 1e30, -1e30, 2**63, 10**400, None, "x"]),
    st.floats(),
    st.integers(),
)
LINES = st.fixed_dictionaries(
    {"epoch": st.one_of(st.integers(1, 9), NUMBERS), "step": NUMBERS, "loss": NUMBERS},
    optional={
        "validation": st.dictionaries(st.sampled_from(["P@1", "PSP@5", "nDCG@2", "<b>"]), NUMBERS),
        "validation_deciles": st.lists(st.dictionaries(st.sampled_from(["labels", "P@1", "&"]), NUMBERS)),
        "best": st.booleans(),
        "redistributions": st.lists(st.fixed_dictionaries({"step": NUMBERS, "moved": NUMBERS}), max_size=3),
        "active_share": NUMBERS,
        "train_seconds": NUMBERS,
        "phase_seconds": st.dictionaries(st.sampled_from(["data", "forward", "sleep"]), NUMBERS),
        "peak_memory_bytes": NUMBERS,
    },
)


@settings(max_examples=300)
@given(st.lists(LINES, min_size=1, max_size=3))
def test_any_lines_give_a_page_or_a_refusal(lines: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        (run / "config.toml").write_text("")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            text = page(read_run(run))
        except CheckpointError:
            return
        assert "nan" not in text.replace("nance", "")
        assert ">inf" not in text


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000], ids=["a monstrous number", "monstrous nesting"])
def test_a_config_that_python_refuses_is_named(tmp_path: Path, value: str) -> None:
    (tmp_path / "config.toml").write_text(f"x = {value}\n")
    with pytest.raises(CheckpointError, match=r"config\.toml: must be TOML"):
        read_run(tmp_path)
