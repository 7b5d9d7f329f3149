"""Settings: defaults, presets, files, overrides, and errors that name place, key and value."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from xmlc.config import PRESETS, Config, build_config, dump_config, load_config
from xmlc.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "my config.toml"
    file.write_text(text, encoding="utf-8")
    return file


RECIPES = sorted(Path(__file__).parents[1].glob("datasets/*/*.toml"))
RECIPES = [path for path in RECIPES if path.name != "dataset.toml"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_committed_settings_of_a_data_set_are_valid(path: Path) -> None:
    assert load_config(path) != Config()


# ---- where settings come from ----------------------------------------------------------------------------


def test_without_anything_the_defaults_hold() -> None:
    assert load_config() == Config()


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[model]\nfan_in = 7\n"))
    assert config.model.fan_in == 7
    assert config == Config().model_copy(update={"model": Config().model.model_copy(update={"fan_in": 7})})


def test_overrides_win_over_the_file_and_the_last_override_over_the_others(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nepochs = 7\nbatch_size = 5\n")
    config = load_config(file, ["training.epochs=8", "training.epochs=9"])
    assert (config.training.epochs, config.training.batch_size) == (9, 5)


def test_the_file_wins_over_the_preset(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "[training]\nepochs = 7\n"), preset="ecml23")
    assert (config.training.epochs, config.training.batch_size) == (7, 32)


def test_a_file_may_name_its_preset(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, 'preset = "ecml23"\n[training]\nepochs = 7\n'))
    assert (config.training.epochs, config.training.metric) == (7, "P@3")


def test_nested_settings_are_taken_like_a_file() -> None:
    config = load_config({"preset": "ecml23", "training": {"epochs": 7}}, ["training.seed=5"])
    assert (config.training.epochs, config.training.seed, config.training.metric) == (7, 5, "P@3")


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("training.epochs=3", "training", "epochs", 3),
        ("output_optimizer.learning_rate=1e-3", "output_optimizer", "learning_rate", 1e-3),
        ("loss.kind=bce", "loss", "kind", "bce"),
        ("loss.kind=decoupled_softmax", "loss", "kind", "decoupled_softmax"),
        ('loss.kind="bce"', "loss", "kind", "bce"),
        ("text.word_ngrams=[1, 2]", "text", "word_ngrams", (1, 2)),
        ("training.tensorboard=true", "training", "tensorboard", True),
        ("model.bias_init=-2", "model", "bias_init", -2.0),
        ("model.bias_init=auto", "model", "bias_init", "auto"),
        (" model.fan_in = 8", "model", "fan_in", 8),
        ("training.metric=PSP@3", "training", "metric", "PSP@3"),
        ("redistribution={fraction = 0.2}", "redistribution", "fraction", 0.2),
    ],
)
def test_an_override_takes_toml_values_and_bare_words(
    override: str, section: str, key: str, value: object
) -> None:
    assert getattr(getattr(load_config(None, [override]), section), key) == value


# ---- round trip ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_toml(preset: str, tmp_path: Path) -> None:
    config = load_config(preset=preset)
    assert load_config(write(tmp_path, dump_config(config))) == config


@given(
    rate=st.floats(0, 1e6),
    seed=st.integers(0, 2**63 - 1),
    bias=st.one_of(st.just("auto"), st.floats(-1e30, 1e30)),
    most=st.one_of(st.none(), st.integers(1, 10**9)),
    ngrams=st.tuples(st.integers(1, 3), st.integers(3, 5)),
    flag=st.booleans(),
)
def test_any_settings_survive_toml(
    rate: float, seed: int, bias: object, most: int | None, ngrams: tuple[int, int], flag: bool
) -> None:
    config = build_config(
        {
            "output_optimizer": {"learning_rate": rate},
            "training": {"seed": seed, "tensorboard": flag},
            "model": {"bias_init": bias},
            "text": {"max_features": most, "character_ngrams": ngrams},
        }
    )
    assert build_config(tomllib.loads(dump_config(config))) == config


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().training.epochs = 3


# ---- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("modle.fan_in", "unknown key modle; did you mean model?"),
        ("model.fanin", r"unknown key model.fanin; did you mean model\.fan_in\?"),
        ("fan_in", r"unknown key fan_in; did you mean model\.fan_in\?"),
        ("training.fan_in", r"unknown key training.fan_in; did you mean model\.fan_in\?"),
        ("zzz", "unknown key zzz; known are data, text, encoder, model,"),
        ("loss.zzz", "unknown key loss.zzz; known are kind, reduction,"),
    ],
)
def test_an_unknown_key_is_answered_with_a_known_one(key: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_config(None, [f"{key}=1"])


def test_a_key_that_is_no_string_is_unknown() -> None:
    settings: Any = {1: 2}
    with pytest.raises(ConfigError, match="config: unknown key 1; known are data"):
        build_config(settings)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epochs=0", ["training.epochs", "greater than or equal to 1", "found 0"]),
        ("training.threads=1000000000", ["training.threads", "less than or equal to 1024"]),
        ("training.epochs=2.5", ["training.epochs", "integer", "found 2.5"]),
        ("training.epochs=", ["training.epochs", "integer", "found ''"]),
        (
            "loss.kind=ce",
            ["loss.kind", "'squared_hinge', 'bce', 'softmax' or 'decoupled_softmax'", "found 'ce'"],
        ),
        ("loss.gradient_cutoff=-1", ["loss.gradient_cutoff", "greater than or equal to 0", "found -1"]),
        ("loss.gradient_cutoff=nan", ["loss.gradient_cutoff", "found nan"]),
        ("loss.gradient_cutoff=inf", ["loss.gradient_cutoff", "found inf"]),
        ("model.group_size=8", ["model.group_size", "1, 16, 32 or 64", "found 8"]),
        ("model.bias_init=x", ["model.bias_init:", "number", "'auto'", "found 'x'"]),
        ("model.bias_init=nan", ["model.bias_init:", "finite", "found nan"]),
        ("data.validation_fraction=nan", ["data.validation_fraction", "less than 1", "found nan"]),
        ("output_optimizer.learning_rate=inf", ["output_optimizer.learning_rate", "finite", "found inf"]),
        ("loss.positive_weight=1e300", ["loss.positive_weight", "at most 1e30", "found 1e+300"]),
        ("output_optimizer.eps=nan", ["output_optimizer.eps", "found nan"]),
        ("training.metric=F@1", ["training.metric", "nDCG", "found 'F@1'"]),
        ("training.metric=P@99999", ["training.metric", "found 'P@99999'"]),
        ("text.word_ngrams=[1]", ["text.word_ngrams:", "found [1]"]),
        (
            "text.word_ngrams=[2, 1]",
            ["text", "word_ngrams must be [low, high] with 1 <= low <= high, found [2, 1]"],
        ),
        ("text.character_ngrams=[0, 2]", ["text", "character_ngrams", "found [0, 2]"]),
        ("training.seed=true", ["training.seed", "integer", "found True"]),
        ("training.epochs=2.0", ["training.epochs", "integer", "found 2.0"]),
        ('training.epochs="2"', ["training.epochs", "integer", "found '2'"]),
        ("training.min_delta=false", ["training.min_delta", "number", "found False"]),
        ("data.unit_length=1", ["data.unit_length", "boolean", "found 1"]),
        ("text.word_ngrams=[1, true]", ["text.word_ngrams", "integer", "found True"]),
        ("model.width=64\nb=2", ["model.width", "integer"]),
        ("model=3", ["model must be a table of settings, found 3"]),
        ("model.fan_in.x=3", ["model.fan_in", "integer", "{'x': 3}"]),
        (
            "model={output='dense', direct_fan_in=4}",
            ["model.direct_fan_in needs output = sparse, found dense"],
        ),
        ("dense_optimizer.kind=label_adam", ["dense_optimizer.kind", "found label_adam"]),
    ],
)
def test_a_wrong_value_is_refused_by_place_key_and_value(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    for word in [f"--set {override}", *words]:
        assert word in str(caught.value)


def test_a_whole_number_is_a_number() -> None:
    assert load_config(None, ["loss.positive_weight=2"]).loss.positive_weight == 2.0


MONSTERS = {
    "digits": ("training.seed", "9" * 5000),
    "brackets": ("training.seed", "[" * 3000 + "]" * 3000),
    "key": (".".join("a" * 5000), "1"),
    "key below a setting": ("model.width." + ".".join("a" * 5000), "1"),
}


@pytest.mark.parametrize("name", MONSTERS)
def test_monstrous_settings_are_refused_in_a_readable_line(name: str, tmp_path: Path) -> None:
    """They once ended in a ValueError or a RecursionError."""
    key, value = MONSTERS[name]
    for call in (
        lambda: load_config(None, [f"{key}={value}"]),
        lambda: load_config(write(tmp_path, f"{key} = {value}\n")),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert len(str(caught.value)) < 1000


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "\ufeff[model]\nwidth = 64\n")).model.width == 64


def test_a_fan_in_above_the_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="model: fan_in must be at most width = 32, found 64"):
        load_config(None, ["model.fan_in=64", "model.width=32"])


def test_a_dense_output_does_not_care_about_fan_in() -> None:
    config = load_config(None, ["model.fan_in=64", "model.width=32", "model.output=dense"])
    assert config.model.output == "dense"


def test_low_bit_gradients_need_dense_ones() -> None:
    bits, towers = "training.gradient_bits=8", "model.output=two_tower"
    for others in ([], [towers], ["encoder.kind=transformer", "encoder.path=x"]):
        with pytest.raises(ConfigError, match="gradient_bits = 8 needs dense gradients to exchange"):
            load_config(None, [bits, *others])
    for others in (
        [towers, "two_tower.projection=8"],
        ["encoder={kind='transformer',path='x',frozen=false}"],
    ):
        assert load_config(None, [bits, *others]).training.gradient_bits == 8
    with pytest.raises(ConfigError, match=r"training\.gradient_bits: .* found 16"):
        load_config(None, ["training.gradient_bits=16"])


def test_an_optimizer_by_label_needs_a_sparse_output() -> None:
    with pytest.raises(ConfigError, match=r"label_adam needs model\.output = sparse"):
        load_config(None, ["output_optimizer.kind=label_adam", "model.output=dense"])
    with pytest.raises(ConfigError, match=r"state_dtype = bfloat16 needs output = sparse, found dense"):
        load_config(None, ["output_optimizer.state_dtype=bfloat16", "model.output=dense"])
    with pytest.raises(ConfigError, match=r"unknown key dense_optimizer\.state_dtype"):
        load_config(None, ["dense_optimizer.state_dtype=bfloat16"])
    with pytest.raises(ConfigError, match=r"similarity needs model\.output = sparse, found dense"):
        load_config(None, ["similarity.text_weight=0.5", "model.output=dense"])


@pytest.mark.parametrize("override", ["training.epochs", "=3", "training.=3", ".epochs=3", ""])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"--set must be SECTION\.KEY=VALUE, found "):
        load_config(None, [override])


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="preset must be one of default, ecml23, found 'icml'"):
        load_config(preset="icml")


def test_a_preset_that_is_no_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.toml: preset must be one of .*, found \['a'\]"):
        load_config(write(tmp_path, 'preset = ["a"]\n'))


def test_an_error_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nepochs = -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(caught.value).startswith(f"{file}: training.epochs: ")


@pytest.mark.parametrize("content", [b"[training\n", b"a = \xff\n"])
def test_a_file_that_is_no_toml_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.toml: the config must be TOML"):
        load_config(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: the config must be a readable file: No such file"):
        load_config(tmp_path / "none.toml")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the config must be a readable file: Is a directory"):
        load_config(tmp_path)


# ---- presets ---------------------------------------------------------------------------------------------


def test_ecml23_is_the_recipe_of_the_paper() -> None:
    """The recipe of Schultheis & Babbar 2023 as their public code runs it, but for what selects on the test
    set, which `paper_protocol` switches on, and for the connections of the start, drawn without replacement.
    """
    config = load_config(preset="ecml23")
    model, loss = config.model, config.loss
    assert (model.output, model.width, model.fan_in, model.group_size) == ("sparse", 32_768, 32, 1)
    assert (model.weight_dtype, model.weight_init) == ("float32", "glorot_flat")  # U(+-sqrt(3 / (L K)))
    assert (model.bias_init, model.penultimate_init) == (0.0, "glorot")  # Keras' defaults
    assert (model.input_dropout, model.hidden_dropout, model.hidden_activation) == (0.1, 0.0, "none")
    assert (loss.kind, loss.reduction, loss.positive_weight) == ("squared_hinge", "mean", 1.0)
    assert not loss.positive_weight_propensity and loss.gradient_cutoff == 0.0
    for optimizer in (config.output_optimizer, config.dense_optimizer):
        assert (optimizer.kind, optimizer.learning_rate, optimizer.weight_decay) == ("adam", 1e-3, 0.0)
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-7)
    moves = config.redistribution
    assert (moves.first_step, moves.interval_steps, moves.fraction) == (
        1,
        1000,
        0.1,
    )  # steps 1, 1001, 2001 ..
    assert (moves.decay, moves.end, moves.mode) == ("constant", 1.0, "fraction")
    assert (moves.scope, moves.new_value) == ("layer", "keep")
    schedule, training = config.schedule, config.training
    assert (schedule.kind, schedule.factor, schedule.patience) == ("plateau", 0.5, 2)
    assert (schedule.min_delta, schedule.min_fraction, schedule.warmup_steps) == (1e-3, 0.1, 0)
    assert (training.epochs, training.batch_size, training.clip_norm) == (100, 32, 0.0)
    assert (training.metric, training.patience, training.min_delta) == ("P@3", 4, 5e-5)


def test_the_test_set_chooses_nothing_unless_asked() -> None:
    for preset in PRESETS:
        config = load_config(preset=preset)
        assert not config.training.paper_protocol
        assert config.data.validation_fraction > 0
