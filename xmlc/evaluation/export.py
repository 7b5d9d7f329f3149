"""A two-tower run for other programs: encoder for sentence-transformers, labels' embeddings for an index."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from xmlc.data.pretrained import quiet
from xmlc.errors import CheckpointError, ConfigError
from xmlc.evaluation.predict import Predictor, load
from xmlc.files import sync, temporary_of, writing
from xmlc.nn import TextEncoder, TwoTower

EMBEDDINGS, LABELS = "label_embeddings.npy", "labels.jsonl"
_MODULES = "sentence_transformers.models"


def export(run: str | Path, out: str | Path, which: str = "best") -> Path:
    """Write a two-tower run's encoder and label embeddings into the new folder ``out``, and return it.

    Of a transformer: a model that ``SentenceTransformer(out)`` loads, and whose ``encode`` gives what
    `Predictor.embed` gives. Of every run: ``label_embeddings.npy``, float32 [label, d] of length 1, and
    ``labels.jsonl`` with a line ``{"label": ID, "name": NAME}`` for each of its rows.

    Raises:
        ConfigError: The run has no two towers.
        CheckpointError: There is no run, ``out`` exists, or the disk refuses.
    """
    predictor = load(run, which)
    if not isinstance(predictor.model, TwoTower):
        raise ConfigError(
            f"{run}: an export needs a run of model.output = two_tower, found "
            f"{predictor.model.config.model.output}; train one"
        )
    target = Path(out)
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            f"{target}: an export needs a new folder, found something there; choose another"
        )
    fresh = temporary_of(target)
    with writing(target):
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            fresh.mkdir()
            _write_labels(fresh, predictor, predictor.model)
            if predictor.text_encoder is not None:
                _write_encoder(fresh, predictor.model, predictor.text_encoder)
            for path in fresh.rglob("*"):
                sync(path)
            fresh.rename(target)
            sync(target.parent)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return target


def _write_labels(folder: Path, predictor: Predictor, model: TwoTower) -> None:
    np.save(folder / EMBEDDINGS, model.embed_labels().cpu().numpy())
    with (folder / LABELS).open("w", encoding="utf-8") as stream:
        for label in range(model.problem.label_count):
            stream.write(json.dumps({"label": label, "name": predictor.label_name(label)}) + "\n")


def _write_encoder(folder: Path, model: TwoTower, encoder: TextEncoder) -> None:
    """Write transformer, pooling, projection and unit length as modules of sentence-transformers."""
    config, transformer = encoder.config, encoder.transformer
    with quiet():
        transformer.encoder.save_pretrained(folder)  # type: ignore[operator]
        encoder.tokenizer.tokenizer.save_pretrained(folder)
    _write(
        folder / "sentence_bert_config.json", {"max_seq_length": config.max_length, "do_lower_case": False}
    )
    _write(
        folder / "config_sentence_transformers.json",
        {"__version__": {}, "similarity_fn_name": "cosine", "prompts": {}, "default_prompt_name": None},
    )
    pooling = {
        "word_embedding_dimension": transformer.hidden,
        "pooling_mode_cls_token": config.pooling == "cls",
        "pooling_mode_mean_tokens": config.pooling == "mean",
    }
    modules: list[tuple[str, dict[str, Any]]] = [("Transformer", {}), ("Pooling", pooling)]
    if isinstance(model.projection, torch.nn.Linear):
        weight = model.projection.weight.detach().cpu()
        if config.unit_variance:  # Normalize gives length 1, this encoder sqrt(hidden)
            modules.append(("Normalize", {}))
            weight = weight * math.sqrt(transformer.hidden)
        dense = {
            "in_features": weight.shape[1],
            "out_features": weight.shape[0],
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        place = folder / f"{len(modules)}_Dense"
        place.mkdir()
        save_file({"linear.weight": weight.contiguous()}, place / "model.safetensors")
        modules.append(("Dense", dense))
    modules.append(("Normalize", {}))
    listed = []
    for number, (kind, settings) in enumerate(modules):
        path = f"{number}_{kind}" if number else ""
        (folder / path).mkdir(exist_ok=True)
        if settings:
            _write(folder / path / "config.json", settings)
        listed.append({"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"})
    _write(folder / "modules.json", listed)


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
