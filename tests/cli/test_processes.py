"""What only a real process shows: exit codes, pipes, terminals, and what is imported."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import problems
import pytest
import streams

from xmlc.data import open_dataset
from xmlc.training.trainer import train_into

COMMAND = [sys.executable, "-P", "-m", "xmlc.cli"]


def python(code: str) -> str:
    """Run code in a fresh interpreter and return its stdout."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["data", "list"], []])
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = f"""
import contextlib, io, sys
from xmlc.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main({arguments!r})
print("torch" in sys.modules)
"""
    assert python(code) == "False\n"


def test_a_reader_that_leaves_is_no_error(home: Path, tmp_path: Path) -> None:
    """``xmlc predict ... | head -1``"""
    lines = tmp_path / "lines"
    lines.write_text("word1 word2\n" * 20_000)
    process = subprocess.Popen(
        [*COMMAND, "predict", str(home / "text run"), str(lines)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b'{"labels": ')
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_any_number_of_lines_is_answered_in_the_memory_of_a_few(home: Path) -> None:
    """Holding 60,000 lines and their answers takes ten times the bound.

    `scripts/stream_test` does this with a million; what it found is in benchmarks/results/stream_test.csv.
    """
    few, many = (streams.peak_bytes(home / "text run", lines) for lines in (4_000, 64_000))
    assert many < few + 4 * 2**20


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_stdout_on_a_full_disk_is_an_error_in_a_line(home: Path) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(
            [*COMMAND, "predict", str(home / "text run")],
            input=b"word1\n",
            stdout=full,
            stderr=subprocess.PIPE,
        )
    assert done.returncode == 2
    assert done.stderr == b"xmlc: [Errno 28] No space left on device\n"


def test_predictions_are_utf_8_in_any_locale(home: Path, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text", train=60)
    (data / "lbl.json").write_text('{"title": "日本"}\n' * problems.LABELS, encoding="utf-8")
    train_into(tmp_path / "run", open_dataset(data), problems.config(training={"epochs": 1}))
    done = subprocess.run(
        [*COMMAND, "predict", str(tmp_path / "run"), "-k", "1"],
        input=b"word1\n",
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert json.loads(done.stdout)["labels"][0]["name"] == "日本"
    assert done.stderr == b""


def test_an_interrupted_prediction_ends_with_130_and_a_line(home: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "predict", str(home / "text run"), "-k", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs ignore Ctrl-C, and so would this process.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"word1\n" * 1024)
    process.stdin.flush()
    for _ in range(1024):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"xmlc: interrupted\n")


def test_errors_and_wrong_calls_end_with_2(tmp_path: Path) -> None:
    for arguments in (["eval", str(tmp_path / "none")], ["frobnicate"]):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert "Traceback" not in done.stderr


def test_a_terminal_gets_a_bar_with_loss_speed_and_memory(home: Path, tmp_path: Path) -> None:
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 160))
    process = subprocess.Popen(
        [
            *COMMAND,
            "train",
            str(home / "dense data"),
            "--out",
            str(tmp_path / "run"),
            "--config",
            str(home / "config.toml"),
        ],
        stdout=subprocess.PIPE,
        stderr=child,
        env={**os.environ, "TQDM_MININTERVAL": "0"},
    )
    os.close(child)
    shown = b""
    try:
        while block := os.read(parent, 65536):
            shown += block
    except OSError:  # how Linux says that the other side has closed
        pass
    out, _ = process.communicate(timeout=60)
    os.close(parent)
    assert process.returncode == 0
    assert out == f"{tmp_path / 'run'}\n".encode()
    for word in (b"\r", b"epoch 6:", b"loss=", b"memory=", b"batch/s"):
        assert word in shown
