"""What a plan of memory is made of: terms, and the phases that they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from xmlc.memory.activations import EncoderMemory
from xmlc.memory.pool import Occurrences, TowerTexts

Phase = Literal[
    "encoding",
    "load",
    "forward",
    "output_step",
    "backward",
    "dense_update",
    "redistribution",
    "mining",
    "validation",
    "checkpoint",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
Category = Literal["weights", "optimizer", "statistics", "batch", "workspace", "temporary"]

ASKED = "asked of the encoder"
TOKENIZER = "its vocabulary and words it has met"
STATISTICS_BYTES = 17
"""Bytes for each label while deciles are cut: counts int32, order int64, half of that to sort it, decile."""


@dataclass(frozen=True)
class Batches:
    """How large batches are, beside the settings."""

    instances: int
    """Of the largest validation or test set."""
    words: float
    """Features of an instance that are not zero; of dense features all."""
    positives: float = 5.0
    """Labels of an instance."""
    encoder: EncoderMemory | None = None
    """Where a transformer reads the texts."""
    distinct_words: Occurrences | None = None
    """Of sparse features, where it is known in how many instances each stands."""
    direct_logits: float = 0.0
    """Logits of an instance that direct connections add to, as expected."""
    vocabulary_bytes: int = 0
    """Of the words that texts are turned into features by."""
    towers: TowerTexts | None = None
    """Where there are two towers, and they are to be planned."""


@dataclass(frozen=True)
class Term:
    """Something that takes memory."""

    name: str
    category: Category
    bytes: int
    formula: str
    at_load: bool = True
    """Whether it is there before the first step. Zeros of an optimizer take memory when they are written."""


def vocabulary(batches: Batches) -> Iterator[Term]:
    """Yield the vectorizer's vocabulary and the tokenizer, where they are."""
    if batches.encoder is not None:
        yield Term("tokenizer", "statistics", batches.encoder.tokenizer, TOKENIZER)
    size = batches.vocabulary_bytes
    if size:
        yield Term("vocabulary", "statistics", size, "its words, and where each of them is")


@dataclass(frozen=True)
class Plan:
    """What a run holds throughout, and what each phase adds at its peak."""

    held: tuple[Term, ...]
    added: dict[Phase, tuple[Term, ...]]
    mapped: tuple[Term, ...] = ()
    """What lies on the disk (``training.storage``): its pages come and go, and are not counted."""
    place: Literal["process", "device"] = "process"

    def terms(self, phase: Phase) -> tuple[Term, ...]:
        """Return all that is held at the peak of a phase."""
        if phase == "encoding":  # which comes before everything else
            return self.added[phase]
        held = (term for term in self.held if phase != "load" or term.at_load)
        return (*held, *self.added[phase])

    def bytes(self, phase: Phase) -> int:
        """Return the peak of a phase."""
        return sum(term.bytes for term in self.terms(phase))

    @property
    def peak_phase(self) -> Phase:
        """The phase with the highest peak."""
        return max(self.added, key=self.bytes)

    @property
    def peak_bytes(self) -> int:
        """The peak of the run."""
        return self.bytes(self.peak_phase)

    @property
    def binding(self) -> Term:
        """The largest term at the peak."""
        return max(self.terms(self.peak_phase), key=lambda term: term.bytes)


def of_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, str]:
    """Return the bytes of a tensor, and their formula."""
    return math.prod(shape) * itemsize, " * ".join(f"{size:,}" for size in (*shape, itemsize))


def largest(*alternatives: list[Term]) -> list[Term]:
    """Return those of the terms that take the most together."""
    return max(alternatives, key=lambda terms: sum(term.bytes for term in terms))
