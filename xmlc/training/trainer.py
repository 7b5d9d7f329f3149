"""Trains a model into a run folder; stops on a signal and goes on from there with the same bits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from xmlc import __version__, native
from xmlc.checkpoint import CheckpointReader, Pieces, Storable, writing_order
from xmlc.config import Config, TrainingConfig
from xmlc.data import Batch, Dataset
from xmlc.data.batches import BatchStream
from xmlc.data.pretrained import locate_encoder
from xmlc.data.rows import CsrRows
from xmlc.errors import CheckpointError, ConfigError, WorkerError, XmlcError
from xmlc.evaluation import evaluate_model
from xmlc.evaluation.predict import check_encoder
from xmlc.memory.budget import BudgetError, fit, needed_bytes
from xmlc.memory.exhausted import Facts, explained
from xmlc.memory.process import (
    device_limit,
    hard_limit,
    return_free_blocks,
    return_large_blocks,
    usage,
)
from xmlc.memory.tables import mebibytes
from xmlc.memory.terms import Batches, Plan
from xmlc.memory.towers import check_plannable
from xmlc.metrics import Report
from xmlc.nn import Model, TwoTower, make_model
from xmlc.nn.label_parallel import LabelParallelOutput
from xmlc.nn.output_layer import SparseOutput, normalised
from xmlc.parallel import ALONE, LowBitWorkers, Workers, as_bytes
from xmlc.sparsity import RedistributionPolicy
from xmlc.training import progress
from xmlc.training.divergence import DivergedError, check_loss, check_weights, high_rates, likely_cause
from xmlc.training.encoding import taken_bytes, within_budget
from xmlc.training.optimizers import Optimizers
from xmlc.training.phases import Stopwatch
from xmlc.training.prepare import Prepared, Within, anywhere, batches_of, import_libraries, prepare
from xmlc.training.run_folder import FollowedRun, RunFolder
from xmlc.training.schedule import EarlyStopping, Plateau, Schedule
from xmlc.training.step import training_step
from xmlc.training.tower_sizes import traced_batches
from xmlc.training.two_tower import mine, two_tower_step

LOWEST_RATE_FACTOR = 2.0**-10
MANY_CONNECTIONS = 1 << 23
"""From here on a step takes so long that fresh pages for its tensors cost nothing to speak of."""
ACTIVE_BATCHES = 2
"""In which active gradients are counted after an epoch."""
METRIC_RANKS = 5
METRICS = ("P", "nDCG", "R", "PSP", "PSnDCG")
DECILE_VALUES = ("labels", "training_positives", "P@1", "P@5", "PSP@1", "PSP@5", "R@5", "coverage@5")
"""What is recorded of each label-frequency decile of a validation."""


class StoppedBySignalError(XmlcError):
    """Training stopped on a signal after writing a checkpoint."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number


