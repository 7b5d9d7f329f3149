"""`xmlc.train`: what may be given as data and as settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import problems
import pytest
import runs

import xmlc
from xmlc.config import Config, dump_config, load_config
from xmlc.data import open_dataset
from xmlc.errors import CheckpointError, ConfigError, DataError

SMALL: dict[str, Any] = problems.config(training={"epochs": 1}).model_dump(mode="json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return problems.write_folder(tmp_path_factory.mktemp("data") / "toy", "text", train=60)


def config_of(run: Path) -> Config:
    return load_config(run / "config.toml")


def test_it_trains_from_a_folder_and_returns_the_model(folder: Path, tmp_path: Path) -> None:
    model = xmlc.train(folder, out=tmp_path / "run", config=SMALL)
    (predictions,) = model.predict(["word0 word1 word2"], k=3)
    assert len(predictions) == 3
    assert predictions[0].name.startswith("label ")
    assert xmlc.load(tmp_path / "run").predict(["word0 word1 word2"], k=3) == [predictions]


def test_a_name_of_a_folder_and_a_data_set_are_as_good_as_a_path(folder: Path, tmp_path: Path) -> None:
    xmlc.train(str(folder), out=str(tmp_path / "by-name"), config=SMALL)
    xmlc.train(open_dataset(folder), out=tmp_path / "by-data-set", config=SMALL)
    runs.assert_same_run(tmp_path / "by-name", tmp_path / "by-data-set")


@pytest.mark.parametrize("form", ["config", "mapping", "path", "string"])
def test_settings_come_in_four_forms_and_overrides_go_on_top(form: str, folder: Path, tmp_path: Path) -> None:
    """Overrides beside a mapping or a `Config` were once dropped without a word."""
    file = tmp_path / "my.toml"
    file.write_text(dump_config(load_config(SMALL)))
    forms: dict[str, Any] = {
        "config": load_config(SMALL),
        "mapping": SMALL,
        "path": file,
        "string": str(file),
    }
    xmlc.train(folder, out=tmp_path / "run", config=forms[form], overrides=["training.seed=9"])
    assert config_of(tmp_path / "run") == load_config(SMALL, ["training.seed=9"])


def test_a_preset_is_a_start(folder: Path, tmp_path: Path) -> None:
    overrides = ["model.width=64", "training.epochs=1", "model.hidden=16"]
    xmlc.train(folder, out=tmp_path / "run", preset="ecml23", overrides=overrides)
    assert config_of(tmp_path / "run") == load_config(None, overrides, "ecml23")


def test_a_recipe_in_the_folder_is_a_start(tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "toy", "text", train=60)
    (data / "recipe.toml").write_text(dump_config(load_config(SMALL)))
    xmlc.train(data, out=tmp_path / "run", recipe=True)
    assert config_of(tmp_path / "run") == load_config(SMALL)


def test_a_data_set_without_a_recipe_has_none(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"toy: must have a recipe\.toml to train by recipe, found none"):
        xmlc.train(folder, out=tmp_path / "run", recipe=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "choices", [{"config": SMALL, "preset": "ecml23"}, {"preset": "default", "recipe": True}]
)
def test_two_starts_are_one_too_many(choices: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only one of config, preset and recipe may be given"):
        xmlc.train(folder, out=tmp_path / "run", **choices)


def test_resuming_takes_the_settings_of_the_run(folder: Path, tmp_path: Path) -> None:
    xmlc.train(folder, out=tmp_path / "run", config=SMALL)
    xmlc.train(folder, out=tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"found training\.seed = 9 where it began with 3"):
        xmlc.train(folder, out=tmp_path / "run", resume=True, overrides=["training.seed=9"])


def test_resuming_what_never_began_makes_no_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--resume needs the folder of a run"):
        xmlc.train(folder, out=tmp_path / "run", resume=True)
    assert not (tmp_path / "run").exists()


def test_wrong_settings_make_no_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key modle"):
        xmlc.train(folder, out=tmp_path / "run", config={"modle": {}})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("budget", [[1], 2.5, True, b"4GiB"])
def test_a_budget_that_is_no_size_makes_no_folder(budget: Any, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="train: budget must be an integer of bytes or a size such as 4GiB"):
        xmlc.train(folder, out=tmp_path / "run", config=SMALL, budget=budget)
    assert not (tmp_path / "run").exists()


def test_an_unknown_data_set_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be a folder or the name of a known data set"):
        xmlc.train("no-such-data", out=tmp_path / "run", config=SMALL)
    assert not (tmp_path / "run").exists()
