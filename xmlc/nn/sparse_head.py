"""The sparse output layer as a torch module, for anyone's encoder and training loop."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch import Tensor, nn

from xmlc.config import Config, WeightDtype, build_config
from xmlc.data.ragged import RaggedLabels, ragged_rows
from xmlc.data.rows import CsrRows
from xmlc.errors import ConfigError, DataError, NativeError, WorkerError, XmlcError
from xmlc.nn.label_parallel import LabelParallelOutput, unit_of
from xmlc.nn.model import check_fits
from xmlc.nn.output_layer import SparseOutput, loss_scale, normalised, positive_tensors
from xmlc.ops import LOSSES, pairs_by_label, redistribute, sparse_linear, top_labels
from xmlc.ops.checks import differentiated_once
from xmlc.parallel import OwnLabels, Workers, check_group, deal_labels, gather_compressed
from xmlc.sparsity import index_dtype


class HeadOutput(NamedTuple):
    """What `SparseHead` returns; ``output[0]`` and ``output.loss`` are the same."""

    loss: Tensor  # float32 []


class SparseHead(nn.Module):
    """An output layer of uniform fan-in over the embeddings of any encoder.

    Called as ``head(embeddings, labels).loss``, whose ``.backward()`` trains everything below, and the head::

        features = relu(penultimate(embeddings))        # or the embeddings themselves, with width=None
        loss = mean over the batch of the loss of sparse_linear(features)

    The penultimate layer is an ordinary ``nn.Linear``: the caller's optimizer updates it. The output layer
    (``head.output``: weight, bias, indices, optimizer state) is, with ``fused=True``, neither parameter nor
    buffer: optimizers, DDP and gradient clipping do not see it. Its contract:

    - The forward pass computes the loss and changes nothing. The backward pass computes the loss's gradient
      and updates the output layer by `fused_step`, without a [label, batch] tensor or a gradient that anyone
      could see. Every backward pass is one step: gradient accumulation accumulates all but the output layer.
    - **The output layer sees the gradient of the unscaled loss.** The gradient that arrives at the loss
      (1 / accumulation steps, a loss scale, a weight) scales what goes on to penultimate layer and encoder
      only.
    - In ``eval()`` mode the backward pass computes the gradient of the embeddings and updates nothing.
    - Between a forward pass and its backward pass the output layer must not change: a second backward pass
      through the same loss, or two losses added up, raise. Nor is there a second derivative.
    - Under torch.distributed every worker has the whole output layer and makes the same step from the batch
      of all workers, gathered in the forward pass; after DDP's mean every gradient equals the one-process
      gradient of the mean over all instances, and ``loss`` is that mean. Without gradients (``no_grad``), in
      ``eval()`` mode and in `topk` a worker works alone.
    - With ``label_parallel=True`` every worker has its own labels' part of the output layer only, and all
      workers call everything together: both passes, in ``eval()`` mode and without gradients too, `topk`,
      `redistribute`, ``state_dict()``. Losses and gradients are as above.

    With ``fused=False`` weight and bias are parameters and everything is plain autograd: any optimizer,
    accumulation, clipping, DDP as they are, for memory of [label, batch] and of the weights' gradient.
    """

    def __init__(
        self,
        hidden: int,
        label_count: int,
        *,
        width: int | None = 8192,
        fan_in: int = 32,
        group_size: Literal[1, 16, 32, 64] = 1,
        loss: str | Mapping[str, Any] = "squared_hinge",
        optimizer: str | Mapping[str, Any] | None = None,
        learning_rate: float | None = None,
        weight_dtype: WeightDtype = "float32",
        weight_init: Literal["zero", "fan_in", "glorot_flat"] = "zero",
        bias_init: float | Literal["auto"] = "auto",
        fused: bool = True,
        seed: int = 0,
        label_parallel: bool = False,
        label_counts: Sequence[int] | NDArray[np.integer[Any]] | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        """Take the settings, named as in docs/configuration.md, and draw weights and connections.

        Args:
            hidden: Width of the embeddings.
            label_count: Number of labels.
            width: Units of the penultimate layer; None connects labels straight to the embedding.
            fan_in: Inputs of each label.
            group_size: Labels that share one set of inputs.
            loss: Kind of loss, or settings of the section ``[loss]``.
            optimizer: Kind of the output layer's optimizer (adam if None), or settings of
                ``[output_optimizer]``, ``state_dtype`` among them; only with ``fused=True``.
            learning_rate: Rate of that optimizer; 0.001 if neither names one. May be set at any time:
                ``head.learning_rate = ...``.
            weight_dtype: Storage of the output layer's weights; float8 only with ``fused=True``.
            weight_init: Start of the output layer's weights.
            bias_init: Start of its biases; auto is -1 for squared hinge, the log-odds of one label in
                ``label_count`` for bce, 0 otherwise.
            fused: See the class.
            seed: Decides initial weights, connections and rounding; the same on all workers.
            label_parallel: Share the labels out to the workers of ``group``; see the class.
            label_counts: With ``label_parallel``, the positives of every label in the training data: labels
                are dealt out so that workers have about as many positives, too (`deal_labels`).
            group: Workers that train together; None is torch.distributed's default group, if there is one.

        Raises:
            ConfigError: A setting is unknown, out of range, or does not fit the others, or the weights do not
                fit into this machine's memory.
        """
        super().__init__()
        _check_sizes(hidden=hidden, label_count=label_count)
        _check_width(width)
        check_group(group, "SparseHead")
        if not fused and not (optimizer is None and learning_rate is None):
            raise ConfigError(
                "SparseHead: with fused=False the caller's optimizer updates the weights, found optimizer or "
                "learning_rate; leave them out"
            )
        rate = {} if learning_rate is None else {"learning_rate": learning_rate}
        rule = "adam" if optimizer is None else optimizer
        settings: dict[str, Any] = {
            "model": {
                "width": hidden if width is None else width,
                "fan_in": fan_in,
                "group_size": group_size,
                "weight_dtype": weight_dtype,
                "weight_init": weight_init,
                "bias_init": bias_init,
            },
            "loss": _section(loss),
            # Of a layer that autograd trains, SparseOutput need not keep any state.
            "output_optimizer": {**_section(rule), **rate} if fused else {"kind": "sgd"},
            "training": {"seed": seed},
        }
        config = build_config(settings, "SparseHead")
        if not fused and config.model.weight_dtype.startswith("float8"):
            raise ConfigError(
                "SparseHead: with fused=False weight_dtype must be float32 or bfloat16, whose gradients "
                f"autograd can hold, found {weight_dtype}; leave fused=False out"
            )
        _check_loss(config, fused)
        _check_memory(hidden, width, label_count, config, label_parallel)
        self._workers = Workers(group) if label_parallel or group is not None else None
        own = _own_labels(label_count, config, self.workers, fused, label_counts) if label_parallel else None
        if own is None and label_counts is not None:
            raise ConfigError(
                "SparseHead: label_counts says how to share labels out, found label_parallel=False; set it "
                "to True or leave label_counts out"
            )
        generator = torch.Generator().manual_seed(seed)
        self.hidden, self.label_count, self.fused = hidden, label_count, fused
        self.learning_rate = config.output_optimizer.learning_rate
        self.penultimate = None if width is None else _penultimate(hidden, width, generator)
        self.output = SparseOutput(
            label_count,
            config.model,
            config.loss,
            config.output_optimizer,
            _initial_bias(config, label_count),
            _positive_weight(config, label_count),
            seed,
            generator,
            own=None if own is None else own.labels,
            state_dtype=config.output_optimizer.state_dtype,
        )
        self.parallel = None if own is None else LabelParallelOutput(self.output, own)
        self.steps = torch.zeros((), dtype=torch.int64)  # updates so far; 0 with fused=False
        self.redistributions = torch.zeros((), dtype=torch.int64)
        if not fused:
            self.weight = nn.Parameter(self.output.weight)  # [label, fan_in]
            self.bias = nn.Parameter(self.output.bias)  # [label]
        self._workers_agree = False

    @property
    def device(self) -> torch.device:
        """Where the output layer is."""
        return self.output.indices.device

    @property
    def workers(self) -> Workers:
        """Who trains together; without ``label_parallel`` the default group may come later than the head."""
        return self._workers or Workers()

    @property
    def learning_rate(self) -> float:
        """Rate of the output layer's next steps (``fused=True``)."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if not (isinstance(value, int | float | np.number) and math.isfinite(value) and value >= 0.0):
            raise ConfigError(f"SparseHead: learning_rate must be a number of at least 0, found {value!r}")
        self._learning_rate = float(value)

    def forward(self, embeddings: Tensor, labels: RaggedLabels) -> HeadOutput:
        """Return the loss of a batch; see the class for what its backward pass does.

        Args:
            embeddings: Floating point [batch, hidden], on the head's device; computed on in float32.
            labels: The positives of each instance: lists, compressed rows, or an int tensor padded with
                negatives (`xmlc.data.ragged.RaggedLabels`).

        Raises:
            DataError: Embeddings are empty, not finite, or of another shape, dtype or device; a label is out
                of range; there is not one row of labels for each embedding.
            WorkerError: The workers' heads differ, or another worker stopped.
        """
        features = self.features(embeddings)
        positives = ragged_rows(labels, len(embeddings), self.label_count, "SparseHead: labels")
        if not self.fused:
            return HeadOutput(self._autograd_loss(features, positives))
        if not torch.is_grad_enabled() and self.parallel is None:
            return HeadOutput(self.output.evaluate(features, positives, gradient=False)[0].float())
        # The embeddings may come from a frozen encoder; the backward pass must reach the head all the same.
        reached = torch.zeros((), requires_grad=True)
        return HeadOutput(_FusedLoss.apply(features, reached, self, positives))

    def features(self, embeddings: Tensor) -> Tensor:
        """Return the output layer's input, float32 [input, batch], on the autograd graph."""
        self._check_embeddings(embeddings)
        if self.penultimate is None:
            return embeddings.T.float().contiguous()
        weight, bias = self.penultimate.weight, self.penultimate.bias
        units = torch.addmm(bias[:, None], weight, embeddings.T.to(weight.dtype)).relu()
        features = units.float().contiguous()
        if not _finite(features):
            raise DataError(
                "SparseHead: the penultimate layer must give finite numbers, found NaN or infinity; lower "
                "the learning rate of its optimizer"
            )
        return features

    @torch.no_grad()
    def topk(self, embeddings: Tensor, k: int = 5) -> tuple[Tensor, Tensor]:
        """Return scores and labels [batch, k], best first, without a [batch, label] tensor.

        Ties go to the lowest label. See `xmlc.ops.top_labels`. With ``label_parallel`` workers may give
        different numbers of embeddings.

        Raises:
            DataError: The embeddings do not fit.
            NativeError: k is not in [1, label].
        """
        if self.parallel is not None:
            return self._topk_of_all(self.features(embeddings), k)
        weight, bias = self._weight_and_bias()
        output = self.output
        return top_labels(
            self.features(embeddings),
            weight,
            output.indices,
            bias,
            k,
            output.group_size,
            weight_scale=output.weight_scale,
        )

    @torch.no_grad()
    def redistribute(self, fraction: float, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Move this share of the connections, the weakest, to random inputs, and return their number.

        Moved connections start with weight 0 and without optimizer state. On all workers alike. See
        `xmlc.ops.redistribute`.

        Args:
            fraction: In [0, 1].
            optimizer: With ``fused=False``, the one that holds ``head.weight``.

        Raises:
            ConfigError: With ``fused=False`` the optimizer is missing.
            NativeError: The fraction is out of range.
        """
        if self.fused != (optimizer is None):
            raise ConfigError(
                "SparseHead.redistribute: the optimizer must be given with fused=False, and only then, "
                f"found fused={self.fused} and {'no' if optimizer is None else 'an'} optimizer"
            )
        weight, _ = self._weight_and_bias()
        states = self.output.state.by_connection()
        if optimizer is not None:
            state = optimizer.state.get(self.weight, {})
            states = [value for value in state.values() if getattr(value, "shape", None) == weight.shape]
        if self.parallel is not None:
            fraction = self.parallel.own_fraction(_share(fraction))
        moved = redistribute(
            weight,
            self.output.indices,
            self.output.input,
            fraction=fraction,
            states=states,
            group_size=self.output.group_size,
            step=int(self.redistributions),
            seed=self.output.seed,
            weight_scale=self.output.weight_scale,
        )
        self.redistributions += 1
        self._workers_agree = False
        return moved if self.parallel is None else self.parallel.sum_over_workers(moved)

    def extra_repr(self) -> str:
        """Return the settings that matter for reading a model."""
        output = self.output
        return (
            f"hidden={self.hidden}, label_count={self.label_count}, input={output.input}, "
            f"fan_in={output.weight.shape[1]}, loss={output.loss.kind}, fused={self.fused}"
        )

    def _check_embeddings(self, embeddings: Tensor) -> None:
        found = f"{type(embeddings).__name__}"
        if isinstance(embeddings, Tensor) and embeddings.layout is not torch.strided:
            found = f"{embeddings.layout}"
        elif isinstance(embeddings, Tensor):
            found = f"{embeddings.dtype} {list(embeddings.shape)}"
            fits = embeddings.dim() == 2 and embeddings.shape[0] > 0 and embeddings.shape[1] == self.hidden
            if fits and embeddings.is_floating_point() and embeddings.device == self.device:
                if _finite(embeddings.float()):
                    return
                raise DataError(
                    "SparseHead: embeddings must be finite in float32, found NaN or infinity; lower the "
                    "learning rate, or look for the layer that makes them"
                )
            found += f" on {embeddings.device}"
        raise DataError(
            f"SparseHead: embeddings must be a floating-point tensor [batch, hidden] = [1 or more, "
            f"{self.hidden}] on the head's device {self.device}, found {found}; move either by .to(device)"
        )

    def _weight_and_bias(self) -> tuple[Tensor, Tensor]:
        return (self.output.weight, self.output.bias) if self.fused else (self.weight, self.bias)

    def _autograd_loss(self, features: Tensor, positives: CsrRows) -> Tensor:
        output, loss, batch = self.output, self.output.loss, features.shape[1]
        logits = sparse_linear(features, self.weight, output.indices, self.bias, output.group_size)
        pairs = pairs_by_label(*positive_tensors(positives), batch, self.label_count)
        labels, instances = (pair.long().to(features.device) for pair in pairs)
        positive = torch.zeros_like(logits, dtype=torch.bool)
        positive[labels, instances] = True
        factor = features.new_ones(1, batch)
        if normalised(loss) and loss.reduction == "mean":
            factor = 1.0 / positive.sum(0, keepdim=True).clamp_min(1)
        if output.positive_weight is not None:
            factor = factor * output.positive_weight[:, None]
        return loss_scale(loss, batch, self.label_count) * LOSSES[loss.kind](logits, positive, factor).sum()

    def _own_step(self, features: Tensor, positives: CsrRows) -> Tensor:
        """Update the output layer and return the feature gradient [input, batch]."""
        self.steps += 1
        return self.output.step(features, positives, self.learning_rate, int(self.steps))[1]

    def _versions(self) -> tuple[int, ...]:
        output = self.output
        return tuple(value._version for value in (output.weight, output.bias, output.indices))

    def _gather(self, features: Tensor, positives: CsrRows) -> _Gathered:
        """Return the batch of all workers, in the order of their ranks, on every one of them.

        With ``label_parallel`` its positives are those among the worker's own labels.
        """
        state = (
            0 if self._workers_agree else self._checksum(),
            int(self.steps),
            int(np.float64(self.learning_rate).view(np.int64)),
        )
        if self.parallel is not None:
            batch = self.parallel.gather(features, positives, None, None, *state)
            gathered = _Gathered(batch.features, batch.positives, batch.lengths)
            states = batch.further
        else:
            (rows,), sizes = gather_compressed(self.workers, [positives], features.device, *state)
            lengths, states = [size[0] for size in sizes], [size[2:] for size in sizes]
            gathered = _Gathered(self.workers.gather_rows(features.T, lengths).T.contiguous(), rows, lengths)
        if any(state != states[0] for state in states):
            raise WorkerError(
                "SparseHead: output layer and learning rate must be the same on all workers, found different "
                "ones; use one seed, and call load_state_dict, redistribute and backward on all workers alike"
            )
        self._workers_agree = True
        return gathered

    def _topk_of_all(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Rank the instances of all workers among all labels, and return this worker's."""
        assert self.parallel is not None
        if not 1 <= k <= self.label_count:
            raise NativeError(f"SparseHead: k must lie in [1, label] = [1, {self.label_count}], got {k}")
        workers = self.workers
        lengths = [size[0] for size in workers.gather_sizes(features.shape[1], device=features.device)]
        features = workers.gather_rows(features.T, lengths).T.contiguous()
        scores, labels = self.parallel.top_labels(features, k)
        own = _rows_of(workers.rank, lengths)
        return scores[own], labels[own]

    def _checksum(self) -> int:
        """Return a number that agreeing workers have in common: of the layer, or of how it is shared out."""
        if self.parallel is not None:
            shares = self.parallel.own.shares
            facts = f"{shares.label} {shares.unit} {self.output.input} {self.output.weight.shape[1]}"
            return zlib.crc32(shares.owner.tobytes(), zlib.crc32(facts.encode()))
        checksum = 0
        for value in self._output_tensors().values():
            checksum = zlib.crc32(value.cpu().contiguous().view(-1).view(torch.uint8).numpy(), checksum)
        return checksum

    # No buffers: DDP would broadcast them at every step, and gloo knows no uint16.

    def _output_tensors(self) -> dict[str, Tensor]:
        tensors = {f"output.{name}": value for name, value in self.output.tensors().items()}
        if not self.fused:
            del tensors["output.weight"], tensors["output.bias"]
        return tensors | {"steps": self.steps, "redistributions": self.redistributions}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SparseHead:
        """Go to another device with the module; dtypes are the settings' and stay."""
        super()._apply(fn, recurse)
        if not self.fused:
            self.output.weight, self.output.bias = self.weight.data, self.bias.data
        self.output.move(fn(torch.empty(0, device=self.device)).device)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let a copy's layer share the parameters, as here; parameters are copied apart from tensors."""
        super().__setstate__(state)
        if not self.fused:
            self.output.weight, self.output.bias = self.weight.data, self.bias.data

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self._output_tensors().items():
            of_each = self._labels_of_a_row(name)
            if of_each is not None:
                assert self.parallel is not None
                value = self.parallel.own.whole(value, of_each)
            destination[prefix + name] = value

    def _labels_of_a_row(self, name: str) -> int | None:
        """Return how many labels a row stands for of a tensor that is shared out; None for any other."""
        key = name.removeprefix("output.")
        return None if self.parallel is None or key == name else self.parallel.rows_of_each(key)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = dict(state_dict)
        for name, value in self._output_tensors().items():
            given = state.pop(prefix + name, None)
            of_each = self._labels_of_a_row(name)
            shape = list(value.shape)
            if of_each is not None:
                assert self.parallel is not None
                shape[0] = self.parallel.own.row_count(of_each)
            if given is None:
                missing_keys.append(prefix + name)
            elif list(given.shape) != shape or given.dtype != value.dtype:
                error_msgs.append(
                    f"{prefix + name} must be {value.dtype} {shape} by this head's settings, "
                    f"found {given.dtype} {list(given.shape)}"
                )
            elif self.parallel is not None and of_each is not None:
                self.parallel.own.take(given, value, of_each)
            else:
                value.copy_(given)
        super()._load_from_state_dict(
            state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        self._workers_agree = False

    def _replicate_for_data_parallel(self) -> SparseHead:
        raise ConfigError(
            "SparseHead: torch.nn.DataParallel's replicas cannot share an output layer; use "
            "DistributedDataParallel (torchrun), or show one device only (CUDA_VISIBLE_DEVICES=0)"
        )


class _Gathered(NamedTuple):
    features: Tensor  # [input, batch of all workers]
    positives: CsrRows
    lengths: list[int]
    """Instances of each worker."""


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, reached: Tensor, head: SparseHead, positives: CsrRows) -> Tensor:
        parallel, workers = head.parallel, head.workers
        if parallel is not None:
            features, positives, lengths = head._gather(features, positives)
            loss = workers.sum(head.output.evaluate(features, positives, gradient=False)[0])
        else:
            lengths = [features.shape[1]]
            loss, _ = head.output.evaluate(features, positives, gradient=False)
            if head.training and workers.size > 1:
                features, positives, lengths = head._gather(features, positives)
                loss = workers.sum(loss * (lengths[workers.rank] / features.shape[1]))
        ctx.save_for_backward(features)
        ctx.rest = (head, positives, lengths, head.training, head._versions())
        return loss.float()

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor | None, ...]:
        differentiated_once("SparseHead: the loss")
        (features,) = ctx.saved_tensors
        head, positives, lengths, update, versions = ctx.rest
        if head._versions() != versions:
            raise XmlcError(
                "SparseHead: the output layer must be as it was in the forward pass, found it changed: every "
                "backward pass updates it; call the head again before another backward pass, or use "
                "fused=False to add up losses"
            )
        gradient = (
            head._own_step(features, positives)
            if update
            else head.output.evaluate(features, positives, gradient=True)[1]
        )
        if head.parallel is not None:
            gradient = head.parallel.scatter(gradient, lengths)
        elif len(lengths) > 1:
            gradient = gradient[:, _rows_of(head.workers.rank, lengths)]
        # DDP takes the mean over workers, of gradients of which each holds its own instances' part.
        return gradient * (loss_gradient * len(lengths)), None, None, None


