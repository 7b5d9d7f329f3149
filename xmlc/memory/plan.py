"""The bytes that a run will hold, tensor by tensor and phase by phase, before anything is allocated.

Counted is what a training process holds beyond an interpreter with this package imported. Native workspaces
are not guessed: the ops are asked. `docs/memory.md` has the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from xmlc.config import Config
from xmlc.memory.encoding import encoding
from xmlc.memory.terms import ASKED, STATISTICS_BYTES, Batches, Plan, Term, largest, of_shape, vocabulary
from xmlc.memory.towers import tower_plan
from xmlc.nn.dense import rows_of_block
from xmlc.nn.model import ON_DISK, Problem, weight_shapes
from xmlc.nn.output_layer import LABELS_DRAWN_AT_ONCE, LOGITS_SORTED_AT_ONCE, absent_state
from xmlc.nn.similarity import INSTANCES_AT_ONCE
from xmlc.ops import checks
from xmlc.ops.fused_step import workspace_bytes as fused_step_bytes
from xmlc.ops.redistribute import workspace_bytes as redistribute_bytes
from xmlc.ops.top_labels import workspace_bytes as top_labels_bytes
from xmlc.sparsity import index_dtype

RANKS = 5
TOUCHED_COPIES = 6
"""Of the embedding's rows that a batch touches, each once, in a step of Adam: the gradient's sum, moments
before, their changes, the weights' change."""


def plan(config: Config, problem: Problem, batches: Batches) -> Plan:
    """Plan what the process of a run holds; what a CUDA device does, `memory.device` plans.

    The problem's ``label_instances`` are not read: their number counts.

    Raises:
        ConfigError: Two towers cannot be planned as they are set.
    """
    if config.model.output == "two_tower":
        return tower_plan(config, problem, batches)
    sizes = Sizes(config, problem, batches)
    if config.training.device == "cuda":
        return _beside_device(sizes)
    held = held_throughout(sizes)
    mapped = tuple(filter(_may_be_mapped, held)) if config.training.storage == "disk" else ()
    return Plan(
        tuple(term for term in held if term not in mapped),
        {
            **encoding(sizes.encoder, config.encoder, problem.instances),
            "load": tuple(_load(sizes)),
            "forward": (*_forward(sizes, sizes.batch), *encoder_forward(sizes)),
            "output_step": tuple(_output_step(sizes)),
            "backward": (*_forward(sizes, sizes.batch), *backward(sizes)),
            "dense_update": (*_forward(sizes, sizes.batch), *dense_update(sizes)),
            "redistribution": tuple(_redistribution(sizes)),
            "validation": tuple(_validation(sizes)),
            "checkpoint": tuple(checked_weights(sizes)),
        },
        mapped,
    )


def held_throughout(s: Sizes) -> tuple[Term, ...]:
    """Return all that is held throughout, wherever it is."""
    return (*_weights(s), *_optimizer_state(s), *_statistics(s))


def moves(term: Term) -> bool:
    """Return whether a term of `held_throughout` lies on the device where there is one."""
    stays = term.category == "statistics" or term.name.startswith("output.direct.")
    return term.name == "positive_weight" or not stays


def _beside_device(s: Sizes) -> Plan:
    """Plan what the process holds where the model is on a device.

    All weights and the output layer's state are made here before they move.
    """
    held = held_throughout(s)
    batch, evaluated = (tuple(_rows(s, size)) for size in (s.batch, s.evaluated))
    nothing: tuple[Term, ...] = ()
    return Plan(
        tuple(term for term in held if not moves(term)),
        {
            **encoding(s.encoder, s.config.encoder, s.problem.instances),  # as if it were here
            "load": (*(term for term in held if moves(term) and term.at_load), *_load(s)),
            "forward": batch,
            "output_step": nothing,
            "backward": nothing,
            "dense_update": nothing,
            "redistribution": nothing,
            "validation": tuple(largest([*evaluated, *_compared(s)], list(_deciles(s)))),
            "checkpoint": (Term("a piece of a tensor on its way", "temporary", PIECE_BYTES, "16 MiB"),),
        },
    )


def _may_be_mapped(term: Term) -> bool:
    return term.name in ON_DISK or term.name.startswith("output.state.")


