"""Hard limits: the budget that a plan asks for is enough, and what runs out of one goes on under a larger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import problems
import pytest
import runs

from xmlc.checkpoint import CheckpointFolder, read_checkpoint

TESTS = str(Path(problems.__file__).parent)

ENFORCED = """
import sys
from pathlib import Path
import torch
from xmlc.config import load_config
from xmlc.memory.budget import needed_bytes
from xmlc.memory.generated import generated_dataset
from xmlc.memory.plan import plan
from xmlc.memory.process import usage
from xmlc.training.prepare import batches_of, prepare
from xmlc.training.trainer import train_into
run, words, *settings = sys.argv[1:]
dataset = generated_dataset(120_000, 30_000 if int(words) else 128, int(words) or None, 700)
config = load_config(None, [*settings, "data.validation_fraction=0.3", "training.epochs=2"])
torch.set_num_threads(config.training.threads)
prepared = prepare(dataset, config)
needed = needed_bytes(plan(config, prepared.problem, batches_of(prepared)))
del prepared
needed += 1 << 20  # taken before the run looks what is left of the budget
train_into(Path(run), dataset, config, budget_bytes=usage().anonymous + needed, enforce=True)
"""


@pytest.mark.parametrize("words", [0, 50])
@pytest.mark.parametrize(
    "settings",
    [
        ("training.threads=1", "model.weight_dtype=bfloat16", "output_optimizer.kind=sgd"),
        ("training.threads=2", "redistribution.first_step=2", "redistribution.end=1.0"),
        (
            "training.threads=1",
            "model.group_size=16",
            "output_optimizer.kind=label_adam",
            "loss.kind=softmax",
        ),
    ],
)
def test_the_planned_budget_is_enough_as_a_hard_limit(
    settings: tuple[str, ...], words: int, tmp_path: Path
) -> None:
    arguments = (str(tmp_path / "run"), str(words), "model.hidden=64", "model.width=4096", *settings)
    done = subprocess.run([sys.executable, "-P", "-c", ENFORCED, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "to fit the budget" not in done.stderr  # nothing had to be changed
    assert "epoch 2/2" in done.stderr


LIMITED = """
import sys
from pathlib import Path
import torch
from xmlc.config import load_config
from xmlc.memory.generated import generated_dataset
from xmlc.memory.process import usage
from xmlc.training import trainer
dataset = generated_dataset(2_000, 5_000, 400, 25_000)
config = load_config(None, ["training.epochs=1", "training.threads=1", "model.hidden=16", "model.width=64",
    "data.training_fraction=0.99", "data.validation_fraction=0.01", "similarity.neighbour_weight=0.5"])
class Told(Exception): pass
def told(limit):
    raise Told(limit)
trainer.hard_limit = told
torch.set_num_threads(1)
before = usage().anonymous
try:
    trainer.train_into(Path(sys.argv[1]), dataset, config, budget_bytes=before + (1 << 30), enforce=True)
except Told as found:
    print((1 << 30) - found.args[0], len(dataset.train.features.indices))
"""


def test_what_is_prepared_before_the_limit_is_part_of_the_budget(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LIMITED, str(tmp_path / "run")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    taken, words = map(int, done.stdout.split())
    assert words > 4_000_000
    assert taken > 0.85 * 8 * words  # nearest instances of likeness of texts; some memory was free before
    assert taken < 1.5 * 8 * words


TRAINED = """
import resource, sys
from xmlc.cli import main
from xmlc.memory.process import return_large_blocks, usage
from xmlc.training import trainer
return_large_blocks(trained_encoder=True)  # not kept for the next step, which then asks the system for them
data, run, step, *options = sys.argv[1:]
step_of = trainer.training_step
def limited(*arguments):
    if arguments[4] == int(step):
        limit = usage().data + (1 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return step_of(*arguments)
trainer.training_step = limited
main(["train", data, "--out", run, "--set", "training.epochs=3", "--set", "training.threads=1",
      "--set", "model.width=16384", "--set", "training.batch_size=64", *options])
"""


def test_a_run_that_ran_out_goes_on_under_a_larger_limit(tmp_path: Path) -> None:
    """From the checkpoint of the first epoch, to the bits of a run that never ran out."""
    data = problems.write_folder(tmp_path / "data", "dense")

    def train(run: str, step: int, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-c", TRAINED, str(data), str(tmp_path / run), str(step), *options],
            capture_output=True,
            text=True,
            env=os.environ | {"XMLC_CACHE": str(tmp_path / "cache")},
        )

    assert train("whole", 0).returncode == 0
    done = train("short", 5)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    found = re.fullmatch(
        r".* memory must suffice for ([0-9,]+) bytes.* in phase .*, found none.*; (\S+) is whole",
        message,
    )
    assert found is not None, message
    assert int(found[1].replace(",", "")) >= 1 << 20
    latest = CheckpointFolder(tmp_path / "short" / "checkpoints").latest()
    assert latest is not None
    assert found[2] == str(latest)
    assert read_checkpoint(latest).metadata["position"]["epoch"] == 1  # type: ignore[index, call-overload]
    done = train("short", 0, "--resume", "--budget", "4GiB", "--enforce")
    assert done.returncode == 0, done.stderr
    runs.assert_same_run(tmp_path / "short", tmp_path / "whole")
