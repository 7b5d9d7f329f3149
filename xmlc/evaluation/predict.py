"""A trained run, loaded to predict labels for texts or features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from numpy.typing import NDArray
from torch import Tensor

from xmlc import native
from xmlc.checkpoint import CheckpointFolder, CheckpointReader
from xmlc.config import Config, OutputOptimizerConfig, build_config
from xmlc.data.batches import BatchStream, Column, take
from xmlc.data.dataset import Features, check_dense, row_count, text_column
from xmlc.data.pretrained import encoder_fingerprint
from xmlc.data.rows import CsrRows, TextColumn
from xmlc.data.text import TextVectorizer
from xmlc.errors import CheckpointError, ConfigError, DataError
from xmlc.nn import EncodedTexts, Model, Problem, Similarity, TextEncoder, TwoTower, make_model, weight_shapes

CHECKPOINTS = "checkpoints"
ENCODER = "encoder"


@dataclass(frozen=True)
class Prediction:
    """One label for an instance."""

    label: int
    name: str
    """The label's name, or its id where the data set has no names."""
    score: float
    """The label's logit: the higher the likelier, of no fixed range, comparable between the labels of an
    instance. Under ``bce`` its sigmoid is a probability; under the softmax losses only differences count."""


@dataclass(frozen=True)
class Predictor:
    """A model with all it needs to take raw input."""

    model: Model | TwoTower
    vectorizer: TextVectorizer | None
    text_encoder: TextEncoder | None
    """Reads texts where a transformer does, with a vectorizer beside it for direct connections; else the
    vectorizer does. A model of features has neither."""
    label_names: TextColumn | None
    metadata: dict[str, Any]
    """Of the checkpoint: config, problem, progress, data set, metrics."""

    @property
    def takes(self) -> str:
        """What an instance is: ``text``, ``sparse`` or ``dense``."""
        if self.vectorizer is not None or self.text_encoder is not None:
            return "text"
        return "dense" if self.model.problem.dense_features else "sparse"

    def predict(
        self, inputs: Sequence[str] | scipy.sparse.sparray | scipy.sparse.spmatrix | NDArray[Any], k: int = 5
    ) -> list[list[Prediction]]:
        """Return the k best labels of every instance, best first.

        An instance without text, or of words that the model has not seen, gets the labels that the biases
        prefer. A label whose score is NaN or -inf, which overflows in float32 make of huge features, is left
        out, so there may be fewer than k; one of +inf stays.

        Args:
            inputs: Texts for a text model, else sparse or dense features [instance, feature].
            k: Labels for each instance; where it exceeds the number of labels, all of them.

        Raises:
            DataError: The inputs do not fit the model, or k is below 1.
        """
        _check_k(k)
        scores, labels = self.top_labels(inputs, min(k, self.model.problem.label_count))
        return [
            [
                Prediction(label, self.label_name(label), score)
                for label, score in zip(row_labels, row_scores, strict=True)
                if label >= 0
            ]
            for row_labels, row_scores in zip(labels.tolist(), scores.tolist(), strict=True)
        ]

    def top_labels(self, inputs: Any, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores float32 and labels int64, [instance, k], best first; inputs as for `predict`.

        Where fewer than k labels have a score above -inf, the rest of the row is label -1 with score -inf.

        Raises:
            DataError: The inputs do not fit the model, or k is below 1.
            NativeError: k exceeds the number of labels.
        """
        _check_k(k)
        features = self.features(inputs)
        rows = row_count(features)
        unlabelled = CsrRows.empty(rows, self.model.problem.label_count)
        words = self.words_of(features.texts) if isinstance(features, EncodedTexts) else None
        scores = np.empty((rows, k), np.float32)
        labels = np.empty((rows, k), np.int64)
        size = self.model.config.training.evaluation_batch
        for batch in BatchStream(features, unlabelled, np.arange(rows), size, 0, words=words).sequential():
            top_scores, top_labels = self.model.top_labels(batch, k)
            scores[batch.instances], labels[batch.instances] = top_scores.numpy(), top_labels.numpy()
        return scores, labels

    def label_name(self, label: int) -> str:
        """Return a label's name, or its id as a string where there are no names."""
        return str(label) if self.label_names is None else self.label_names[label]

    def features(self, inputs: Any) -> Features | Column:
        """Return inputs as the features that the model takes.

        Raises:
            DataError: Kind or width do not fit.
        """
        wanted = self.model.problem.feature_count
        if self.takes == "text":
            if isinstance(inputs, str) or not isinstance(inputs, Iterable):
                raise DataError(
                    f"predict: this model takes a list of texts, found {type(inputs).__name__}; pass a list"
                )
            return self.of_texts(text_column(inputs, "predict: texts"))
        found = f"{type(inputs).__name__} {list(getattr(inputs, 'shape', ()))}"
        if self.model.problem.dense_features:
            dense = np.asarray(inputs)
            if scipy.sparse.issparse(inputs) or dense.ndim != 2 or dense.shape[1] != wanted:
                raise DataError(
                    f"predict: dense features must be an array [instance, {wanted}], found {found}; "
                    "use the features the model was trained on"
                )
            check_dense(dense, "predict")
            return dense.astype(np.float32)
        if not scipy.sparse.issparse(inputs) or inputs.shape[1:] != (wanted,):
            raise DataError(
                f"predict: features must be a sparse matrix [instance, {wanted}], found {found}; "
                "use the features the model was trained on"
            )
        return CsrRows.from_scipy(inputs, "predict: features")

    def of_texts(self, texts: TextColumn) -> Features | Column:
        """Return texts as the features that a model of texts takes; a transformer reads them by batches."""
        return _texts_of(self.vectorizer, self.text_encoder, texts)

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return a two-tower model's embeddings of texts, of instances or labels, [text, d] of length 1.

        Raises:
            ConfigError: The model has no two towers.
            DataError: They are no texts.
        """
        model = self._two_tower("embed")
        column = self.of_texts(text_column(texts, "embed: texts"))
        found = [np.empty((0, model.embed_labels().shape[1]), np.float32)]
        with torch.no_grad():
            size = model.config.training.evaluation_batch
            for first in range(0, row_count(column), size):
                rows = np.arange(first, min(first + size, row_count(column)))
                found.append(model.embed(take(column, rows)).cpu().numpy())
        return np.concatenate(found)

    def with_labels(self, texts: Sequence[str], names: Sequence[str] | None = None) -> Predictor:
        """Return a predictor that knows further labels by their texts, numbered behind those of training.

        Args:
            texts: One for each new label.
            names: Their names; None takes the texts.

        Raises:
            ConfigError: The model has no two towers.
            DataError: There are no texts, or not as many names.
        """
        model = self._two_tower("with_labels")
        added = text_column(texts, "with_labels: texts")
        named = added if names is None else text_column(names, "with_labels: names")
        if len(added) == 0 or len(named) != len(added):
            raise DataError(
                "with_labels: there must be at least one text, and a name for each or none, found "
                f"{len(added)} texts and {len(named)} names"
            )
        known = [self.label_name(label) for label in range(model.problem.label_count)]
        column = self.of_texts(added)
        extended = model.with_labels(take(column, np.arange(len(added))))
        return replace(self, model=extended, label_names=TextColumn.from_strings([*known, *named]))

    def with_index(self, probes: int = 32) -> Predictor:
        """Return a predictor of a two-tower model that searches its labels by an index, not all of them.

        To make the index takes longer than to rank a few thousand instances exactly (`ApproximateIndex`).

        Args:
            probes: Lists that are looked through for an instance: more miss fewer labels, and take longer.

        Raises:
            ConfigError: The model has no two towers, ``probes`` is below 1, or faiss is not installed.
        """
        if isinstance(probes, bool) or not isinstance(probes, int | np.integer) or probes < 1:
            raise ConfigError(f"with_index: probes must be an integer of at least 1, found {probes!r}")
        return replace(self, model=self._two_tower("with_index").with_index(int(probes)))

    def _two_tower(self, where: str) -> TwoTower:
        if not isinstance(self.model, TwoTower):
            raise ConfigError(
                f"{where}: needs a run of model.output = two_tower, found "
                f"{self.model.config.model.output}; train one"
            )
        return self.model

    def words_of(self, texts: TextColumn) -> CsrRows | None:
        """Return the words that a model sees beside what a transformer reads; None where it sees none."""
        if self.text_encoder is None or self.vectorizer is None:
            return None
        return self.vectorizer.transform(texts)


def _texts_of(
    vectorizer: TextVectorizer | None, encoder: TextEncoder | None, texts: TextColumn
) -> CsrRows | EncodedTexts:
    if encoder is not None:
        return EncodedTexts(texts, encoder)
    assert vectorizer is not None, "a model of texts has one of the two"
    return vectorizer.transform(texts)


def fingerprint_of_run(folder: Path) -> str:
    """Return the fingerprint of a run's own encoder.

    Raises:
        CheckpointError: It is not there.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: must hold the encoder of the run, found no such folder; copy the run's folder whole"
        )
    return encoder_fingerprint(folder)


