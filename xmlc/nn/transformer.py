"""A Hugging Face encoder under the penultimate layer: texts' tokens to hidden [batch, hidden]."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xmlc.config import EncoderConfig
from xmlc.data.batches import Batch
from xmlc.data.pretrained import first_line, quiet, transformers
from xmlc.data.rows import Int64, TokenRows
from xmlc.data.tokens import TextTokenizer
from xmlc.errors import ConfigError, DataError
from xmlc.files import parse_json
from xmlc.nn.compressed import compressed_activations
from xmlc.nn.encoder import drop

TOKENS_AT_ONCE = 8192
"""Padding included, where nothing is kept for a backward pass."""
_PROBE_SEED = 0


class TransformerEncoder(nn.Module):
    """An encoder of `transformers`, pooled: one vector for each text.

    ::

        states = encoder(tokens)                          # [token, hidden]
        pooled = mean of the states, or the first one     # pooling
        hidden = pooled * sqrt(hidden) / |pooled|         # unit_variance

    The encoder computes in float32, or under autocast in bfloat16; pooling is float32. In training it is on
    the autograd graph with its own dropout, whose bits the batch's generator decides.
    """

    def __init__(self, encoder: nn.Module, config: EncoderConfig, pad: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.pad = pad
        self.hidden = int(encoder.config.hidden_size)  # type: ignore[union-attr, arg-type]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.encoder.parameters()).device

    def forward(self, batch: Batch, dropout: float, generator: torch.Generator) -> Tensor:
        """Return hidden [batch, hidden]; ``dropout`` is that of the pooled embeddings."""
        tokens = batch.features
        if not isinstance(tokens, TokenRows):
            raise DataError("encoder: a transformer reads tokens, found features; use a data set of texts")
        if not self.training:
            return self.embed(tokens)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator))
        # The encoder's own dropout draws from torch's generator: seeded for this step, and put back after it.
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seed)
            with compressed_activations() if self.config.compress_activations else nullcontext():
                pooled = self._pooled(tokens)
        return drop(pooled, dropout, generator)

    @torch.no_grad()
    def embed(self, tokens: TokenRows) -> Tensor:
        """Return hidden [text, hidden] without dropout and graph, texts of about one length at a time."""
        training = self.training
        self.eval()
        hidden = torch.empty(len(tokens), self.hidden, device=self.device)
        for rows in _at_once(tokens.lengths):
            hidden[torch.from_numpy(rows).to(self.device)] = self._pooled(tokens.take(rows))
        self.train(training)
        return hidden

    def _pooled(self, tokens: TokenRows) -> Tensor:
        ids, mask = _padded(tokens, self.pad)
        ids, mask = ids.to(self.device), mask.to(self.device)
        reduced = self.config.autocast == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=reduced):
            states = self.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        states = states.float()
        if self.config.pooling == "cls":
            pooled = states[:, 0]
        else:
            pooled = (states * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        if not self.config.unit_variance:
            return pooled
        return nn.functional.normalize(pooled, dim=1) * math.sqrt(self.hidden)


def load_transformer(folder: Path, config: EncoderConfig, tokenizer: TextTokenizer) -> TransformerEncoder:
    """Load an encoder from its folder: weights from safetensors, no code of the folder, no network.

    Layers that ``config`` freezes, or all, want no gradient. Of a BERT's pooler nothing is kept: it follows
    the states that are pooled here.

    Raises:
        ConfigError: It is no encoder of texts, weights are missing, or a setting does not fit it.
    """
    _check_index(folder)
    try:
        with quiet():
            encoder, loaded = transformers().AutoModel.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                use_kernels=False,  # they are code from the network, and round otherwise than torch
                output_loading_info=True,
            )
    except Exception as error:  # whatever a folder that is none makes of the library
        raise _no_encoder(folder, f"{type(error).__name__}: {first_line(error)}") from None
    encoder.pooler = None
    missing = sorted(name for name in loaded["missing_keys"] if not name.startswith("pooler."))
    missing += [str(each) for each in loaded["mismatched_keys"]]
    if missing:
        raise _no_encoder(folder, f"no weights of {', '.join(missing[:3])} ({len(missing)} in all)")
    settings = encoder.config
    if getattr(settings, "is_encoder_decoder", False) or getattr(settings, "is_decoder", False):
        raise _no_encoder(folder, f"a {settings.model_type} with a decoder")
    _check_sizes(encoder, config, tokenizer, folder)
    _freeze(encoder, config)
    if config.recompute_activations and config.trained:
        settings.use_cache = False  # of decoders; where it is set, recomputing warns
        # Renamed in transformers 5. Its hook on the embeddings, which makes them want gradients, is for the
        # reentrant kind, and would let frozen layers compute gradients.
        enable = getattr(encoder, "activation_checkpointing_enable", encoder.gradient_checkpointing_enable)
        try:
            enable({"use_reentrant": False})
            encoder.disable_input_require_grads()
        except ValueError:
            raise ConfigError(
                f"encoder.recompute_activations: {settings.model_type} in {folder} cannot do that; "
                "set it to false"
            ) from None
    made = TransformerEncoder(encoder, config, tokenizer.pad).eval()
    _probe(made, folder)
    return made


def _check_index(folder: Path) -> None:
    """Check that an index names no pickle and no file that the folder's fingerprint leaves out."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return
    try:
        names = set(parse_json(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _no_encoder(folder, f"an index without files ({type(error).__name__})") from None
    for name in names:
        if not (isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")):
            raise _no_encoder(folder, f"an index that names {name!r}, no safetensors beside it")


def _check_sizes(encoder: Any, config: EncoderConfig, tokenizer: TextTokenizer, folder: Path) -> None:
    positions = getattr(encoder.config, "max_position_embeddings", None) or config.max_length
    accepted = tokenizer.tokenizer.model_max_length
    if not isinstance(accepted, int | float):
        raise _no_encoder(folder, f"a tokenizer whose model_max_length is {accepted!r}")
    longest = min(positions, accepted)
    if config.max_length > longest:
        raise ConfigError(
            f"encoder.max_length: must be at most the {longest} positions of the encoder in {folder}, found "
            f"{config.max_length}; lower it"
        )
    known = encoder.get_input_embeddings().num_embeddings
    if len(tokenizer.tokenizer) > known:
        raise _no_encoder(folder, f"a tokenizer of {len(tokenizer.tokenizer)} tokens where it knows {known}")


def _probe(encoder: TransformerEncoder, folder: Path) -> None:
    """Run it once on texts of the greatest length: this finds what no setting tells.

    An encoder's first token sees the last one; in a model that only looks back it does not, and neither its
    first token nor the mean over all of them stands for a text.
    """
    known = encoder.encoder.get_input_embeddings().num_embeddings  # type: ignore[operator]
    rng = np.random.default_rng(_PROBE_SEED)
    ids = np.repeat(rng.integers(0, known, (1, encoder.config.max_length), dtype=np.int32), 2, axis=0)
    ids[ids == encoder.pad] = (encoder.pad + 1) % known
    ids[1, -1] = (ids[1, -1] + 1) % known
    both = torch.from_numpy(ids).long()
    try:
        with torch.no_grad():
            states = encoder.encoder(input_ids=both, attention_mask=torch.ones_like(both)).last_hidden_state
    except Exception as error:
        raise _no_encoder(folder, f"{type(error).__name__}: {first_line(error)}") from None
    if states.shape != (*both.shape, encoder.hidden):
        raise _no_encoder(folder, f"states of shape {list(states.shape)}")
    if encoder.config.max_length > 1 and torch.equal(states[0, 0], states[1, 0]):
        raise _no_encoder(folder, "a model whose tokens see only those before them")


def _freeze(encoder: nn.Module, config: EncoderConfig) -> None:
    """Take the gradient from everything, or from the first layers and what comes before them."""
    if not config.trained:
        encoder.requires_grad_(False)
        return
    if not config.frozen_layers:
        return
    depth = int(encoder.config.num_hidden_layers)  # type: ignore[union-attr, arg-type]
    stacks = [each for each in encoder.modules() if isinstance(each, nn.ModuleList) and len(each) == depth]
    if not stacks or config.frozen_layers > depth:
        found = f"{depth}" if stacks else "a model that shares or hides them"
        raise ConfigError(
            f"encoder.frozen_layers: must be at most the encoder's layers, found {config.frozen_layers} "
            f"of {found}; lower it, or set encoder.frozen"
        )
    layers = stacks[0]
    first = next(layers.parameters())
    for parameter in encoder.parameters():  # in the order of the data's way: embeddings come first
        if parameter is first:
            break
        parameter.requires_grad_(False)
    layers[: config.frozen_layers].requires_grad_(False)


def _at_once(lengths: Int64) -> Iterator[Int64]:
    """Cut texts, the longest first, into parts of about one length and at most so many padded tokens."""
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        end = first + max(1, TOKENS_AT_ONCE // max(1, int(lengths[order[first]])))
        yield order[first:end]
        first = end


def _padded(tokens: TokenRows, pad: int) -> tuple[Tensor, Tensor]:
    """Return ids int64 and mask float32, [text, token], filled up at the right."""
    lengths = tokens.lengths
    mask = np.arange(int(lengths.max(initial=1))) < lengths[:, None]
    ids = np.full(mask.shape, pad, np.int64)
    ids[mask] = tokens.ids
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.float32))


def _no_encoder(folder: Path, found: str) -> ConfigError:
    return ConfigError(
        f"encoder.path: {folder} must hold a text encoder that transformers' AutoModel loads, found {found}; "
        "name another folder"
    )
