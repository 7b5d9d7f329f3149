"""The README's examples run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xmlc.cli import main

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("xmlc ", "echo "))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def test_every_kind_of_example_is_found() -> None:
    assert len(PYTHON) == 5
    assert len(COMMANDS) == 11


def test_the_parts_for_embedding_models_fit_on_a_screen() -> None:
    [example] = [each for each in PYTHON if "SparseHead" in each]
    assert "multi_positive_loss(" in example and "two_tower" in example
    assert len(example.splitlines()) < 30


def test_python_examples_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XMLC_CACHE", str(folder / "cache"))
    names: dict[str, Any] = {}
    for example in PYTHON:
        exec(compile(example, "README.md", "exec"), names)
    assert set(names["best"][0].tolist()) == {0, 2}, "what the estimator's comment says"


def test_command_lines_run_in_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XMLC_CACHE", str(folder / "cache"))
    for line in COMMANDS:
        text, _, command = line.rpartition("|")
        words = shlex.split(command)
        assert words[0] == "xmlc"
        options = ["--set", "training.epochs=1"] if words[1] == "train" else []
        spoken = shlex.split(text)[1] if text else None
        result = CliRunner().invoke(main, [*words[1:], *options], input=spoken, catch_exceptions=False)
        assert result.exit_code == 0, (line, result.output)
        assert result.stdout, line
