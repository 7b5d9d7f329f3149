"""A run that was stopped or killed anywhere goes on to the same bits as one that was not."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import problems
import pytest
import runs
import torch
from disk import PowerCut, failing_disk

from xmlc.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from xmlc.config import Config, dump_config, load_config
from xmlc.data import open_dataset
from xmlc.errors import CheckpointError, ConfigError
from xmlc.evaluation import load
from xmlc.training import run_folder, trainer
from xmlc.training.run_folder import CHANGEABLE, RunFolder
from xmlc.training.trainer import StoppedBySignalError

Train = Callable[..., Path]

STEPS_PER_EPOCH = 12  # 180 training instances in batches of 16, see `problems`


def everything(optimizer: str = "adam", output: str = "sparse", **training: Any) -> dict[str, dict[str, Any]]:
    """Return settings with all that has a state: dropout, redistribution, moments, stopping, and a plateau
    (no metric gains 2.0) whose rate falls after the second epoch.
    """
    return {
        "model": {
            "output": output,
            "bottleneck": 9,
            "input_dropout": 0.2,
            "hidden_dropout": 0.2,
            "weight_dtype": "bfloat16" if output == "sparse" else "float32",
            "group_size": 16,
        },
        "output_optimizer": {"kind": optimizer, "weight_decay": 0.01},
        "redistribution": {"interval_steps": 4, "first_step": 3, "end": 0.8, "new_value": "random"},
        "schedule": {"kind": "plateau", "patience": 1, "min_delta": 2.0, "warmup_steps": 20},
        "training": {"epochs": 3, "patience": 2, "clip_norm": 1.0} | training,
    }


class Killed(BaseException):
    """What no code of the package catches, as if the process had ended here."""


# ---- stopped by a signal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["sparse", "dense", "bottleneck"])
@pytest.mark.parametrize("kind", problems.KINDS)
def test_a_stopped_run_goes_on_to_the_same_bits(
    kind: problems.Kind, output: str, train: Train, tmp_path: Path, at_step: Any
) -> None:
    dataset, settings = problems.dataset(kind), everything(output=output)
    whole = train(dataset, "whole", **settings)
    at_step(STEPS_PER_EPOCH + 5, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError, match="stopped by SIGTERM at step 17, checkpoint written"):
        train(dataset, "stopped", **settings)
    _, facts = runs.checkpoint(tmp_path / "stopped")
    assert (facts["position"]["epoch"], facts["position"]["batch"]) == (1, 5)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "label_adam"])
def test_every_optimizer_goes_on(optimizer: str, train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything(optimizer)
    whole = train(dataset, "whole", **settings)
    at_step(7, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(StoppedBySignalError, match="SIGINT"):
        train(dataset, "stopped", **settings)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", ["text", "sparse"])
def test_direct_connections_go_on(kind: problems.Kind, optimizer: str, train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(kind), everything(optimizer)
    settings["model"] |= {"direct_fan_in": 5, "direct_max_frequency": 1.0}
    settings["similarity"] = {"neighbour_weight": 0.5}
    whole = train(dataset, "whole", **settings)
    at_step(7, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(StoppedBySignalError, match="SIGINT"):
        train(dataset, "stopped", **settings)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


@pytest.mark.parametrize("weight_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_float8_weights_go_on(optimizer: str, weight_dtype: str, train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything(optimizer)
    settings["model"] |= {"weight_dtype": weight_dtype}
    whole = train(dataset, "whole", **settings)
    latest = CheckpointFolder(whole / "checkpoints").latest()
    assert latest is not None
    tensors = read_checkpoint(latest).tensors
    assert tensors["model.output.weight"].dtype == getattr(torch, weight_dtype)
    assert tensors["model.output.weight_scale"].dtype == torch.float32
    at_step(7, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(StoppedBySignalError, match="SIGINT"):
        train(dataset, "stopped", **settings)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_narrow_state_goes_on(optimizer: str, state_dtype: str, train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything(optimizer)
    settings["output_optimizer"] |= {"state_dtype": state_dtype}
    whole = train(dataset, "whole", **settings)
    latest = CheckpointFolder(whole / "checkpoints").latest()
    assert latest is not None
    tensors = read_checkpoint(latest).tensors
    assert tensors["model.output.state.weight_first"].dtype == getattr(torch, state_dtype)
    assert ("model.output.state.scale" in tensors) == (state_dtype == "float8_e4m3fn")
    at_step(7, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(StoppedBySignalError, match="SIGINT"):
        train(dataset, "stopped", **settings)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


@pytest.mark.parametrize("step", [1, STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1, 3 * STEPS_PER_EPOCH])
def test_a_run_goes_on_from_the_edge_of_an_epoch(step: int, train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything()
    whole = train(dataset, "whole", **settings)
    at_step(step, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError, match=f"at step {step},"):
        train(dataset, "stopped", **settings)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


def test_a_run_goes_on_after_many_stops(train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything()
    whole = train(dataset, "whole", **settings)
    for step in range(5, 3 * STEPS_PER_EPOCH, 5):
        at_step(step, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(StoppedBySignalError):
            train(dataset, "stopped", resume=step > 5, **settings)
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


def test_a_signal_during_validation_stops_after_the_epoch_is_recorded(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, settings = problems.dataset(), everything()
    whole = train(dataset, "whole", **settings)
    measure = trainer.evaluate_model

    def interrupted(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(trainer, "evaluate_model", measure)
        signal.raise_signal(signal.SIGTERM)
        return measure(*arguments, **named)

    monkeypatch.setattr(trainer, "evaluate_model", interrupted)
    with pytest.raises(StoppedBySignalError, match="at step 12,"):
        train(dataset, "stopped", **settings)
    assert len(runs.metrics(tmp_path / "stopped")) == 1
    runs.assert_same_run(train(dataset, "stopped", resume=True, **settings), whole)


def test_the_time_before_a_stop_counts(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stopped epoch; its moved connections are compared wherever runs are."""
    dataset, settings = problems.dataset(), everything()
    step_of = trainer.training_step

    def stopping(*arguments: Any) -> Any:
        if arguments[4] == STEPS_PER_EPOCH + 5:
            arguments[6].seconds["forward"] += 1000.0
            monkeypatch.setattr(trainer, "training_step", step_of)
            signal.raise_signal(signal.SIGTERM)
        return step_of(*arguments)

    monkeypatch.setattr(trainer, "training_step", stopping)
    with pytest.raises(StoppedBySignalError):
        train(dataset, "stopped", **settings)
    run = train(dataset, "stopped", resume=True, **settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["phase_seconds"]["forward"] > 1000.0 for line in lines] == [False, True, False]


