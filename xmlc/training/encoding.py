"""Holds the embedding of texts, before anything of a run is made, to the run's budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from xmlc.errors import OutOfMemoryError
from xmlc.memory.activations import encoder_memory
from xmlc.memory.budget import BudgetError, needed_bytes
from xmlc.memory.encoding import encoding
from xmlc.memory.exhausted import ran_out
from xmlc.memory.process import device_limit, hard_limit, return_free_blocks, usage
from xmlc.memory.tables import mebibytes
from xmlc.memory.terms import Plan
from xmlc.nn import TextEncoder
from xmlc.training.prepare import Within


def taken_bytes(before_bytes: int, known_bytes: int) -> int:
    """Return what of the budget the process has taken since ``before_bytes``, before the limit is set.

    Not more than is planned for it: libraries keep buffers of an encoder that was tried, which no plan knows.
    """
    gc.collect()
    return_free_blocks()
    return min(max(usage().anonymous - before_bytes, 0), known_bytes)


def within_budget(available_bytes: int, before_bytes: int, on_device: bool, enforce: bool) -> Within:
    """Return what `prepare` embeds texts in, where a budget leaves so many bytes for it.

    ``before_bytes`` is what the process held before anything was loaded.

    Raises, where texts are embedded:
        BudgetError: The plan says that they are too few.
        OutOfMemoryError: They were, and are a hard limit.
    """

    @contextmanager
    def within(encoder: TextEncoder, texts: int) -> Iterator[None]:
        memory = encoder_memory(encoder.transformer, encoder.config.max_length, encoder.tokenizer.vocabulary)
        planned = Plan(
            (),
            encoding(memory, encoder.config, texts, on_device),
            place="device" if on_device else "process",
        )
        needed, left = needed_bytes(planned), max(available_bytes, 0)
        if needed > left:
            raise BudgetError(
                f"memory: the budget must leave at least {mebibytes(needed)} to embed texts of up to "
                f"{encoder.config.max_length} tokens, found {mebibytes(left)}; raise it, lower "
                "encoder.max_length, or take a smaller encoder"
            )
        limit: AbstractContextManager[None] = nullcontext()
        if enforce:
            known = memory.weights + memory.tokenizer
            limit = (
                device_limit(available_bytes)
                if on_device
                else hard_limit(available_bytes - taken_bytes(before_bytes, known))
            )
        try:
            with limit:
                yield
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            raise OutOfMemoryError(
                f"memory: the budget must suffice to embed texts, found {str(error) or 'no memory left'} "
                f"within the {mebibytes(left)} that it leaves; raise it: what is embedded stays in the cache"
            ) from None

    return within