class Sizes:
    """The numbers that the formulas speak of."""

    def __init__(self, config: Config, problem: Problem, batches: Batches) -> None:
        model = config.model
        self.config, self.problem, self.batches = config, problem, batches
        self.sparse = model.output == "sparse"
        self.label = problem.label_count
        self.batch = config.training.batch_size
        self.evaluated = min(config.training.evaluation_batch, max(batches.instances, 1))
        self.hidden = problem.feature_count if problem.dense_features else model.hidden
        self.width = {"sparse": model.width, "bottleneck": model.bottleneck, "dense": 0}[model.output]
        self.input = self.width or self.hidden
        self.threads = config.training.threads or torch.get_num_threads()
        self.shapes = weight_shapes(config, problem)
        self.encoder = batches.encoder
        self.weight_dtype: torch.dtype = getattr(torch, model.weight_dtype)

    def layer(self) -> dict[str, Any]:
        """Return the output layer as the ops take one that does not exist yet."""
        model = self.config.model
        return checks.absent_layer(self.label, model.fan_in, self.input, model.group_size, self.weight_dtype)

    def threads_for(self, multiply_adds: int) -> int:
        """Return the threads of a call on the CPU."""
        return 1 if multiply_adds < 1 << 20 else self.threads

    def block(self, rows: int, columns: int) -> int:
        """Return the rows of a block of a `BlockedLinear`."""
        return min(rows, rows_of_block(columns, self.config.training.block_bytes))

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element of a weight."""
        if name == "output.indices":
            return index_dtype(self.input).itemsize
        return self.weight_dtype.itemsize if name == "output.weight" and self.sparse else 4


def _weights(s: Sizes) -> Iterator[Term]:
    if s.encoder is not None:
        yield Term("encoder", "weights", s.encoder.weights, "weights and buffers that lie in no mapped file")
        yield Term("encoder once trained", "weights", s.encoder.mapped, "weights that do, and change", False)
    for name, shape in s.shapes.items():
        yield Term(name, "weights", *of_shape(shape, s.itemsize(name)))


def _optimizer_state(s: Sizes) -> Iterator[Term]:
    copies = {"sgd": 0, "momentum": 1, "adam": 2}
    dense = [name for name in s.shapes if name.startswith(("encoder.", "penultimate."))]
    output = ["output.weight", "output.bias"] if not s.sparse else []
    for names, kind in ((dense, s.config.dense_optimizer.kind), (output, s.config.output_optimizer.kind)):
        for name in names:
            size, formula = of_shape(s.shapes[name], 4)
            if copies[kind]:
                yield Term(
                    f"{kind} of {name}",
                    "optimizer",
                    copies[kind] * size,
                    f"{copies[kind]} * {formula}",
                    False,
                )
    if s.encoder is not None and copies[s.config.encoder_optimizer.kind] and s.encoder.trained:
        kind = s.config.encoder_optimizer.kind
        size, formula = copies[kind] * s.encoder.trained, f"{copies[kind]} * {s.encoder.trained:,}"
        yield Term(f"{kind} of encoder", "optimizer", size, formula, False)
    if not s.sparse:
        return
    optimizer = s.config.output_optimizer
    state = absent_state(optimizer.kind, s.label, s.config.model.fan_in, optimizer.state_dtype)
    for name, tensor in state.tensors().items():
        yield Term(f"output.state.{name}", "optimizer", *of_shape(tuple(tensor.shape), tensor.itemsize))
    if s.config.model.direct_fan_in:
        shape = s.shapes["output.direct.weight"]
        if s.config.output_optimizer.kind == "adam":
            size, formula = of_shape(shape, 4)
            yield Term("output.direct.state", "optimizer", 2 * size, f"2 * {formula}")
        yield Term("direct connections by feature", "statistics", *of_shape(shape, 4), False)


def _statistics(s: Sizes) -> Iterator[Term]:
    yield Term("label_instances", "statistics", *of_shape((s.label,), 8))
    size, formula = of_shape((s.problem.instances,), 8)
    yield Term("rows of the instances, and their order", "statistics", 2 * size, f"2 * {formula}")
    yield Term("inverse_propensity", "statistics", *of_shape((s.label,), 8), at_load=_weighted(s))
    if _weighted(s) or s.config.loss.positive_weight != 1.0:
        yield Term("positive_weight", "statistics", *of_shape((s.label,), 4))
    similarity, problem, batches = s.config.similarity, s.problem, s.batches
    yield from vocabulary(batches)
    if similarity.text_weight > 0.0:  # as long as the instances' texts, for want of better knowledge
        entries = round(s.label * batches.words)
        yield Term("similarity.texts", "statistics", *of_shape((entries,), 8))
    if similarity.neighbour_weight > 0.0:
        entries = round(problem.instances * batches.words)
        yield Term("similarity.instances", "statistics", *of_shape((entries,), 8))
        entries = round(problem.instances * batches.positives)
        yield Term("similarity.labels", "statistics", *of_shape((entries,), 4))


def _weighted(s: Sizes) -> bool:
    return s.config.loss.positive_weight_propensity


def _load(s: Sizes) -> Iterator[Term]:
    if s.config.model.direct_fan_in:  # chosen before the layer is made, which takes them for its own then
        size, formula = of_shape(s.shapes["output.direct.weight"], 4)
        yield Term("direct connections as chosen", "temporary", 2 * size, f"2 * {formula}")
    if s.sparse and s.config.model.weight_init != "zero":
        rows = min(LABELS_DRAWN_AT_ONCE, s.label)
        yield Term("block of drawn weights", "temporary", *of_shape((rows, s.config.model.fan_in), 4))


def _forward(s: Sizes, batch: int) -> Iterator[Term]:
    yield from features(s, batch)
    if not s.problem.dense_features:
        entries = round(batch * s.batches.words)
        yield Term("words of the batch", "batch", *of_shape((entries,), 40))


def features(s: Sizes, batch: int) -> Iterator[Term]:
    """Yield what the layers before the output give it, and what they have it from."""
    yield Term("hidden", "batch", *of_shape((batch, s.hidden), 4))
    if s.width:
        yield Term("features", "batch", *of_shape((s.width, batch), 4))


def _rows(s: Sizes, batch: int) -> Iterator[Term]:
    """Yield a batch on its way to the device."""
    if s.problem.dense_features and s.encoder is None:
        yield Term("rows of the batch", "batch", *of_shape((batch, s.hidden), 4))
    if not s.problem.dense_features:
        entries = round(batch * s.batches.words)
        yield Term("words of the batch", "batch", *of_shape((entries,), 40))


def _narrow_features(s: Sizes, batch: int) -> Iterator[Term]:
    if s.config.model.feature_dtype == "bfloat16":  # which the CPU's kernels take widened
        yield Term("features in bfloat16, and widened", "temporary", *of_shape((s.input, batch), 6))


def _output_step(s: Sizes) -> Iterator[Term]:
    yield from _forward(s, s.batch)
    if s.encoder is not None and s.encoder.trained:
        yield Term("activations of the encoder", "batch", s.encoder.kept(s.batch), ASKED)
    yield Term("gradient of the features", "batch", *of_shape((s.input, s.batch), 4))
    if s.sparse:
        yield from _direct_logits(s, s.batch, "step")
        yield from _narrow_features(s, s.batch)
        pairs = round(s.batch * s.batches.positives)
        config = s.config
        size = fused_step_bytes(
            s.layer(),
            s.batch,
            pairs,
            config.loss.kind,
            config.output_optimizer.kind,
            s.threads_for(s.label * config.model.fan_in * s.batch),
        )
        yield Term("workspace of fused_step", "workspace", size, "asked of the op")
    else:
        yield logits(s, s.batch, LOSS_BYTES)


LOSS_BYTES = 37
"""Of a logit of the dense output: nine floats and a flag, of autograd through the loss."""
_SORT_BYTES = 32
"""Of a logit of the dense output while it is ranked: copies, order and labels."""
PIECE_BYTES = 16 << 20
"""Of what a checkpoint copies at a time."""
CHECKED_AT_ONCE = 1 << 20
"""Of float8 weights, which are widened to look for what is not finite."""


def encoder_forward(s: Sizes) -> Iterator[Term]:
    """Yield what a trained encoder takes beside its weights."""
    if s.encoder is not None and s.encoder.trained:
        yield Term("forward pass of the encoder", "batch", s.encoder.forward_peak(s.batch), ASKED)


def logits(s: Sizes, batch: int, logit_bytes: int) -> Term:
    """Return a block of the dense output's logits, and what is made of it."""
    shape = (s.block(s.label, s.input), batch)
    return Term("logits of a block", "temporary", *of_shape(shape, logit_bytes))


