"""`docs/trust.md` names what proves each promise; all of it exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = [
    line
    for line in (ROOT / "docs" / "trust.md").read_text().splitlines()
    if re.match(r"\| (?!promise)", line)
]


def functions_of(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_what_proves_a_promise_exists(row: str) -> None:
    proofs = re.findall(r"`([^`]+)`", row.split("|")[2])
    assert proofs
    file = ROOT
    for proof in proofs:
        path, _, name = proof.partition("::")
        file = ROOT / path if path else file  # `::name` is of the file before
        assert file.is_file(), proof
        assert not name or name in functions_of(file), proof
