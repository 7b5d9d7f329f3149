"""The bytes that a run holds on a CUDA device: the plan of `memory.plan`, of the other place.

Planned are tensors and workspaces, as torch's allocator hands them out, and the workspace that torch gives to
cuBLAS. The CUDA context, the code of kernels and what the allocator keeps to round and reuse are not known
without a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from xmlc.config import Config
from xmlc.memory.encoding import encoding
from xmlc.memory.plan import (
    LOSS_BYTES,
    RANKS,
    Sizes,
    backward,
    checked_weights,
    dense_update,
    encoder_forward,
    features,
    held_throughout,
    logits,
    moves,
    ranked_logits,
)
from xmlc.memory.terms import ASKED, Batches, Plan, Term, of_shape
from xmlc.native import ON_DEVICE
from xmlc.nn.model import Problem
from xmlc.ops.checks import CHECKED_AT_ONCE
from xmlc.ops.fused_step import workspace_bytes as fused_step_bytes
from xmlc.ops.redistribute import workspace_bytes as redistribute_bytes
from xmlc.ops.top_labels import workspace_bytes as top_labels_bytes

CUBLAS = "workspace of cuBLAS"
CUBLAS_BYTES = 32 << 20
"""What torch gives it with the first product: ``:4096:8`` of CUBLAS_WORKSPACE_CONFIG, its larger default."""
_WORD_BYTES = 20
"""Of a word of the batch: index int64, value float32, and its instance, int64."""


def device_plan(config: Config, problem: Problem, batches: Batches) -> Plan:
    """Plan what a run holds on its CUDA device; arguments as of `plan`."""
    s = Sizes(config, problem, batches)
    batch = tuple(_features(s, s.batch))
    return Plan(
        (*_held(s), Term(CUBLAS, "workspace", CUBLAS_BYTES, "at most, by torch", False)),
        {
            **encoding(s.encoder, config.encoder, problem.instances, on_device=True),
            "load": (),
            "forward": (*batch, *encoder_forward(s)),
            "output_step": (*batch, *_output_step(s)),
            "backward": (*batch, *backward(s)),
            "dense_update": (*batch, *dense_update(s)),
            "redistribution": tuple(_redistribution(s)),
            "validation": tuple(_validation(s)),
            "checkpoint": tuple(checked_weights(s)),
        },
        place="device",
    )


def _held(s: Sizes) -> Iterator[Term]:
    for term in held_throughout(s):
        if moves(term) and not term.name.startswith("encoder once") and term.name != "encoder":
            yield term
    if s.encoder is not None:
        yield Term("encoder", "weights", s.encoder.all, "all weights and buffers")


def _features(s: Sizes, batch: int) -> Iterator[Term]:
    yield from features(s, batch)
    if not s.problem.dense_features:
        entries = round(batch * s.batches.words)
        yield Term("words of the batch", "batch", *of_shape((entries,), _WORD_BYTES))


def _output_step(s: Sizes) -> Iterator[Term]:
    if s.encoder is not None and s.encoder.trained:
        yield Term("activations of the encoder", "batch", s.encoder.kept(s.batch), ASKED)
    gradient = Term("gradient of the features", "batch", *of_shape((s.input, s.batch), 4))
    if not s.sparse:
        yield gradient
        yield logits(s, s.batch, LOSS_BYTES)
        return
    config = s.config
    pairs = round(s.batch * s.batches.positives)
    size = fused_step_bytes(
        s.layer(), s.batch, pairs, config.loss.kind, config.output_optimizer.kind, ON_DEVICE, _narrow(s)
    )
    step = [gradient, Term("workspace of fused_step", "workspace", size, "asked of the op")]
    yield Term("positives", "batch", *of_shape((pairs,), 8))
    yield from _narrow_features(s, s.batch)
    yield from _checked_first(s, step)


def _narrow(s: Sizes) -> bool:
    """Return whether the kernels take features in bfloat16 as they are (`checks.narrow`)."""
    model = s.config.model
    return model.feature_dtype == model.weight_dtype == "bfloat16" and model.group_size > 1


def _narrow_features(s: Sizes, batch: int) -> Iterator[Term]:
    if s.config.model.feature_dtype == "bfloat16":
        itemsize = 2 if _narrow(s) else 6  # widened where the kernels do not take them
        yield Term("features in bfloat16", "temporary", *of_shape((s.input, batch), itemsize))


def _checked_first(s: Sizes, op: list[Term]) -> list[Term]:
    """Return what an op takes, or the pieces of the indices that were looked at before, whichever is more."""
    itemsize = s.itemsize("output.indices")
    piece = min(CHECKED_AT_ONCE, math.prod(s.shapes["output.indices"]))
    size, formula = of_shape((piece, 2 * itemsize), 2)  # wider by half, and masked
    checked = Term("indices, widened to check them", "temporary", size, formula)
    return op if sum(term.bytes for term in op) >= size else [checked]


def _redistribution(s: Sizes) -> Iterator[Term]:
    if not s.sparse:
        return
    yield Term("in place of the bias", "temporary", *of_shape((s.label,), 4))
    within = s.config.redistribution.mode == "fraction" and s.config.redistribution.scope == "group"
    size = redistribute_bytes(s.layer(), ON_DEVICE, within)
    yield from _checked_first(s, [Term("workspace of redistribute", "workspace", size, "asked of the op")])


def _validation(s: Sizes) -> Iterator[Term]:
    ranking = list(_features(s, s.evaluated))
    if s.sparse:
        ranking += _narrow_features(s, s.evaluated)
        size = top_labels_bytes(s.layer(), s.evaluated, RANKS, ON_DEVICE)
        ranking += _checked_first(s, [Term("workspace of top_labels", "workspace", size, "asked of the op")])
    else:
        ranking += ranked_logits(s)
    trained = s.encoder is not None and s.encoder.trained
    embedding = s.encoder.evaluation_peak(s.evaluated) if s.encoder is not None and trained else 0
    if embedding > sum(term.bytes for term in ranking):
        ranking = [Term("embedding texts", "batch", embedding, ASKED)]
    yield from ranking
