"""The bytes that a run of two towers will hold: the plan of `memory.plan` for these.

Rows are instances and, behind them, the labels of the step's pool; both sides go through one encoder.
"""

from __future__ import annotations

from collections.abc import Iterator

from xmlc.config import Config
from xmlc.errors import ConfigError
from xmlc.losses.multi_positive import TILE
from xmlc.memory.activations import EncoderMemory
from xmlc.memory.encoding import encoding
from xmlc.memory.terms import (
    ASKED,
    STATISTICS_BYTES,
    Batches,
    Phase,
    Plan,
    Term,
    largest,
    of_shape,
    vocabulary,
)
from xmlc.nn.model import Problem, weight_shapes
from xmlc.nn.nearest import KEYS_AT_ONCE
from xmlc.nn.two_tower import TEXTS_AT_ONCE

WORD_BYTES = 40
"""Of a word of a batch: taken, put in order, scaled, and as the embedding saves it."""
DENSE_COPIES = 3
"""Of rows of embeddings from a frozen encoder: taken, put in order, as a tensor."""
ROW_COPIES = 3
"""Of an embedding on the graph: before and after it has unit length, and in the batch's order."""
DROPOUT_COPIES = 3
"""Of hidden where units are dropped: which are kept, their values, those scaled."""
SCORE_BYTES = 13
"""Of a score while the nearest labels are looked for: float32, a flag, and the flag as int64."""
LABEL_EMBEDDINGS = "label embeddings"
HEAP = "heap between small blocks"
HEAP_BYTES = 7 << 20
"""What the C library keeps between blocks too small to go back to the system (`LARGE_BYTES`); measured."""
CHANGES = 5
"""Of the embedding's rows that a step of Adam touches: moments before, their changes, the weights' change."""


def check_plannable(config: Config) -> None:
    """Check that the plan is of what will run.

    Raises:
        ConfigError: Two towers are on a device, or negatives are looked for by an index.
    """
    if config.model.output != "two_tower":
        return
    if config.training.device != "cpu":
        raise ConfigError(
            "memory: two towers are planned with training.device = cpu, found "
            f"{config.training.device}; leave plan and budget out"
        )
    if config.two_tower.mined_negatives and config.two_tower.mining_search == "approximate":
        raise ConfigError(
            "memory: two towers are planned with two_tower.mining_search = exact, found approximate, whose "
            "index faiss allocates; set it to exact, or leave plan and budget out"
        )


def tower_plan(config: Config, problem: Problem, batches: Batches) -> Plan:
    """Plan what the process of a two-tower run holds; arguments as of `plan`.

    Raises:
        ConfigError: It cannot be planned.
    """
    check_plannable(config)
    s = _Sizes(config, problem, batches)
    mining: dict[Phase, tuple[Term, ...]] = {"mining": tuple(_mining(s))} if s.mined else {}
    return Plan(
        _held(s),
        {
            **encoding(s.encoder, config.encoder, problem.instances),
            "load": (),
            "forward": tuple(_forward(s)),
            "output_step": tuple(_output_step(s)),
            "backward": tuple(_backward(s)),
            "dense_update": tuple(_dense_update(s)),
            **mining,
            "validation": tuple(_validation(s)),
            "checkpoint": tuple(_checkpoint(s)),
        },
    )


class _Sizes:
    """The numbers that the formulas speak of."""

    def __init__(self, config: Config, problem: Problem, batches: Batches) -> None:
        assert batches.towers is not None, "asked of the data by who plans two towers"
        settings = config.two_tower
        self.config, self.problem, self.batches, self.texts = config, problem, batches, batches.towers
        self.label = problem.label_count
        self.batch = config.training.batch_size
        self.evaluated = min(config.training.evaluation_batch, max(batches.instances, 1))
        self.mined = settings.mined_negatives > 0
        self.pool = max(
            self.texts.pool.expected(self.batch, self.batch if self.mined else 0, settings.random_negatives),
            1,
        )
        self.hidden = problem.feature_count if problem.dense_features else config.model.hidden
        self.units = settings.projection or self.hidden
        self.shapes = weight_shapes(config, problem)
        self.encoder = batches.encoder
        self.trained = 0 if batches.encoder is None else batches.encoder.trained
        self.words = not problem.dense_features
        self.entries = round(self.batch * batches.words) + round(self.pool * self.texts.label_words)
        mini = settings.mini_batch_size
        self.cached = mini > 0
        self.queries_at_once = min(mini or self.batch, self.batch)
        self.keys_at_once = min(mini or self.pool, self.pool)


