"""A training set larger than the memory of a run: what it needs of it comes from the mapped files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xmlc.data.batches import BatchStream
from xmlc.data.rows import CsrRows, TokenRows, offsets_of
from xmlc.memory.process import PeakWatch

LIMIT = 48 << 20
INSTANCES, LABELS, WORDS = 48_000, 500, 300
SETTINGS = ("training.epochs=1", "training.batch_size=128", "model.width=512", "model.hidden=32")
"""Of each, the file of what an instance is takes twice the limit."""


def write(folder: Path, kind: str) -> None:
    """Write the arrays of a data set, as a store has them."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    arrays: dict[str, np.ndarray] = {
        "label_offsets": np.arange(INSTANCES + 1) * 4,
        "labels": np.sort(generator.integers(0, LABELS // 4, (INSTANCES, 4)) * 4 + np.arange(4))
        .ravel()
        .astype(np.int32),
    }
    if kind == "dense":
        arrays["features"] = generator.standard_normal((INSTANCES, 2 * WORDS), np.float32)
    else:
        words = np.sort(generator.integers(0, 10, (INSTANCES, WORDS)) + 10 * np.arange(WORDS))
        arrays["offsets"] = np.arange(INSTANCES + 1) * WORDS
        if kind == "sparse":
            arrays["words"] = words.ravel().astype(np.int32)
            arrays["values"] = np.ones(words.size, np.float32)
        else:
            text = np.full((INSTANCES, WORDS, 5), ord(" "), np.uint8)
            for place in range(4):
                text[:, :, 3 - place] = ord("a") + words // 10**place % 10
            arrays |= {"texts": text.ravel(), "offsets": np.arange(INSTANCES + 1) * WORDS * 5}
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)


CODE = """
import sys
from pathlib import Path
import numpy as np
from xmlc.config import load_config
from xmlc.data import CsrRows, Dataset, TextColumn
from xmlc.data.dataset import Split
from xmlc.memory.process import hard_limit, return_large_blocks
from xmlc.training.prepare import prepare
from xmlc.training.trainer import train_into
data, run, kind, limit, labels, *settings = sys.argv[1:]
arrays = {file.stem: np.load(file, mmap_mode="r") for file in Path(data).iterdir()}
features = texts = None
if kind == "dense":
    features = arrays["features"]
elif kind == "sparse":
    features = CsrRows(arrays["offsets"], arrays["words"], arrays["values"], 3000)
else:
    texts = TextColumn(arrays["offsets"], arrays["texts"])
truth = CsrRows(arrays["label_offsets"], arrays["labels"], None, int(labels))
columns = {"dense": 600, "sparse": 3000, "text": 0}[kind]
split = Split(truth, features, texts)
dataset = Dataset("large", kind, split, None, int(labels), columns, fingerprint="large")
config = load_config(None, ["training.threads=1", *settings])
if kind == "text":
    prepare(dataset, config)  # makes the features' store
return_large_blocks()
with hard_limit(int(limit)):
    train_into(Path(run), dataset, config)
"""


@pytest.mark.parametrize("kind", ["dense", "sparse", "text"])
def test_a_training_set_larger_than_the_limit_trains_under_it(kind: str, tmp_path: Path) -> None:
    write(tmp_path / "data", kind)
    arguments = (str(tmp_path / "data"), str(tmp_path / "run"), kind, str(LIMIT), str(LABELS), *SETTINGS)
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"XMLC_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr
    places = [tmp_path / "data"] if kind != "text" else list((tmp_path / "cache").glob("*/"))
    files = [file for place in places for file in place.glob("*.npy") if "label" not in file.name]
    assert sum(file.stat().st_size for file in files) > 2 * LIMIT
    assert "epoch 1/1" in done.stderr


def test_tokens_stay_in_their_file(tmp_path: Path) -> None:
    lengths = np.full(400_000, 128)
    ids = np.lib.format.open_memmap(tmp_path / "ids.npy", "w+", np.uint16, (int(lengths.sum()),))
    ids[:] = 7
    ids.flush()
    tokens = TokenRows(offsets_of(lengths), np.load(tmp_path / "ids.npy", mmap_mode="r"))
    stream = BatchStream(tokens, CsrRows.empty(len(lengths), 3), np.arange(len(lengths)), 256, seed=0)
    with PeakWatch() as watch:
        start = watch.take()
        total = sum(int(batch.features.ids.sum()) for batch in stream.epoch(0))  # type: ignore[union-attr]
        peak = watch.take() - start
    assert total == 7 * lengths.sum()
    assert peak < 24 << 20 < tokens.ids.nbytes // 4
