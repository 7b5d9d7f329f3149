"""What other programs read of a two-tower run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import problems
import pytest
import two_towers
from click.testing import CliRunner

from xmlc.cli import main
from xmlc.data.pretrained import quiet
from xmlc.errors import CheckpointError, ConfigError
from xmlc.evaluation import load
from xmlc.evaluation.export import export
from xmlc.training.trainer import train_into

TEXTS = ["word15 word16 word17", "", "word3 unknown word7 " + "word9 " * 40]


@pytest.mark.parametrize(
    ("encoder", "projection"),
    [
        ({"frozen": False}, 0),
        ({"frozen": False, "pooling": "cls", "unit_variance": False}, 0),
        ({"frozen": True, "embedding_dtype": "float32"}, encoders.HIDDEN),
        ({"frozen": True, "embedding_dtype": "float32", "unit_variance": False, "pooling": "cls"}, 7),
    ],
)
def test_sentence_transformers_gives_the_same_embeddings(
    encoder: dict[str, Any], projection: int, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = encoders.write(tmp_path / "encoder")
    settings = two_towers.config(
        folder, encoder=encoder, two_tower={"projection": projection}, training={"epochs": 2}
    )
    train_into(tmp_path / "run", two_towers.dataset(60), settings)
    assert export(tmp_path / "run", tmp_path / "out") == tmp_path / "out"
    predictor = load(tmp_path / "run")
    with quiet():
        model = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
        found = model.encode(TEXTS)
    np.testing.assert_allclose(found, predictor.embed(TEXTS), atol=1e-5)
    labels = np.load(tmp_path / "out" / "label_embeddings.npy")
    np.testing.assert_allclose(labels, predictor.embed(two_towers.label_texts()), atol=1e-5)
    scores, best = predictor.top_labels(TEXTS, 3)
    np.testing.assert_allclose(np.take_along_axis(found @ labels.T, best, 1), scores, atol=1e-5)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_labels_of_a_run_of_words_are_exported_by_the_command_line(tmp_path: Path) -> None:
    train_into(tmp_path / "run", two_towers.dataset(60), two_towers.config(training={"epochs": 1}))
    done = CliRunner().invoke(main, ["export", str(tmp_path / "run"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == str(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "label_embeddings.npy",
        "labels.jsonl",
    ]
    rows = [json.loads(line) for line in (tmp_path / "out" / "labels.jsonl").read_text().splitlines()]
    assert rows[5] == {"label": 5, "name": "label 5"}
    labels = np.load(tmp_path / "out" / "label_embeddings.npy")
    assert len(rows) == len(labels) == problems.LABELS
    np.testing.assert_allclose(labels, load(tmp_path / "run").embed(two_towers.label_texts()), atol=1e-6)


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    train_into(tmp_path / "sparse", problems.dataset("text", 40), problems.config(training={"epochs": 1}))
    with pytest.raises(ConfigError, match=r"an export needs a run of model\.output"):
        export(tmp_path / "sparse", tmp_path / "out")
    train_into(tmp_path / "run", two_towers.dataset(40), two_towers.config(training={"epochs": 1}))
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="an export needs a new folder, found something there"):
        export(tmp_path / "run", tmp_path / "there")
    with pytest.raises(CheckpointError, match="must be writable, found"):
        export(tmp_path / "run", tmp_path / "none" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "sparse", "there"]
