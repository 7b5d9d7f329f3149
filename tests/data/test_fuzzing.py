"""Any bytes in any file: the readers keep their promises (`tests/fuzzing.py`)."""

from __future__ import annotations

from pathlib import Path

import fuzzing
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# What means something in some format; put together at random it gets far into every parser.
TOKENS = [
    *b"0 1 2 3 9 00 -1 +1 1.5 . , : ; e E e5 nan inf { } [ ] # = \x00 \xff \xef\xbb\xbf".split(b" "),
    *(b"\t", b"\r", b"\n", b"\n\n", b'"', b"\\"),
    b" ",
    b"1:1 ",
    b"0,1 ",
    b"2 3 2\n",
    b"4294967296",
    b"99999999999999999999",
    b"1e39",
    b'"title": ',
    b'"target_ind": ',
    b'{"title": "T", "target_ind": [0]}\n',
    b"\\ud800",
    b"\x1f\x8b",
]

pieces = st.one_of(st.sampled_from(TOKENS), st.binary(max_size=3))
changes = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 6), pieces), min_size=1, max_size=4)


def changed(data: bytes, edits: list[tuple[float, int, bytes]]) -> bytes:
    """Replace a few bytes at each place, given as a share of the length."""
    for place, removed, inserted in edits:
        at = int(place * len(data))
        data = data[:at] + inserted + data[at + removed :]
    return data


def seeds(target: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((fuzzing.CORPUS / target).iterdir())]


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_the_corpus_is_accepted(target: str, tmp_path: Path) -> None:
    run = fuzzing.runner(target, tmp_path)
    assert all(run(seed) for seed in seeds(target))


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_a_changed_file_is_sound_or_refused(target: str, tmp_path: Path) -> None:
    run = fuzzing.runner(target, tmp_path)

    @given(st.sampled_from(seeds(target)), changes)
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    def check(seed: bytes, edits: list[tuple[float, int, bytes]]) -> None:
        run(changed(seed, edits))

    check()


@pytest.mark.parametrize("target", fuzzing.TARGETS)
def test_any_tokens_are_sound_or_refused(target: str, tmp_path: Path) -> None:
    run = fuzzing.runner(target, tmp_path)

    @given(st.lists(pieces, max_size=30).map(b"".join))
    @settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
    def check(data: bytes) -> None:
        run(data)

    check()
