"""The command line in this process, and trained runs to use it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import oracles
import problems
import pytest
import two_towers
from click.testing import CliRunner, Result

from xmlc.cli import main
from xmlc.config import dump_config
from xmlc.data import open_dataset
from xmlc.training.trainer import train_into

Xmlc = Callable[..., Result]


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Keep torch's many small operations from waiting for each other's threads on a busy machine."""
    with oracles.threads(1):
        yield


@pytest.fixture
def xmlc() -> Xmlc:
    """Call the command line with these arguments, and with bytes on stdin."""

    def call(*arguments: object, stdin: bytes = b"") -> Result:
        return CliRunner().invoke(main, [str(each) for each in arguments], input=stdin)

    return call


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``<kind> data``, a run on it in ``<kind> run``, and ``config.toml``."""
    folder = tmp_path_factory.mktemp("home")
    config = problems.config(training={"epochs": 6})
    (folder / "config.toml").write_text(dump_config(config))
    for kind in problems.KINDS:
        data = problems.write_folder(folder / f"{kind} data", kind, train=120)
        train_into(folder / f"{kind} run", open_dataset(data), config)
    return folder


@pytest.fixture(scope="package")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two towers."""
    run = tmp_path_factory.mktemp("towers") / "run"
    train_into(run, two_towers.dataset(), two_towers.config(training={"epochs": 2}))
    return run