def _rows_of(rank: int, lengths: list[int]) -> slice:
    """Return where a worker's instances lie in the batch of all."""
    first = sum(lengths[:rank])
    return slice(first, first + lengths[rank])


def _own_labels(label_count: int, config: Config, workers: Workers, fused: bool, counts: Any) -> OwnLabels:
    """Share the labels out to the workers.

    Raises:
        ConfigError: The settings do not allow it.
    """
    if not fused:
        raise ConfigError(
            "SparseHead: label_parallel needs fused=True, whose steps it shares out, found fused=False; "
            "leave one of them out"
        )
    if counts is not None:
        counts = np.asarray(counts)
        if counts.shape != (label_count,) or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise ConfigError(
                f"SparseHead: label_counts must be integers of at least 0, [{label_count}], found "
                f"{counts.dtype} {list(counts.shape)}"
            )
    return OwnLabels(deal_labels(label_count, workers.size, unit_of(config.model), counts), workers)


def _share(fraction: float) -> float:
    """Return a fraction of connections, checked before workers act on it.

    Raises:
        NativeError: It is out of range.
    """
    if not 0.0 <= fraction <= 1.0:
        raise NativeError(f"SparseHead: fraction must lie in [0, 1], got {fraction}")
    return fraction


def _finite(values: Tensor) -> bool:
    """Return whether all are finite, without a tensor of their size: NaN counts as smallest and largest."""
    low, high = values.detach().aminmax()
    return bool(torch.isfinite(torch.stack([low, high])).all())


