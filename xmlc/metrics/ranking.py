"""Ranking metrics of extreme classification at every rank 1..k, over all labels and by label frequency.

The true pairs stay sparse throughout: nothing of shape [instance, label] is ever built. ``docs/metrics.md``
gives the definitions and their sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from xmlc.errors import DataError

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

DECILES = 10


@dataclass(frozen=True)
class Report:
    """What an evaluation found; every metric is a fraction in [0, 1]."""

    values: Mapping[str, float]
    """``P@1`` .. ``P@k``, likewise ``nDCG``, ``R``, ``coverage``, ``macroP`` and, where inverse propensities
    were given, ``PSP``, ``PSnDCG``, ``PSR``."""
    instances: int
    unlabelled_instances: int
    """Instances without a true label; they count as zeros in every mean."""
    deciles: tuple[Mapping[str, float], ...]
    """Most frequent labels first: the same metrics with the truth restricted to one decile of labels, and its
    ``labels``, ``training_positives`` and ``unlabelled_instances``. Empty without training counts."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report as nested dictionaries, tuples and numbers, ready for JSON."""
        return asdict(self)


def evaluate(
    truth: sparse.csr_array,
    top_labels: npt.NDArray[np.integer],
    k: int,
    *,
    inverse_propensity: npt.NDArray[np.floating] | None = None,
    train_counts: npt.NDArray[np.integer] | None = None,
) -> Report:
    """Compare ranked predictions with the truth.

    With hit_j = 1 if the prediction at rank j is a true label of the instance, n = its number of true labels,
    and means over all instances (one without labels is a zero):

        P@k    = mean of (sum_{j<=k} hit_j) / k
        nDCG@k = mean of (sum_{j<=k} hit_j / log2(j + 1)) / (sum_{j<=min(k,n)} 1 / log2(j + 1))
        R@k    = mean of (sum_{j<=k} hit_j) / n
        PSP@k, PSnDCG@k, PSR@k = the same means with hit_j / p_label in place of hit_j, divided by the means
            that the best possible ranking, the true labels by falling 1 / p, would get
        coverage@k = labels hit at least once within rank k / labels that occur in the truth
        macroP@k   = mean over all labels of hits within rank k / predictions within rank k

    A ratio 0 / 0 is 0 (a label never predicted, no true label at all): no value is ever NaN.

    Args:
        truth: CSR [instance, label]; its structure counts (an explicit zero is a label), not its values.
        top_labels: Integer [instance, any]; label ids best first, -1 where there is no prediction at a rank.
            Columns beyond k are ignored, missing ones are "no prediction".
        k: Largest rank, at least 1; may exceed the number of labels.
        inverse_propensity: Float [label], finite and above 0: 1 / p. Adds PSP, PSnDCG and PSR.
        train_counts: Integer [label]: training instances of each label. Adds the deciles of
            ``label_deciles``; for a decile the predictions stay whole and only its labels count as true.

    Raises:
        DataError: Shapes or types do not fit, a value is out of range, or a label is predicted twice for one
            instance within the first k ranks.
    """
    keys = _pair_keys("evaluate: truth", truth)
    instances, labels = truth.shape
    instance, label = np.divmod(keys, max(labels, 1))
    predicted = _candidates("evaluate", top_labels, truth.shape, k)[:, :k]
    _refuse_repeats(predicted)
    weight = None
    if inverse_propensity is not None:
        weight = _checked_weights(inverse_propensity, labels)
        # Order the labels of each instance by falling weight: sort by rank of weight, then look the label up.
        occurring, place = np.unique(label, return_inverse=True)
        by_weight = np.argsort(-weight[occurring], kind="stable")
        order = np.argsort(by_weight)
        shift = instance * len(occurring)
        label = occurring[by_weight[np.sort(shift + order[place]) - shift]]
    ranking = _Ranking(predicted, _contained(predicted, keys, labels), instance, label, weight)

    deciles: list[Mapping[str, float]] = []
    if train_counts is not None:
        if train_counts.shape != (labels,):
            raise DataError(
                f"evaluate: train_counts must be [label] = [{labels}], found {list(train_counts.shape)}; "
                "count the training instances of every label"
            )
        decile = label_deciles(train_counts)
        for number in range(DECILES):
            chosen = decile == number
            sizes = {
                "labels": int(chosen.sum()),
                "training_positives": int(train_counts.sum(where=chosen)),
                "unlabelled_instances": _unlabelled(ranking, chosen),
            }
            deciles.append({**sizes, **_measure(ranking, chosen)})
    everything = np.ones(labels, dtype=bool)
    return Report(_measure(ranking, everything), instances, _unlabelled(ranking, everything), tuple(deciles))


