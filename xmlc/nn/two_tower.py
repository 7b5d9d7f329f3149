"""One encoder for instances and label texts; a label's score is the cosine of both embeddings."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from xmlc.checkpoint import CheckpointReader, Storable
from xmlc.config import Config
from xmlc.data.batches import Batch, Column, Rows
from xmlc.data.dataset import row_count
from xmlc.data.rows import CsrRows
from xmlc.losses import MultiPositive
from xmlc.nn.approximate import ApproximateIndex
from xmlc.nn.model import Model, Problem, check_memory, hidden_of, make_encoder, read_weights
from xmlc.nn.nearest import nearest
from xmlc.nn.transformer import TransformerEncoder
from xmlc.parallel import ALONE, Workers

TEXTS_AT_ONCE = 4096
"""Label texts that are embedded at a time."""
_EPSILON = 1e-6  # a hidden of zeros stays one; the gradient of its direction is bounded by 1 / this

Progress = Callable[[Iterable[int], int], Iterable[int]]


class TwoTower:
    """Embeddings of unit length, and of the labels' those of the current weights where they have been made::

    embedding = projection(encoder(text)) / |projection(encoder(text))|
    scores[b, l] = <embedding of instance b, embedding of the text of label l>
    """

    def __init__(
        self, config: Config, problem: Problem, transformer: TransformerEncoder | None = None
    ) -> None:
        """Draw the weights; a ``transformer`` that is trained brings its own."""
        check_memory(config, problem)
        self.config = config
        self.problem = problem
        settings = config.two_tower
        generator = torch.Generator().manual_seed(config.training.seed)
        self.encoder = make_encoder(config, problem, transformer, generator)
        self.projection: nn.Module = nn.Identity()
        if settings.projection:
            self.projection = _projection(self.encoder.hidden, settings.projection, generator)
        self.loss = MultiPositive(
            settings.loss,
            temperature=settings.temperature,
            bias=settings.bias,
            learn_scale=settings.learn_scale,
            learn_bias=settings.learn_scale and settings.loss == "sigmoid",
        )
        self.texts: CsrRows | Column | None = None
        """Of the labels, as the encoder takes them: given by who has them. [label]"""
        self.embeddings: Tensor | None = None
        """Of the labels' texts by the current weights, where they are known. [label, d]"""
        self.index: ApproximateIndex | None = None
        """Of the embeddings, where labels are ranked by one (`with_index`)."""

    def move(self, device: torch.device) -> None:
        """Move all weights to a device; optimizers are made after that."""
        for part in (self.encoder, self.projection, self.loss):
            part.to(device)
        if self.embeddings is not None:
            self.embeddings = self.embeddings.to(device)

    @property
    def units(self) -> int:
        """Numbers of an embedding, d."""
        return self.config.two_tower.projection or self.encoder.hidden

    @property
    def towers(self) -> list[nn.Parameter]:
        """What is trained besides the encoder."""
        both = (*self.projection.parameters(), *self.loss.parameters())
        return [each for each in both if each.requires_grad]

    def embed(self, rows: Rows, generator: torch.Generator | None = None) -> Tensor:
        """Return embeddings [row, d] of unit length on the autograd graph; with a generator, after dropout.

        A text without known words has zeros.
        """
        count = row_count(rows)
        batch = Batch(np.arange(count), rows, CsrRows.empty(count, self.problem.label_count))
        hidden = self.projection(hidden_of(self.encoder, self.config.model, batch, generator))
        return nn.functional.normalize(hidden, dim=1, eps=_EPSILON)

    @torch.no_grad()
    def embed_labels(self, progress: Progress = lambda firsts, _: firsts) -> Tensor:
        """Return the embeddings of all label texts by the current weights, [label, d].

        They are kept until a training step drops them. ``progress`` wraps the blocks, given their number.
        """
        if self.embeddings is None:
            assert self.texts is not None, "given by who has the texts"
            firsts = range(0, row_count(self.texts), TEXTS_AT_ONCE)
            found: Tensor | None = None
            for first in progress(firsts, len(firsts)):
                rows = np.arange(first, min(first + TEXTS_AT_ONCE, row_count(self.texts)))
                block = self.embed(self.texts.take(rows))
                if found is None:
                    found = block.new_empty(row_count(self.texts), block.shape[1])
                found[first : first + len(block)] = block
            self.embeddings = found
        assert self.embeddings is not None, "a data set has labels"
        return self.embeddings

    @torch.no_grad()
    def top_labels(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """Return cosines and labels [batch, k] of the batch's instances, best first, on the CPU.

        All labels are scored, block by block, and ties go to the lowest label; with an index only those of
        some lists are, and ties go to any.
        """
        scores, labels = self.search(self.embed(batch.features), k)
        return scores.cpu(), labels.cpu()

    @torch.no_grad()
    def search(self, queries: Tensor, k: int, excluded: CsrRows | None = None) -> tuple[Tensor, Tensor]:
        """Return cosines and labels [query, k] of embeddings, as `nearest` does; by the index if any."""
        if self.index is not None:
            return self.index.search(queries, k, excluded)
        return nearest(queries, self.embed_labels(), k, excluded)

    @torch.no_grad()
    def with_labels(self, rows: Rows) -> TwoTower:
        """Return a model of the same weights that knows further labels, by their texts, behind its own."""
        added = self.embed(rows)
        made = copy.copy(self)
        made.embeddings = torch.cat([self.embed_labels(), added])
        made.texts = None  # their embeddings are there
        if self.index is not None:
            made.index = ApproximateIndex(made.embeddings, self.index.probes)
        instances = np.concatenate([self.problem.label_instances, np.zeros(len(added), np.int64)])
        made.problem = replace(self.problem, label_count=len(made.embeddings), label_instances=instances)
        return made

    def with_index(self, probes: int) -> TwoTower:
        """Return a model that ranks labels by an index of their present embeddings."""
        made = copy.copy(self)
        made.index = ApproximateIndex(self.embed_labels(), probes)
        return made

    def tensors(self) -> dict[str, Tensor]:
        """Return every weight by name, sharing memory."""
        parts: dict[str, nn.Module] = {"encoder": self.encoder, "projection": self.projection}
        if self.config.two_tower.learn_scale:
            parts["loss"] = self.loss
        return {
            f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()
        }

    def stored(self) -> dict[str, Storable]:
        """Return `tensors` as a checkpoint takes them."""
        return dict(self.tensors())

    def read(self, reader: CheckpointReader) -> None:
        """Read every tensor in place; see `Model.read`."""
        read_weights(reader, self.tensors())


def make_model(
    config: Config,
    problem: Problem,
    transformer: TransformerEncoder | None = None,
    scratch: Path | None = None,
    workers: Workers = ALONE,
) -> Model | TwoTower:
    """Return the model that the settings ask for; see there."""
    if config.model.output == "two_tower":
        return TwoTower(config, problem, transformer)
    return Model(config, problem, transformer, scratch, workers)


def _projection(hidden: int, units: int, generator: torch.Generator) -> nn.Linear:
    """Return the identity, or random directions where the numbers of units differ."""
    layer = nn.Linear(hidden, units, bias=False)
    with torch.no_grad():
        if units == hidden:
            nn.init.eye_(layer.weight)
        else:
            layer.weight.normal_(0.0, 1.0 / math.sqrt(hidden), generator=generator)
    return layer