def test_signals_are_handled_as_before_once_training_is_over(train: Train) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train(problems.dataset(), training={"epochs": 1})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_finished_run_resumes_to_itself(train: Train, tmp_path: Path) -> None:
    dataset, settings = problems.dataset(), everything()
    run = train(dataset, **settings)
    shutil.copytree(run, tmp_path / "before")
    runs.assert_same_run(train(dataset, resume=True, **settings), tmp_path / "before")


def test_a_run_stopped_early_stays_stopped(train: Train) -> None:
    settings: dict[str, dict[str, Any]] = {
        "output_optimizer": {"kind": "sgd", "learning_rate": 0.0},
        "dense_optimizer": {"kind": "sgd", "learning_rate": 0.0},
        "training": {"patience": 1, "epochs": 9},
    }
    run = train(problems.dataset(), **settings)
    assert len(runs.metrics(run)) == 2
    train(problems.dataset(), resume=True, **settings)
    assert len(runs.metrics(run)) == 2


# ---- killed ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def killed_at(operation: int) -> Iterator[list[str]]:
    """Kill the process before the n-th of the operations that change a run folder, counted from 1."""
    done: list[str] = []

    def deadly(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if len(done) + 1 == operation:
                raise Killed
            done.append(name)
            return original(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (RunFolder, "record"),
            (CheckpointFolder, "save"),
            (CheckpointFolder, "mark_best"),
            (CheckpointFolder, "keep"),
        ):
            patch.setattr(owner, name, deadly(name, getattr(owner, name)))
        yield done


@pytest.mark.parametrize("checkpoint_seconds", [600.0, 0.0], ids=["by-epoch", "by-step"])
def test_a_run_killed_between_any_two_writes_goes_on_to_the_same_bits(
    checkpoint_seconds: float, train: Train, tmp_path: Path
) -> None:
    """A kill between the line of metrics and its checkpoint once left the line twice; one between the
    checkpoint and its mark lost the best epoch.
    """
    dataset = problems.dataset("dense", train=60)
    settings = everything(checkpoint_seconds=checkpoint_seconds, epochs=2)
    whole = train(dataset, "whole", **settings)
    with killed_at(0) as operations:
        train(dataset, "counted", **settings)
    assert {"record", "save", "mark_best", "keep"} <= set(operations)
    for number in range(1, len(operations) + 1):
        name = f"killed-{number}"
        with pytest.raises(Killed), killed_at(number):
            train(dataset, name, **settings)
        run = train(dataset, name, resume=True, **settings)
        runs.assert_same_run(run, whole)
        folder = CheckpointFolder(run / "checkpoints")
        assert set(folder.names()) == {path.name for path in (folder.latest(), folder.best()) if path}
        shutil.rmtree(tmp_path / name)


def test_a_line_of_metrics_cut_short_by_a_crash_is_written_again(train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything()
    whole = train(dataset, "whole", **settings)
    at_step(STEPS_PER_EPOCH + 3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        train(dataset, "torn", **settings)
    with (whole.parent / "torn" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "st')
    runs.assert_same_run(train(dataset, "torn", resume=True, **settings), whole)


def test_a_run_killed_before_its_first_checkpoint_starts_again(train: Train, at_step: Any) -> None:
    dataset, settings = problems.dataset(), everything()
    whole = train(dataset, "whole", **settings)

    def kill() -> None:
        raise Killed

    at_step(5, kill)
    with pytest.raises(Killed):
        train(dataset, "killed", **settings)
    runs.assert_same_run(train(dataset, "killed", resume=True, **settings), whole)


def test_a_run_begun_before_times_were_kept_goes_on(stopped: Path, train: Train) -> None:
    path = CheckpointFolder(stopped / "checkpoints").latest()
    assert path is not None
    old = read_checkpoint(path)
    facts: dict[str, Any] = dict(old.metadata)
    del facts["phase_seconds"], facts["position"]["redistributions"]
    write_checkpoint(path, old.tensors, facts)
    assert len(runs.metrics(train(problems.dataset(), resume=True))) == 8


# ---- what a resumed run refuses --------------------------------------------------------------------------


@pytest.fixture
def stopped(train: Train, tmp_path: Path, at_step: Any) -> Path:
    at_step(5, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        train(problems.dataset())
    return tmp_path / "run"


def test_a_run_may_go_on_on_another_device(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "config.toml").write_text(dump_config(Config()))
    (tmp_path / "data.json").write_text(json.dumps({"fingerprint": "f"}))
    folder.check_same(Config.model_validate({"training": {"device": "cuda"}}), "f")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"batch_size": 9}}, r"found training\.batch_size = 9 where it began with 16"),
        ({"training": {"epochs": 9, "seed": 9}}, r"found training\.seed = 9 where it began with 3"),
        ({"schedule": {"kind": "cosine"}}, r"found schedule\.kind = 'cosine' where it began with 'constant'"),
        ({"model": {"fan_in": 8}}, r"found model\.fan_in = 8 where it began with 16"),
        ({"text": {"max_features": 8}}, r"found text\.max_features = 8 where it began with None"),
    ],
)
def test_a_changed_setting_is_refused_by_key(
    sections: dict[str, dict[str, Any]], message: str, stopped: Path, train: Train
) -> None:
    before = runs.checkpoint(stopped)
    with pytest.raises(ConfigError, match=message):
        train(problems.dataset(), resume=True, **sections)
    assert runs.checkpoint(stopped) == before


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("output_optimizer", "learning_rate", 0.002),
        ("dense_optimizer", "learning_rate", 0.002),
        ("encoder_optimizer", "learning_rate", 0.002),
        ("training", "epochs", 2),
        ("training", "epochs", 10),
        ("training", "threads", 1),
        ("training", "storage", "disk"),
        ("training", "clip_norm", 0.5),
        ("training", "patience", 1),
        ("training", "on_divergence", "lower_rate"),
        ("training", "explosion_factor", 100.0),
        ("training", "checkpoint_seconds", 1.0),
        ("training", "worker_timeout_seconds", 60.0),
        ("training", "keep_last", 2),
        ("training", "tensorboard", True),
    ],
)
def test_what_may_change_changes_and_is_kept(
    section: str, key: str, value: Any, stopped: Path, train: Train, capsys: Any
) -> None:
    old = getattr(getattr(problems.config(), section), key)
    train(problems.dataset(), resume=True, **{section: {key: value}})
    assert f"run: resumed with {section}.{key} = {value!r}, {old!r} before" in capsys.readouterr().err
    assert load_config(stopped / "config.toml") == problems.config(**{section: {key: value}})
    last = runs.metrics(stopped)[-1]["epoch"]
    assert last == (value if key == "epochs" else last if key == "patience" else 8)
    if key in ("checkpoint_seconds", "storage"):  # what has no say in the numbers changes no bit
        runs.assert_same_metrics_and_tensors(stopped, train(problems.dataset(), "whole"))