def check_encoder(path: Path, expected: object, found: str | None) -> None:
    """Check that a checkpoint and the encoder beside it belong together.

    Raises:
        CheckpointError: They do not.
    """
    if expected != found:
        raise CheckpointError(
            f"{path}: the run's folder {ENCODER} must have the fingerprint {expected}, found {found}; copy "
            "that folder again, whole"
        )


def _check_k(k: int) -> None:
    if not isinstance(k, int | np.integer) or k < 1:
        raise DataError(
            f"predict: k must be a whole number, at least 1, found {k!r}; ask for one label or more"
        )


def load(run: str | Path, which: str = "best", device: str = "cpu") -> Predictor:
    """Load a run's best (or ``latest``) checkpoint; where none is marked best, the latest.

    Args:
        run: Folder of the run, wherever it was trained.
        which: ``best`` or ``latest``.
        device: ``cpu`` or ``cuda``: where to compute. Inputs and answers are on the CPU.

    Raises:
        CheckpointError: There is no run or checkpoint, or it cannot be trusted.
        ConfigError: ``which`` or ``device`` is neither.
        NativeError: There is no CUDA device, or no kernels for it.
    """
    if which not in ("best", "latest"):
        raise ConfigError(f"load: which must be best or latest, found {which!r}; choose one")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"load: device must be cpu or cuda, found {device!r}; choose one")
    if device == "cuda":
        native.require_cuda()
    folder = Path(run) / CHECKPOINTS
    if not Path(run).is_dir():
        found = "a file" if Path(run).exists() else "no such folder"
        raise CheckpointError(f"{run}: must be the folder of a run, found {found}; check the path")
    if not folder.is_dir():
        raise CheckpointError(
            f"{run}: must be the folder of a run, found no {CHECKPOINTS} in it; train one first"
        )
    checkpoints = CheckpointFolder(folder)
    path = (checkpoints.best() if which == "best" else None) or checkpoints.latest()
    if path is None:
        raise CheckpointError(f"{run}: the run has no checkpoint yet; let it train until its first one")
    predictor = restore(path)
    if device != "cpu":
        predictor.model.move(torch.device(device))
    return predictor


