"""Run folders, written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xmlc.config import dump_config, load_config

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a run folder of these lines and settings, and return it."""

    def run(
        *entries: dict[str, Any], name: str = "run", data: Any = None, settings: tuple[str, ...] = ()
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.toml").write_text(dump_config(load_config(None, list(settings))))
        facts: dict[str, Any] = {"name": "toy", "source": "/home/somebody/toy", "kind": "text"}
        facts |= {"fingerprint": "abc", "instances": 200, "labels": 24} | (data or {})
        (folder / "data.json").write_text(json.dumps(facts))
        machine = {"machine": "x86_64", "processors": 2, "cpu_kernels_in_use": "avx2", "module": "/home/x.so"}
        environment = {
            "command": ["/home/somebody/xmlc"],
            "started": "2026-01-01T00:00:00+00:00",
            "python": "3.11.7",
            "packages": {"xmlc": "0.1.0", "torch": "2.6.0"},
            "platform": "Linux",
            "native": machine,
            "git_commit": None,
        }
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
        return folder

    return run
