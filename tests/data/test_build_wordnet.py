"""The build of the WordNet data sets: parsing, split, filters, and bytes that never change."""

from __future__ import annotations

import gzip
import hashlib
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from xmlc.data import open_dataset
from xmlc.data.card import cards_folder

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_wordnet"
WORDNET = Path("/usr/share/wordnet")

# Lines of the form of data.noun and data.adj; a cake points to food and to a part of itself.
FOOD = (
    "00000001 13 n 02 food 0 solid_food 0 002 ~ 00000002 n 0000 ~ 00000003 n 0000 | any solid substance; "
    '"food and drink"  \n'
)
CAKE = "00000002 13 n 01 cake 0 002 @ 00000001 n 0000 + 00000002 n 0101 | a baked sweet  \n"
PIE = "00000003 13 n 01 pie 0 001 @ 00000001 n 0000 | dish baked in pastry  \n"
GALORE = "00000004 00 s 02 abounding 0 galore(ip) 0 001 & 00000005 a 0000 | existing in abundance  \n"
MANY = "00000005 00 a 01 many 0 001 & 00000004 a 0000 | a large number  \n"
LICENCE = "  1 This software and database is being provided to you\n"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("build_wordnet", str(SCRIPT))
    spec = importlib.util.spec_from_loader("build_wordnet", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "build_wordnet", module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


@pytest.fixture
def database(tmp_path: Path) -> Path:
    folder = tmp_path / "wordnet"
    folder.mkdir()
    (folder / "data.noun").write_text(LICENCE + FOOD + CAKE + PIE)
    (folder / "data.adj").write_text(LICENCE + GALORE + MANY)
    (folder / "data.verb").write_text(LICENCE)
    (folder / "data.adv").write_text(LICENCE)
    return folder


def test_a_line_becomes_a_synset(script: ModuleType) -> None:
    synset = script.read_synset(FOOD)
    assert synset.uid == "n00000001"
    assert synset.title == "food, solid food"
    assert synset.content == 'any solid substance; "food and drink"'
    assert synset.targets == {"n00000002", "n00000003"}
    assert synset.lexicographer_file == 13


def test_satellites_are_adjectives_without_their_markers(script: ModuleType) -> None:
    synset = script.read_synset(GALORE)
    assert synset.uid == "a00000004"
    assert synset.title == "abounding, galore"
    assert script.read_synset(MANY).targets == {"a00000004"}


def test_a_synset_is_not_its_own_label(script: ModuleType) -> None:
    assert script.read_synset(CAKE).targets == {"n00000001"}


def test_one_instance_in_five_is_for_testing_by_its_name(script: ModuleType) -> None:
    digest = int(hashlib.md5(b"n00000002").hexdigest()[:8], 16)
    assert script.read_synset(CAKE).in_test == (digest % 100 < 20)


def test_labels_need_training_instances_and_instances_need_labels(script: ModuleType, database: Path) -> None:
    synsets = script.read_wordnet(database)
    for minimum in (1, 2, 3):
        problem = script.make_problem(synsets, minimum)
        labels = {label.uid for label in problem.labels}
        for label in labels:
            assert sum(label in instance.targets for instance in problem.train) >= minimum
        assert all(instance.targets & labels for instance in problem.train + problem.test)


def test_the_build_is_readable_and_the_same_to_the_byte(
    script: ModuleType, database: Path, tmp_path: Path, cache: Path
) -> None:
    problem = script.make_problem(script.read_wordnet(database), 1)
    script.write_problem(problem, tmp_path / "one")
    script.write_problem(problem, tmp_path / "two")
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        assert path.read_bytes()[3:8] == b"\0" * 5  # no name, no time
    dataset = open_dataset(tmp_path / "one")
    assert dataset.train.instances == len(problem.train)
    assert dataset.train.filter_pairs is not None


def test_missing_database_files_are_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--wordnet", str(tmp_path), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "must hold data.noun of WordNet 3.0, found none; install wordnet-base" in result.stderr


@pytest.mark.shared_data
def test_the_shipped_and_the_shared_set_are_what_the_script_builds(
    script: ModuleType, tmp_path: Path, shared: Callable[[str], Path]
) -> None:
    if not (WORDNET / "data.noun").is_file():
        pytest.skip(f"{WORDNET} holds no WordNet 3.0; install wordnet-base")
    folder = shared("wordnet-related")
    synsets = script.read_wordnet(WORDNET)
    script.write_problem(script.make_problem(synsets, 1), tmp_path / "related")
    mini = [synset for synset in synsets if synset.lexicographer_file in script.MINI_LEXICOGRAPHER_FILES]
    script.write_problem(script.make_problem(mini, script.MINI_TRAINING_INSTANCES), tmp_path / "mini")
    for built, expected in (("related", folder), ("mini", cards_folder() / "wordnet-mini")):
        for path in (tmp_path / built).iterdir():
            ours, theirs = (gzip.decompress(file.read_bytes()) for file in (path, expected / path.name))
            assert ours == theirs, path
            if path.name == "trn.json.gz":
                assert json.loads(ours.partition(b"\n")[0])["uid"]
