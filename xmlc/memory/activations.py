"""What a transformer takes: its weights, and for any batch its activations, asked of the encoder itself.

Two small batches are traced. The same calls come in the same order whatever the batch, their bytes linear in
it; so what a batch of any size holds after each call follows from the two, and with it the peak,
wherever in the pass it then lies. Recomputed activations, frozen layers and autocast need no formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.data.batches import Batch
from xmlc.data.rows import CsrRows, TokenRows, offsets_of
from xmlc.errors import XmlcError
from xmlc.losses.backward import backward
from xmlc.memory.process import mapped_files
from xmlc.memory.tracked import now, tracked
from xmlc.nn.transformer import TOKENS_AT_ONCE, TransformerEncoder

TOKEN_BYTES = 370
"""Of a token that a tokenizer knows, measured."""
KEPT_BYTES, KEPT_WORDS = 700, 10_000
"""Of a word that it has met, measured; and how many it keeps, if it knows as many tokens."""
SMALL, LARGE = 2, 4
"""Texts of the batches that are traced; one alone may take other ways."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Bytes that are held after each call of the allocator, linear in the texts. [call]"""

    small: NDArray[np.int64]
    """Of a batch of `SMALL` texts."""
    by_text: NDArray[np.float64]
    """What every further text adds."""

    def held(self, texts: int) -> NDArray[np.float64]:
        """Return the bytes held after each call for a batch."""
        return self.small + self.by_text * (texts - SMALL)


