"""Pages that make claims about code: examples run as they stand, and lists of files are complete."""

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


OPS = sorted(
    file.stem
    for file in (ROOT / "cuda_ext" / "cuda").glob("*.cu")
    if (ROOT / "xmlc/ops" / f"{file.stem}.py").exists()
)


def files_of_an_op(op: str) -> tuple[set[str], set[str]]:
    """Return what `docs/adding-an-op.md` lists: files that are the op's, and files that it is entered in."""
    page = (ROOT / "docs" / "adding-an-op.md").read_text().partition("## The files, exactly")[2]
    own, _, entered = page.partition("Entered in:")
    loops = (ROOT / "cuda_ext" / "cpu" / f"{op}.inl").exists()

    def listed(text: str) -> set[str]:
        items = [line for line in text.splitlines() if line.startswith("- ")]
        assert items
        kept = [line for line in items if loops or "where it has inner loops" not in line]
        return {name.replace("<op>", op) for line in kept for name in re.findall("`(.*?)`", line)}

    return listed(own), listed(entered)


def names(file: Path, op: str) -> bool:
    """Return whether a file names an op, as in Python and C++ or as its type of arguments or passes."""
    camel = "".join(part.title() for part in op.split("_"))
    return re.search(rf"(?<![a-z]){op}(?![a-z])|{camel}", file.read_text()) is not None


@pytest.mark.parametrize("op", OPS)
def test_the_files_of_an_op_are_listed_exactly(op: str) -> None:
    own, entered = files_of_an_op(op)
    assert [name for name in sorted(own | entered) if not (ROOT / name).is_file()] == []
    assert [name for name in sorted(entered) if not names(ROOT / name, op)] == []
    sources = [
        file
        for file in (ROOT / "cuda_ext").rglob("*")
        if file.suffix in {".h", ".cpp", ".inl", ".cu", ".cuh", ".txt"}
    ]
    assert sources
    naming = {str(file.relative_to(ROOT)) for file in sources if names(file, op)}
    assert naming - own - entered == set()


def test_there_are_ops_to_list() -> None:
    assert OPS == ["fused_step", "redistribute", "sparse_linear", "top_labels"]
