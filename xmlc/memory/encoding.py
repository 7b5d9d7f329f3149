"""What it takes to embed texts into the cache, where a transformer is frozen."""

from __future__ import annotations

import torch

from xmlc.config import EncoderConfig
from xmlc.memory.activations import EncoderMemory
from xmlc.memory.terms import ASKED, TOKENIZER, Phase, Term, largest, of_shape
from xmlc.nn.embeddings import TEXTS_PER_BLOCK


def encoding(
    encoder: EncoderMemory | None, config: EncoderConfig, texts: int, on_device: bool = False
) -> dict[Phase, tuple[Term, ...]]:
    """Return the phase of a plan: before everything else; none where nothing is embedded beforehand.

    Args:
        encoder: The transformer, if there is one.
        config: Its settings.
        texts: How many are embedded.
        on_device: Plan what a CUDA device holds instead of the process.
    """
    if encoder is None or encoder.trained:
        return {}
    held = encoder.all if on_device else encoder.weights
    what = "all weights and buffers" if on_device else "weights and buffers that lie in no mapped file"
    block = min(TEXTS_PER_BLOCK, texts)
    rows = (block, encoder.hidden)
    stored = 8 + 2 * getattr(torch, config.embedding_dtype).itemsize  # as they are, checked, and narrowed
    on_their_way = Term("embeddings on their way to the cache", "batch", *of_shape(rows, stored))
    peak = largest(
        [
            Term("embedding texts", "batch", encoder.evaluation_peak(block), ASKED),
            Term("embeddings of a block of texts", "batch", *of_shape(rows, 4)),
        ],
        [] if on_device else [on_their_way],
    )
    if not on_device:
        peak.append(Term("tokenizer", "statistics", encoder.tokenizer, TOKENIZER))
    return {"encoding": (Term("encoder", "weights", held, what), *peak)}