@dataclass
class Position:
    """Where a run stands: ``step`` steps done, the next batch is ``batch`` of ``epoch``."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss_sum: float = 0.0  # over the epoch's batches so far
    first_loss: float = 0.0  # of the first step whose loss was not 0
    finished: bool = False
    redistributions: list[dict[str, int]] = field(default_factory=list)  # of the epoch: step, moved


class Trainer:
    """One run: model, optimizers, schedules, and where they stand."""

    def __init__(
        self,
        dataset: Dataset,
        config: Config,
        folder: RunFolder,
        prepared: Prepared,
        workers: Workers = ALONE,
    ) -> None:
        self.dataset = dataset
        self.config = config
        self.folder = folder
        self.prepared = prepared
        bits = config.training.gradient_bits
        if workers.size > 1 and bits != 32:
            workers = LowBitWorkers(bits, workers.group)
        self.workers = workers
        encoder = prepared.text_encoder
        self.model = make_model(
            config,
            prepared.problem,
            encoder.transformer if encoder is not None and config.encoder.trained else None,
            folder.path,
            workers,
        )
        self._connect()
        self.model.move(torch.device(config.training.device))
        self.optimizers = Optimizers(self.model)
        total_steps = len(prepared.train) * config.training.epochs
        self.policy = RedistributionPolicy(config.redistribution, total_steps)
        self.schedule = Schedule(config.schedule, total_steps, Plateau())
        self.stopping = EarlyStopping(config.training, Plateau())
        self.position = Position()
        self.negatives: CsrRows | None = None  # of a two-tower model, mined
        self.rate_factor = 1.0  # below 1 after a loss that diverged
        self.seconds = 0.0  # spent in training steps, over all sessions of the run
        self.stopwatch = Stopwatch()  # since the last line of metrics
        if workers.size > 1:
            workers.place = self._place
        self._saved = time.monotonic()
        self._signal: int | None = None
        board = config.training.tensorboard and workers.rank == 0
        self._board = _tensorboard(folder.path) if board else None

    def _connect(self) -> None:
        """Give the model its texts, and direct connections their start; a checkpoint overwrites that."""
        if isinstance(self.model, TwoTower):
            self.model.texts = self.prepared.label_texts
            return
        self.model.similarity = self.prepared.similarity
        output, direct = self._sparse_output, self.prepared.direct
        if output is not None and direct is not None:
            output.connect_direct(direct.indices, direct.weight)

    def run(self) -> None:
        """Train to the end, or until early stopping or a signal.

        Raises:
            StoppedBySignalError: A signal came; the checkpoint is written.
            DivergedError: The loss is no number any more, or has exploded.
            CheckpointError: The disk refuses.
        """
        path = self.folder.path
        reason = self._reason_to_end()
        if reason is not None:
            progress.say(f"{path}: nothing left to do, {reason}")
        with self._signals_noted(), closing(self._board) if self._board is not None else nullcontext():
            if self._goes_back and self.position.step == 0:
                self.save()
            while self._reason_to_end() is None:
                try:
                    self._epoch()
                    self._finish_epoch()
                except DivergedError as error:
                    if not self._goes_back:
                        raise
                    self._go_back(error)
        if reason is None and self.position.finished:
            progress.say(f"{path}: {self._reason_to_end()}")
        self.folder.log(f"finished after {self.position.step} steps, {self._reason_to_end()}")

    def _place(self) -> str:
        """Say where the run is, for a worker that waits for another one."""
        return f"{self.stopwatch.current or 'the end'} of step {self.position.step}"

    @property
    def _sparse_output(self) -> SparseOutput | LabelParallelOutput | None:
        output = None if isinstance(self.model, TwoTower) else self.model.output
        return output if isinstance(output, SparseOutput | LabelParallelOutput) else None

    @property
    def _goes_back(self) -> bool:
        return self.config.training.on_divergence == "lower_rate"

    def _reason_to_end(self) -> str | None:
        """Say why training is over, or None where it goes on."""
        position, training = self.position, self.config.training
        if position.finished:
            best = max((entry["epoch"] for entry in self.folder.metrics() if entry["best"]), default=None)
            return (
                f"stopped early after epoch {position.epoch}: no gain of {training.metric} in "
                f"training.patience = {training.patience} evaluations, the best epoch is {best}"
            )
        if position.epoch >= training.epochs:
            return f"training.epochs = {training.epochs} are done"
        return None

    def _epoch(self) -> None:
        position, training = self.position, self.config.training
        started = time.monotonic()
        if position.batch == 0:
            self._mine()
        workers = self.workers
        part = (workers.rank, workers.size)
        stream = replace(self.stream, part=part)
        with progress.bar(len(stream), f"epoch {position.epoch + 1}", position.batch) as bar:
            for batch in self.stopwatch.each("data", stream.epoch(position.epoch, position.batch)):
                loss = self.step(batch)
                position.batch += 1
                position.loss_sum += loss
                instances = position.batch * training.batch_size
                bar.update()
                bar.set_postfix(
                    loss=f"{position.loss_sum / position.batch:.4g}",
                    instances=instances,
                    memory=f"{progress.peak_memory_bytes() / 2**20:.0f} MiB",
                    refresh=False,
                )
                due = self._agree(time.monotonic() - self._saved > training.checkpoint_seconds)
                if self._signal is not None:
                    self.seconds += time.monotonic() - started
                    self._stop_on_signal()
                if due:
                    self.seconds += time.monotonic() - started
                    started = time.monotonic()
                    self.save()
        self.seconds += time.monotonic() - started

    def _agree(self, due: bool) -> bool:
        """Have all workers note a signal that came to any of them; return whether to save, as rank 0 says."""
        if self.workers.size > 1:
            mine = [self._signal or 0, int(due and self.workers.rank == 0)]
            device = self.config.training.device
            number, save = self.workers.max(torch.tensor(mine, device=device)).tolist()
            self._signal = int(number) or None
            due = bool(save)
        return due

    def step(self, batch: Batch) -> float:
        """Train on one batch, and move connections where that is due; return the loss.

        Raises:
            DivergedError: The loss is no number any more, or has exploded.
        """
        config, position = self.config, self.position
        position.step += 1
        factor = self.rate_factor * self.schedule.factor(position.step)
        output_rate = config.output_optimizer.learning_rate * factor
        self.optimizers.set_rates(
            config.dense_optimizer.learning_rate * factor,
            output_rate,
            config.encoder_optimizer.learning_rate * factor * self._encoder_warmup(),
        )
        model, optimizers = self.model, self.optimizers
        rest = (position.step, config.training.clip_norm, self.stopwatch)
        if isinstance(model, TwoTower):
            loss = float(two_tower_step(model, batch, optimizers, *rest, self.workers))
        else:
            loss = float(training_step(model, batch, optimizers, output_rate, *rest, self.workers))
        if self.config.encoder.trained and self.config.encoder.compress_activations:
            return_free_blocks()  # to compress leaves many small ones, which the C library would keep
        self._check_loss(loss, batch, factor)
        output = self._sparse_output
        if output is not None and self.policy.due(position.step):
            with self.stopwatch.phase("redistribution"):
                moved = output.redistribute(
                    config.redistribution, self.policy.strength(position.step), position.step
                )
            position.redistributions.append({"step": position.step, "moved": moved})
            self.folder.log(f"step {position.step}: redistributed {moved} connections")
        return loss

    @property
    def stream(self) -> BatchStream:
        """The training instances, with the negatives that were mined for them."""
        return replace(self.prepared.train, negatives=self.negatives)

    @property
    def mines(self) -> bool:
        """Whether negatives are looked for."""
        return isinstance(self.model, TwoTower) and self.config.two_tower.mined_negatives > 0

    def mine(self) -> None:
        """Look for the negatives of the steps to come by the current weights, where the model `mines`."""
        assert isinstance(self.model, TwoTower), "asked by the caller"
        self.model.embed_labels(progress.embedding_bar)
        self.negatives = mine(self.model, self.prepared.train, progress.mining_bar)

    def _mine(self) -> None:
        """Look for the negatives of the epochs to come, where that is due."""
        if self.mines and self.position.epoch % self.config.two_tower.refresh_epochs == 0:
            with self.stopwatch.phase("data"):
                self.mine()

    def _encoder_warmup(self) -> float:
        """Return the factor of a trained encoder's rate in this step."""
        steps = self.config.encoder_optimizer.warmup_steps
        return min(1.0, self.position.step / steps) if steps else 1.0

    def _check_loss(self, loss: float, batch: Batch, factor: float) -> None:
        position = self.position
        try:
            check_loss(loss, position.first_loss, self.config)
        except DivergedError as error:
            raise self._diverged(error, likely_cause(batch, self.config, factor)) from None
        position.first_loss = position.first_loss or loss

    def _check_weights(self) -> None:
        try:
            self._check_weights_of_all()
        except DivergedError as error:
            factor = self.rate_factor * self.schedule.factor(self.position.step)
            raise self._diverged(error, high_rates(self.config, factor)) from None

    def _check_weights_of_all(self) -> None:
        """Check the weights; where one worker's have diverged, all workers raise."""
        found: DivergedError | None = None
        try:
            check_weights(self.model.tensors())
        except DivergedError as error:
            found = error
        flag = torch.tensor(int(found is not None), device=self.config.training.device)
        if int(self.workers.max(flag)):
            raise found or DivergedError("the weights must stay finite, found others in another worker")

    def _check_copies(self) -> None:
        """Check that what every worker has whole is the same on all, to the last bit.

        Raises:
            WorkerError: It is not.
        """
        if self.workers.size == 1:
            return
        checksum = 0
        for name, tensor in self.model.tensors().items():
            if not name.startswith("output."):  # shared out
                checksum = crc32(as_bytes(tensor.reshape(-1)).cpu().numpy(), checksum)
        checksums = self.workers.gather_sizes(checksum, device=torch.device(self.config.training.device))
        if any(each != checksums[0] for each in checksums):
            raise WorkerError(
                "training: what is not shared out must be the same on all workers, found different weights "
                f"at step {self.position.step}; go on from the latest checkpoint with --resume, on machines "
                "of one kind"
            )

    def _diverged(self, error: DivergedError, cause: str) -> DivergedError:
        path = self.folder.checkpoints.latest()
        before = "no checkpoint was written before" if path is None else f"{path} was written before"
        return DivergedError(
            f"training: {error} at step {self.position.step}; the likely cause: {cause}; {before}"
        )

    def _go_back(self, error: DivergedError) -> None:
        """Return to the latest checkpoint with half the rates; raise the error where that was of no use."""
        lowered = 0.5 * self.rate_factor  # not of the checkpoint's: this may be the second time from there
        path = self.folder.checkpoints.latest()
        if path is None or lowered < LOWEST_RATE_FACTOR:
            raise DivergedError(
                f"{error}; the rates had been lowered to {self.rate_factor:.3g} of the settings'"
            )
        self.optimizers = Optimizers(self.model)
        self._restore(path)
        self.rate_factor = lowered
        message = f"{error}; going back to step {self.position.step} with {lowered:g} of the learning rates"
        self.folder.log(message)
        progress.say(message)

    def _finish_epoch(self) -> None:
        """Evaluate, let schedule and stopping react, record, and save."""
        self._check_weights()
        position, training = self.position, self.config.training
        batches = len(self.prepared.train)
        entry: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "step": position.step,
            "loss": position.loss_sum / batches,
            "learning_rate_factor": self.rate_factor * self.schedule.factor(position.step),
        }
        best = True
        if isinstance(self.model, TwoTower):  # also for the checkpoint: who loads it need not embed them
            with self.stopwatch.phase("validation"):
                self.model.embed_labels(progress.embedding_bar)
        if len(self.prepared.validation.rows):
            with self.stopwatch.phase("validation"):
                report = self.validate()
            values = {
                name: report.values[name] for name in report.values if name.partition("@")[0] in METRICS
            }
            entry["validation"] = values
            entry["validation_deciles"] = [
                {name: decile[name] for name in DECILE_VALUES} for decile in report.deciles
            ]
            self.schedule.evaluated(values[training.metric])
            best = self.stopping.evaluated(values[training.metric])
            position.finished = self.stopping.stop
        entry["best"] = best
        if self._sparse_output is not None:
            entry["redistributions"] = position.redistributions
            if not normalised(self.config.loss):
                with self.stopwatch.phase("validation"):
                    entry["active_share"] = self.active_share()
        entry["train_seconds"] = round(self.seconds, 3)
        entry["phase_seconds"] = self.stopwatch.take()
        entry["peak_memory_bytes"] = progress.peak_memory_bytes()
        if self.config.training.device == "cuda":
            entry["peak_device_memory_bytes"] = torch.cuda.max_memory_allocated()
        position.epoch += 1
        position.batch = 0
        position.loss_sum = 0.0
        position.redistributions = []
        self.folder.record(entry)
        self.save(best)
        self._tell(entry)
        if self._signal is not None and position.epoch < training.epochs and not position.finished:
            self._stop_on_signal()

    def validate(self) -> Report:
        """Measure the model on the validation instances."""
        ranks = max(METRIC_RANKS, int(self.config.training.metric.partition("@")[2]))
        return evaluate_model(
            self.model,
            self.prepared.validation,
            ranks,
            self.prepared.validation_filter,
            deciles=True,
            progress=progress.evaluation_bar,
        )

    def active_share(self) -> float:
        """Return the share of active gradients in the first batches of the coming epoch, without dropout."""
        model, output, shares = self.model, self._sparse_output, []
        assert isinstance(model, Model) and output is not None
        with torch.no_grad():
            for batch in islice(self.prepared.train.epoch(self.position.epoch + 1), ACTIVE_BATCHES):
                features = model.features(model.hidden(batch))
                direct = model.direct_features(batch)
                shares.append(output.active_share(features, batch.labels, direct, batch.skipped))
        return sum(shares) / len(shares)

    def _tell(self, entry: dict[str, Any]) -> None:
        parts = [f"epoch {entry['epoch']}/{self.config.training.epochs}", f"loss {entry['loss']:.4g}"]
        for name in ("P@1", "P@5", "PSP@1", "PSP@5"):
            if name in entry.get("validation", {}):
                parts.append(f"{name} {100 * entry['validation'][name]:.2f}")
        parts.append(f"{self.seconds:.0f} s")
        parts.append(f"{entry['peak_memory_bytes'] / 2**20:.0f} MiB")
        line = "  ".join(parts) + ("  best" if entry["best"] and "validation" in entry else "")
        self.folder.log(line)
        progress.say(line)
        if self._board is not None:
            self._board.add_scalar("loss", entry["loss"], entry["step"])
            for name, value in entry.get("validation", {}).items():
                self._board.add_scalar(f"validation/{name}", value, entry["step"])
            self._board.flush()

    def save(self, best: bool = False) -> None:
        """Write a checkpoint of everything that the run needs to go on; keep the last ones and the best.

        Raises:
            DivergedError: A weight is not finite; nothing is written.
            WorkerError: The workers have drifted apart; nothing is written.
            CheckpointError: The disk refuses.
        """
        with self.stopwatch.phase("checkpoint"):
            self._check_weights()
            self._check_copies()
        position = self.position
        name = f"step-{position.step:010d}"
        model = self.model
        tensors: dict[str, Storable] = {f"model.{key}": value for key, value in model.stored().items()}
        tensors |= {f"optimizer.{key}": value for key, value in self.optimizers.tensors().items()}
        tensors["label_instances"] = torch.from_numpy(self.prepared.problem.label_instances)
        if self.prepared.vectorizer is not None:
            for key, array in self.prepared.vectorizer.to_arrays().items():
                tensors[f"text.{key}"] = torch.tensor(array)
        if self.prepared.similarity is not None:
            for key, array in self.prepared.similarity.arrays().items():
                tensors[f"similarity.{key}"] = torch.from_numpy(array)
        if isinstance(model, TwoTower):
            tensors |= self._of_labels(model)
        if self.dataset.label_names is not None:
            tensors["label_names.offsets"] = torch.tensor(self.dataset.label_names.offsets)
            tensors["label_names.data"] = torch.tensor(self.dataset.label_names.data)
        metadata: dict[str, Any] = {
            "xmlc_version": __version__,
            "config": self.config.model_dump(mode="json"),
            "problem": self.prepared.problem.facts(),
            "data": data_facts(self.dataset),
            "encoder": self._encoder_fingerprint(),
            "position": vars(position),
            "schedule": {
                "plateau": self.schedule.plateau.state(),
                "factor": self.schedule.plateau_factor,
                "rate_factor": self.rate_factor,
            },
            "stopping": self.stopping.plateau.state(),
            "seconds": self.seconds,
            "phase_seconds": dict(self.stopwatch.seconds),
        }
        self.folder.check_held()
        with self.stopwatch.phase("checkpoint"):
            if self.workers.rank == 0:
                self.folder.checkpoints.save(name, tensors, metadata)
                if best:
                    self.folder.checkpoints.mark_best(name)
                self.folder.checkpoints.keep(last=self.config.training.keep_last)
            else:
                _contribute(tensors)
        self._saved = time.monotonic()

    def _of_labels(self, model: TwoTower) -> dict[str, Tensor]:
        """Return the labels' texts, their embeddings where these are current, and mined negatives."""
        texts = self.dataset.label_texts
        assert texts is not None, "checked before training"
        tensors = {
            "label_texts.offsets": torch.tensor(texts.offsets),
            "label_texts.data": torch.tensor(texts.data),
        }
        if model.embeddings is not None:
            tensors["label_embeddings"] = model.embeddings
        if self.negatives is not None:
            tensors["negatives.offsets"] = torch.from_numpy(self.negatives.offsets)
            tensors["negatives.indices"] = torch.from_numpy(self.negatives.indices)
        return tensors

    def _encoder_fingerprint(self) -> str | None:
        encoder = self.prepared.text_encoder
        return None if encoder is None else encoder.tokenizer.fingerprint

    def resume(self) -> None:
        """Continue from the latest checkpoint; from the start where there is none yet."""
        path = self.folder.checkpoints.latest()
        if path is None:
            self.folder.check_nothing_lost()
            self.folder.forget_after(0)
            return
        self._restore(path)
        position, epochs = self.position, self.config.training.epochs
        begun = position.epoch + (position.batch > 0)
        if epochs < begun:
            raise ConfigError(
                f"{self.folder.path}: training.epochs must be at least the {begun} that the run has begun, "
                f"found {epochs}; raise it"
            )
        # A patience that has changed decides anew.
        position.finished = self.stopping.stop and position.batch == 0
        self.folder.forget_after(self.position.epoch)
        finished = self.folder.metrics()
        if (
            self.workers.rank == 0
            and finished
            and finished[-1]["step"] == self.position.step
            and finished[-1]["best"]
        ):
            self.folder.checkpoints.mark_best(path.name)  # a kill may have come between save and mark
        self.folder.log(f"resumed at step {self.position.step}")

    def _restore(self, path: Path) -> None:
        """Take over everything that `save` wrote."""
        reader = CheckpointReader(path)
        metadata: Any = reader.metadata
        check_encoder(path, metadata.get("encoder"), self._encoder_fingerprint())
        try:
            self.model.read(reader)
            self.optimizers.load(
                {
                    name.removeprefix("optimizer."): reader.read(name)
                    for name in reader.shapes
                    if name.startswith("optimizer.")
                }
            )
            if isinstance(self.model, TwoTower):
                self._restore_labels(self.model, reader)
            reader.check_rest()
            self.position = Position(**metadata["position"])
            self.schedule.plateau = Plateau(**metadata["schedule"]["plateau"])
            self.schedule.plateau_factor = metadata["schedule"]["factor"]
            self.rate_factor = metadata["schedule"].get("rate_factor", 1.0)  # older versions knew none
            self.stopping.plateau = Plateau(**metadata["stopping"])
            self.seconds = metadata["seconds"]
            self.stopwatch.restore(metadata.get("phase_seconds", {}))  # older versions kept none
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: the checkpoint must hold the state of this run, found "
                f"{type(error).__name__}: {error}; resume with the version that wrote it"
            ) from None

    def _restore_labels(self, model: TwoTower, reader: CheckpointReader) -> None:
        """Take over what `_of_labels` keeps; the texts are the data set's."""
        model.embeddings = None
        if "label_embeddings" in reader.shapes:
            model.embeddings = reader.read("label_embeddings").to(self.config.training.device)
        if "negatives.offsets" in reader.shapes:
            offsets, indices = (reader.read(f"negatives.{name}").numpy() for name in ("offsets", "indices"))
            self.negatives = CsrRows(offsets, indices, None, model.problem.label_count)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM instead of dying on them; only the main thread may ask for that."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, _: FrameType | None) -> None:
            self._signal = number

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop_on_signal(self) -> None:
        assert self._signal is not None
        self.save()
        name = signal.Signals(self._signal).name
        self.folder.log(f"stopped by {name} at step {self.position.step}")
        raise StoppedBySignalError(
            self._signal,
            f"{self.folder.path}: stopped by {name} at step {self.position.step}, checkpoint written; "
            "continue with --resume",
        )


