"""The whole model: encoder, penultimate layer, output layer."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc.checkpoint import CheckpointReader, Storable
from xmlc.config import Config, ModelConfig
from xmlc.data.batches import Batch
from xmlc.data.rows import CsrRows, unit_length
from xmlc.errors import ConfigError
from xmlc.metrics import inverse_propensity
from xmlc.nn.direct import DirectConnections
from xmlc.nn.encoder import BagOfWords, DenseFeatures, drop, drop_features
from xmlc.nn.label_parallel import LabelParallelOutput, unit_of
from xmlc.nn.output_layer import DenseOutput, OutputLayer, SparseOutput
from xmlc.nn.penultimate import PenultimateLayer
from xmlc.nn.scratch import ScratchFiles, Zeros, in_memory
from xmlc.nn.similarity import Similarity
from xmlc.nn.transformer import TransformerEncoder
from xmlc.ops import LogitOffsets
from xmlc.ops.float8 import is_float8, scales
from xmlc.parallel import ALONE, OwnLabels, Workers, deal_labels


@dataclass(frozen=True)
class Problem:
    """What a model must know of its data set."""

    dense_features: bool
    """Whether hidden is given: by dense features, or by a transformer."""
    feature_count: int
    """Of a transformer the width of its embeddings."""
    label_count: int
    instances: int
    """Training instances."""
    propensity_a: float
    propensity_b: float
    label_instances: NDArray[np.int64]
    """Training instances of each label, before any are held out. [label]"""
    word_count: int = 0
    """Sparse features beside a transformer, where direct connections or similarity see some."""

    @property
    def words(self) -> int:
        """Sparse features that direct connections and similarity see."""
        return self.word_count or self.feature_count

    @cached_property
    def inverse_propensity(self) -> NDArray[np.float64]:
        """1 / p of every label (Jain et al. 2016). [label]"""
        return inverse_propensity(self.label_instances, self.instances, self.propensity_a, self.propensity_b)

    def facts(self) -> dict[str, int | float | bool]:
        """Return the plain values, all but ``label_instances``."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


ON_DISK = frozenset({"output.indices", "output.weight"})
"""Weights that ``training.storage = "disk"`` keeps out of memory, and with them the optimizer's state."""


def weight_shapes(config: Config, problem: Problem) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight by its name in `Model.tensors`, without making any.

    Raises:
        ConfigError: Labels have more inputs than the layer before them has outputs.
    """
    model = config.model
    shapes: dict[str, tuple[int, ...]] = {}
    hidden = problem.feature_count
    if not problem.dense_features:
        shapes["encoder.embedding"] = (problem.feature_count, model.hidden)
        hidden = model.hidden
    if model.output == "two_tower":
        units = config.two_tower.projection
        return shapes | ({"projection.weight": (units, hidden)} if units else {})
    width = _width(config)
    if width:
        shapes |= {"penultimate.weight": (width, hidden), "penultimate.bias": (width,)}
    inputs = width or hidden
    if model.output == "sparse":
        if model.fan_in > inputs:
            raise ConfigError(
                f"model.fan_in: must be at most the encoder's {inputs} outputs, as model.width = 0 leaves "
                f"out the penultimate layer, found {model.fan_in}; lower it or give model.width"
            )
        inputs = model.fan_in
        shapes["output.indices"] = (-(-problem.label_count // model.group_size), model.fan_in)
        if is_float8(getattr(torch, model.weight_dtype)):
            shapes["output.weight_scale"] = (scales(problem.label_count),)
        if model.direct_fan_in:
            direct = (problem.label_count, model.direct_fan_in)
            shapes |= {"output.direct.indices": direct, "output.direct.weight": direct}
    return shapes | {"output.weight": (problem.label_count, inputs), "output.bias": (problem.label_count,)}


def check_memory(config: Config, problem: Problem) -> None:
    """Check that this machine has the memory for the weights alone, as they are drawn in float32.

    Those on the disk need none.

    Raises:
        ConfigError: It has not, or labels have more inputs than there are.
    """
    shapes = weight_shapes(config, problem)
    if config.training.storage == "disk":
        shapes = {name: shape for name, shape in shapes.items() if name not in ON_DISK}
    tensors = {name: (shape, torch.float32) for name, shape in shapes.items()}
    check_fits("model", tensors, "model.width, model.hidden or model.fan_in, or keep fewer features")


def check_fits(where: str, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], lower: str) -> None:
    """Check that this machine has the memory for tensors of these shapes and dtypes.

    Args:
        where: Names who makes them in the error.
        tensors: By name.
        lower: What to lower where they do not fit.

    Raises:
        ConfigError: It has not.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in tensors.items()}
    needed_bytes = sum(sizes.values())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed_bytes > memory_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"{where}: the weights must fit into this machine's memory of {memory_bytes / 2**30:,.1f} GiB, "
            f"found {needed_bytes / 2**30:,.1f} GiB, the most in {largest} {list(tensors[largest][0])}; "
            f"lower {lower}"
        )