def _held(s: _Sizes) -> tuple[Term, ...]:
    return (*_weights(s), *_optimizer_state(s), *_statistics(s))


def _weights(s: _Sizes) -> Iterator[Term]:
    if s.encoder is not None:
        yield Term("encoder", "weights", s.encoder.weights, "weights and buffers that lie in no mapped file")
        yield Term("encoder once trained", "weights", s.encoder.mapped, "weights that do, and change", False)
    for name, shape in s.shapes.items():
        yield Term(name, "weights", *of_shape(shape, 4))


def _optimizer_state(s: _Sizes) -> Iterator[Term]:
    copies = {"sgd": 0, "momentum": 1, "adam": 2}
    kind = s.config.dense_optimizer.kind
    for name, shape in s.shapes.items():
        if copies[kind]:
            size, formula = of_shape(shape, 4)
            yield Term(
                f"{kind} of {name}", "optimizer", copies[kind] * size, f"{copies[kind]} * {formula}", False
            )
    kind = s.config.encoder_optimizer.kind
    if s.trained and copies[kind]:
        size, formula = copies[kind] * s.trained, f"{copies[kind]} * {s.trained:,}"
        yield Term(f"{kind} of encoder", "optimizer", size, formula, False)


def _statistics(s: _Sizes) -> Iterator[Term]:
    yield Term("label_instances", "statistics", *of_shape((s.label,), 8))
    size, formula = of_shape((s.problem.instances,), 8)
    yield Term("rows of the instances, and their order", "statistics", 2 * size, f"2 * {formula}")
    yield Term("inverse_propensity", "statistics", *of_shape((s.label,), 8), at_load=False)
    texts = s.texts
    yield from vocabulary(s.batches)
    if texts.kept_labels_bytes:
        size = texts.kept_labels_bytes
        yield Term("labels without filter pairs", "statistics", size, "4 each, 8 for each instance")
    # They are those of the current weights until the first step of the next epoch has changed these.
    yield Term(LABEL_EMBEDDINGS, "batch", *of_shape((s.label, s.units), 4), at_load=False)
    yield Term(HEAP, "temporary", HEAP_BYTES, "7 MiB, measured", at_load=False)
    if s.mined:
        yield Term("mined negatives", "statistics", *_found(s), at_load=False)


def _found(s: _Sizes) -> tuple[int, str]:
    """Return the bytes of what mining finds, and their formula."""
    return of_shape((s.texts.instances, min(s.config.two_tower.mined_from, s.label)), 4)


def _rows(s: _Sizes, name: str, rows: int, words: float) -> Iterator[Term]:
    """Yield what the encoder reads of some texts."""
    if s.words:
        yield Term(f"words of {name}", "batch", *of_shape((round(rows * words),), WORD_BYTES))
    elif not s.trained:
        size, formula = of_shape((rows, s.hidden), 4)
        yield Term(f"rows of {name}", "batch", DENSE_COPIES * size, f"{DENSE_COPIES} * {formula}")


def _both_rows(s: _Sizes) -> Iterator[Term]:
    yield from _rows(s, "the batch", s.batch, s.batches.words)
    yield from _rows(s, "the pool", s.pool, s.texts.label_words)