def _check_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]], reader: CheckpointReader) -> None:
    """Check that the checkpoint holds the weights of its own settings, before memory is taken for those."""
    for name, shape in shapes.items():
        found = reader.shapes[f"model.{name}"]
        if found != shape:
            raise CheckpointError(
                f"{path}: {name} must have the shape {list(shape)} of the checkpoint's settings, found "
                f"{list(found)}; load another checkpoint of the run"
            )


def _label_embeddings(path: Path, reader: CheckpointReader, model: TwoTower) -> Tensor | None:
    """Return the labels' embeddings of a checkpoint, where it has some.

    Raises:
        CheckpointError: They are not one for each label, of the model's width and finite.
    """
    if "label_embeddings" not in reader.shapes:
        return None
    embeddings = reader.read("label_embeddings")
    wanted = [model.problem.label_count, model.units]
    if list(embeddings.shape) != wanted or embeddings.dtype != torch.float32:
        raise CheckpointError(
            f"{path}: label_embeddings must be {torch.float32} {wanted}, found {embeddings.dtype} "
            f"{list(embeddings.shape)}; load another checkpoint of the run"
        )
    if not embeddings.isfinite().all():
        raise CheckpointError(
            f"{path}: label_embeddings must be finite, found NaN or infinity; load another checkpoint of the "
            "run"
        )
    return embeddings