def backward(s: Sizes) -> Iterator[Term]:
    """Yield what the way back to the encoder's weights takes besides `features`."""
    yield Term("gradient of the features", "batch", *of_shape((s.input, s.batch), 4))
    if s.width:
        yield Term("gradient of hidden", "batch", *of_shape((s.batch, s.hidden), 4))
    if s.encoder is not None and s.encoder.trained:
        yield Term("backward pass of the encoder", "batch", s.encoder.backward_peak(s.batch), ASKED)
    if not s.problem.dense_features:
        yield _embedding_gradient(s)


def dense_update(s: Sizes) -> Iterator[Term]:
    """Yield what the update of penultimate layer and encoder takes besides `features`."""
    yield Term("gradient of the features", "batch", *of_shape((s.input, s.batch), 4))
    if s.encoder is not None and s.encoder.trained:
        yield Term("gradients of the encoder", "temporary", s.encoder.trained, "of its trained weights")
    block = (s.block(s.width, s.hidden), s.hidden)
    blocks = [Term("gradient of a block of penultimate", "temporary", *of_shape(block, 4))] if s.width else []
    if s.problem.dense_features:
        yield from blocks
    else:  # the embedding's gradient is there before, and its update comes after
        size, formula = of_shape((_distinct(s), s.hidden), 4)
        adam, clipped = s.config.dense_optimizer.kind == "adam", s.config.training.clip_norm > 0.0
        copies = TOUCHED_COPIES if adam else 2 * clipped  # to clip it, the gradient's sum and its squares
        touched = Term("its sum by word, and changes", "temporary", copies * size, f"{copies} * {formula}")
        by_entry = _embedding_gradient(s)
        yield from largest([*blocks, by_entry], [by_entry, touched])