def test_every_setting_that_may_change_is_tested() -> None:
    marks = test_what_may_change_changes_and_is_kept.pytestmark  # type: ignore[attr-defined]
    tested = {f"{section}.{key}" for section, key, _ in marks[0].args[1]}
    assert tested | {"training.device"} == CHANGEABLE  # `test_a_run_may_go_on_on_another_device`


def test_a_refused_change_leaves_the_config(stopped: Path, train: Train) -> None:
    before = (stopped / "config.toml").read_bytes()
    with pytest.raises(ConfigError):
        train(problems.dataset(), resume=True, training={"epochs": 9, "seed": 4})
    assert (stopped / "config.toml").read_bytes() == before


def test_the_last_checkpoints_and_the_best_are_kept(train: Train) -> None:
    settings = {"output_optimizer": {"learning_rate": 0.0}, "dense_optimizer": {"learning_rate": 0.0}}
    run = train(problems.dataset(), **settings, training={"epochs": 5, "keep_last": 2})
    names = CheckpointFolder(run / "checkpoints").names()
    assert [int(name.removeprefix("step-")) for name in names] == [
        epoch * STEPS_PER_EPOCH for epoch in (1, 4, 5)
    ]
    assert CheckpointFolder(run / "checkpoints").best() == run / "checkpoints" / names[0]