def _column(reader: CheckpointReader, name: str) -> TextColumn:
    return TextColumn(reader.read(f"{name}.offsets").numpy(), reader.read(f"{name}.data").numpy())


def _arrays(reader: CheckpointReader, prefix: str) -> dict[str, NDArray[Any]]:
    """Return the tensors whose names start so, by the rest of the name."""
    return {
        name.removeprefix(prefix): reader.read(name).numpy()
        for name in reader.shapes
        if name.startswith(prefix)
    }


def restore(path: Path) -> Predictor:
    """Build the predictor of one checkpoint folder.

    The model's tensors are read in place one by one; all optimizer state is verified and not kept.
    """
    reader = CheckpointReader(path)
    metadata = dict(reader.metadata)
    try:
        config = build_config(metadata["config"], f"{path}: its config")  # type: ignore[arg-type]
        problem = Problem(label_instances=reader.read("label_instances").numpy(), **metadata["problem"])  # type: ignore[arg-type]
        config = _without_state(config)
        _check_shapes(path, weight_shapes(config, problem), reader)
        text_encoder = _text_encoder(path, config, metadata.get("encoder"))
        model = make_model(
            config,
            problem,
            text_encoder.transformer if text_encoder is not None and config.encoder.trained else None,
            path.parent.parent,
        )
        model.read(reader)
        if isinstance(model, Model) and config.similarity.used:
            model.similarity = Similarity.from_arrays(
                config.similarity,
                _arrays(reader, "similarity."),
                problem.words,
                problem.label_count,
            )
        arrays = _arrays(reader, "text.")
        vectorizer = TextVectorizer.from_arrays(arrays, config.text) if arrays else None
        if isinstance(model, TwoTower):
            model.texts = _texts_of(vectorizer, text_encoder, _column(reader, "label_texts"))
            model.embeddings = _label_embeddings(path, reader, model)
        names = None
        if "label_names.offsets" in reader.shapes:
            names = _column(reader, "label_names")
        reader.check_rest()
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: the checkpoint must hold a model of this version, found "
            f"{type(error).__name__}: {error}; load it with the version that wrote it"
        ) from None
    return Predictor(model, vectorizer, text_encoder, names, metadata)


def _without_state(config: Config) -> Config:
    """Return the settings of the same weights under an optimizer of the output layer that keeps no state."""
    return config.model_copy(update={"output_optimizer": OutputOptimizerConfig(kind="sgd")})


def _text_encoder(path: Path, config: Config, fingerprint: object) -> TextEncoder | None:
    """Load the transformer that lies beside the checkpoints, where the run has one."""
    if config.encoder.kind != "transformer":
        return None
    folder = path.parent.parent / ENCODER
    check_encoder(path, fingerprint, fingerprint_of_run(folder))
    return TextEncoder.load(folder, config.encoder)
