"""Tiny random encoders, written as a user's folder would be: no download, nothing trained.

Tokens are the words of `problems`' texts, so that the encoder tells labels apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problems
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from xmlc.data.pretrained import quiet

HIDDEN = 32
LAYERS = 2
POSITIONS = 24
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tokenizer(labels: int = problems.LABELS, pad: str | None = "[PAD]") -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    words = [*MARKS, *(f"word{number}" for number in range(4 * labels))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token=pad
    )


def bert(seed: int = 0, **settings: Any) -> BertModel:
    """Return a BERT of two layers with random weights."""
    config = BertConfig(
        **{
            "vocab_size": len(MARKS) + 4 * problems.LABELS,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.2,
            **settings,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(config)


def write(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """Write encoder and tokenizer, and return the folder."""
    with quiet():
        bert(seed, **settings).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    """Return the section ``encoder`` that takes this folder."""
    return {"kind": "transformer", "path": str(folder), "max_length": 12, **others}