def _contribute(tensors: Mapping[str, Storable]) -> None:
    """Give the worker that writes a checkpoint this one's share of every tensor, in the order of writing."""
    for name in writing_order(tensors):
        value = tensors[name]
        if isinstance(value, Pieces):
            for _ in value.make():
                pass


def data_facts(dataset: Dataset) -> dict[str, Any]:
    """Return what identifies a data set in a run."""
    return {
        "name": dataset.name,
        "source": None if dataset.source is None else str(dataset.source),
        "fingerprint": dataset.fingerprint,
        "kind": dataset.kind,
        "instances": dataset.train.instances,
        "labels": dataset.label_count,
    }


def train_into(
    folder: Path,
    dataset: Dataset,
    config: Config,
    *,
    resume: bool = False,
    cache: Path | None = None,
    budget_bytes: int | None = None,
    enforce: bool = False,
    workers: Workers = ALONE,
) -> Trainer:
    """Train a data set into a run folder and return the finished trainer.

    Args:
        folder: Run folder.
        dataset: What to train on.
        config: Settings; with a budget, those to start from (`xmlc.memory.budget.fit`).
        resume: Go on from the latest checkpoint; a budget then changes nothing, it is only checked.
        cache: Folder of the stores.
        budget_bytes: Anonymous memory that the whole process may have, or, on a CUDA device, memory of the
            device that torch may have; None plans nothing.
        enforce: Make the budget a hard limit (`hard_limit`, `device_limit`).
        workers: Who trains together; rank 0 writes the folder, which all must see.

    Raises:
        StoppedBySignalError: SIGINT or SIGTERM; the run can be resumed.
        OutOfMemoryError: Memory ran out; the last checkpoint is whole.
        XmlcError: Data, config or folder do not fit.
    """
    if config.training.device == "cuda":
        native.require_cuda()
    if enforce and budget_bytes is None:
        raise ConfigError("train: enforce needs a budget to enforce, found none; give one, such as 4GiB")
    if budget_bytes is not None:
        check_plannable(config)
    if workers.size > 1:
        _check_shared_out(config, workers, budget_bytes)
    run = RunFolder(folder) if workers.rank == 0 else FollowedRun(folder)
    with run.locked(), progress.silenced(workers.rank > 0):
        changed = run.check_same(config, dataset.fingerprint) if resume else {}
        if not resume:
            run.check_empty()
        sparing = budget_bytes is not None or dataset.label_count * config.model.fan_in >= MANY_CONNECTIONS
        if sparing:
            return_large_blocks(config.encoder.trained)
        import_libraries(dataset, config)
        start = usage()
        threads = config.training.threads or torch.get_num_threads()
        torch.set_num_threads(1 if config.training.deterministic else threads)
        encoder = None
        if config.encoder.kind == "transformer":
            encoder = run.encoder if resume else locate_encoder(config.encoder)
        on_device = config.training.device == "cuda"
        within: Within = anywhere
        limit = None
        if budget_bytes is not None:
            limit = budget_bytes - (0 if on_device else start.anonymous)
            within = within_budget(limit, start.anonymous, on_device, enforce)
        prepared = prepare(dataset, config, cache, encoder, within)
        batches = (
            batches_of(prepared) if limit is None else traced_batches(dataset, config, prepared)
        )  # what nothing is planned for needs no transformer tried
        enforced = None
        if limit is not None:
            taken = 0 if on_device else start.anonymous
            config, prepared, planned = _fitted(config, prepared, batches, limit, taken, run, resume)
            if enforce:
                enforced = (
                    limit if on_device else limit - taken_bytes(start.anonymous, _prepared_bytes(planned))
                )
        facts = Facts(config, prepared.problem, batches, start.data, enforced if on_device else None)
        make_limit = device_limit if on_device else hard_limit
        running: list[Stopwatch] = []  # of the trainer, once it trains
        with (
            nullcontext() if enforced is None else make_limit(enforced),
            explained(facts, lambda: _place(running), lambda: _kept(run)),
        ):
            trainer = Trainer(dataset, config, run, prepared, workers)
            if sparing:
                return_free_blocks()
            if resume:
                trainer.resume()
                for key, (before, now) in changed.items():
                    progress.say(f"{folder}: resumed with {key} = {now!r}, {before!r} before")
                    run.log(f"resumed with {key} = {now!r}, {before!r} before")
                if changed:
                    run.change(config)
            else:
                run.create(config, data_facts(dataset), encoder)
            if workers.size > 1:
                run.log(f"{workers.size} workers share out the labels")
            kernels = native.cpu.isa() if config.training.device == "cpu" else "CUDA"
            run.log(f"training on {threads} threads with {kernels} kernels")
            running.append(trainer.stopwatch)
            with native.kernel_threads(threads), _sums_in_order(config.training):
                trainer.run()
        return trainer