def _embeddings(s: _Sizes) -> Iterator[Term]:
    """Yield the embeddings of a step, and what the graph keeps between them and the encoder."""
    rows = s.batch + s.pool
    size, formula = of_shape((rows, s.units), 4)
    yield Term("embeddings", "batch", ROW_COPIES * size, f"{ROW_COPIES} * {formula}")
    graphs = s.queries_at_once + s.keys_at_once if s.cached else rows
    copies = int(s.words and s.config.two_tower.projection > 0)
    dropped = DROPOUT_COPIES if s.config.model.hidden_dropout > 0.0 else 0
    if copies + dropped:
        size, formula = of_shape((graphs, s.hidden), 4)
        yield Term("hidden", "batch", (copies + dropped) * size, f"{copies + dropped} * {formula}")


def _forward(s: _Sizes) -> Iterator[Term]:
    yield from _both_rows(s)
    yield from _embeddings(s)
    if not s.trained:
        return
    queries, keys = _encoders(s)
    if s.cached:
        assert s.texts.instance_passes is not None and s.texts.label_passes is not None, "of what is trained"
        peak = max(
            s.texts.instance_passes.blind_peak(s.queries_at_once),
            s.texts.label_passes.blind_peak(s.keys_at_once),
        )
        yield Term("pass of a mini-batch without a graph", "batch", peak, ASKED)
    else:
        peak = max(queries.forward_peak(s.batch), queries.kept(s.batch) + keys.forward_peak(s.pool))
        yield Term("forward passes of the encoder", "batch", peak, ASKED)


def _encoders(s: _Sizes) -> tuple[EncoderMemory, EncoderMemory]:
    assert s.encoder is not None and s.texts.labels is not None, "of what is trained"
    return s.encoder, s.texts.labels


def _kept(s: _Sizes) -> Iterator[Term]:
    if s.trained and not s.cached:
        queries, keys = _encoders(s)
        kept = queries.kept(s.batch) + keys.kept(s.pool)
        yield Term("activations of the encoder", "batch", kept, ASKED)


def _gradient_of_embeddings(s: _Sizes) -> Term:
    return Term("gradient of the embeddings", "batch", *of_shape((s.batch + s.pool, s.units), 4))


def _output_step(s: _Sizes) -> Iterator[Term]:
    yield from _both_rows(s)
    yield from _embeddings(s)
    yield from _kept(s)
    yield _gradient_of_embeddings(s)
    scores, formula = _scores_of_tiles(s)
    yield Term("tiles of scores", "temporary", 4 * scores, f"{formula} * 4")


def _scores_of_tiles(s: _Sizes) -> tuple[int, str]:
    """Return how many scores the loss holds at its peak: of a tile, and of the one before it."""
    first = min(s.batch, TILE) * min(s.pool, TILE)
    second = min(s.batch, TILE) * min(max(s.pool - TILE, 0), TILE)
    if s.pool <= TILE:
        second = min(max(s.batch - TILE, 0), TILE) * s.pool
    held = 4 if s.config.two_tower.loss == "sigmoid" else 5
    if not second:
        return held * first, f"{held} * {first:,}"
    return max(held * first, held * second + first, (held - 2) * (first + second)), (
        f"of tiles of {first:,} and {second:,}"
    )


def _backward(s: _Sizes) -> Iterator[Term]:
    yield from _both_rows(s)
    yield from _embeddings(s)
    yield _gradient_of_embeddings(s)
    if s.words:
        yield _embedding_gradient(s, 2)  # a part is added to those before, in a new place
    if not s.trained:
        return
    queries, keys = _encoders(s)
    assert s.texts.instance_passes is not None and s.texts.label_passes is not None, "of what is trained"
    further_keys = s.trained + s.texts.label_passes.further_peak(s.keys_at_once)
    if s.cached:
        of_queries = queries.backward_peak(s.queries_at_once)
        if s.queries_at_once < s.batch:
            of_queries = s.trained + s.texts.instance_passes.further_peak(s.queries_at_once)
    else:
        of_queries = keys.kept(s.pool) + queries.backward_peak(s.batch)
    peak = max(of_queries, further_keys)
    yield Term("backward passes of the encoder", "batch", peak, f"{ASKED}, with its gradients")


