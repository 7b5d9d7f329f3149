"""Every setting of a training run: frozen, validated, read from TOML, overridable by ``key=value``."""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from xmlc.errors import ConfigError


def _in_float32(value: float) -> float:
    if not abs(value) <= 1e30:  # NaN too; beyond it, products leave float32
        raise ValueError(f"must be finite and at most 1e30 in size, found {value}")
    return value


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0), AfterValidator(_in_float32)]
NonNegativeFloat = Annotated[float, Field(ge=0.0), AfterValidator(_in_float32)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
FiniteFloat = Annotated[float, AfterValidator(_in_float32)]
PositiveFraction = Annotated[float, Field(gt=0.0, le=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, lt=1.0)]
WeightDtype = Literal["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
StateDtype = Literal["float32", "bfloat16", "float8_e4m3fn"]


# Strict as everything, but for the list that TOML and JSON have instead of a tuple.
FromList = Field(strict=False)

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxlong = _brief.maxother = 80


class Section(BaseModel):
    """A group of settings: frozen, an unknown key is an error, and so is ``true`` for 1 or ``"1"`` for 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class DataConfig(Section):
    """How a data set becomes training, validation and test instances."""

    validation_fraction: UnitInterval = 0.05
    """Share of the training instances held out to choose learning rate, epoch and early stop."""
    training_fraction: PositiveFraction = 1.0
    """Share of the other instances that is trained on, drawn by the seed. Propensities stay those of all."""
    mask_filter_pairs: bool = True
    """Mask the (instance, label) pairs of the filter files in evaluation."""
    skip_filter_pairs: bool = False
    """Let the pairs of the training filter file count neither as positives nor as negatives in training.
    ``output = "two_tower"`` always does."""
    label_documents: bool = False
    """Also train on every label's own text (or features), as an instance whose one label it is. Propensities
    and validation know nothing of these instances."""
    unit_length: bool = True
    """Scale every instance's sparse features to Euclidean length 1."""


class TextConfig(Section):
    """TF-IDF over words and, optionally, character n-grams (scikit-learn's ``TfidfVectorizer``)."""

    word_ngrams: Annotated[tuple[PositiveInt, PositiveInt], FromList] = (1, 1)
    """Shortest and longest run of words that counts as a term."""
    character_ngrams: Annotated[tuple[NonNegativeInt, NonNegativeInt], FromList] = (0, 0)
    """Shortest and longest character n-gram within word boundaries; [0, 0] uses none."""
    min_document_frequency: PositiveInt = 1
    """Training texts that a term must occur in."""
    max_features: PositiveInt | None = None
    """Terms to keep, those in the most texts, of words and of character n-grams each."""
    sublinear_tf: bool = True
    """Weigh a term's count as 1 + ln(count)."""

    @model_validator(mode="after")
    def _check_ngrams(self) -> TextConfig:
        for name in ("word_ngrams", "character_ngrams"):
            low, high = getattr(self, name)
            if low > high or (low == 0 and high > 0):
                raise ValueError(f"{name} must be [low, high] with 1 <= low <= high, found [{low}, {high}]")
        return self


class EncoderConfig(Section):
    """What turns an instance into the ``hidden`` vector that the penultimate layer sees."""

    kind: Literal["features", "transformer"] = "features"
    """features: a learnt embedding of the sparse features (TF-IDF of texts), or dense features as they are.
    transformer: a Hugging Face encoder reads the texts (extra ``text``)."""
    path: str = ""
    """Of ``transformer``: a folder with config.json, safetensors and tokenizer; or ``package:NAME/FOLDER``, a
    folder inside an installed Python package; or a model's name on the Hugging Face Hub."""
    download: bool = False
    """Let a name on the Hub be fetched; without it only what is on this machine is used."""
    max_length: PositiveInt = 128
    """Tokens of a text, those that mark its ends included; longer texts are cut."""
    pooling: Literal["mean", "cls"] = "mean"
    """A text's embedding: the mean over its tokens, or the first token's."""
    unit_variance: bool = True
    """Scale every embedding to Euclidean length sqrt(hidden), mean square 1, whatever the encoder's scale."""
    frozen: bool = True
    """Leave the whole encoder as it is: every text is embedded once, into the cache, and training runs as
    with dense features. false trains it."""
    frozen_layers: NonNegativeInt = 0
    """With ``frozen = false``: leave the token embeddings and so many layers above them as they are; 0
    trains everything."""
    embedding_dtype: Literal["float16", "float32"] = "float16"
    """How ``frozen`` embeddings are kept."""
    autocast: Literal["none", "bfloat16"] = "none"
    """bfloat16: compute the encoder's products in it (torch.autocast); its weights stay float32."""
    recompute_activations: bool = False
    """Keep the activations between layers only and compute the others again in the backward pass."""
    compress_activations: bool = False
    """Keep what the backward pass needs of the activations in int8, a scale for every row: the loss stays,
    the gradients get an error of a few percent."""

    @model_validator(mode="after")
    def _check_kind(self) -> EncoderConfig:
        if self.kind == "transformer" and not self.path:
            raise ValueError("path must name an encoder where kind = transformer, found none")
        if self.kind != "transformer" and self.path:
            raise ValueError(f"path needs kind = transformer, found {self.kind}")
        if self.frozen_layers and self.frozen:
            raise ValueError(f"frozen_layers = {self.frozen_layers} needs frozen = false, found true")
        if self.compress_activations and self.recompute_activations:
            raise ValueError("compress_activations needs recompute_activations = false, found true")
        return self

    @property
    def trained(self) -> bool:
        """Whether training changes a transformer."""
        return self.kind == "transformer" and not self.frozen


class ModelConfig(Section):
    """Penultimate layer and output layer, and what comes before them."""

    output: Literal["sparse", "dense", "bottleneck", "two_tower"] = "sparse"
    """sparse: hidden -> width -> fixed fan-in output. dense: hidden -> label.
    bottleneck: hidden -> ``bottleneck`` units -> label, both dense. two_tower: the cosine between the
    instance's text and the label's, both embedded by the encoder (``[two_tower]``)."""
    hidden: PositiveInt = 512
    """Width of the encoder's output; dense features and transformers bring their own."""
    width: NonNegativeInt = 8192
    """Units of the penultimate layer, that is, the ``input`` axis of the sparse output layer. 0 has no
    penultimate layer: labels connect to the encoder's output, whose ``hidden`` values are the inputs then."""
    fan_in: PositiveInt = 32
    """Inputs of each label (K)."""
    group_size: Literal[1, 16, 32, 64] = 1
    """Labels that share one set of inputs; 1 is uniform fan-in."""
    direct_fan_in: NonNegativeInt = 0
    """Connections of each label straight to the instance's own sparse features (words), beside ``fan_in``:
    the strongest in the label's text and in the mean of its training instances. 0 has none."""
    direct_max_frequency: Fraction = 0.01
    """Features in more than this share of the training instances get no direct connections: each would touch
    many labels in every step, and units see them as well."""
    direct_text: NonNegativeFloat = 1.0
    """Initial weight of a direct connection: this times the feature's value in the label's text of unit
    length, plus the next."""
    direct_positives: NonNegativeFloat = 0.5
    """The same of the mean of the label's training instances, of unit length."""
    bottleneck: PositiveInt = 64
    """Units of the penultimate layer of ``output = "bottleneck"``."""
    weight_dtype: WeightDtype = "float32"
    """Storage of the sparse output layer's weights. All but float32 are rounded stochastically; those of
    float8 have a scale for every 64 labels."""
    feature_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the sparse output layer sees its inputs in. With bfloat16, weights in bfloat16 and groups of at
    least 16, a CUDA device computes on its tensor cores, and rounds the gradients of logits to bfloat16."""
    weight_init: Literal["zero", "fan_in", "glorot_flat"] = "zero"
    """Of the sparse output layer: 0; U(+-1/sqrt(fan_in)); or U(+-sqrt(3/(label*fan_in))), which is what Keras
    gives a flat tensor."""
    bias_init: FiniteFloat | Literal["auto"] = "auto"
    """auto: -1 for squared hinge (negatives start at loss 0), else the log-odds of the label's share."""
    penultimate_init: Literal["he", "glorot"] = "he"
    """N(0, 2/hidden); or U(+-sqrt(6/(hidden+width)))."""
    input_dropout: UnitInterval = 0.2
    """Dropout on the instance's features (of a transformer: its embedding) before the first dense layer."""
    hidden_dropout: UnitInterval = 0.0
    """Dropout on the encoder's output."""
    hidden_activation: Literal["none", "relu"] = "none"
    """Activation of the encoder's output."""

    @model_validator(mode="after")
    def _check_fan_in(self) -> ModelConfig:
        if self.output == "sparse" and self.fan_in > self.width > 0:
            raise ValueError(f"fan_in must be at most width = {self.width}, found {self.fan_in}")
        if self.output != "sparse" and self.feature_dtype != "float32":
            raise ValueError(
                f"feature_dtype = {self.feature_dtype} needs output = sparse, found {self.output}"
            )
        return self


class SimilarityConfig(Section):
    """Likeness of texts, added to a sparse model's logits when labels are ranked, never in training."""

    text_weight: NonNegativeFloat = 0.0
    """Times the cosine between the features of the instance and those of the label's text."""
    neighbour_weight: NonNegativeFloat = 0.0
    """Times the sum of the squared cosines to the nearest training instances that carry the label. The run
    then keeps the training features, and an instance costs a product with all of them."""
    neighbours: PositiveInt = 50
    """Nearest training instances."""

    @property
    def used(self) -> bool:
        """Whether anything is added."""
        return self.text_weight > 0.0 or self.neighbour_weight > 0.0


class LossConfig(Section):
    """Loss of one logit, and how the logits of an instance are combined."""

    kind: Literal["squared_hinge", "bce", "softmax", "decoupled_softmax"] = "squared_hinge"
    """max(0, 1 - target * logit)^2 with targets -1 and +1; binary cross-entropy with logits; the
    cross-entropy of each positive against all labels; or of each against itself and the negatives."""
    reduction: Literal["sum", "mean"] = "sum"
    """Over labels: their sum or their mean; of the softmax losses over the instance's positives. Over the
    batch it is always the mean."""
    gradient_cutoff: NonNegativeFloat = 0.0
    """A label whose logit gradients (before the reduction's factor) are at most this for all instances of a
    batch tile skips its backward work there; 0 is exact. Of the sparse output layer."""
    positive_weight: PositiveFloat = 1.0
    """Factor on the loss of every positive."""
    positive_weight_propensity: bool = False
    """Multiply the positives' weight by the label's inverse propensity."""


class TwoTowerConfig(Section):
    """Contrastive training of one encoder for instances and label texts (``model.output = "two_tower"``).

    The labels of a step, its pool, are positives of the batch and negatives. Whatever of them is a known
    positive of an instance counts as one, whoever brought it; all others are its negatives.
    """

    loss: Literal["decoupled_softmax", "softmax", "sigmoid"] = "decoupled_softmax"
    """See `xmlc.losses.MultiPositive`."""
    temperature: PositiveFloat = 0.05
    """Scores are cosines divided by this."""
    bias: FiniteFloat = 0.0
    """Added to every score; the softmaxes do not feel it."""
    learn_scale: bool = False
    """Train 1 / ``temperature`` and, of ``sigmoid``, ``bias``, with ``dense_optimizer``."""
    projection: NonNegativeInt = 0
    """Units of a linear layer without bias behind the encoder, the identity at the start where it has as many
    units as the encoder; 0 has none. A ``frozen`` encoder needs one: nothing else is trained."""
    positives: PositiveInt = 3
    """Positives that an instance brings into the pool, at most, drawn anew in every step."""
    random_negatives: NonNegativeInt = 0
    """Labels that a step draws into the pool from all labels."""
    mined_negatives: NonNegativeInt = 0
    """Labels that an instance brings into the pool, drawn in every step from its ``mined_from`` nearest."""
    mined_from: PositiveInt = 50
    """Nearest labels of an instance that are no known positives of it and no filter pairs."""
    mining_search: Literal["exact", "approximate"] = "exact"
    """How the nearest labels are looked for: in all labels; or in lists of labels around the centres of a
    k-means (extra ``search``), which misses some and pays for itself with many labels."""
    mining_probes: PositiveInt = 32
    """Of ``approximate``: lists that are looked through for an instance."""
    refresh_epochs: PositiveInt = 1
    """Epochs after which the nearest labels are looked for again, by the embeddings of that moment."""
    mini_batch_size: NonNegativeInt = 0
    """Texts whose activations are kept at a time: the encoder then runs twice, first without a graph. 0 keeps
    those of the whole step."""

    @model_validator(mode="after")
    def _check_mined(self) -> TwoTowerConfig:
        if self.mined_negatives > self.mined_from:
            raise ValueError(
                f"mined_negatives must be at most mined_from = {self.mined_from}, found "
                f"{self.mined_negatives}"
            )
        return self


class OptimizerConfig(Section):
    """Update rule of one part of the model."""

    kind: Literal["sgd", "momentum", "adam", "label_adam"] = "adam"
    """``label_adam``: no first moment and one second moment for each label (sparse output layer only)."""
    learning_rate: NonNegativeFloat = 1e-3
    """Rate before the schedule's factor."""
    momentum: UnitInterval = 0.9
    """Of ``momentum``."""
    beta1: UnitInterval = 0.9
    """Of ``adam``: decay of the first moment."""
    beta2: UnitInterval = 0.999
    """Of ``adam`` and ``label_adam``: decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Of ``adam`` and ``label_adam``: added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled: every step multiplies the weights by ``1 - learning_rate * weight_decay``; biases and
    embeddings, of which a step sees a few rows only, are spared."""


class OutputOptimizerConfig(OptimizerConfig):
    """Update rule of the output layer."""

    state_dtype: StateDtype = "float32"
    """Storage of what ``momentum`` and ``adam`` keep for each connection of the sparse output layer. All but
    float32 is rounded stochastically; in float8 every label has a scale. What is one value for each label
    (biases, ``label_adam``), and the state of direct connections, stays float32."""


class EncoderOptimizerConfig(OptimizerConfig):
    """Update rule of a transformer that is trained."""

    learning_rate: NonNegativeFloat = 5e-5
    """Rate before the schedule's factor."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled: every step multiplies the matrices by ``1 - learning_rate * weight_decay``; biases and the
    scales of normalisations are spared."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from 0, besides the schedule's warm-up."""


class RedistributionConfig(Section):
    """Prune the weakest connections and regrow as many elsewhere, during training."""

    interval_steps: NonNegativeInt = 1000
    """Steps between two redistributions; 0 never redistributes."""
    first_step: PositiveInt = 1000
    """Step after which connections move for the first time."""
    fraction: Fraction = 0.1
    """Share of the connections to move."""
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    """Course of ``fraction`` (or ``threshold``) from ``first_step`` down to 0 at the end."""
    end: Fraction = 0.66
    """Share of the planned training steps after which connections stay."""
    mode: Literal["fraction", "threshold"] = "fraction"
    """Whether ``fraction`` or ``threshold`` decides."""
    threshold: NonNegativeFloat = 0.0
    """Magnitude below which a connection moves."""
    scope: Literal["layer", "group"] = "layer"
    """Whether weak connections are ranked over the whole layer or within each group."""
    new_value: Literal["zero", "random", "keep"] = "zero"
    """Weight of a moved connection."""
    new_value_bound: NonNegativeFloat = 0.01
    """Half width of the uniform distribution of ``new_value = "random"``."""


class ScheduleConfig(Section):
    """Learning rate over time: warm-up, then a course."""

    kind: Literal["constant", "linear", "cosine", "plateau"] = "linear"
    """``plateau``: multiply by ``factor`` when the validation metric stalls for ``patience`` evaluations."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from 0."""
    final_fraction: Fraction = 0.0
    """Where linear and cosine end, as a share of the learning rate."""
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """Of ``plateau``."""
    patience: PositiveInt = 2
    """Of ``plateau``: evaluations without a gain before the rate falls."""
    min_delta: NonNegativeFloat = 1e-3
    """Of ``plateau``: what counts as a gain."""
    min_fraction: Fraction = 0.1
    """Floor of ``plateau``, as a share of the learning rate."""


class TrainingConfig(Section):
    """Length, batches, stopping, checkpoints."""

    epochs: PositiveInt = 20
    """Passes over the training instances, at most."""
    batch_size: PositiveInt = 128
    """Instances of one step, of all workers together."""
    evaluation_batch: PositiveInt = 256
    """Instances whose labels are ranked at a time."""
    block_bytes: Annotated[int, Field(ge=1 << 16)] = 16 << 20
    """Of a dense layer, the gradient that exists at a time; of a dense output also the weights whose logits
    do. Smaller blocks are slower. The sparse output layer cuts its own."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Decides initial weights, connections, order, dropout and rounding."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model is trained; ``cuda`` needs a device and kernels built for it (`xmlc info`)."""
    storage: Literal["memory", "disk"] = "memory"
    """Of the sparse output layer's weights, connections and optimizer state. disk: scratch files in the run
    folder, read ahead and written back in blocks of labels; the same bits, slower. Not on a CUDA device."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of the native kernels and of torch; 0 takes torch's own number."""
    deterministic: bool = False
    """Let torch work on one thread, and only the kernels on ``threads``: the same bits for any number. On
    ``cuda``: give every sum one order (torch.use_deterministic_algorithms), which costs speed."""
    clip_norm: NonNegativeFloat = 0.0
    """Upper bound of the global gradient norm of encoder and penultimate layer; 0 does not clip."""
    metric: str = Field(default="P@1", pattern=r"^(P|nDCG|R|PSP|PSnDCG)@[1-9][0-9]{0,2}$")
    """Validation metric that chooses the best epoch."""
    patience: NonNegativeInt = 5
    """Evaluations without a gain of ``min_delta`` before training stops; 0 never stops early."""
    min_delta: NonNegativeFloat = 5e-5
    """What counts as a gain for early stopping and the best epoch."""
    on_divergence: Literal["stop", "lower_rate"] = "stop"
    """When the loss is no number any more or explodes: stop with an error, or go back to the latest
    checkpoint (one is written before the first step) and halve the learning rates, ten times at most. What
    comes out then depends on when checkpoints were written."""
    explosion_factor: NonNegativeFloat = 1e6
    """A loss above this many times the run's first one has exploded; 0 waits until it is no number."""
    checkpoint_seconds: NonNegativeFloat = 600.0
    """Longest time between two checkpoints; every evaluation writes one as well."""
    gradient_bits: Literal[4, 8, 32] = 32
    """Of several workers: what each number of a gradient takes that they exchange of a transformer or of two
    towers. 4 and 8 round, and feed back to the next steps what that takes (LoCo); a run that goes on from a
    checkpoint has lost the last such rest."""
    worker_timeout_seconds: Annotated[float, Field(ge=1.0, le=1e6)] = 1800.0
    """Of several workers: how long one waits for another, at the start and in each exchange, before the run
    ends with an error. Longer than the slowest may need more for its data, an evaluation or a checkpoint."""
    keep_last: PositiveInt = 1
    """Checkpoints to keep, the last ones; the best one stays besides."""
    paper_protocol: bool = False
    """Let the *test* set choose rate, epoch and early stop, as published tables did. Not for new results."""
    tensorboard: bool = False
    """Write TensorBoard events into the run folder (extra ``report``)."""


class Config(Section):
    """All settings of a run."""

    data: DataConfig = DataConfig()
    text: TextConfig = TextConfig()
    encoder: EncoderConfig = EncoderConfig()
    model: ModelConfig = ModelConfig()
    similarity: SimilarityConfig = SimilarityConfig()
    loss: LossConfig = LossConfig()
    two_tower: TwoTowerConfig = TwoTowerConfig()
    output_optimizer: OutputOptimizerConfig = OutputOptimizerConfig()
    dense_optimizer: OptimizerConfig = OptimizerConfig()
    encoder_optimizer: EncoderOptimizerConfig = EncoderOptimizerConfig()
    redistribution: RedistributionConfig = RedistributionConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    training: TrainingConfig = TrainingConfig()

    @model_validator(mode="after")
    def _check_optimizers(self) -> Config:
        if self.dense_optimizer.kind == "label_adam":
            raise ValueError("dense_optimizer.kind must be sgd, momentum or adam, found label_adam")
        if self.model.output != "sparse" and self.output_optimizer.kind == "label_adam":
            raise ValueError("output_optimizer.kind = label_adam needs model.output = sparse")
        if self.model.output != "sparse" and self.output_optimizer.state_dtype != "float32":
            raise ValueError(
                f"output_optimizer.state_dtype = {self.output_optimizer.state_dtype} needs output = sparse, "
                f"found {self.model.output}"
            )
        if self.model.direct_fan_in:
            if self.model.output != "sparse":
                raise ValueError(f"model.direct_fan_in needs output = sparse, found {self.model.output}")
            if self.output_optimizer.kind not in ("adam", "sgd"):
                raise ValueError(
                    "output_optimizer.kind must be adam or sgd where direct_fan_in is above 0, found "
                    f"{self.output_optimizer.kind}"
                )
        if self.encoder_optimizer.kind == "label_adam":
            raise ValueError("encoder_optimizer.kind must be sgd, momentum or adam, found label_adam")
        if self.data.skip_filter_pairs and self.model.output not in ("sparse", "two_tower"):
            raise ValueError(f"data.skip_filter_pairs needs output = sparse, found {self.model.output}")
        if self.training.storage == "disk":
            if self.model.output != "sparse":
                raise ValueError(f"training.storage = disk needs output = sparse, found {self.model.output}")
            if self.training.device != "cpu":
                raise ValueError(
                    f"training.storage = disk needs training.device = cpu, found {self.training.device}"
                )
        dense = self.encoder.trained or (self.model.output == "two_tower" and self.two_tower.projection > 0)
        if self.training.gradient_bits != 32 and not dense:
            raise ValueError(
                f"training.gradient_bits = {self.training.gradient_bits} needs dense gradients to exchange: "
                "those of a transformer with encoder.frozen = false, or of model.output = two_tower with "
                "two_tower.projection above 0, found neither"
            )
        if self.similarity.used and self.model.output != "sparse":
            raise ValueError(f"similarity needs model.output = sparse, found {self.model.output}")
        return self

    @model_validator(mode="after")
    def _check_two_tower(self) -> Config:
        if self.model.output != "two_tower":
            return self
        if self.encoder.kind == "transformer" and self.encoder.frozen and not self.two_tower.projection:
            raise ValueError(
                "two_tower.projection must be above 0 where the encoder is frozen, found 0: nothing would be "
                "trained"
            )
        if self.data.label_documents:
            raise ValueError("data.label_documents must be false where model.output = two_tower, found true")
        if self.model.hidden_activation != "none":
            raise ValueError(
                "model.hidden_activation must be none where model.output = two_tower, found "
                f"{self.model.hidden_activation}"
            )
        return self


_KERAS_ADAM = {
    "kind": "adam",
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-7,
    "weight_decay": 0.0,
}

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    # Schultheis & Babbar 2023, "Towards Memory-Efficient Training for Extremely Large Output Spaces":
    # the recipe of its Amazon-670K rows, whose "validation" data was the test set (hence paper_protocol).
    # Every setting that the recipe fixes stands here, whatever the defaults are.
    "ecml23": {
        "model": {
            "output": "sparse",
            "width": 32_768,
            "fan_in": 32,
            "group_size": 1,
            "weight_dtype": "float32",
            "weight_init": "glorot_flat",
            "bias_init": 0.0,
            "penultimate_init": "glorot",
            "input_dropout": 0.1,
            "hidden_dropout": 0.0,
            "hidden_activation": "none",
        },
        "loss": {
            "kind": "squared_hinge",
            "reduction": "mean",
            "gradient_cutoff": 0.0,
            "positive_weight": 1.0,
            "positive_weight_propensity": False,
        },
        "output_optimizer": _KERAS_ADAM | {"state_dtype": "float32"},
        "dense_optimizer": _KERAS_ADAM,
        "redistribution": {
            "interval_steps": 1000,
            "first_step": 1,
            "fraction": 0.1,
            "decay": "constant",
            "end": 1.0,
            "mode": "fraction",
            "scope": "layer",
            "new_value": "keep",
        },
        "schedule": {
            "kind": "plateau",
            "warmup_steps": 0,
            "factor": 0.5,
            "patience": 2,
            "min_delta": 1e-3,
            "min_fraction": 0.1,
        },
        "training": {
            "epochs": 100,
            "batch_size": 32,
            "clip_norm": 0.0,
            "metric": "P@3",
            "patience": 4,
            "min_delta": 5e-5,
        },
    },
}


def load_config(
    source: Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = (), preset: str = "default"
) -> Config:
    """Build a config: defaults, then the preset, then the source, then ``section.key=value`` overrides.

    The source, a TOML file or nested settings, may name its own preset by a top-level ``preset = "..."``.

    Raises:
        ConfigError: A key is unknown (with a suggestion), a value is out of range, or the file is no TOML.
    """
    where = str(source) if isinstance(source, Path) else "config"
    settings = _read_toml(source) if isinstance(source, Path) else dict(source or {})
    preset = settings.pop("preset", preset)
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ConfigError(f"{where}: preset must be one of {', '.join(PRESETS)}, found {preset!r}")
    merged = _merge(PRESETS[preset], settings, where)
    short = [_cut(override) for override in overrides]
    for override, shown in zip(overrides, short, strict=True):
        merged = _merge(merged, _parse_override(override), f"--set {shown}")
    return build_config(merged, where if not overrides else f"{where} with --set {' '.join(short)}")


def build_config(settings: Mapping[str, Any], where: str = "config") -> Config:
    """Validate nested settings; the error names the place ``where`` they come from and the key."""
    _check_keys(settings, Config, where, "")
    try:
        return Config.model_validate(settings)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        first = errors[0]
        place = first["loc"][:2]  # section and key; pydantic goes on with which choice of a union failed
        key = ".".join(str(part) for part in place)
        messages = [each["msg"].removeprefix("Value error, ") for each in errors if each["loc"][:2] == place]
        message = " or ".join(dict.fromkeys(messages))
        found = "" if first["type"] == "value_error" else f", found {_brief.repr(first['input'])}"
        raise ConfigError(f"{where}: {key + ': ' if key else ''}{message}{found}") from None


def dump_config(config: Config) -> str:
    """Return the config as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is none, or holds a number or nesting that Python refuses.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too deep nesting") from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return parse_toml(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file}: the config must be a readable file: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: the config must be TOML: {error}") from None


def _parse_override(text: str) -> dict[str, Any]:
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set must be SECTION.KEY=VALUE, found {_cut(text)!r}")
    try:
        parsed = parse_toml(f"value = {raw}")
    except ValueError:
        parsed = {}
    # What is no single value is a bare word, as in loss.kind=bce.
    nested: Any = parsed["value"] if len(parsed) == 1 else raw
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def _cut(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."


def _merge(base: Mapping[str, Any], over: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the sections of ``base`` with the settings of ``over`` in place of theirs."""
    _check_keys(over, Config, where, "")
    return dict(base) | {section: {**base.get(section, {}), **settings} for section, settings in over.items()}


def _check_keys(settings: Mapping[str, Any], section: type[BaseModel], where: str, prefix: str) -> None:
    """Refuse unknown keys with the closest known one, before pydantic names them less helpfully."""
    for key, value in settings.items():
        field = section.model_fields.get(key)
        if field is None:
            known = list(section.model_fields)
            close = difflib.get_close_matches(str(key), known, n=1) or [
                full for full in _all_keys(Config) if full.endswith(f".{key}")
            ]
            hint = (
                f"did you mean {(prefix + close[0]) if close[0] in known else close[0]}?"
                if close
                else (f"known are {', '.join(known)}")
            )
            raise ConfigError(f"{where}: unknown key {prefix}{_cut(str(key))}; {hint}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{where}: {prefix}{key} must be a table of settings, found {_brief.repr(value)}"
                )
            _check_keys(value, field.annotation, where, f"{prefix}{key}.")


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys
