"""Transformer encoders: the pooled states of `transformers`, what is trained of them, what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
import torch
from transformers import (
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    GPT2Config,
    GPT2Model,
    T5Config,
    T5Model,
)

from xmlc.config import EncoderConfig
from xmlc.data.batches import Batch
from xmlc.data.pretrained import quiet
from xmlc.data.rows import CsrRows, TokenRows
from xmlc.data.tokens import TextTokenizer
from xmlc.errors import ConfigError, DataError
from xmlc.nn import transformer as module
from xmlc.nn.transformer import TransformerEncoder, load_transformer

TEXTS = ["word1 word2", "", "word3 " * 40, "unknown word1", "word95 word4 word5"]
VOCABULARY = len(encoders.MARKS) + 4 * encoders.problems.LABELS

Load = Callable[..., TransformerEncoder]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.write(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def load(folder: Path) -> Load:
    def call(at: Path = folder, **settings: Any) -> TransformerEncoder:
        config = EncoderConfig(**encoders.settings(at, **settings))
        return load_transformer(at, config, TextTokenizer.load(at, config.max_length, ""))

    return call


def tokens(folder: Path, texts: list[str] = TEXTS, max_length: int = 12) -> TokenRows:
    return TextTokenizer.load(folder, max_length, "").transform(texts)


def batch(rows: TokenRows) -> Batch:
    return Batch(np.arange(len(rows)), rows, CsrRows(np.zeros(len(rows) + 1, np.int64), np.empty(0), None, 3))


def states(folder: Path, text: str) -> torch.Tensor:
    """The last states [token, hidden] of one text alone, by transformers itself, in float64."""
    with quiet():
        model = BertModel.from_pretrained(folder).double().eval()
    ids = encoders.tokenizer()(text, truncation=True, max_length=12, return_tensors="pt")
    with torch.no_grad():
        return model(ids["input_ids"], ids["attention_mask"]).last_hidden_state[0]


# ---- what is computed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit_variance", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_the_pooled_states_of_each_text_alone(
    pooling: str, unit_variance: bool, folder: Path, load: Load
) -> None:
    hidden = load(pooling=pooling, unit_variance=unit_variance).embed(tokens(folder))
    for text, found in zip(TEXTS, hidden.double(), strict=True):
        alone = states(folder, text)
        wanted = alone.mean(dim=0) if pooling == "mean" else alone[0]
        if unit_variance:
            wanted *= math.sqrt(encoders.HIDDEN) / wanted.norm()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_parts_of_few_tokens_change_nothing(
    folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, rows = load(), tokens(folder)
    whole = encoder.embed(rows)
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 13)
    torch.testing.assert_close(encoder.embed(rows), whole, rtol=1e-4, atol=1e-5)


def test_no_kernel_of_the_network_stands_in_for_torch(load: Load) -> None:
    assert not getattr(load().encoder, "use_kernels", True)


def test_no_text_gives_no_embedding(folder: Path, load: Load) -> None:
    assert load().embed(tokens(folder, [])).shape == (0, encoders.HIDDEN)


def test_autocast_computes_in_bfloat16_and_returns_float32(folder: Path, load: Load) -> None:
    exact, reduced = load().embed(tokens(folder)), load(autocast="bfloat16").embed(tokens(folder))
    assert reduced.dtype == torch.float32
    assert not torch.equal(reduced, exact)
    assert torch.nn.functional.cosine_similarity(exact, reduced).min() > 0.99


def test_evaluation_has_no_dropout_and_training_has(folder: Path, load: Load) -> None:
    encoder, rows = load(frozen=False), batch(tokens(folder))
    generator = torch.Generator().manual_seed(1)
    encoder.eval()
    assert torch.equal(encoder(rows, 0.0, generator), encoder(rows, 0.0, generator))
    encoder.train()
    assert not torch.equal(encoder(rows, 0.0, generator), encoder(rows, 0.0, generator))


def test_dropout_depends_on_the_generator_alone_and_leaves_torchs_own_untouched(
    folder: Path, load: Load
) -> None:
    encoder, rows = load(frozen=False).train(), batch(tokens(folder))
    torch.manual_seed(5)
    first = encoder(rows, 0.3, torch.Generator().manual_seed(1))
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(()))
    assert torch.equal(encoder(rows, 0.3, torch.Generator().manual_seed(1)), first)
    assert not torch.equal(encoder(rows, 0.3, torch.Generator().manual_seed(2)), first)


def test_embedding_in_training_leaves_the_mode_as_it_was(folder: Path, load: Load) -> None:
    encoder = load(frozen=False).train()
    encoder.embed(tokens(folder))
    assert encoder.training
    assert encoder.encoder.training


def test_features_are_refused(load: Load) -> None:
    rows = batch(TokenRows(np.array([0]), np.empty(0, np.uint16)))
    features = Batch(rows.instances, np.ones((0, 4), np.float32), rows.labels)
    with pytest.raises(DataError, match="a transformer reads tokens"):
        load()(features, 0.0, torch.Generator())


# ---- what is trained -------------------------------------------------------------------------------------


def gradients(encoder: TransformerEncoder, rows: TokenRows) -> dict[str, torch.Tensor]:
    encoder.train()
    hidden = encoder(batch(rows), 0.0, torch.Generator().manual_seed(1))
    hidden.backward(torch.arange(hidden.numel()).reshape(hidden.shape).sin())
    return {name: each.grad for name, each in encoder.named_parameters() if each.grad is not None}


def test_frozen_wants_no_gradient(load: Load) -> None:
    assert not any(each.requires_grad for each in load().parameters())


def test_trained_everything_gets_a_gradient(folder: Path, load: Load) -> None:
    encoder = load(frozen=False)
    assert gradients(encoder, tokens(folder)).keys() == dict(encoder.named_parameters()).keys()


@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_layers_and_the_embeddings_below_them_get_none(
    recompute: bool, folder: Path, load: Load
) -> None:
    encoder = load(frozen=False, frozen_layers=1, recompute_activations=recompute)
    names = gradients(encoder, tokens(folder)).keys()
    assert names == {name for name, _ in encoder.named_parameters() if "encoder.layer.1." in name}


def test_frozen_layers_of_a_model_that_names_them_otherwise(tmp_path: Path, load: Load) -> None:
    config = DistilBertConfig(vocab_size=VOCABULARY, dim=16, n_layers=3, n_heads=2, hidden_dim=16)
    with quiet():
        DistilBertModel(config).save_pretrained(tmp_path)
        encoders.tokenizer().save_pretrained(tmp_path)
    encoder = load(tmp_path, frozen=False, frozen_layers=2)
    trained = {name for name, each in encoder.named_parameters() if each.requires_grad}
    assert trained
    assert all("transformer.layer.2." in name for name in trained)


def test_recomputed_activations_give_the_same_gradients(folder: Path, load: Load) -> None:
    plain = gradients(load(frozen=False), tokens(folder))
    again = gradients(load(frozen=False, recompute_activations=True), tokens(folder))
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert torch.equal(gradient, again[name]), name


def test_the_gradient_is_that_of_the_pooled_embedding(folder: Path, load: Load, tmp_path: Path) -> None:
    """Of a model without dropout, against autograd through transformers' own module in float64."""
    at = encoders.write(tmp_path / "still", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    found = gradients(load(at, frozen=False), tokens(at, TEXTS[:2]))
    with quiet():
        model = BertModel.from_pretrained(at).double().eval()
    rows = []
    for text in TEXTS[:2]:
        ids = encoders.tokenizer()(text, return_tensors="pt")["input_ids"]
        pooled = model(ids).last_hidden_state[0].mean(dim=0)
        rows.append(pooled * math.sqrt(encoders.HIDDEN) / pooled.norm())
    hidden = torch.stack(rows)
    hidden.backward(torch.arange(hidden.numel()).double().reshape(hidden.shape).sin())
    wanted = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    largest = max(float(each.abs().max()) for each in wanted.values())
    for name, gradient in found.items():
        expected = wanted[name.removeprefix("encoder.")]
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-5 * largest)


# ---- what is refused -------------------------------------------------------------------------------------


def test_a_length_above_the_positions_is_refused(load: Load) -> None:
    assert load(max_length=encoders.POSITIONS).config.max_length == encoders.POSITIONS
    with pytest.raises(ConfigError, match=r"max_length: must be at most the 24 positions .* found 25"):
        load(max_length=25)


def test_more_frozen_layers_than_there_are_are_refused(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"frozen_layers: must be at most .* found 3 of 2"):
        load(frozen=False, frozen_layers=3)


def test_recomputing_where_the_model_cannot_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BertModel, "supports_gradient_checkpointing", False)
    with pytest.raises(
        ConfigError, match=r"recompute_activations: bert in .* cannot do that; set it to false"
    ):
        load(frozen=False, recompute_activations=True)
    assert load(recompute_activations=True)  # a frozen encoder has nothing to recompute


def test_weights_that_are_missing_are_refused_and_not_drawn(tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path)
    two = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(two.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ConfigError, match=r"found no weights of encoder\.layer\.2"):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"intermediate_size": 48', '"intermediate_size": 40'))
    with pytest.raises(ConfigError, match="must hold a text encoder"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"model_type": "no such"}', b"\xff\xfe"])
def test_settings_that_are_none_are_refused(content: bytes, tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"encoder\.path: .* must hold"):
        load(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
    with pytest.raises(ConfigError, match="must hold a text encoder"):
        load(tmp_path)


def test_a_decoder_is_refused(tmp_path: Path, load: Load) -> None:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=24)
    with quiet():
        GPT2Model(config).save_pretrained(tmp_path)
        encoders.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="found a model whose tokens see only those before them"):
        load(tmp_path)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path, load: Load) -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with quiet():
        T5Model(config).save_pretrained(tmp_path)
        encoders.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="found a t5 with a decoder"):
        load(tmp_path)


def test_a_tokenizer_that_says_no_number_of_tokens_is_refused(tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": "x"}))
    with pytest.raises(ConfigError, match="found a tokenizer whose model_max_length is 'x'"):
        load(tmp_path)


def test_a_tokenizer_of_more_tokens_than_the_encoder_knows_is_refused(tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path, vocab_size=50)
    with pytest.raises(ConfigError, match="a tokenizer of 100 tokens where it knows 50"):
        load(tmp_path)


def test_code_in_the_folder_is_never_run(tmp_path: Path, load: Load) -> None:
    encoders.write(tmp_path)
    mark = tmp_path / "it ran"
    (tmp_path / "modeling_own.py").write_text(f"open({str(mark)!r}, 'w')\nclass Own: pass\n")
    text = (tmp_path / "config.json").read_text()
    own = (
        '"auto_map": {"AutoModel": "modeling_own.Own", "AutoConfig": "modeling_own.Own"}, "model_type": "own"'
    )
    (tmp_path / "config.json").write_text(text.replace('"model_type": "bert"', own))
    with pytest.raises(ConfigError, match="must hold"):
        load(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (
            '{"weight_map": {"a": "pytorch_model.bin"}}',
            "an index that names 'pytorch_model.bin', no safetensors",
        ),
        ('{"weight_map": {"a": "../model.safetensors"}}', "an index that names .*, no safetensors beside it"),
        ("[]", r"an index without files \(TypeError\)"),
    ],
)
def test_an_index_names_only_safetensors_in_its_folder(index: str, words: str, tmp_path: Path) -> None:
    """The library would unpickle the first, and read the second, of which no fingerprint knows."""
    folder = encoders.write(tmp_path)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=words):
        load_transformer(folder, EncoderConfig(kind="transformer", path="x"), None)  # type: ignore[arg-type]