def test_other_data_are_refused(stopped: Path, train: Train) -> None:
    with pytest.raises(CheckpointError, match=r"the run began on data with fingerprint .*; give the same"):
        train(problems.dataset(train=201), resume=True)


def test_a_run_is_not_begun_anew_in_its_folder(stopped: Path, train: Train) -> None:
    with pytest.raises(CheckpointError, match="or continue that run with --resume"):
        train(problems.dataset())


def test_a_folder_without_a_run_is_refused(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match=r"--resume needs the folder of a run, found no config\.toml"):
        train(problems.dataset(), resume=True)


def test_a_run_that_was_killed_before_it_began_can_begin(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder once was neither empty nor a run, and took neither a new run nor --resume."""
    whole = train(problems.dataset(), "whole", training={"epochs": 1})
    write = run_folder.write_atomic
    for lost in ("environment.json", "data.json", "config.toml"):

        def deadly(path: Path, data: str, lost: str = lost) -> None:
            if path.name == lost:
                raise Killed
            write(path, data)

        monkeypatch.setattr(run_folder, "write_atomic", deadly)
        with pytest.raises(Killed):
            train(problems.dataset(), lost, training={"epochs": 1})
        monkeypatch.setattr(run_folder, "write_atomic", write)
        with pytest.raises(CheckpointError, match="a run that has not begun starts without --resume"):
            train(problems.dataset(), lost, resume=True, training={"epochs": 1})
        runs.assert_same_run(train(problems.dataset(), lost, training={"epochs": 1}), whole)


def test_files_of_others_are_no_run_that_was_killed(train: Train, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.json").write_text("mine")
    with pytest.raises(CheckpointError, match="a new run needs a new or empty folder"):
        train(problems.dataset())
    assert (tmp_path / "run" / "data.json").read_text() == "mine"


@pytest.mark.parametrize("content", [None, "{", "{}", "[]", '{"fingerprint": "", "fingerprint": ""}'])
def test_a_damaged_description_of_the_data_is_refused(
    content: str | None, stopped: Path, train: Train
) -> None:
    (stopped / "data.json").unlink()
    if content is not None:
        (stopped / "data.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"data\.json: must say what data the run began on"):
        train(problems.dataset(), resume=True)


@pytest.mark.parametrize("file", [".lock", "metrics.jsonl", "train.log", "data.json"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link_and_no_pipe_is_waited_for(
    file: str, kind: str, stopped: Path, train: Train, tmp_path: Path
) -> None:
    """A stranger's run: the lock once emptied the file that a link led to, the log was added to it."""
    mine = tmp_path / "mine"
    mine.write_bytes((stopped / file).read_bytes() if file == "data.json" else b"mine\n")
    before = mine.read_bytes()
    (stopped / file).unlink(missing_ok=True)
    if kind == "link":
        (stopped / file).symlink_to(mine)
    else:
        os.mkfifo(stopped / file)
    with pytest.raises(CheckpointError, match=rf"{file} is a link, a folder or a device|must say what data"):
        train(problems.dataset(), resume=True)
    assert mine.read_bytes() == before


def test_no_checkpoint_is_written_or_removed_through_a_link(
    stopped: Path, train: Train, tmp_path: Path
) -> None:
    (stopped / "checkpoints").rename(tmp_path / "elsewhere")
    (stopped / "checkpoints").symlink_to(tmp_path / "elsewhere")
    before = sorted((tmp_path / "elsewhere").rglob("*"))
    with pytest.raises(CheckpointError, match="checkpoints: must be a folder, found a link; put the folder"):
        train(problems.dataset(), resume=True)
    assert sorted((tmp_path / "elsewhere").rglob("*")) == before


def test_a_damaged_checkpoint_is_refused(stopped: Path, train: Train) -> None:
    (data,) = (stopped / "checkpoints").glob("*/tensors-*.safetensors")
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="must have the checksum of manifest"):
        train(problems.dataset(), resume=True)