def _width(config: Config) -> int:
    """Return the units of the penultimate layer, 0 where there is none."""
    return {"sparse": config.model.width, "bottleneck": config.model.bottleneck, "dense": 0}[
        config.model.output
    ]


Encoder = BagOfWords | DenseFeatures | TransformerEncoder


def make_encoder(
    config: Config, problem: Problem, transformer: TransformerEncoder | None, generator: torch.Generator
) -> Encoder:
    """Return the encoder with its weights drawn; a ``transformer`` that is trained brings its own."""
    if transformer is not None:
        return transformer
    if problem.dense_features:
        return DenseFeatures(problem.feature_count)
    return BagOfWords(problem.feature_count, config.model.hidden, config.data.unit_length, generator)


def hidden_of(
    encoder: Encoder, config: ModelConfig, batch: Batch, generator: torch.Generator | None
) -> Tensor:
    """Return hidden [batch, hidden] on the autograd graph; with a generator, after dropout."""
    train = generator is not None
    generator = generator or torch.Generator()
    encoder.train(train)
    if len(batch.instances) == 0:  # of a worker that has none of a short batch
        return next(chain(encoder.parameters(), encoder.buffers())).new_zeros(0, encoder.hidden)
    hidden = encoder(batch, config.input_dropout if train else 0.0, generator)
    if config.hidden_activation == "relu":
        hidden = hidden.relu()
    return drop(hidden, config.hidden_dropout if train else 0.0, generator)


class Model:
    """Encoder -> penultimate layer, but for ``output = "dense"`` or ``width = 0`` -> output layer."""

    def __init__(
        self,
        config: Config,
        problem: Problem,
        transformer: TransformerEncoder | None = None,
        scratch: Path | None = None,
        workers: Workers = ALONE,
    ) -> None:
        """Draw the weights; a ``transformer`` that is trained brings its own.

        ``scratch`` is the folder for the files of ``training.storage = "disk"``. Several ``workers`` share
        out the labels of a sparse output layer; each has all else whole, the same at the start.
        """
        check_memory(config, problem)
        self.config = config
        self.problem = problem
        self.similarity: Similarity | None = None  # not trained: given by who has the texts
        model = config.model
        generator = torch.Generator().manual_seed(config.training.seed)
        self.encoder = make_encoder(config, problem, transformer, generator)
        hidden = self.encoder.hidden
        width = _width(config)
        block_bytes = config.training.block_bytes
        self.penultimate = (
            PenultimateLayer(hidden, width, model.penultimate_init, generator, block_bytes) if width else None
        )
        bias = _initial_bias(config, problem)
        weight = _positive_weight(config, problem)
        self.output: OutputLayer
        if model.output == "sparse":
            own = None
            if workers.size > 1:
                shares = deal_labels(
                    problem.label_count, workers.size, unit_of(model), problem.label_instances
                )
                own = OwnLabels(shares, workers)
            part = SparseOutput(
                problem.label_count,
                model.model_copy(update={"width": width or hidden}),
                config.loss,
                config.output_optimizer,
                bias,
                weight,
                config.training.seed,
                generator,
                _direct_connections(config, problem, problem.label_count if own is None else len(own.labels)),
                _zeros(config, scratch),
                None if own is None else own.labels,
                config.output_optimizer.state_dtype,
            )
            self.output = part if own is None else LabelParallelOutput(part, own)
        else:
            self.output = DenseOutput(
                problem.label_count, width or hidden, config.loss, bias, weight, generator, block_bytes
            )

    def move(self, device: torch.device) -> None:
        """Move all weights and the output layer's state to a device; optimizers are made after that."""
        self.encoder.to(device)
        if self.penultimate is not None:
            self.penultimate.linear.move(device)
        self.output.move(device)

    def hidden(self, batch: Batch, generator: torch.Generator | None = None) -> Tensor:
        """Return hidden [batch, hidden] on the autograd graph; with a generator, after dropout."""
        return hidden_of(self.encoder, self.config.model, batch, generator)

    def features(self, hidden: Tensor) -> Tensor:
        """Return the output layer's input, [input, batch] contiguous."""
        return hidden.T.contiguous() if self.penultimate is None else self.penultimate(hidden)

    def direct_features(self, batch: Batch, generator: torch.Generator | None = None) -> CsrRows | None:
        """Return what the direct connections see, [batch, feature], or None without such connections."""
        if not self.config.model.direct_fan_in:
            return None
        features = self.words(batch)
        return (
            features
            if generator is None
            else drop_features(features, self.config.model.input_dropout, generator)
        )

    def words(self, batch: Batch) -> CsrRows:
        """Return the sparse features [batch, feature] that direct connections and similarity see."""
        if isinstance(self.encoder, BagOfWords):
            return self.encoder.rows(batch)
        assert batch.words is not None, "checked where the stream was made"
        return unit_length(batch.words) if self.config.data.unit_length else batch.words

    def top_labels(self, batch: Batch, k: int, further: LogitOffsets | None = None) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k] of the batch's instances, best first, on the CPU.

        ``further`` is added to the logits, where the output layer can do that.
        """
        offsets = self._similarity(batch)
        if further is not None:
            offsets = further.and_also(offsets)
        with torch.no_grad():
            features = self.features(self.hidden(batch))
            scores, labels = self.output.top_labels(features, k, self.direct_features(batch), offsets)
        return scores.cpu(), labels.cpu()

    def _similarity(self, batch: Batch) -> LogitOffsets | None:
        if self.similarity is None:
            return None
        return self.similarity.offsets(self.words(batch))

    def tensors(self) -> dict[str, Tensor]:
        """Return every weight and the output layer's optimizer state by name, sharing memory."""
        tensors = {f"encoder.{name}": value for name, value in self.encoder.state_dict().items()}
        if self.penultimate is not None:
            linear = self.penultimate.linear
            tensors |= {"penultimate.weight": linear.weight, "penultimate.bias": linear.bias}
        return tensors | {f"output.{name}": value for name, value in self.output.tensors().items()}

    def stored(self) -> dict[str, Storable]:
        """Return `tensors` as a checkpoint takes them: of all labels, whoever has them."""
        stored: dict[str, Storable] = dict(self.tensors())
        if isinstance(self.output, LabelParallelOutput):
            stored |= {f"output.{name}": value for name, value in self.output.stored().items()}
        return stored

    def read(self, reader: CheckpointReader) -> None:
        """Read every tensor in place, from ``model.<name>``; of labels that are shared out the own ones.

        Raises:
            KeyError: The checkpoint lacks one.
            CheckpointError: One does not fit, or is not what was written.
        """
        tensors = self.tensors()
        if isinstance(self.output, LabelParallelOutput):
            self.output.read(reader, "model.output.")
            tensors = {name: value for name, value in tensors.items() if not name.startswith("output.")}
        read_weights(reader, tensors)


def read_weights(reader: CheckpointReader, tensors: Mapping[str, Tensor]) -> None:
    """Read tensors in place, each from ``model.<name>`` of a checkpoint.

    Raises:
        KeyError: The checkpoint lacks one.
        CheckpointError: One does not fit, or is not what was written.
    """
    for name, tensor in tensors.items():
        reader.read_into(f"model.{name}", tensor)


def _direct_connections(config: Config, problem: Problem, label: int) -> DirectConnections | None:
    fan_in = config.model.direct_fan_in
    if not fan_in:
        return None
    if problem.dense_features and not problem.word_count:
        raise ConfigError(
            "model.direct_fan_in: needs texts or sparse features, found dense ones; set it to 0"
        )
    return DirectConnections(label, problem.words, fan_in, config.output_optimizer)


def _zeros(config: Config, scratch: Path | None) -> Zeros:
    """Return what makes the sparse output layer's tensors."""
    if config.training.storage == "memory":
        return in_memory
    assert scratch is not None, "who trains or loads a model names the folder"
    return ScratchFiles(scratch, config.training.threads or torch.get_num_threads()).zeros


def _initial_bias(config: Config, problem: Problem) -> Tensor:
    given = config.model.bias_init
    if given != "auto":
        return torch.full((problem.label_count,), float(given))
    if config.loss.kind == "squared_hinge":
        return torch.full((problem.label_count,), -1.0)
    share = (torch.from_numpy(problem.label_instances) + 0.5) / (problem.instances + 1.0)
    return share.logit().float()


def _positive_weight(config: Config, problem: Problem) -> Tensor | None:
    loss = config.loss
    if loss.positive_weight == 1.0 and not loss.positive_weight_propensity:
        return None
    weight = np.full(problem.label_count, loss.positive_weight)
    if loss.positive_weight_propensity:
        weight = weight * problem.inverse_propensity
    return torch.from_numpy(weight.astype(np.float32))
