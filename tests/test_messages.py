"""Every message of an error on purpose is a text that some test expects.

A message is known by its literal parts. A test expects it where a string of the test holds three words of it
in a row, at most with a value among them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import xmlc
from xmlc import errors

PACKAGE = Path(xmlc.__file__).parent
WORDS = 3
VALUE = "\0"  # stands for a value within a message

ERRORS = {name for name, found in vars(errors).items() if isinstance(found, type)}
ERRORS |= {"ValueError", "DivergedError", "StoppedBySignalError"}


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every message of an error that a source makes, or that a generator yields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS:
            text = "".join(map(text_of, node.args[:1]))
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.JoinedStr):
            text = text_of(node.value) if " must " in text_of(node.value) else ""
        else:
            continue
        if re.search(r"\w", text):
            yield node.lineno, text


def text_of(node: ast.AST) -> str:
    """Return a string with `VALUE` for all that is known only when it runs."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else VALUE


@cache
def expected() -> str:
    """Return all strings of all tests, without the backslashes of expressions, cut at their wildcards."""
    texts = []
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                texts.append(text_of(node).replace("\\", "").replace(".*", " \n "))
    return "\n".join(texts)


def is_expected(message: str) -> bool:
    """Return whether some test holds `WORDS` words of the message in a row, with a value among them or none.

    A message that has no such words, only values between single ones, must be there from first to last word.
    """
    words = message.split()
    windows = [
        window
        for length in (WORDS, WORDS + 1)
        for first in range(len(words))
        if (window := words[first : first + length]) and sum(VALUE not in word for word in window) == WORDS
    ]
    value = r"\S+(?: \S+)?" if windows else ".+"
    own = [place for place, word in enumerate(words) if VALUE not in word]
    for window in windows or [words[own[0] : own[-1] + 1]]:
        pattern = " ".join(re.escape(word).replace(re.escape(VALUE), value) for word in window)
        if re.search(pattern, expected()):
            return True
    return False


@pytest.mark.parametrize(
    "file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE))
)
def test_every_message_is_expected_by_a_test(file: Path) -> None:
    unexpected = [
        f"{file}:{line}: {text.replace(VALUE, '…')}"
        for line, text in messages(file.read_text())
        if not is_expected(text)
    ]
    assert not unexpected, "\n".join(unexpected)


def test_a_message_that_no_test_expects_is_found() -> None:
    words = ["moon", "must", "shine", "at", "night", "found", "a", "cloud"]
    source = "def check():\n    raise DataError(f'{where}: the " + " ".join(words) + " {more}; wait')\n"
    ((line, text),) = messages(source)
    assert (line, text) == (2, f"{VALUE}: the {' '.join(words)} {VALUE}; wait")
    assert not is_expected(text)
    assert is_expected(f"{VALUE}: must be a sparse matrix saved {VALUE}")
