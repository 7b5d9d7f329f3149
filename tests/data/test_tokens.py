"""Tokens of texts: those of the tokenizer, ragged, stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
from disk import failing_disk

from xmlc.data import TextColumn
from xmlc.data import tokens as module
from xmlc.data.rows import TokenRows
from xmlc.data.tokens import TextTokenizer, open_tokens
from xmlc.errors import ConfigError, DataError

TEXTS = ["word1 word2", "", "word3 " * 40, "unknown word1", "word95"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.write(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder, 8, "print")


def lists(rows: TokenRows) -> list[list[int]]:
    return [row.tolist() for row in np.split(rows.ids, rows.offsets[1:-1])]


def test_tokens_are_those_of_the_tokenizer_with_its_marks_cut_to_the_length(tokenizer: TextTokenizer) -> None:
    assert lists(tokenizer.transform(TEXTS)) == [
        [2, 5, 6, 3],
        [2, 3],
        [2, 7, 7, 7, 7, 7, 7, 3],
        [2, 1, 5, 3],
        [2, 99, 3],
    ]


def test_ids_take_two_bytes_where_they_fit(tokenizer: TextTokenizer) -> None:
    assert tokenizer.transform(TEXTS).ids.dtype == np.uint16


def test_ids_of_a_large_vocabulary_take_four_bytes(tokenizer: TextTokenizer) -> None:
    class Large:
        pad_token_id = 0

        def __len__(self) -> int:
            return 2**16 + 1

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[2**16] for _ in texts]}

    rows = TextTokenizer(Large(), 8, "").transform(TEXTS)
    assert rows.ids.dtype == np.int32
    assert rows.ids.tolist() == [2**16] * len(TEXTS)


def test_no_texts_have_no_tokens(tokenizer: TextTokenizer) -> None:
    rows = tokenizer.transform([])
    assert (len(rows), rows.ids.tolist()) == (0, [])


def test_a_text_of_which_a_tokenizer_makes_nothing_gets_a_pad() -> None:
    class Markless:
        pad_token_id = 7

        def __len__(self) -> int:
            return 10

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[] for _ in texts]}

    assert lists(TextTokenizer(Markless(), 8, "").transform(["", ""])) == [[7], [7]]


def test_rows_are_taken_in_their_order(tokenizer: TextTokenizer) -> None:
    rows = tokenizer.transform(TEXTS)
    taken = rows.take(np.array([4, 0, 4]))
    assert lists(taken) == [[2, 99, 3], [2, 5, 6, 3], [2, 99, 3]]
    assert taken.lengths.tolist() == [3, 4, 3]


def test_stored_tokens_are_the_same_column_below_column(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TEXTS_PER_BLOCK", 2)
    columns = [TextColumn.from_strings(TEXTS), TextColumn.from_strings(TEXTS[:1])]
    stored = open_tokens(tokenizer, columns, "here", tmp_path)
    assert lists(stored) == lists(tokenizer.transform([*TEXTS, TEXTS[0]]))
    assert stored.ids.dtype == np.uint16
    assert not stored.ids.flags.writeable


def test_tokens_are_computed_once(
    tokenizer: TextTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = [TextColumn.from_strings(TEXTS)]
    first = open_tokens(tokenizer, columns, "here", tmp_path)
    monkeypatch.setattr(TextTokenizer, "transform", lambda *_: pytest.fail("computed again"))
    assert lists(open_tokens(tokenizer, columns, "here", tmp_path)) == lists(first)


@pytest.mark.parametrize("changed", ["texts", "max_length", "fingerprint"])
def test_other_texts_length_or_encoder_have_tokens_of_their_own(
    changed: str, folder: Path, tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    open_tokens(tokenizer, [TextColumn.from_strings(TEXTS)], "here", tmp_path)
    other = TextTokenizer.load(
        folder, 7 if changed == "max_length" else 8, "other" if changed == "fingerprint" else "print"
    )
    key = "there" if changed == "texts" else "here"
    texts = ["word7"]
    assert lists(open_tokens(other, [TextColumn.from_strings(texts)], key, tmp_path)) == [[2, 11, 3]]


def test_a_full_disk_ends_with_a_message_and_the_next_call_builds_the_store(
    tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    columns = [TextColumn.from_strings(TEXTS)]
    with failing_disk(10**9, OSError(28, "x"), forever=True) as done:
        open_tokens(tokenizer, columns, "counted", tmp_path)
    assert len(done) > 3
    for point in range(len(done) - 2):
        cache = tmp_path / f"cache-{point}"
        cache.mkdir()
        with (
            failing_disk(point, OSError(28, "No space left on device"), forever=True),
            pytest.raises(DataError, match="No space left on device"),
        ):
            open_tokens(tokenizer, columns, "here", cache)
        assert lists(open_tokens(tokenizer, columns, "here", cache)) == lists(tokenizer.transform(TEXTS))


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    encoders.bert().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"must hold the encoder's tokenizer, found .*save_pretrained"):
        TextTokenizer.load(tmp_path, 8, "")


def test_a_tokenizer_without_pad_token_is_refused(tmp_path: Path) -> None:
    encoders.write(tmp_path)
    encoders.tokenizer(pad=None).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="must have a pad token, found none"):
        TextTokenizer.load(tmp_path, 8, "")


def test_a_length_that_the_marks_fill_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_length: must be above the 2 tokens .* found 2"):
        TextTokenizer.load(folder, 2, "")
