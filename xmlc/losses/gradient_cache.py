"""Large batches through a small memory: embeddings without a graph, and their gradients in mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xmlc.errors import ConfigError, DataError, XmlcError
from xmlc.losses.backward import backward

Encoder = Callable[[Any], Tensor]


class GradientCache:
    """Gradients of a loss over many embeddings, with the encoder's graph of one mini-batch at a time.

    A contrastive loss wants a large batch, an encoder's saved activations a small one (Gao et al. 2021,
    "Scaling deep contrastive learning batch size under memory limited setup")::

        cache = GradientCache(mini_batch_size=64)
        queries = cache.embed(encoder, texts)           # no graph, mini-batch by mini-batch
        keys = cache.embed(encoder, label_texts)
        loss(queries, keys, positives).backward()       # the gradients of the embeddings; or a scaler's
        cache.backward()                                # the encoder once more, with a graph
        optimizer.step()

    Every mini-batch finds the random state (dropout) and the autocast of its first pass again, so that the
    parameters' gradients equal those of one graph over the same mini-batches. The encoder runs twice, its
    buffers (batch normalisation) are updated twice. Under DDP a module reduces its gradients once: all but
    its last mini-batch run in its ``no_sync``. Whatever is done to the loss (a loss scale, division by
    accumulation steps) holds for the parameters as well.
    """

    def __init__(self, mini_batch_size: int) -> None:
        """Take the number of rows that go through an encoder at a time.

        Raises:
            ConfigError: It is no integer of at least 1.
        """
        if isinstance(mini_batch_size, bool) or not isinstance(mini_batch_size, int) or mini_batch_size < 1:
            raise ConfigError(
                f"GradientCache: mini_batch_size must be an integer of at least 1, found {mini_batch_size!r}"
            )
        self.mini_batch_size = mini_batch_size
        self._embedded: list[_Embedded] = []

    def embed(self, encoder: Encoder, inputs: Any, module: Any = None) -> Tensor:
        """Return the embeddings [row, d], a leaf whose gradient `backward` takes back through the encoder.

        Where gradients are off it only runs the encoder in mini-batches.

        Args:
            encoder: Called with a part of the inputs, returns its embeddings.
            inputs: A tensor, a list or anything else that has a length and can be sliced, or a mapping of
                such, as a tokenizer returns it; of this the encoder gets a dict.
            module: What holds DDP's ``no_sync``, where the encoder is a function around it.

        Raises:
            DataError: The values of a mapping differ in length, or the encoder does not return one row each.
        """
        parts = []
        embeddings = []
        with torch.no_grad():
            for part in _parts(inputs, self.mini_batch_size):
                parts.append(_MiniBatch(part, _RandomState(), _autocast()))
                embeddings.append(_checked(encoder(part), _length(part)))
        # torch may keep the weights that autocast has cast, here without a graph: not for the second pass.
        torch.clear_autocast_cache()
        whole = torch.cat(embeddings)
        if torch.is_grad_enabled():
            whole.requires_grad_()
            self._embedded.append(_Embedded(encoder, encoder if module is None else module, parts, whole))
        return whole

    def backward(self) -> None:
        """Add the gradients of the encoders' parameters to their ``.grad``, and forget the embeddings.

        Raises:
            XmlcError: The loss's backward pass has not reached all embeddings.
        """
        if any(each.embeddings.grad is None for each in self._embedded):
            raise XmlcError(
                "GradientCache.backward: all embeddings must have gradients, found some without; call "
                "backward() of a loss of them all first, or clear() where a step is given up"
            )
        # Forgotten first: where an encoder fails, the next step must not add these gradients once more.
        embedded, self._embedded = self._embedded, []
        last = {id(each.module): each for each in embedded}  # of several, the last stays
        for each in embedded:
            each.backward(reduce=last[id(each.module)] is each)

    def clear(self) -> None:
        """Forget the embeddings of a step that is given up."""
        self._embedded = []


class _RandomState:
    """State of torch's generators, to draw the same numbers again."""

    def __init__(self) -> None:
        self.cpu = torch.get_rng_state()
        self.devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Draw from it, and go on outside as if nothing had been drawn."""
        with torch.random.fork_rng(devices=range(len(self.devices))):
            torch.set_rng_state(self.cpu)
            if self.devices:
                torch.cuda.set_rng_state_all(self.devices)
            yield


@dataclass(frozen=True)
class _MiniBatch:
    inputs: Any
    random_state: _RandomState
    autocast: list[torch.autocast]

    @contextmanager
    def as_before(self) -> Iterator[None]:
        """Restore what the first pass depended on, besides the weights."""
        with self.random_state.restored(), ExitStack() as stack:
            for each in self.autocast:
                stack.enter_context(each)
            yield


@dataclass(frozen=True)
class _Embedded:
    encoder: Encoder
    module: Any
    parts: list[_MiniBatch]
    embeddings: Tensor  # [row, d], a leaf

    def backward(self, reduce: bool) -> None:
        """Back-propagate mini-batch by mini-batch; only the last one may reduce over workers."""
        assert self.embeddings.grad is not None, "checked by the caller"
        gradients = self.embeddings.grad.split([_length(part.inputs) for part in self.parts])
        for number, (part, gradient) in enumerate(zip(self.parts, gradients, strict=True), 1):
            held = not reduce or number < len(self.parts)
            with self._held(held):
                with part.as_before():
                    embeddings = self.encoder(part.inputs)
                if embeddings.requires_grad:  # not of a frozen encoder
                    backward(embeddings, gradient)

    def _held(self, held: bool) -> AbstractContextManager[Any]:
        return self.module.no_sync() if held and hasattr(self.module, "no_sync") else nullcontext()


def _autocast() -> list[torch.autocast]:
    kinds = ["cpu", "cuda"] if torch.cuda.is_initialized() else ["cpu"]
    return [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
        for kind in kinds
    ]


def _parts(inputs: Any, size: int) -> Iterator[Any]:
    """Yield parts of the inputs; one empty one where there is nothing, for DDP's workers must all run."""
    for first in range(0, max(1, _length(inputs)), size):
        part = slice(first, first + size)
        if isinstance(inputs, Mapping):
            yield {name: value[part] for name, value in inputs.items()}
        else:
            yield inputs[part]


def _length(inputs: Any) -> int:
    if not isinstance(inputs, Mapping):
        if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
            raise DataError(
                "GradientCache: inputs must have a length and be sliced, or be a mapping of such, found "
                f"{type(inputs).__name__}; give a tensor or a list"
            )
        return len(inputs)
    lengths = {name: _length(value) for name, value in inputs.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"GradientCache: all inputs must have one length, found {lengths}")
    return next(iter(lengths.values()))


def _checked(embeddings: Any, rows: int) -> Tensor:
    if isinstance(embeddings, Tensor) and embeddings.dim() == 2 and len(embeddings) == rows:
        return embeddings
    found = list(embeddings.shape) if isinstance(embeddings, Tensor) else type(embeddings).__name__
    raise DataError(
        f"GradientCache: the encoder must return a tensor [row, d] with the {rows} rows it was given, found "
        f"{found}; wrap it in a function that does"
    )