def _embedding_gradient(s: _Sizes, copies: int) -> Term:
    size, formula = of_shape((s.entries, s.hidden + 2), 4)  # row numbers are int64
    return Term("gradient of the embedding, by word", "temporary", copies * size, f"{copies} * {formula}")


def _dense_update(s: _Sizes) -> Iterator[Term]:
    yield from _both_rows(s)
    yield from _embeddings(s)
    yield _gradient_of_embeddings(s)
    clipped = s.config.training.clip_norm > 0.0
    if s.trained:
        yield Term("gradients of the encoder", "temporary", s.trained, "of its trained weights")
        if clipped:
            assert s.texts.label_passes is not None, "of what is trained"
            yield Term("squares", "temporary", s.texts.label_passes.largest, "of the largest weight")
    if s.words:
        yield _embedding_gradient(s, 1)
        adam = s.config.dense_optimizer.kind == "adam"
        copies = 1 + CHANGES if adam else 2 * clipped
        if copies:
            touched = s.texts.words.expected(s.batch, s.pool)
            size, formula = of_shape((touched, s.hidden), 4)
            yield Term("its sum by word, and changes", "temporary", copies * size, f"{copies} * {formula}")


def _embedding_texts(
    s: _Sizes, name: str, rows: int, words: float, encoder: EncoderMemory | None
) -> list[Term]:
    """Return what it takes to embed some texts without a graph."""
    terms = list(_rows(s, name, rows, words))
    size, formula = of_shape((rows, s.units), 4)
    terms.append(Term(f"embeddings of {name}", "batch", 2 * size, f"2 * {formula}"))
    size, formula = of_shape((rows, s.hidden), 4)
    terms.append(Term("hidden", "batch", size, formula))
    if encoder is not None and encoder.trained:
        terms.append(Term("embedding texts", "batch", encoder.evaluation_peak(rows), ASKED))
    return terms


def _embedding_labels(s: _Sizes) -> list[Term]:
    rows = min(TEXTS_AT_ONCE, s.label)
    return _embedding_texts(s, "labels", rows, s.texts.label_words, s.texts.labels)


def _ranking(s: _Sizes, rows: int) -> list[Term]:
    embedding = _embedding_texts(s, "instances", rows, s.batches.words, s.encoder)
    shape = (rows, min(s.label, KEYS_AT_ONCE))
    scores = Term("scores of the nearest labels", "temporary", *of_shape(shape, SCORE_BYTES))
    size, formula = of_shape((rows, s.units), 4)
    queries = Term("embeddings of instances", "batch", size, formula)
    return largest(embedding, [*_rows(s, "instances", rows, s.batches.words), queries, scores])


def _mining(s: _Sizes) -> Iterator[Term]:
    size, formula = _found(s)
    ranking = [
        *_ranking(s, s.batch),
        Term("what is found, batch by batch", "temporary", size, formula),
    ]
    joined = [Term("what is found, by batch and as one", "temporary", 2 * size, f"2 * {formula}")]
    # The first time the labels are embedded here, before anything is held that steps bring; then their
    # embeddings are those of the validation before.
    later = sum(term.bytes for term in _held(s) if not term.at_load and term.name != LABEL_EMBEDDINGS)
    size = max(0, sum(term.bytes for term in _embedding_labels(s)) - later)
    embedding = [Term("embedding the labels, beyond what steps bring", "temporary", size, "see validation")]
    yield from largest(embedding, ranking, joined)


def _validation(s: _Sizes) -> Iterator[Term]:
    deciles = Term("label deciles", "statistics", *of_shape((s.label,), STATISTICS_BYTES))
    yield from largest(_embedding_labels(s), _ranking(s, s.evaluated), [deciles])


def _checkpoint(s: _Sizes) -> Iterator[Term]:
    stored = s.texts.stored_bytes
    yield Term("copies of texts, names and vocabulary", "temporary", stored, "as they are stored")
