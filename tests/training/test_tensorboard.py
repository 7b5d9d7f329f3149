"""TensorBoard: optional, and asked for by name where it is absent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import problems
import pytest
import runs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from xmlc.errors import ConfigError

Train = Callable[..., Path]


def test_every_epoch_appears_in_tensorboard(train: Train) -> None:
    run = train(problems.dataset(), training={"tensorboard": True, "epochs": 2})
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    entries = runs.metrics(run)
    assert [event.step for event in events.Scalars("loss")] == [12, 24]
    for name in ("P@1", "PSnDCG@5"):
        values = [event.value for event in events.Scalars(f"validation/{name}")]
        assert values == pytest.approx([entry["validation"][name] for entry in entries])


def test_without_the_setting_there_is_no_tensorboard(train: Train) -> None:
    run = train(problems.dataset(), training={"epochs": 1})
    assert not (run / "tensorboard").exists()


def test_without_the_package_an_error_says_how_to_install_it(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"training\.tensorboard: .* `pip install 'xmlc\[report\]'`"):
        train(problems.dataset(), training={"tensorboard": True})
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock"}