def _embedding_gradient(s: Sizes) -> Term:
    return Term("gradient of the embedding", "temporary", *of_shape((_entries(s), s.hidden), 4))


def _entries(s: Sizes) -> int:
    """Return the words of a batch, as often as they occur."""
    return round(s.batch * s.batches.words)


def _distinct(s: Sizes) -> int:
    """Return the words of a batch, each once: as expected, or where nothing is known as many as can be."""
    most = min(_entries(s), s.problem.feature_count)
    known = s.batches.distinct_words
    return most if known is None else min(most, known.expected(s.batch))


def checked_weights(s: Sizes) -> Iterator[Term]:
    """Yield what it takes to see that a model may be saved."""
    if s.sparse and s.weight_dtype.itemsize == 1:
        checked = min(CHECKED_AT_ONCE, s.label * s.config.model.fan_in)
        yield Term("weights in float8, widened", "temporary", *of_shape((checked,), 4))


def _redistribution(s: Sizes) -> Iterator[Term]:
    if s.sparse:
        size = redistribute_bytes(s.layer(), s.threads_for(8 * s.label * s.config.model.fan_in))
        yield Term("workspace of redistribute", "workspace", size, "asked of the op")


def _validation(s: Sizes) -> Iterator[Term]:
    ranking = list(_forward(s, s.evaluated))
    if s.sparse:
        ranking += _narrow_features(s, s.evaluated)
        size = top_labels_bytes(
            s.layer(), s.evaluated, RANKS, s.threads_for(s.label * s.config.model.fan_in * s.evaluated)
        )
        ranking.append(Term("workspace of top_labels", "workspace", size, "asked of the op"))
    else:
        ranking += ranked_logits(s)
    direct = _direct_logits(s, s.evaluated, "with similarity" if s.config.similarity.used else "ranking")
    ranking += largest(list(_compared(s)), list(direct))
    others = [*_deciles(s)]
    if s.encoder is not None and s.encoder.trained:
        embedding = s.encoder.evaluation_peak(s.evaluated)
        others.append(Term("embedding texts", "batch", embedding, ASKED))
    yield from largest(ranking, *([other] for other in others))


def ranked_logits(s: Sizes) -> Iterator[Term]:
    """Yield what the dense output takes to rank its labels."""
    block = s.block(s.label, s.input)
    blocks_held = 2 if block < s.label else 1  # one goes when the next has come
    yield logits(s, s.evaluated, 4 * blocks_held)
    sorted_at_once = min(LOGITS_SORTED_AT_ONCE, block * s.evaluated)
    yield Term("sorting", "temporary", *of_shape((sorted_at_once,), _SORT_BYTES))


def _deciles(s: Sizes) -> Iterator[Term]:
    yield Term("label deciles", "statistics", *of_shape((s.label,), STATISTICS_BYTES))


DIRECT_BYTES = {"step": 24, "ranking": 40, "with similarity": 95}
"""Of a logit that direct connections add to: label, instance, value, gradient, and where it comes from;
put in order with what similarity adds, as measured."""


def _direct_logits(s: Sizes, batch: int, where: str) -> Iterator[Term]:
    entries = round(batch * s.batches.direct_logits)
    if entries:
        yield Term("logits of direct connections", "temporary", *of_shape((entries,), DIRECT_BYTES[where]))


def _compared(s: Sizes) -> Iterator[Term]:
    similarity = s.config.similarity
    labels = s.label * (similarity.text_weight > 0.0)
    instances = s.problem.instances * (similarity.neighbour_weight > 0.0)
    compared = max(labels, instances)  # one after the other
    if compared:
        shape = (s.threads, INSTANCES_AT_ONCE, compared)
        yield Term("products with all texts, at most", "temporary", *of_shape(shape, 8))
