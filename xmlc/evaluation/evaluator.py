"""Ranks the labels of a split and measures the ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import scipy.sparse
from numpy.typing import NDArray
from torch import Tensor

from xmlc.data.batches import Batch, BatchStream
from xmlc.data.rows import CsrRows
from xmlc.metrics import Report, evaluate, mask_pairs
from xmlc.nn import Problem

Progress = Callable[[Iterable[Batch], int], Iterable[Batch]]


class Ranker(Protocol):
    """A trained model that ranks labels."""

    @property
    def problem(self) -> Problem:
        """What it was trained for."""

    def top_labels(self, batch: Batch, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k], best first, on the CPU."""


def rank_labels(
    model: Ranker,
    stream: BatchStream,
    k: int,
    filter_pairs: CsrRows | None,
    progress: Progress = lambda batches, _: batches,
) -> NDArray[np.int64]:
    """Return the k best labels of every instance of the stream, [instance, k], best first.

    Labels that ``filter_pairs`` [instance, label] holds for an instance are left out; -1 stands where fewer
    than k labels remain.
    """
    masked = 0 if filter_pairs is None else int(np.diff(filter_pairs.offsets).max(initial=0))
    candidates = min(k + masked, model.problem.label_count)
    ranked = [
        model.top_labels(batch, candidates)[1].numpy() for batch in progress(stream.sequential(), len(stream))
    ]
    top = np.concatenate(ranked) if ranked else np.empty((0, candidates), np.int64)
    if filter_pairs is not None:
        return mask_pairs(top, structure(filter_pairs), k)
    return np.pad(top, ((0, 0), (0, k - candidates)), constant_values=-1)


def evaluate_model(
    model: Ranker,
    stream: BatchStream,
    k: int,
    filter_pairs: CsrRows | None,
    *,
    deciles: bool = False,
    inverse_propensity: NDArray[np.float64] | None = None,
    progress: Progress = lambda batches, _: batches,
) -> Report:
    """Measure the model on the stream's instances, in the order of ``stream.rows``.

    Args:
        model: Trained on the same labels.
        stream: Its labels are the truth.
        k: Largest rank of the metrics.
        filter_pairs: Pairs to mask, [instance of the stream, label], or None.
        deciles: Add every metric by label-frequency decile.
        inverse_propensity: Instead of the model's own, [label].
        progress: Wraps the batches, given their number.
    """
    top = rank_labels(model, stream, k, filter_pairs, progress)
    problem = model.problem
    return evaluate(
        structure(stream.labels.take(stream.rows)),
        top,
        k,
        inverse_propensity=problem.inverse_propensity if inverse_propensity is None else inverse_propensity,
        train_counts=problem.label_instances if deciles else None,
    )


def structure(rows: CsrRows) -> scipy.sparse.csr_array:
    """Return where a matrix is set, as metrics take it."""
    return scipy.sparse.csr_array(rows.to_scipy())