@pytest.mark.parametrize("lost", ["checkpoints", "checkpoints/latest", "checkpoints/*"])
def test_lost_checkpoints_are_refused_and_the_metrics_stay(lost: str, train: Train, tmp_path: Path) -> None:
    """Such a run once started again from step 0 without a word, over its metrics."""
    run = train(problems.dataset())
    before = (run / "metrics.jsonl").read_bytes()
    for path in run.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost == "checkpoints/latest":
        message = r"write one of \['step-"
    else:
        message = "needs the run's checkpoints, found n.* put them back, or start a new run"
    with pytest.raises(CheckpointError, match=message):
        train(problems.dataset(), resume=True)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("lost", [1, 3, 8])
def test_lost_metrics_are_refused(lost: int, train: Train) -> None:
    run = train(problems.dataset())
    file = run / "metrics.jsonl"
    kept = [line for number, line in enumerate(file.read_bytes().splitlines(True), 1) if number != lost]
    file.write_bytes(b"".join(kept))
    with pytest.raises(CheckpointError, match="must hold a line for each of the 8 epochs that are done"):
        train(problems.dataset(), resume=True)
    assert file.read_bytes() == b"".join(kept)


def test_metrics_are_on_the_disk_before_their_checkpoint(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut could keep the checkpoint and lose the epoch's line."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushing(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def renaming(source: Any, target: Any) -> None:
        done.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushing)
    monkeypatch.setattr(os, "replace", renaming)
    train(problems.dataset(), training={"epochs": 1})
    written = done[done.index("metrics.jsonl") :]
    assert written[:2] == ["metrics.jsonl", "run"]
    assert written.index("rename manifest.json") > 1
    assert "rename manifest.json" not in done[: done.index("metrics.jsonl")]


