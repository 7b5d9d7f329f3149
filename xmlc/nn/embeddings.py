"""Texts through a frozen encoder: on demand, or once into the cache and memory-mapped from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xmlc.config import EncoderConfig
from xmlc.data.batches import Rows
from xmlc.data.pretrained import encoder_fingerprint
from xmlc.data.rows import Float32, Int64, TextColumn
from xmlc.data.store import Stored, cache_folder, digest_of, open_or_build
from xmlc.data.tokens import TextTokenizer
from xmlc.errors import DataError
from xmlc.nn.transformer import TransformerEncoder, load_transformer

TEXTS_PER_BLOCK = 4096
"""Texts that are embedded and stored at a time; a killed computation loses no more."""

_DECIDING = ("max_length", "pooling", "unit_variance", "embedding_dtype", "autocast")
_Block = tuple[str, TextColumn, int]
Progress = Callable[[Iterable[_Block], int], Iterable[_Block]]


@dataclass(frozen=True, eq=False)
class TextEncoder:
    """A pretrained encoder with its tokenizer."""

    config: EncoderConfig
    tokenizer: TextTokenizer
    transformer: TransformerEncoder

    @classmethod
    def load(cls, folder: Path, config: EncoderConfig) -> TextEncoder:
        """Load both from the folder of an encoder.

        Raises:
            ConfigError: It holds no encoder, or a setting does not fit it.
        """
        tokenizer = TextTokenizer.load(folder, config.max_length, encoder_fingerprint(folder))
        return cls(config, tokenizer, load_transformer(folder, config, tokenizer))

    def rows(self, texts: TextColumn) -> Rows:
        """Return what the model takes of texts: tokens, or a frozen encoder's embeddings as they are kept."""
        tokens = self.tokenizer.transform(texts)
        if self.config.trained:
            return tokens
        hidden = self.transformer.embed(tokens).cpu().numpy()
        with np.errstate(over="ignore"):
            kept = hidden.astype(self.config.embedding_dtype)
        if not np.isfinite(kept).all():
            raise DataError(
                f"encoder: embeddings must be finite in {self.config.embedding_dtype}, found values up to "
                f"{np.abs(hidden).max()}; set encoder.embedding_dtype = float32 or encoder.unit_variance"
            )
        return kept.astype(np.float32)


@dataclass(frozen=True, eq=False)
class EncodedTexts:
    """Texts that are encoded when a batch asks for them."""

    texts: TextColumn
    encoder: TextEncoder

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: Int64) -> Rows:
        """Return tokens or embeddings of the given texts."""
        return self.encoder.rows(self.texts.take(rows))


@dataclass(frozen=True, eq=False)
class StoredEmbeddings:
    """Embeddings [text, hidden] in memory-mapped blocks, one below the other."""

    hidden: int
    blocks: Sequence[NDArray[Any]]  # [text, hidden] each
    starts: Int64  # [block + 1]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def take(self, rows: Int64) -> Float32:
        """Return the given texts' embeddings, [text, hidden]."""
        taken = np.empty((len(rows), self.hidden), np.float32)
        home = np.searchsorted(self.starts, rows, side="right") - 1
        for number in np.unique(home):
            here = home == number
            taken[here] = self.blocks[number][rows[here] - self.starts[number]]
        return taken


def open_embeddings(
    encoder: TextEncoder,
    columns: Mapping[str, TextColumn],
    progress: Progress = lambda blocks, _: blocks,
    cache: Path | None = None,
) -> StoredEmbeddings:
    """Embed the texts of columns, one below the other, or open what an earlier call stored.

    Every block of `TEXTS_PER_BLOCK` texts is a store of its own, so that a computation that was killed goes
    on where it was, and columns are found again whatever stands below them.

    Args:
        encoder: A frozen one.
        columns: By what names their texts: the data set's fingerprint, and which of its columns they are.
        progress: Wraps the blocks, given their number.
        cache: Folder of the stores; None takes `cache_folder`.

    Raises:
        DataError: The cache is not writable, or an embedding is not finite.
    """
    parts = [
        (key, texts, first)
        for key, texts in columns.items()
        for first in range(0, len(texts), TEXTS_PER_BLOCK)
    ]
    blocks = [
        _open_block(encoder, key, texts, first, cache or cache_folder())
        for key, texts, first in progress(parts, len(parts))
    ]
    starts = np.cumsum([0, *map(len, blocks)], dtype=np.int64)
    return StoredEmbeddings(encoder.transformer.hidden, blocks, starts)


def _open_block(encoder: TextEncoder, key: str, texts: TextColumn, first: int, cache: Path) -> NDArray[Any]:
    config = encoder.config
    facts = {
        "texts": f"{key} {first}",
        "encoder": encoder.tokenizer.fingerprint,
        **config.model_dump(mode="json", include=set(_DECIDING)),
    }

    def build(_: Path) -> Stored:
        rows = np.arange(first, min(first + TEXTS_PER_BLOCK, len(texts)))
        embeddings = encoder.rows(texts.take(rows))
        assert isinstance(embeddings, np.ndarray), "of a frozen encoder"
        return Stored({"embeddings": embeddings.astype(config.embedding_dtype)}, {})

    return open_or_build(cache, f"embeddings-{digest_of(facts)}", facts, build).arrays["embeddings"]
