"""Files: plain or packed, blocks of lines, and what is no text."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from xmlc.data.reader import files
from xmlc.data.reader.files import decode, find, line_blocks, lines, require
from xmlc.errors import DataError

Write = Callable[..., Path]


def test_a_file_is_found_plain_or_packed(write: Write) -> None:
    folder = write({"a.txt": "1", "b.txt.gz": "1"})
    assert find(folder, "a.txt") == folder / "a.txt"
    assert find(folder, "b.txt") == folder / "b.txt.gz"
    assert find(folder, "c.txt") is None


def test_plain_and_packed_together_are_refused(write: Write) -> None:
    folder = write({"a.txt": "1", "a.txt.gz": "2"})
    with pytest.raises(DataError, match=r"must hold one of a.txt and a.txt.gz, found both; remove one"):
        find(folder, "a.txt")


def test_a_missing_file_is_named_with_its_folder(write: Write) -> None:
    folder = write({})
    with pytest.raises(DataError, match=rf"{folder}: must hold a.txt or a.txt.gz, found neither"):
        require(folder, "a.txt")


@pytest.mark.parametrize("block_bytes", [1, 2, 5, 1 << 20])
@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\nbc", "a\nbcdefgh\n\n"])
def test_blocks_hold_whole_lines_and_know_their_number(
    write: Write, monkeypatch: pytest.MonkeyPatch, block_bytes: int, text: str
) -> None:
    monkeypatch.setattr(files, "_BLOCK_BYTES", block_bytes)
    folder = write({"a.txt": text})
    blocks = list(line_blocks(folder / "a.txt"))
    expected = text + "\n" if text and not text.endswith("\n") else text
    assert b"".join(block for _, block in blocks) == expected.encode()
    seen = 1
    for line, block in blocks:
        assert line == seen
        assert block.endswith(b"\n")
        seen += block.count(b"\n")


def test_lines_lose_their_ends(write: Write) -> None:
    folder = write({"a.txt": "ä\r\n\nb"})
    assert list(lines(folder / "a.txt")) == [(1, "ä".encode()), (2, b""), (3, b"b")]


def test_a_truncated_gzip_file_is_refused_at_the_line_that_was_reached(write: Write) -> None:
    packed = gzip.compress(b"".join(b"%d\n" % number for number in range(1_000_000)))
    folder = write({"a.txt": ""})
    (folder / "a.txt.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(
        DataError, match=r"a\.txt\.gz:\d{2,}: must be a whole gzip file, found at or after this"
    ):
        list(line_blocks(folder / "a.txt.gz"))


def test_a_damaged_gzip_file_is_refused(write: Write) -> None:
    packed = bytearray(gzip.compress(b"hello " * 1000))
    packed[20] ^= 0xFF
    folder = write({"a.txt": ""})
    (folder / "a.txt.gz").write_bytes(packed)
    with pytest.raises(DataError, match=r"a\.txt\.gz:1: must be a whole gzip file"):
        list(line_blocks(folder / "a.txt.gz"))


def test_a_file_that_only_claims_to_be_packed_is_refused(write: Write) -> None:
    folder = write({})
    (folder / "a.txt.gz").write_text("1 2 3\n")
    with pytest.raises(DataError, match=r"a\.txt\.gz:1: must be a whole gzip file, .*Not a gzipped file"):
        list(line_blocks(folder / "a.txt.gz"))


def test_a_packed_file_with_a_plain_name_is_refused(write: Write) -> None:
    folder = write({"a.txt": gzip.compress(b"1 2 3\n")})
    with pytest.raises(DataError, match=r"a\.txt:1: must be text, found gzip; name the file a\.txt\.gz"):
        list(line_blocks(folder / "a.txt"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_refused(write: Write, encoding: str) -> None:
    folder = write({"a.txt": "1 2 3\n".encode(encoding)})
    with pytest.raises(DataError, match=r"a\.txt:1: must be text in UTF-8, found (UTF-16|a zero byte)"):
        list(line_blocks(folder / "a.txt"))


def test_binary_content_is_refused_at_its_line(write: Write) -> None:
    folder = write({"a.txt": b"ab\ncd\ne\0f\n"})
    with pytest.raises(DataError, match=r"a\.txt:3: must be text in UTF-8, found a zero byte"):
        list(line_blocks(folder / "a.txt"))


def test_another_encoding_is_refused_at_its_line(write: Write) -> None:
    folder = write({"a.txt": "ab\ncafé\n".encode("latin-1")})
    with pytest.raises(DataError, match=r"a\.txt:2: must be text in UTF-8, found byte 0xe9 at column 4"):
        for number, raw in lines(folder / "a.txt"):
            decode(f"a.txt:{number}", raw)


def test_an_endless_line_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK_BYTES", 4)
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 16)
    folder = write({"a.txt": "ab\n" + "x" * 100})
    with pytest.raises(DataError, match=r"a\.txt:2: a line must be shorter than 16 bytes"):
        list(line_blocks(folder / "a.txt"))


def test_an_unreadable_file_is_a_data_error(write: Write) -> None:
    folder = write({})
    with pytest.raises(DataError, match=r"a\.txt: must be a readable file, found: No such file"):
        list(line_blocks(folder / "a.txt"))
