"""The examples of the pages about your own training loop run as they stand, each by itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import xmlc  # noqa: F401  (before the path changes)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "embedding-models.md"
EXAMPLES = re.findall(r"^(#+ .*?)\n|```python\n(.*?)```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
# What a library says about its own code.
IGNORED = {
    "Lightning": [
        "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning",
    ],
}


def examples() -> list[Any]:
    """Return every block of Python under the heading that it stands below."""
    heading, found = "", []
    for line, code in EXAMPLES:
        heading = line.lstrip("# ") if line else heading
        if code:
            ignored = [pytest.mark.filterwarnings(each) for each in IGNORED.get(heading, ())]
            found.append(pytest.param(code, id=heading, marks=ignored))
    return found


def test_every_example_is_found() -> None:
    assert len(examples()) == PAGE.read_text().count("```python") == 8


@pytest.mark.parametrize("code", examples())
def test_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # transformers looks for a package `datasets`, and would find the repository's folder.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).resolve() != ROOT])
    exec(compile(code, PAGE.name, "exec"), {"__name__": "example"})