def mask_pairs(top_labels: npt.NDArray[np.integer], filter_pairs: sparse.csr_array, k: int) -> Integers:
    """Drop masked labels from ranked candidates and close the gaps.

    Keeps, in order, the first k candidates of each row that are neither -1 nor a pair of ``filter_pairs``; a
    row with fewer ends in -1. With m the most pairs that any instance has in the filter, k + m candidates are
    enough to fill k ranks.

    Args:
        top_labels: Integer [instance, any]; label ids best first, -1 for "no prediction".
        filter_pairs: CSR [instance, label]; its structure counts, not its values.
        k: Ranks to keep, at least 1.

    Returns:
        int64 [instance, k].

    Raises:
        DataError: Shapes or types do not fit, or a label id is out of range.
    """
    keys = _pair_keys("mask_pairs: filter_pairs", filter_pairs)
    candidates = _candidates("mask_pairs", top_labels, filter_pairs.shape, k)
    dropped = (candidates < 0) | _contained(candidates, keys, filter_pairs.shape[1])
    order = np.argsort(dropped, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(np.where(dropped, -1, candidates), order, axis=1)


def label_deciles(train_counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int8]:
    """Cut the labels by training frequency into ten groups of about equal numbers of training positives.

    Labels are ranked by falling frequency, ties by label id. A label with c positives ranked before it, of t
    in all, falls into decile floor(10 c / t): decile 0 holds the most frequent labels, decile 9 the rarest
    and every label without a training positive. A label with over a tenth of all positives can leave the next
    decile empty.

    Args:
        train_counts: Integer [label], none negative.

    Returns:
        int8 [label] in 0..9.

    Raises:
        DataError: ``train_counts`` is not a vector of non-negative integers.
    """
    if train_counts.ndim != 1 or train_counts.dtype.kind not in "iu" or (train_counts < 0).any():
        raise DataError(
            f"label_deciles: train_counts must be non-negative integers [label], found {train_counts.dtype} "
            f"{list(train_counts.shape)}; count the training instances of every label"
        )
    total = int(train_counts.sum(dtype=np.int64))
    narrow = np.int32 if total < 2**31 else np.int64
    falling = train_counts.astype(narrow)
    np.negative(falling, out=falling)
    order = np.argsort(falling, kind="stable")
    decile = np.full(len(train_counts), DECILES - 1, np.int8)
    before = 0
    for first in range(0, len(order), _LABELS_AT_ONCE):  # vectors of millions of labels: as few as possible
        labels = order[first : first + _LABELS_AT_ONCE]
        counts = train_counts[labels].astype(np.int64)
        found = counts > 0
        above = before + np.cumsum(counts) - counts
        decile[labels[found]] = DECILES * above[found] // max(total, 1)
        before += int(counts.sum())
    return decile


_LABELS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class _Ranking:
    """Checked predictions beside the truth."""

    predicted: Integers  # [instance, k], best first, -1 for "no prediction"
    hit: Flags  # [instance, k]
    instance: Integers  # [pair]: the true pairs, each once, by instance
    label: Integers  # [pair]; of one instance by falling weight, where there are weights
    weight: Floats | None  # [label]: 1 / p


def _measure(ranking: _Ranking, chosen: Flags) -> dict[str, float]:
    """Return every metric by name, with the truth restricted to the ``chosen`` labels, bool [label]."""
    hit = ranking.hit & np.append(chosen, False)[ranking.predicted]
    true = chosen[ranking.label]
    instance, label = ranking.instance[true], ranking.label[true]
    positives = np.bincount(instance, minlength=len(hit))
    metrics = _instance_means(hit, positives)
    if ranking.weight is not None:
        gain = np.zeros(hit.shape)
        gain[hit] = ranking.weight[ranking.predicted[hit]]
        found = _instance_means(gain, positives)
        rank = np.arange(len(label)) - (np.cumsum(positives) - positives)[instance]
        top = rank < hit.shape[1]
        gain = np.zeros(hit.shape)
        gain[instance[top], rank[top]] = ranking.weight[label[top]]
        best = _instance_means(gain, positives)
        metrics |= {f"PS{name}": _ratio(found[name], best[name]) for name in found}
    metrics |= _label_means(ranking.predicted, hit, int(chosen.sum()), len(np.unique(label)))
    return {
        f"{name}@{rank}": float(value)
        for name, values in metrics.items()
        for rank, value in enumerate(values, start=1)
    }


def _instance_means(gain: npt.NDArray[Any], positives: Integers) -> dict[str, Floats]:
    """Return P, nDCG and R [k] of ``gain`` [instance, k] by rank, given the true labels of each instance."""
    instances, k = gain.shape
    rank = np.arange(1, k + 1)
    discount = 1.0 / np.log2(rank + 1.0)
    total = np.cumsum(gain, axis=1, dtype=np.float64)
    discounted = np.cumsum(gain * discount, axis=1)
    # An instance without labels has no gain; any divisor above 0 gives its zero.
    positives = np.maximum(positives, 1)[:, None]
    ideal = np.cumsum(discount)[np.minimum(positives, rank) - 1]
    sums = {"P": (total / rank).sum(0), "nDCG": (discounted / ideal).sum(0), "R": (total / positives).sum(0)}
    return {name: values / max(instances, 1) for name, values in sums.items()}


def _label_means(predicted: Integers, hit: Flags, labels: int, occurring: int) -> dict[str, Floats]:
    """Return coverage and macroP [k] over chosen ``labels`` in number, ``occurring`` of them in the truth."""
    k = hit.shape[1]
    found, place = np.unique(predicted, return_inverse=True)  # the others have no share in the sums
    place = place.reshape(predicted.shape)
    hits, predictions = np.zeros(len(found)), np.zeros(len(found))
    covered, precision = np.zeros(k), np.zeros(k)
    for rank in range(k):
        column = place[:, rank]
        hits += np.bincount(column[hit[:, rank]], minlength=len(found))
        predictions += np.bincount(column[predicted[:, rank] >= 0], minlength=len(found))
        covered[rank] = np.count_nonzero(hits)
        precision[rank] = (hits / np.maximum(predictions, 1.0)).sum()
    return {"coverage": covered / max(occurring, 1), "macroP": precision / max(labels, 1)}


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Return numerator / denominator, and 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0.0)


