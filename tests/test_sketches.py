"""What people who bring an encoder write: a head under it, two towers over label texts, a plan and a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoders
import numpy as np
import problems
import runs
import torch
import two_towers
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer
from workers import in_workers, uneven_rows

import xmlc
from xmlc.data.pretrained import quiet
from xmlc.evaluation.export import export
from xmlc.evaluation.run import evaluate_predictor
from xmlc.losses import multi_positive_loss


def test_a_head_under_an_encoder_in_accelerates_loop(tmp_path: Path) -> None:
    with quiet():
        folder = encoders.write(tmp_path / "encoder")
        encoder, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    known = problems.split("text", 64)

    def collate(rows: list[int]) -> Any:
        texts = tokenizer([known.features[row] for row in rows], padding=True, return_tensors="pt")
        return texts, known.labels[rows]

    class Tagger(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder
            self.head = xmlc.SparseHead(
                encoders.HIDDEN, problems.LABELS, width=128, fan_in=16, loss="bce", learning_rate=1e-2
            )

        def embed(self, texts: Any) -> torch.Tensor:
            return self.encoder(**texts).last_hidden_state[:, 0]  # type: ignore[no-any-return]

        def forward(self, texts: Any, labels: Any) -> Any:
            return self.head(self.embed(texts), labels)

    accelerator = Accelerator(cpu=True)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(list(range(64)), batch_size=16, collate_fn=collate)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(20):
        for texts, labels in loader:
            loss = model(texts, labels).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert np.mean(losses[-4:]) < 0.5 * np.mean(losses[:4])
    texts, labels = collate(list(range(16)))
    scores, found = model.head.topk(model.embed(texts), k=5)
    assert scores.shape == found.shape == (16, 5)
    rows = [set(row.indices.tolist()) for row in labels]
    hits = [int(best) in row for best, row in zip(found[:, 0].tolist(), rows, strict=True) if row]
    assert np.mean(hits) > 0.8


def test_two_towers_over_an_encoder_from_training_to_export(tmp_path: Path) -> None:
    dataset = two_towers.dataset(360)
    predictor = xmlc.train(
        dataset,
        out=tmp_path / "run",
        config=two_towers.config(
            encoders.write(tmp_path / "encoder"),
            two_tower={
                "loss": "decoupled_softmax",
                "temperature": 0.05,
                "mini_batch_size": 8,
                "mined_negatives": 2,
                "mined_from": 8,
                "refresh_epochs": 2,
            },
            training={"epochs": 8},
        ),
    )
    metrics = evaluate_predictor(predictor, dataset, **runs.WHOLE)["metrics"]
    assert metrics["P@1"] > 0.7 and 0.0 < metrics["PSP@5"] <= 1.0
    from sentence_transformers import SentenceTransformer

    export(tmp_path / "run", tmp_path / "out")
    with quiet():
        exported = SentenceTransformer(str(tmp_path / "out"), device="cpu", local_files_only=True)
    index = np.load(tmp_path / "out" / "label_embeddings.npy")
    np.testing.assert_allclose(exported.encode(two_towers.label_texts()), index, atol=1e-5)


def test_a_plan_of_8_million_labels() -> None:
    plan = xmlc.profile(
        xmlc.Sizes(labels=8_623_847, dim=768),
        overrides=["training.batch_size=256", "model.width=65536"],
        budget="4GiB",
    )
    assert plan.fitted is not None and plan.fitted.changes
    assert plan.limited.bytes(plan.limited.peak_phase) <= 4 << 30
    for words in ("output_step", "fits: ", "the largest part is "):
        assert words in str(plan)


QUERIES, KEYS, D = 7, 5, 6
POSITIVES = [[0, 3], [1], [], [4, 0], [2], [2, 3], [1, 4]]


class Towers(torch.nn.Module):
    """One encoder of instances and label texts, with a learnt scale and bias of their scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = torch.nn.Linear(4, D).double()
        self.log_scale = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))

    def forward(self, docs: torch.Tensor, pool: torch.Tensor, positives: list[list[int]]) -> torch.Tensor:
        return multi_positive_loss(
            self.encoder(docs),
            self.encoder(pool),
            positives,
            kind="sigmoid",
            scale=self.log_scale.exp(),
            bias=self.bias,
            tile=2,
        )


def step(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients, of workers after DDP's mean."""
    torch.manual_seed(1)
    docs, pool = torch.randn(QUERIES, 4).double(), torch.randn(KEYS, 4).double()
    rows, columns = uneven_rows(rank, size, QUERIES), uneven_rows(rank, size, KEYS)
    towers = Towers()
    model = towers if size == 1 else DistributedDataParallel(towers)
    loss = model(docs[rows], pool[columns], POSITIVES[rows])
    loss.backward()
    return {"loss": loss.detach()} | {name: each.grad for name, each in towers.named_parameters()}


def test_the_loss_in_plain_ddp_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    expected = step(0, 1)
    assert all(float(value.abs().max()) > 0 for value in expected.values())
    for found in in_workers(2, step, tmp_path):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
