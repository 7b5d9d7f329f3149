"""The whole model: which parts it has, how they start, and what it is by one formula."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import oracles
import problems
import pytest
import torch

from xmlc.data import Batch, BatchStream, CsrRows, Dataset
from xmlc.errors import ConfigError
from xmlc.metrics import inverse_propensity
from xmlc.nn import Model, Problem, weight_shapes
from xmlc.nn.encoder import BagOfWords, DenseFeatures
from xmlc.nn.output_layer import DenseOutput, SparseOutput
from xmlc.training.prepare import prepare

COUNTS = np.array([0, 1, 5, 20])


def problem(**settings: Any) -> Problem:
    base: dict[str, Any] = {
        "dense_features": False,
        "feature_count": 30,
        "label_count": len(COUNTS),
        "instances": 20,
        "propensity_a": 0.55,
        "propensity_b": 1.5,
        "label_instances": COUNTS,
    }
    return Problem(**(base | settings))


def model(problem: Problem, **sections: dict[str, Any]) -> Model:
    return Model(problems.config(**sections), problem)


def batch_of(dataset: Dataset, size: int = 40) -> Batch:
    rows = np.arange(size)
    assert dataset.train.features is not None
    return next(BatchStream(dataset.train.features, dataset.train.labels, rows, size, 0).sequential())


def for_dataset(dataset: Dataset, **sections: dict[str, Any]) -> Model:
    config = problems.config(**sections)
    return Model(config, prepare(dataset, config).problem)


@pytest.mark.parametrize(
    ("output", "width", "kind", "penultimate", "inputs"),
    [
        ("sparse", 64, SparseOutput, 64, 64),
        ("sparse", 0, SparseOutput, None, 32),
        ("dense", 64, DenseOutput, None, 32),
        ("bottleneck", 64, DenseOutput, 9, 9),
    ],
)
def test_output_and_width_decide_what_lies_before_it(
    output: str, width: int, kind: type, penultimate: int | None, inputs: int
) -> None:
    made = model(problem(), model={"output": output, "width": width, "bottleneck": 9})
    assert isinstance(made.output, kind)
    assert (None if made.penultimate is None else made.penultimate.linear.weight.shape[0]) == penultimate
    output_layer: Any = made.output
    columns = output_layer.input if output == "sparse" else output_layer.linear.weight.shape[1]
    assert columns == inputs


def test_labels_have_at_most_the_inputs_that_there_are() -> None:
    message = (
        "model.fan_in: must be at most the encoder's 13 outputs, as model.width = 0 leaves out the "
        "penultimate layer, found 14; lower it or give model.width"
    )
    dense = problem(dense_features=True, feature_count=13)
    with pytest.raises(ConfigError, match=re.escape(message)):
        model(dense, model={"width": 0, "fan_in": 14})
    assert model(dense, model={"width": 0, "fan_in": 13}).penultimate is None


def test_dense_features_bring_their_own_width() -> None:
    made = model(problem(dense_features=True, feature_count=13), model={"hidden": 32})
    assert isinstance(made.encoder, DenseFeatures)
    assert made.penultimate is not None
    assert made.penultimate.linear.weight.shape == (64, 13)


def test_sparse_features_are_embedded_in_the_hidden_width() -> None:
    made = model(problem(), model={"hidden": 17})
    assert isinstance(made.encoder, BagOfWords)
    assert made.encoder.embedding.shape == (30, 17)


# ---- how it starts ---------------------------------------------------------------------------------------


def test_squared_hinge_starts_every_bias_at_minus_one() -> None:
    """There the loss of a negative is 0, and with it all its backward work."""
    bias = model(problem(), model={"bias_init": "auto"}).output.tensors()["bias"]
    assert bias.tolist() == [-1.0] * 4


@pytest.mark.parametrize("loss", ["bce", "softmax", "decoupled_softmax"])
def test_other_losses_start_every_bias_at_the_log_odds_of_its_label(loss: str) -> None:
    bias = model(problem(), model={"bias_init": "auto"}, loss={"kind": loss}).output.tensors()["bias"]
    share = (COUNTS + 0.5) / 21.0
    np.testing.assert_allclose(bias.numpy(), np.log(share / (1 - share)), rtol=2e-6)


@pytest.mark.parametrize("loss", ["squared_hinge", "bce", "softmax", "decoupled_softmax"])
def test_a_given_bias_is_taken(loss: str) -> None:
    bias = model(problem(), model={"bias_init": -2.5}, loss={"kind": loss}).output.tensors()["bias"]
    assert bias.tolist() == [-2.5] * 4


def test_the_seed_decides_every_weight() -> None:
    def tensors(seed: int) -> dict[str, torch.Tensor]:
        return model(problem(), training={"seed": seed}).tensors()

    one, again, other = tensors(1), tensors(1), tensors(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    for name in ("encoder.embedding", "penultimate.weight", "output.weight", "output.indices"):
        assert not torch.equal(one[name], other[name])


def test_no_global_generator_is_read_or_moved() -> None:
    before = torch.get_rng_state()
    first = model(problem()).tensors()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    second = model(problem()).tensors()
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---- weights of positives --------------------------------------------------------------------------------


def test_without_settings_positives_have_no_weight() -> None:
    layer: Any = model(problem()).output
    assert layer.positive_weight is None


@pytest.mark.parametrize("output", ["sparse", "dense"])
def test_positives_weigh_by_inverse_propensity_and_factor(output: str) -> None:
    layer: Any = model(
        problem(),
        model={"output": output},
        loss={"positive_weight": 3.0, "positive_weight_propensity": True},
    ).output
    expected = 3.0 * inverse_propensity(COUNTS, 20, 0.55, 1.5)
    np.testing.assert_array_equal(layer.positive_weight, expected.astype(np.float32))


def test_a_factor_alone_weighs_every_positive_alike() -> None:
    layer: Any = model(problem(), loss={"positive_weight": 3.0}).output
    assert layer.positive_weight.tolist() == [3.0] * 4


# ---- what it computes ------------------------------------------------------------------------------------


@problems.every_output
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_scores_are_those_of_the_formula(kind: problems.Kind, output: str, width: int) -> None:
    dataset = problems.dataset(kind)
    made = for_dataset(
        dataset,
        model={"output": output, "width": width, "bottleneck": 9},
        data={"unit_length": False},
        loss={"kind": "bce"},
    )
    batch = batch_of(dataset)

    def logits(dtype: torch.dtype) -> torch.Tensor:
        named = {name: value.to(dtype) for name, value in made.tensors().items() if name != "output.indices"}
        features = batch.features
        x = torch.from_numpy(features.to_scipy().toarray() if isinstance(features, CsrRows) else features).to(
            dtype
        )
        if kind == "sparse":
            x = x @ named["encoder.embedding"]
        if made.penultimate is not None:
            x = (x @ named["penultimate.weight"].T + named["penultimate.bias"]).relu()
        weight = named["output.weight"]
        if output == "sparse":
            weight = oracles.dense(weight, made.tensors()["output.indices"], 1, width or 32)
        return x @ weight.T + named["output.bias"]

    scores, labels = made.top_labels(batch, 24)
    exact, plain = logits(torch.float64), logits(torch.float32)
    slack = oracles.UNIT * exact
    oracles.assert_no_worse_than_plain(
        scores, exact.sort(descending=True)[0], plain.sort(descending=True)[0], slack
    )
    oracles.assert_no_worse_than_plain(scores, exact.gather(1, labels), plain.gather(1, labels), slack)


def test_dropout_is_off_unless_training() -> None:
    dataset = problems.dataset("dense")
    made = for_dataset(dataset, model={"input_dropout": 0.5, "hidden_dropout": 0.5})
    batch = batch_of(dataset)
    assert torch.equal(made.hidden(batch), torch.from_numpy(batch.features))
    dropped = made.hidden(batch, torch.Generator().manual_seed(0))
    assert 0.7 < float((dropped == 0).double().mean()) < 0.8


def test_relu_comes_before_the_dropout_of_hidden() -> None:
    dataset = problems.dataset("dense")
    made = for_dataset(dataset, model={"hidden_activation": "relu"})
    batch = batch_of(dataset)
    assert torch.equal(made.hidden(batch), torch.from_numpy(batch.features).relu())


def test_tensors_share_the_memory_of_the_model() -> None:
    made = model(problem())
    for tensor in made.tensors().values():
        if tensor.is_floating_point():
            tensor.fill_(0.25)
    assert isinstance(made.encoder, BagOfWords)
    assert (made.encoder.embedding == 0.25).all()
    assert made.penultimate is not None
    assert (made.penultimate.linear.blocks[0].weight == 0.25).all()


def test_the_facts_of_a_problem_are_its_plain_values() -> None:
    facts = problem().facts()
    assert facts == {
        "dense_features": False,
        "feature_count": 30,
        "label_count": 4,
        "instances": 20,
        "propensity_a": 0.55,
        "propensity_b": 1.5,
        "word_count": 0,
    }
    assert Problem(label_instances=COUNTS, **facts).inverse_propensity.tolist() == pytest.approx(  # type: ignore[arg-type]
        inverse_propensity(COUNTS, 20, 0.55, 1.5).tolist()
    )


@problems.every_output
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("group_size", [1, 16])
def test_the_shapes_are_known_before_the_weights(
    output: str, width: int, dense: bool, group_size: int
) -> None:
    settings = {"output": output, "width": width, "group_size": group_size, "bottleneck": 9}
    made = model(problem(dense_features=dense), model=settings)
    expected = {name: tuple(value.shape) for name, value in made.tensors().items() if ".state." not in name}
    assert weight_shapes(made.config, made.problem) == expected


def test_weights_that_cannot_fit_are_refused_before_they_are_made() -> None:
    with pytest.raises(ConfigError) as caught:
        model(problem(), model={"width": 10**12})
    for words in (
        "weights must fit into this machine's memory of ",
        "penultimate.weight [1000000000000, 32]",
    ):
        assert words in str(caught.value)