def _unlabelled(ranking: _Ranking, chosen: Flags) -> int:
    """Count the instances without a true label among the ``chosen``, bool [label]."""
    labelled = np.bincount(ranking.instance[chosen[ranking.label]]) > 0
    return len(ranking.hit) - int(labelled.sum())


def _pair_keys(where: str, pairs: sparse.csr_array) -> Integers:
    """Return instance * labels + label of a CSR matrix's pairs, sorted, each once, int64 [pair]."""
    if not sparse.issparse(pairs) or pairs.format != "csr":
        raise DataError(
            f"{where} must be a scipy CSR matrix [instance, label], found {type(pairs).__name__}; "
            "convert it with .tocsr()"
        )
    instances, labels = pairs.shape
    if pairs.nnz and not 0 <= pairs.indices.min() <= pairs.indices.max() < labels:
        raise DataError(
            f"{where} must hold label ids in [0, {labels}), found "
            f"[{pairs.indices.min()}, {pairs.indices.max()}]; check the file it was read from"
        )
    instance = np.repeat(np.arange(instances, dtype=np.int64), np.diff(pairs.indptr))
    keys = np.sort(instance * labels + pairs.indices)
    # Not np.unique: its hash table takes 20 times as long on 20 million pairs.
    return keys[np.diff(keys, prepend=-1) > 0]


def _candidates(where: str, top_labels: npt.NDArray[np.integer], shape: tuple[int, int], k: int) -> Integers:
    """Check ``top_labels`` and return it as int64 with at least k columns, filled up with -1."""
    instances, labels = shape
    if k < 1:
        raise DataError(f"{where}: k must be at least 1, found {k}; name the largest rank to keep")
    if top_labels.ndim != 2 or top_labels.dtype.kind not in "iu" or len(top_labels) != instances:
        raise DataError(
            f"{where}: top_labels must be integers [instance, k] with instance = {instances}, found "
            f"{top_labels.dtype} {list(top_labels.shape)}; pass one row of label ids per instance, best first"
        )
    outside = np.argwhere((top_labels < -1) | (top_labels >= labels))
    if len(outside):
        row, rank = outside[0]
        raise DataError(
            f"{where}: top_labels must be label ids in [0, {labels}) or -1, found {top_labels[row, rank]} at "
            f"[{row}, {rank}]; predictions and labels must come from the same data set"
        )
    missing = max(k - top_labels.shape[1], 0)
    return np.pad(top_labels.astype(np.int64), ((0, 0), (0, missing)), constant_values=-1)


def _refuse_repeats(predicted: Integers) -> None:
    """Raise DataError if a row of ``predicted`` [instance, k] holds a label twice: it would be hit twice."""
    ordered = np.sort(predicted, axis=1)
    repeated = np.argwhere((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0))
    if len(repeated):
        row, column = repeated[0]
        raise DataError(
            f"evaluate: top_labels must name a label at most once per instance, found label "
            f"{ordered[row, column]} twice in row {row}; merge repeated candidates before ranking"
        )


def _checked_weights(inverse_propensity: npt.NDArray[np.floating], labels: int) -> Floats:
    """Return ``inverse_propensity`` as float64 [label] after checking shape and range."""
    if inverse_propensity.shape != (labels,) or inverse_propensity.dtype.kind not in "fiu":
        raise DataError(
            f"evaluate: inverse_propensity must be numbers [label] = [{labels}], found "
            f"{inverse_propensity.dtype} {list(inverse_propensity.shape)}; compute it from the training set"
        )
    outside = np.flatnonzero(~(np.isfinite(inverse_propensity) & (inverse_propensity > 0)))
    if len(outside):
        raise DataError(
            "evaluate: inverse_propensity must be finite and above 0, found "
            f"{inverse_propensity[outside[0]]} for label {outside[0]}; compute it from the training set"
        )
    return inverse_propensity.astype(np.float64, copy=False)


def _contained(candidates: Integers, keys: Integers, labels: int) -> Flags:
    """Say which ``candidates`` [instance, any] are pairs of the sorted ``keys``; -1 never is."""
    wanted = np.arange(len(candidates))[:, None] * labels + candidates
    found = np.searchsorted(keys, wanted, "right") > np.searchsorted(keys, wanted, "left")
    return found & (candidates >= 0)
