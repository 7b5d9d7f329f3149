"""Measures a run on a data set, and prints it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from xmlc.data import Dataset, open_dataset
from xmlc.data.batches import BatchStream, Column
from xmlc.data.dataset import Features
from xmlc.data.rows import Int64, TextColumn
from xmlc.errors import ConfigError, DataError
from xmlc.evaluation.evaluator import Progress, Ranker, evaluate_model
from xmlc.evaluation.hybrid import Hybrid, best_weight, held_out, join
from xmlc.evaluation.predict import Predictor, load
from xmlc.metrics import inverse_propensity
from xmlc.nn import open_embeddings


def evaluate_run(
    run: str | Path,
    data: str | Path | None = None,
    *,
    k: int = 5,
    which: str = "best",
    split: str = "test",
    propensity_a: float | None = None,
    propensity_b: float | None = None,
    mask_filter_pairs: bool = True,
    deciles: bool = False,
    tower: str | Path | None = None,
    tower_weight: float | None = None,
    device: str = "cpu",
    progress: Progress = lambda batches, _: batches,
) -> dict[str, Any]:
    """Evaluate a run's checkpoint.

    Args:
        run: Folder of the run.
        data: Folder or name of a data set; None takes the one that the run was trained on.
        k: Largest rank.
        which: ``best`` or ``latest`` checkpoint.
        split: ``test`` or ``train``.
        propensity_a: Instead of the data set's A; propensities come from the run's training labels.
        propensity_b: Instead of the data set's B.
        mask_filter_pairs: Whether the pairs of the filter file are left out of the ranking.
        deciles: Add every metric by label-frequency decile.
        tower: Folder of a two-tower run, whose cosines are added to the run's logits; see `Hybrid`.
        tower_weight: Their weight; None chooses it on the training instances that both runs held out.
        device: ``cpu`` or ``cuda``: where to compute.
        progress: Wraps the batches, given their number.

    Returns:
        JSON-ready: what was measured, under which settings, and ``metrics`` as fractions.

    Raises:
        CheckpointError: There is no run, or it cannot be trusted.
        DataError: The data set does not fit the run.
        ConfigError: ``which``, ``split``, a weight or a propensity constant is out of range; or the two runs
            do not go together.
        NativeError: There is no CUDA device, or no kernels for it.
    """
    if split not in ("test", "train"):
        raise ConfigError(f"evaluate: split must be test or train, found {split!r}; choose one")
    if tower_weight is not None and (tower is None or not 0.0 <= tower_weight < math.inf):
        raise ConfigError(
            f"evaluate: tower_weight must be a number from 0 on, of a tower, found {tower_weight} and tower "
            f"{tower}; name the run of the tower as well"
        )
    predictor = load(run, which, device)
    trained_on = predictor.metadata["data"]
    source = data if data is not None else trained_on["source"]
    if source is None:
        raise DataError(f"{run}: the run was trained on arrays in memory; name a data set to evaluate on")
    dataset = open_dataset(source)
    return evaluate_predictor(
        predictor,
        dataset,
        k=k,
        split=split,
        propensity_a=propensity_a,
        propensity_b=propensity_b,
        mask_filter_pairs=mask_filter_pairs,
        deciles=deciles,
        progress=progress,
        tower=None if tower is None else load(tower, which, device),
        tower_weight=tower_weight,
    ) | {"run": str(run), "checkpoint": which, "tower": None if tower is None else str(tower)}


def evaluate_predictor(
    predictor: Predictor,
    dataset: Dataset,
    *,
    k: int,
    split: str,
    propensity_a: float | None,
    propensity_b: float | None,
    mask_filter_pairs: bool,
    deciles: bool,
    progress: Progress,
    tower: Predictor | None = None,
    tower_weight: float | None = None,
) -> dict[str, Any]:
    """Evaluate a loaded model; see `evaluate_run`."""
    chosen = dataset.test if split == "test" else dataset.train
    if chosen is None:
        raise DataError(
            f"{dataset.name}: evaluation needs a test split, found none; use --split train or other data"
        )
    problem = predictor.model.problem
    if dataset.label_count != problem.label_count:
        raise DataError(
            f"{dataset.name}: the run knows {problem.label_count} labels, found {dataset.label_count}; "
            "evaluate on data with the labels it was trained on"
        )
    if dataset.kind != predictor.takes:
        raise DataError(
            f"{dataset.name}: the run takes {predictor.takes} instances, found {dataset.kind} ones; "
            "evaluate on data of the kind it was trained on"
        )
    if predictor.takes != "text" and dataset.feature_count != problem.feature_count:
        raise DataError(
            f"{dataset.name}: the run knows {problem.feature_count} features, found "
            f"{dataset.feature_count}; evaluate on data with the features it was trained on"
        )
    stream = _stream(predictor, dataset, split, np.arange(chosen.instances))
    ranker: Ranker = predictor.model
    if tower is not None:
        ranker = _with_tower(predictor, tower, dataset, split, tower_weight)
    a = problem.propensity_a if propensity_a is None else propensity_a
    b = problem.propensity_b if propensity_b is None else propensity_b
    filter_pairs = chosen.filter_pairs if mask_filter_pairs else None
    report = evaluate_model(
        ranker,
        stream,
        k,
        filter_pairs,
        deciles=deciles,
        inverse_propensity=inverse_propensity(problem.label_instances, problem.instances, a, b),
        progress=progress,
    )
    trained_on = predictor.metadata["data"]
    return {
        "data": dataset.name,
        "split": split,
        "instances": report.instances,
        "unlabelled_instances": report.unlabelled_instances,
        "labels": dataset.label_count,
        "masked_pairs": 0 if filter_pairs is None else len(filter_pairs.indices),
        "propensity_a": a,
        "propensity_b": b,
        "fingerprint": dataset.fingerprint,
        "trained_on_this_data": dataset.fingerprint == trained_on["fingerprint"],
        "epoch": predictor.metadata["position"]["epoch"],
        "tower_weight": ranker.weight if isinstance(ranker, Hybrid) else None,
        "metrics": dict(report.values),
        "deciles": [dict(decile) for decile in report.deciles],
    }


def _stream(predictor: Predictor, dataset: Dataset, split: str, rows: Int64) -> BatchStream:
    """Return some instances of a split as the model takes them."""
    chosen = dataset.train if split == "train" else dataset.test
    assert chosen is not None, "checked by who chose the split"
    features: Features | Column | None = chosen.features
    words = None
    if predictor.takes == "text":
        assert chosen.texts is not None, "a text data set has texts"
        features = _features(predictor, chosen.texts, f"{dataset.fingerprint} {split}")
        words = predictor.words_of(chosen.texts)
    assert features is not None, "a data set without texts has features"
    batch = predictor.model.config.training.evaluation_batch
    return BatchStream(features, chosen.labels, rows, batch, 0, words=words)


def _with_tower(
    head: Predictor, tower: Predictor, dataset: Dataset, split: str, weight: float | None
) -> Hybrid:
    """Return both as one; without a weight the best on what they held out."""
    if tower.takes != dataset.kind:
        raise ConfigError(
            f"hybrid: the tower must take the {dataset.kind} instances of {dataset.name}, found "
            f"{tower.takes} ones; train one on that data"
        )
    none = np.empty(0, np.int64)
    joined = join(head, tower, _stream(tower, dataset, split, none).features, weight or 0.0)
    if weight is not None:
        return joined
    stream = _stream(head, dataset, "train", held_out(head, tower, dataset))
    pairs = dataset.train.filter_pairs
    read = join(head, tower, _stream(tower, dataset, "train", none).features, 0.0)
    return replace(
        joined, weight=best_weight(read, stream, None if pairs is None else pairs.take(stream.rows))
    )


def _features(predictor: Predictor, texts: TextColumn, key: str) -> Features | Column:
    """Return texts as the model takes them; what a frozen encoder makes of them is kept in the cache."""
    encoder = predictor.text_encoder
    if encoder is None or encoder.config.trained:
        return predictor.of_texts(texts)
    return open_embeddings(encoder, {key: texts})


def report_table(report: dict[str, Any]) -> str:
    """Return a report of `evaluate_run` as a table of percent for people."""
    metrics = report["metrics"]
    ranks = sorted({int(name.partition("@")[2]) for name in metrics})
    shown = [rank for rank in ranks if rank in (1, 3, 5) or rank == ranks[-1]]
    kinds = list(dict.fromkeys(name.partition("@")[0] for name in metrics))
    lines = [
        f"{report['data']}, {report['split']}: {report['instances']} instances "
        f"({report['unlabelled_instances']} without labels, counted as zeros), {report['labels']} labels",
        f"filter pairs masked: {report['masked_pairs']}; propensities: A = {report['propensity_a']}, "
        f"B = {report['propensity_b']}; epoch {report['epoch']}",
    ]
    if report["tower_weight"] is not None:
        lines.append(f"two towers added: {report['tower']}, weight {report['tower_weight']:g}")
    if not report["trained_on_this_data"]:
        lines.append("note: this is not the data set that the run was trained on (fingerprints differ)")
    lines += ["", f"{'percent':10}" + "".join(f"{'@' + str(rank):>8}" for rank in shown)]
    for kind in kinds:
        lines.append(f"{kind:10}" + "".join(f"{100 * metrics[f'{kind}@{rank}']:8.2f}" for rank in shown))
    if report["deciles"]:
        names = ("P@1", "P@5", "PSP@5", "R@5", "coverage@5")
        present = [name for name in names if name in report["deciles"][0]]
        lines += ["", f"{'decile':8}{'labels':>9}" + "".join(f"{name:>12}" for name in present)]
        for number, decile in enumerate(report["deciles"], 1):
            values = "".join(f"{100 * decile[name]:12.2f}" for name in present)
            lines.append(f"{number:<8}{int(decile['labels']):>9}{values}")
        lines.append("(labels by falling training frequency, each decile a tenth of the training positives)")
    return "\n".join(lines)