@dataclass(frozen=True, eq=False)
class EncoderMemory:
    """Bytes of a transformer, traced on the CPU."""

    weights: int
    """Of those that do not lie in a mapped file, the encoder's own, from which nothing has changed them."""
    mapped: int
    """Of those that do and have a gradient: the first step makes them the process's own."""
    trained: int
    """Of all those that have a gradient."""
    tokens: int
    """Of the longest text; a batch is filled up to it."""
    forward: Pass | None
    """None where it is frozen: its texts are encoded before training, by passes as of ``evaluation``."""
    backward: Pass | None
    """After ``forward``, with the gradients of the weights."""
    evaluation: Pass | None
    all: int = 0
    """Of all weights and buffers: what the encoder takes on a device."""
    hidden: int = 0
    """Values of a text's embedding."""
    tokenizer: int = 0
    """Of the tokenizer that belongs to it, with what it keeps once it has been used."""

    def forward_peak(self, texts: int) -> int:
        """Return the peak of the forward pass."""
        return 0 if self.forward is None else int(self.forward.held(texts).max())

    def kept(self, texts: int) -> int:
        """Return what the forward pass leaves for the backward pass."""
        return 0 if self.forward is None else int(self.forward.held(texts)[-1])

    def backward_peak(self, texts: int) -> int:
        """Return the peak of the backward pass, with what the forward pass has left."""
        return 0 if self.backward is None else int(self.backward.held(texts).max())

    def evaluation_peak(self, texts: int) -> int:
        """Return the peak of embedding texts without gradients, which goes by parts."""
        if self.evaluation is None:
            return 0
        return int(self.evaluation.held(min(texts, max(1, TOKENS_AT_ONCE // self.tokens))).max())


def encoder_memory(encoder: TransformerEncoder, tokens: int, vocabulary: int = 0) -> EncoderMemory:
    """Trace an encoder, which stays as it is.

    Args:
        encoder: On any device.
        tokens: Of the longest text.
        vocabulary: Tokens that its tokenizer knows.
    """
    place = encoder.device
    encoder.to("cpu")  # whose allocator is recorded; a device's passes are taken to be as large
    try:
        found = _on_cpu(encoder, tokens)
    finally:
        encoder.to(place)
    kept = KEPT_BYTES * min(vocabulary, KEPT_WORDS)
    return replace(found, tokenizer=TOKEN_BYTES * vocabulary + kept)


def _on_cpu(encoder: TransformerEncoder, tokens: int) -> EncoderMemory:
    places = mapped_files()

    def is_mapped(tensor: Tensor) -> bool:
        return any(begin <= tensor.data_ptr() < end for begin, end in places)

    state = [*encoder.parameters(), *encoder.buffers()]
    weights = sum(each.nbytes for each in state if not is_mapped(each))
    mapped = sum(each.nbytes for each in encoder.parameters() if each.requires_grad and is_mapped(each))
    trained = sum(each.nbytes for each in encoder.parameters() if each.requires_grad)
    whole = sum(each.nbytes for each in state)
    if not encoder.config.trained:
        _trace_evaluation(encoder, SMALL, tokens)  # what loads itself at first use
        evaluation = _pass(*(_trace_evaluation(encoder, texts, tokens) for texts in (SMALL, LARGE)))
        return EncoderMemory(weights, mapped, trained, tokens, None, None, evaluation, whole, encoder.hidden)
    _trace(encoder, SMALL, tokens)  # what loads itself at first use
    small, large = (_trace(encoder, texts, tokens) for texts in (SMALL, LARGE))
    forward, backward, evaluation = (_pass(*both) for both in zip(small, large, strict=True))
    return EncoderMemory(
        weights, mapped, trained, tokens, forward, backward, evaluation, whole, encoder.hidden
    )


@dataclass(frozen=True, eq=False)
class TowerPasses:
    """Passes of one of two towers that a single encoder has none of."""

    blind: Pass
    """A forward pass with dropout and without a graph: the first one of gradient caching."""
    further: Pass
    """A backward pass, with what the forward pass has left, that finds gradients and adds to them."""
    largest: int
    """Bytes of the largest weight that has a gradient."""

    def blind_peak(self, texts: int) -> int:
        """Return the peak of a forward pass without a graph."""
        return int(self.blind.held(texts).max())

    def further_peak(self, texts: int) -> int:
        """Return the peak of a backward pass, beside the gradients that it adds to."""
        return int(self.further.held(texts).max())


def tower_passes(encoder: TransformerEncoder, tokens: int) -> TowerPasses:
    """Trace further passes of a trained encoder on the CPU; arguments as of `encoder_memory`."""
    _trace_tower(encoder, SMALL, tokens)  # what loads itself at first use
    small, large = (_trace_tower(encoder, texts, tokens) for texts in (SMALL, LARGE))
    blind, further = (_pass(*both) for both in zip(small, large, strict=True))
    largest = max(each.nbytes for each in encoder.parameters() if each.requires_grad)
    return TowerPasses(blind, further, largest)


def _trace_tower(encoder: TransformerEncoder, texts: int, tokens: int) -> list[NDArray[np.int64]]:
    """Return the bytes held after each call in a pass without a graph, and in a second backward pass."""
    batch = _batch(texts, tokens, encoder.pad)
    training = encoder.training
    encoder.train()
    with torch.no_grad(), tracked() as course:
        hidden = encoder(batch, 0.1, torch.Generator().manual_seed(0))
    blind = course().held
    del hidden
    for parameter in encoder.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    _, further = _step(encoder, batch)
    encoder.train(training)
    return [blind, further]


def _pass(small: NDArray[np.int64], large: NDArray[np.int64]) -> Pass:
    if len(small) != len(large):
        raise XmlcError(
            f"memory: an encoder must allocate alike for {SMALL} and {LARGE} texts, found {len(small)} and "
            f"{len(large)} calls; plan without this encoder"
        )
    return Pass(small, (large - small) / (LARGE - SMALL))


def _trace(encoder: TransformerEncoder, texts: int, tokens: int) -> list[NDArray[np.int64]]:
    """Return the bytes held after each call in a forward pass, in the backward pass, and in an evaluation."""
    batch = _batch(texts, tokens, encoder.pad)
    training = encoder.training
    encoder.train()
    forward, turned = _step(encoder, batch)
    encoder.train(training)
    return [forward, turned, _trace_evaluation(encoder, texts, tokens)]


def _trace_evaluation(encoder: TransformerEncoder, texts: int, tokens: int) -> NDArray[np.int64]:
    """Return the bytes held after each call of embedding texts without gradients."""
    rows = _batch(texts, tokens, encoder.pad).features
    assert isinstance(rows, TokenRows), "made below"
    with tracked() as course:
        encoder.embed(rows)
    return course().held


def _step(encoder: TransformerEncoder, batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes held after each call of a forward and of a backward pass; leave no gradients."""
    with tracked() as course:
        hidden = encoder(batch, 0.1, torch.Generator().manual_seed(0))
        turned = now()
        backward(hidden, torch.ones_like(hidden))
    step = course()
    del hidden
    for parameter in encoder.parameters():
        parameter.grad = None
    turn = int(np.searchsorted(step.times, turned)) + 1
    return step.held[:turn], step.held[turn:]


def _batch(texts: int, tokens: int, pad: int) -> Batch:
    """Return texts of one token, again and again; it is not the one that fills up."""
    ids = np.full(texts * tokens, 1 if pad == 0 else 0, np.int32)
    rows = TokenRows(offsets_of(np.full(texts, tokens)), ids)
    return Batch(np.arange(texts), rows, CsrRows.empty(texts, 1))
