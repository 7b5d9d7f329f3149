"""One training step of a two-tower model, and the negatives that it learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from xmlc.data.batches import Batch, BatchStream, Rows, take
from xmlc.data.dataset import row_count
from xmlc.data.rows import CsrRows, Int64, TokenRows, concatenate_rows, offsets_of
from xmlc.losses import GradientCache, LabelPool, label_pool
from xmlc.losses.backward import backward
from xmlc.nn import TwoTower
from xmlc.parallel import ALONE, Workers
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.step import gradient_square, step_generator, sum_gradients

_SAMPLES = 2**63
"""Added to a step it is the second key word of its draws; orders of epochs count from 0."""

Progress = Callable[[Iterable[Batch], int], Iterable[Batch]]


def two_tower_step(
    model: TwoTower,
    batch: Batch,
    optimizers: Optimizers,
    step: int,
    clip_norm: float,
    stopwatch: Stopwatch,
    workers: Workers = ALONE,
) -> Tensor:
    """Update encoder and projection from one batch and return the loss [].

    Each of several ``workers`` gives its part of the batch, draws from its labels, and embeds its part of the
    pool; all take the same step, from the gradients of the whole batch's loss.

    ``step`` counts from 1 and, with the seed, decides what is drawn and dropped. With ``mini_batch_size`` the
    gradients are those of one graph over the same mini-batches.
    """
    assert model.texts is not None, "given by who has the texts"
    settings = model.config.two_tower
    with stopwatch.phase("forward"):
        pool = pool_of(model, batch, step, workers)
        cache = GradientCache(settings.mini_batch_size) if settings.mini_batch_size else _Graph()
        seed = step_generator(model.config.training.seed, step, workers.rank).initial_seed()
        queries = _embedded(cache, model, batch.features, seed, side=0)
        keys = _embedded(cache, model, model.texts.take(pool.own.numpy()), seed, side=1)
    with stopwatch.phase("output_step"):
        loss = model.loss(queries, keys, pool.positives, pool.ignored, workers)
        loss.backward()
    with stopwatch.phase("backward"):
        cache.backward()
    with stopwatch.phase("dense_update"):
        sum_gradients(list(optimizers.parameters()), workers, 1.0 / workers.size)
        if clip_norm > 0.0:
            gradients = [each.grad for each in optimizers.parameters() if each.grad is not None]
            factor = (clip_norm / (gradient_square(gradients).sqrt() + 1e-12)).clamp(max=1.0)
            for gradient in gradients:
                gradient.mul_(factor)
        optimizers.step_encoder()
        model.embeddings = None
    return loss.detach()


def pool_of(model: TwoTower, batch: Batch, step: int, workers: Workers = ALONE) -> LabelPool:
    """Draw the labels of a step: positives, negatives that were mined, and any, of these a worker's part."""
    settings, labels = model.config.two_tower, model.problem.label_count
    key = np.array([model.config.training.seed, _SAMPLES + step + (workers.rank << 40)], np.uint64)
    of_any = [settings.random_negatives * each // workers.size for each in (workers.rank, workers.rank + 1)]
    generator = np.random.Generator(np.random.Philox(key=key))
    drawn = [
        _draw(batch.labels, settings.positives, generator),
        generator.integers(labels, size=of_any[1] - of_any[0]),
    ]
    if batch.negatives is not None:
        drawn.append(_draw(batch.negatives, settings.mined_negatives, generator))
    device = model.config.training.device
    return label_pool(np.concatenate(drawn), batch.labels, labels, workers, device, batch.skipped)


def _draw(rows: CsrRows, most: int, generator: np.random.Generator) -> Int64:
    """Return the columns of at most so many entries of every row, at random."""
    order = np.lexsort((generator.random(len(rows.indices)), rows.entry_rows))
    place = np.arange(len(order)) - np.repeat(rows.offsets[:-1], np.diff(rows.offsets))
    return rows.indices[order][place < most].astype(np.int64)


def _embedded(cache: GradientCache | _Graph, model: TwoTower, rows: Rows, seed: int, side: int) -> Tensor:
    """Return the embeddings of rows, a leaf; mini-batches hold texts of about one length."""
    order = (
        np.argsort(rows.lengths, kind="stable") if isinstance(rows, TokenRows) else np.arange(row_count(rows))
    )

    def embed(texts: _Texts) -> Tensor:
        # Of its place alone, so that a mini-batch drops the same when it comes again.
        generator = torch.Generator().manual_seed((seed + 2 * texts.first + side) % (1 << 63))
        return model.embed(texts.rows, generator)

    embeddings = cache.embed(embed, _Texts(take(rows, order), 0))
    # The order is undone on the graph: the leaf's gradient comes back in the order of the mini-batches.
    return embeddings[torch.from_numpy(np.argsort(order)).to(embeddings.device)]


@dataclass(frozen=True, eq=False)
class _Texts:
    """Rows that a gradient cache can cut, and where in the whole they begin."""

    rows: Rows
    first: int

    def __len__(self) -> int:
        return row_count(self.rows)

    def __getitem__(self, part: slice) -> _Texts:
        chosen = np.arange(len(self))[part]
        return _Texts(take(self.rows, chosen), self.first + part.start)


class _Graph:
    """What `GradientCache` does, with the graph of the whole batch kept: the encoder runs once."""

    def __init__(self) -> None:
        self._graphs: list[tuple[Tensor, Tensor]] = []

    def embed(self, encoder: Callable[[_Texts], Tensor], texts: _Texts) -> Tensor:
        graph = encoder(texts)
        leaf = graph.detach().requires_grad_()
        self._graphs.append((graph, leaf))
        return leaf

    def backward(self) -> None:
        for graph, leaf in self._graphs:
            if graph.requires_grad:  # not of a worker without instances
                assert leaf.grad is not None, "the loss is of all embeddings"
                backward(graph, leaf.grad)


@torch.no_grad()
def mine(model: TwoTower, stream: BatchStream, progress: Progress = lambda batches, _: batches) -> CsrRows:
    """Return the nearest labels of the stream's instances by the current embeddings, [instance, label].

    Exactly, or by ``two_tower.mining_search = "approximate"``. Of every instance
    ``two_tower.mined_from`` labels, without its known positives and its filter pairs; fewer
    where there are no more. Instances that the stream leaves out have none.
    """
    labels = model.problem.label_count
    settings = model.config.two_tower
    k = min(settings.mined_from, labels)
    if settings.mining_search == "approximate":
        model = model.with_index(settings.mining_probes)
    found, counts = [np.empty(0, np.int32)], np.zeros(stream.labels.rows, np.int64)
    for batch in progress(stream.sequential(), len(stream)):
        excluded = batch.labels if batch.skipped is None else _union(batch.labels, batch.skipped)
        scores, nearby = model.search(model.embed(batch.features), k, excluded)
        kept = scores.isfinite().cpu()
        rows = np.sort(nearby.cpu().masked_fill(~kept, labels).numpy(), axis=1)
        counts[batch.instances] = kept.sum(1).numpy()
        found.append(rows[rows < labels].astype(np.int32))
    assert (np.diff(stream.rows) > 0).all(), "the rows of instances rise, so that theirs may be appended"
    return CsrRows(offsets_of(counts), np.concatenate(found), None, labels)


def _union(first: CsrRows, second: CsrRows) -> CsrRows:
    """Return the entries of both; for `nearest`, which asks for no order."""
    both = concatenate_rows([first, second], first.columns)
    rows = np.concatenate([first.entry_rows, second.entry_rows])
    order = np.argsort(rows, kind="stable")
    return CsrRows(first.offsets + second.offsets, both.indices[order], None, first.columns)