@pytest.mark.parametrize(
    "line",
    [
        *(b"{}", b"[]", b"7", b"\xff", b"\0\0", b"[" * 100_000),
        b'{"epoch": "1", "step": 1, "best": true}',
        b'{"epoch": 1, "epoch": 1, "step": 1, "best": true}',
    ],
)
def test_a_damaged_line_of_metrics_is_refused(line: bytes, train: Train) -> None:
    run = train(problems.dataset(), training={"epochs": 1})
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2: must be a JSON object with epoch"):
        train(problems.dataset(), resume=True, training={"epochs": 1})


# ---- real processes --------------------------------------------------------------------------------------


class Process:
    """A training in a process of its own, through the command line."""

    def __init__(self, folder: Path, config: Config, run: Path, *flags: str, file_bytes: int = -1) -> None:
        file = run.with_suffix(".toml")
        file.write_text(dump_config(config))
        command = [sys.executable, "-P", "-m", "xmlc.cli", "train", str(folder), "--out", str(run)]
        command += ["--config", str(file), *flags]

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        self.run = run
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            preexec_fn=limit,
        )

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until something has come about, and fail with the process's words if it ends before."""
        until = time.monotonic() + 60
        while not ready():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until, "the process is too slow"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Wait until a redistribution at or after a step is in the log."""
        self.wait_for(lambda: self._last_step() >= step)

    def _last_step(self) -> int:
        log = self.run / "train.log"
        lines = log.read_text().splitlines() if log.exists() else []
        steps = [int(line.split("step ")[1].split(":")[0]) for line in lines if "redistributed" in line]
        return max(steps, default=0)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def result(self) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


INSTANCES = 1600
LONG_EPOCH = 360
"""Steps: 1,440 training instances in batches of 4, about a second."""


def long_config(optimizer: str, **training: Any) -> Config:
    sections = everything(optimizer, batch_size=4, threads=1, epochs=2, **training)
    return problems.config(**sections)


@pytest.mark.parametrize(
    ("kind", "optimizer", "number", "code"),
    [("text", "adam", signal.SIGTERM, 143), ("sparse", "label_adam", signal.SIGINT, 130)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signalled_process_stops_and_its_successor_ends_with_the_same_bits(
    kind: problems.Kind, optimizer: str, number: int, code: int, tmp_path: Path
) -> None:
    folder = problems.write_folder(tmp_path / "toy", kind, train=INSTANCES)
    config = long_config(optimizer)
    process = Process(folder, config, tmp_path / "stopped")
    process.wait_for_step(LONG_EPOCH + 50)
    process.signal(number)
    found, out, err = process.result()
    assert found == code
    assert out == ""
    assert "checkpoint written; continue with --resume" in err.splitlines()[-1]
    assert "Traceback" not in err
    _, facts = runs.checkpoint(tmp_path / "stopped")
    assert facts["position"]["epoch"] == 1
    assert 0 < facts["position"]["batch"] < LONG_EPOCH

    resumed = Process(folder, config, tmp_path / "stopped", "--resume")
    assert resumed.result()[0] == 0
    trainer.train_into(tmp_path / "whole", open_dataset(folder), config)
    runs.assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_killed_process_leaves_a_checkpoint_within_the_epoch_to_go_on_from(tmp_path: Path) -> None:
    folder = problems.write_folder(tmp_path / "toy", "sparse", train=INSTANCES)
    config = long_config("adam", checkpoint_seconds=0.05)
    process = Process(folder, config, tmp_path / "killed")
    process.wait_for_step(LONG_EPOCH + 100)
    process.process.kill()
    assert process.result()[0] == -signal.SIGKILL
    _, facts = runs.checkpoint(tmp_path / "killed")
    assert 0 < facts["position"]["batch"] < LONG_EPOCH

    assert Process(folder, config, tmp_path / "killed", "--resume").result()[0] == 0
    trainer.train_into(tmp_path / "whole", open_dataset(folder), config)
    runs.assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_runs_killed_at_random_moments_end_with_the_same_bits() -> None:
    """The script kills a hundred times by default; what it found is in benchmarks/results/kill_test.csv."""
    script = Path(__file__).parents[2] / "scripts" / "kill_test"
    done = subprocess.run(
        [sys.executable, "-P", str(script), "--times", "5", "--seed", str(time.time_ns())],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kills, " in done.stdout.splitlines()[-1]


def test_two_processes_do_not_share_a_run_folder(tmp_path: Path) -> None:
    folder = problems.write_folder(tmp_path / "toy", "dense", train=INSTANCES)
    config = long_config("adam")
    first = Process(folder, config, tmp_path / "run")
    first.wait_for(lambda: (tmp_path / "run" / "train.log").exists())
    with pytest.raises(CheckpointError, match="found another at it"), RunFolder(tmp_path / "run").locked():
        pass
    first.process.kill()
    first.result()
    with RunFolder(tmp_path / "run").locked():
        pass  # the lock dies with its process


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_folder_vanishes_stops_and_does_not_make_it_again(
    replaced: bool, train: Train, tmp_path: Path, at_step: Any
) -> None:
    def vanish() -> None:
        (tmp_path / "run").rename(tmp_path / "moved")
        if replaced:
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / ".lock").write_text("")

    at_step(5, vanish)
    with pytest.raises(CheckpointError, match=r"the run folder must stay|must be writable: No such file"):
        train(problems.dataset(), training={"epochs": 2, "checkpoint_seconds": 0.0})
    assert not (tmp_path / "run" / "checkpoints").exists()
    whole = train(problems.dataset(), "whole", training={"epochs": 2, "checkpoint_seconds": 0.0})
    resumed = train(
        problems.dataset(), "moved", resume=True, training={"epochs": 2, "checkpoint_seconds": 0.0}
    )
    runs.assert_same_run(resumed, whole)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_refuses_any_change_of_a_run_stops_it_with_an_error_and_costs_nothing(
    code: int, train: Train, tmp_path: Path
) -> None:
    """At every write, flush, rename and removal in turn, for good; then there is space again."""
    dataset = problems.dataset("dense", train=40)
    settings: dict[str, dict[str, Any]] = {"training": {"epochs": 2, "batch_size": 12}}
    whole = train(dataset, "whole", **settings)
    with failing_disk(10**9, PowerCut(), forever=True) as done:
        train(dataset, "counted", **settings)
    assert len(done) > 60
    refused_at = range(0, len(done), 1 if code == errno.ENOSPC else 7)
    for point in refused_at:
        run = tmp_path / "run"
        with failing_disk(point, OSError(code, os.strerror(code)), forever=True):
            try:
                train(dataset, **settings)
            except CheckpointError as error:
                assert os.strerror(code) in str(error)
                assert str(tmp_path) in str(error)
            else:  # only the last removals of what is not needed any more
                assert point > len(done) - 10
        if CheckpointFolder(run / "checkpoints").names():
            load(run, "latest")
        if run.exists():
            runs.assert_same_run(train(dataset, resume=(run / "config.toml").exists(), **settings), whole)
            shutil.rmtree(run)


def test_a_full_disk_ends_with_a_message_and_the_last_checkpoint(tmp_path: Path, at_step: Any) -> None:
    """Files are limited to fewer bytes than a checkpoint; the limit of the process stands for the disk's."""
    dataset = open_dataset(problems.write_folder(tmp_path / "toy", "sparse"))
    config = problems.config(**everything(threads=1))
    at_step(5, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(StoppedBySignalError):
        trainer.train_into(tmp_path / "run", dataset, config)
    before = runs.checkpoint(tmp_path / "run")

    full = Process(tmp_path / "toy", config, tmp_path / "run", "--resume", file_bytes=10_000)
    code, out, err = full.result()
    assert (code, out) == (2, "")
    assert "must be writable" in err.splitlines()[-1]
    assert "free space" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert runs.checkpoint(tmp_path / "run") == before
    assert load(tmp_path / "run").metadata["position"] == before[1]["position"]
    trainer.train_into(tmp_path / "run", dataset, config, resume=True)
    assert len(runs.metrics(tmp_path / "run")) == 3