def _section(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given, str | Mapping):
        raise ConfigError(
            f"SparseHead: loss and optimizer must be a kind or a table of settings, found {given!r}"
        )
    return {"kind": given} if isinstance(given, str) else dict(given)


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if not _counts(value):
            raise ConfigError(f"SparseHead: {name} must be an integer of at least 1, found {value!r}")


def _check_width(width: object) -> None:
    if width is not None and not _counts(width):
        raise ConfigError(
            "SparseHead: width must be an integer of at least 1, or None for no penultimate layer, found "
            f"{width!r}"
        )


def _counts(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 1)


def _check_memory(
    hidden: int, width: int | None, label_count: int, config: Config, label_parallel: bool
) -> None:
    """Check that this machine has the memory for the weights alone.

    With ``label_parallel`` of the output layer only the connections count: whose weights are whose is open.
    """
    model = config.model
    groups = -(-label_count // model.group_size)
    tensors = {"output.indices": ((groups, model.fan_in), index_dtype(model.width))}
    if not label_parallel:
        tensors["output.weight"] = ((label_count, model.fan_in), getattr(torch, model.weight_dtype))
    if width is not None:
        tensors["penultimate.weight"] = ((width, hidden), torch.float32)
    check_fits("SparseHead", tensors, "label_count, fan_in or width")


def _check_loss(config: Config, fused: bool) -> None:
    if config.loss.positive_weight_propensity:
        raise ConfigError(
            "SparseHead: positive_weight_propensity must be false, as the head knows no label frequencies, "
            "found true"
        )
    if config.loss.gradient_cutoff > 0.0 and not fused:
        raise ConfigError(
            f"SparseHead: gradient_cutoff must be 0 with fused=False, found {config.loss.gradient_cutoff}"
        )


def _penultimate(hidden: int, width: int, generator: torch.Generator) -> nn.Linear:
    """Return a layer that starts as the model's (He et al. 2015), drawn from the generator alone."""
    linear: nn.Linear = nn.utils.skip_init(nn.Linear, hidden, width)
    with torch.no_grad():
        linear.weight.normal_(0.0, math.sqrt(2.0 / hidden), generator=generator)
        linear.bias.zero_()
    return linear


def _initial_bias(config: Config, label_count: int) -> Tensor:
    given = config.model.bias_init
    if given == "auto":
        odds = -math.log(max(label_count - 1, 1))
        given = {"squared_hinge": -1.0, "bce": odds}.get(config.loss.kind, 0.0)
    return torch.full((label_count,), float(given))


def _positive_weight(config: Config, label_count: int) -> Tensor | None:
    weight = config.loss.positive_weight
    return None if weight == 1.0 else torch.full((label_count,), float(weight))
