"""`scripts/device_check` without a GPU: its parts on a pretended device, and what it says and writes."""

from __future__ import annotations

import csv
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import oracles
import pretended
import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "device_check"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("device_check", str(SCRIPT))
    spec = importlib.util.spec_from_loader("device_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


@pytest.fixture
def gpu() -> Iterator[dict[str, float]]:
    """Pretend a device, and answer torch's questions about its memory; return the fraction asked for."""
    asked: dict[str, float] = {}
    answers = {
        "get_device_properties": lambda _: SimpleNamespace(total_memory=16 * 10**9),
        "set_per_process_memory_fraction": lambda fraction: asked.update(fraction=fraction),
        "get_device_name": lambda *_: "a pretended GPU",
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 2 * 10**9,
        "max_memory_reserved": lambda: 3 * 10**9,
        "mem_get_info": lambda: (12 * 10**9, 16 * 10**9),
    }
    with oracles.threads(1), pretended.device(), pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        yield asked


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_limits_together_are_below_eight_minutes(script: ModuleType) -> None:
    assert script.BUILD_SECONDS + sum(script.LIMIT_SECONDS.values()) < 8 * 60
    assert script.LIMIT_SECONDS.keys() <= script.PARTS.keys()


def test_a_part_that_fails_does_not_stop_the_next_and_ends_with_1(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(command: list[str], **options: object) -> SimpleNamespace:
        part = command[-1]
        ran.append(part)
        if part == "speed":
            raise subprocess.TimeoutExpired(command, 1)
        return SimpleNamespace(returncode=3 if part == "tests" else 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["device_check", "--installed", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="device_check: tests, speed failed"):
        script.main()
    assert ran == list(script.LIMIT_SECONDS) and (tmp_path / "out").is_dir()
    said = capsys.readouterr().out
    assert "runtime: ok" in said and "tests: failed (3)" in said and "speed: failed (-1)" in said


def test_the_kernels_are_built_for_the_gpus_that_are_there(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="9.0\n8.6\n9.0\n"))
    assert script.architectures() == ["86-real;90-real"]

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(script.subprocess, "run", missing)
    assert script.architectures() == []


def test_runtime_and_every_op_run(
    script: ModuleType, gpu: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = SimpleNamespace(__enter__=None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: oracles.threads(1))
    script.check_runtime(tmp_path)
    script.use_every_op(tmp_path)


def test_tests_pass_on_right_kernels_and_fail_on_wrong_ones(
    script: ModuleType, gpu: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = [shape for shape in oracles.SHAPES if shape.label * shape.batch * shape.input < 1 << 19][:12]
    monkeypatch.setattr(oracles, "SHAPES", small)
    script.check_tests(tmp_path)
    right = oracles.top
    monkeypatch.setattr(oracles, "top", lambda scores, k: right(-scores, k))
    with pytest.raises(AssertionError, match="top labels"):
        script.check_tests(tmp_path)


def test_speed_writes_a_row_for_every_op_and_size(
    script: ModuleType, gpu: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = [
        (100, 4, 64, 8, 1, "float32"),
        (100, 4, 64, 8, 32, "bfloat16"),
        (100, 32, 16_384, 8, 1, "float32"),
    ]
    monkeypatch.setattr(script, "SIZES", sizes)
    # Of torch's own, which the pretended device does not have.
    csr = lambda rows, columns, values, size, **_: torch.zeros(size, device="cuda")  # noqa: E731
    monkeypatch.setattr(torch, "sparse_csr_tensor", csr)
    monkeypatch.setattr(script, "CEILING_FLOATS", 1 << 10)
    monkeypatch.setattr(script, "CEILING_SIDE", 16)
    script.check_speed(tmp_path)
    rows = table(tmp_path / "device.csv")
    own = {"forward", "fused_step", "top_labels", "redistribute"}
    found = [{row["op"] for row in rows if int(row["fan_in"]) == fan_in} for fan_in in (4, 32)]
    assert found == [own | {"torch_sparse_csr_forward"}, found[0] | {"torch_dense_768_step"}]
    assert all(float(row["seconds"]) > 0 and float(row["ceiling_bytes_per_second"]) > 0 for row in rows)
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"}
    # Index of 2 bytes and weight of 2, read, and the weight written.
    assert script.floor_bytes("fused_step", 100, 4, 64, 8, 32, "bfloat16") == 4 * 4 * 2 + 2 * 100 * 4 * 2


def test_what_is_not_measured_for_want_of_time_is_said(
    script: ModuleType,
    gpu: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "CEILING_FLOATS", 1 << 10)
    monkeypatch.setattr(script, "CEILING_SIDE", 16)
    monkeypatch.setitem(script.LIMIT_SECONDS, "speed", 0)
    script.check_speed(tmp_path)
    assert f"NOT MEASURED for want of time, from {script.SIZES[0]} on" in capsys.readouterr().out


def test_training_goes_through_the_trainer_under_a_fraction_of_4_gb(
    script: ModuleType, gpu: dict[str, float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = {"label": 300, "width": 128, "fan_in": 8, "batch": 16, "instances": 150, "features": 12}
    monkeypatch.setattr(script, "TRAINED", sizes)
    script.check_training(tmp_path)
    assert gpu["fraction"] == 0.25
    rows = table(tmp_path / "device_memory.csv")
    assert [(row["dtype"], row["optimizer"], row["steps"]) for row in rows] == [
        ("float32", "adam", "9"),
        ("bfloat16", "label_adam", "9"),
    ]
    assert {row["allocated_bytes"] for row in rows} == {str(2 * 10**9)}
    assert {row["reserved_bytes"] for row in rows} == {str(3 * 10**9)}
    assert {row["device_bytes"] for row in rows} == {str(4 * 10**9)}


def write_tool(folder: Path, body: str) -> Path:
    folder.mkdir()
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)
    return folder


def test_a_machine_without_compute_sanitizer_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.shutil, "which", lambda *_, **__: None)
    script.check_sanitizer(tmp_path)
    assert "sanitizer: NOT RUN, no compute-sanitizer" in capsys.readouterr().out
    assert not (tmp_path / "device_sanitizer.csv").exists()


def test_what_compute_sanitizer_finds_fails_the_part(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = write_tool(
        tmp_path / "clean", 'test "$3" = --error-exitcode && test "$PYTORCH_NO_CUDA_MEMORY_CACHING"'
    )
    monkeypatch.setenv("PATH", str(clean), prepend=":")
    script.check_sanitizer(tmp_path)
    assert table(tmp_path / "device_sanitizer.csv") == [
        {"tool": name, "verdict": "clean"} for name in ("memcheck", "racecheck", "synccheck")
    ]
    found = write_tool(tmp_path / "found", 'echo "race in a kernel"; [ "$2" != racecheck ] || exit 86')
    monkeypatch.setenv("PATH", str(found), prepend=":")
    with pytest.raises(AssertionError, match="'racecheck': 'errors'"):
        script.check_sanitizer(tmp_path)
    assert "racecheck, status 86:\nrace in a kernel" in capsys.readouterr().out