def _prepared_bytes(planned: Plan) -> int:
    """Return what is planned of what has been prepared before the trainer is made."""
    return sum(term.bytes for term in planned.held if term.category == "statistics" and term.at_load)


def _check_shared_out(config: Config, workers: Workers, budget_bytes: int | None) -> None:
    """Check that several workers can train this together.

    Raises:
        ConfigError: They cannot.
    """
    where = f"train: {workers.size} workers"
    if config.model.output not in ("sparse", "two_tower"):
        raise ConfigError(
            f"{where} need model.output = sparse or two_tower, found {config.model.output}; train alone"
        )
    if config.training.batch_size < workers.size:
        raise ConfigError(
            f"{where} share out each batch, found training.batch_size = {config.training.batch_size}; "
            "raise it"
        )
    if config.training.storage == "disk":
        raise ConfigError(f"{where} need training.storage = memory, found disk; set it to memory")
    if budget_bytes is not None:
        raise ConfigError(f"{where}: a budget is planned for one process, found one given; leave it out")


@contextmanager
def _sums_in_order(training: TrainingConfig) -> Iterator[None]:
    """On a device, give every sum one order where the settings ask for the same bits.

    torch then refuses what has no such order, and cuBLAS needs a setting before its first product.
    """
    asked = training.device == "cuda" and training.deterministic
    if not asked or torch.are_deterministic_algorithms_enabled():
        yield  # and not torch's switch, which imports its compiler
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _fitted(
    config: Config,
    prepared: Prepared,
    batches: Batches,
    available_bytes: int,
    taken_bytes: int,
    run: RunFolder,
    resume: bool,
) -> tuple[Config, Prepared, Plan]:
    """Return settings that fit the budget, the streams in their batches, the plan; say what was changed.

    Raises:
        BudgetError: None fit; or a run that is resumed, whose settings stay, does not.
    """
    fitting = fit(config, prepared.problem, batches, available_bytes, taken_bytes)
    if resume and fitting.changes:
        options = ", ".join(map(str, fitting.changes))
        raise BudgetError(
            f"{run.path}: a resumed run keeps its settings, which do not fit the budget (a new run would "
            f"take {options}); raise the budget"
        )
    progress.say(
        f"{run.path}: {mebibytes(needed_bytes(fitting.plan))} planned of {mebibytes(available_bytes)}, "
        f"the most in {fitting.plan.peak_phase}"
    )
    for change in fitting.changes:
        progress.say(f"{run.path}: to fit the budget, {change}")
    training = fitting.config.training
    streams = replace(
        prepared,
        train=replace(prepared.train, batch_size=training.batch_size),
        validation=replace(prepared.validation, batch_size=training.evaluation_batch),
    )
    return fitting.config, streams, fitting.plan


def _place(running: list[Stopwatch]) -> str:
    return (running[0].current or "data") if running else "load"


def _kept(run: RunFolder) -> str:
    path = run.checkpoints.latest()
    return "no checkpoint was written before" if path is None else f"{path} is whole"


def _tensorboard(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "training.tensorboard: needs the package tensorboard, found none; "
            "install it with `pip install 'xmlc[report]'`, or set it to false"
        ) from None
    return SummaryWriter(str(path / "tensorboard"))
