"""Cards: those of the project, finding their files, and what a wrong card says."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import xmlc
from xmlc.data import DataWarning, card, find_card, list_cards, open_dataset
from xmlc.data.check import check_data
from xmlc.errors import DataError

Write = Callable[..., Path]

XMC = {"train.txt": "1 2 3\n0 0:1\n", "test.txt": "1 2 3\n0 0:1\n"}
CARD = """
name = "own"
title = "Own data"
kind = "sparse"
licence = "CC0"
source = "us"
obtain = "Ask us"
propensity_a = 0.6
propensity_b = 2.6
[counts]
train = 1
test = 1
labels = 3
features = 2
[files]
"train.txt" = ""
"test.txt" = ""
"""


def test_every_card_is_named_after_its_folder_and_names_its_filters() -> None:
    cards = list_cards()
    folders = [path.name for path in sorted(card.cards_folder().iterdir()) if path.is_dir()]
    assert [known.name for known in cards] == folders
    for known in cards:
        assert set(known.filters) <= set(known.files), known.name
        assert known.counts is not None, known.name


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [
        ("Amazon-670K", 0.6, 2.6),
        ("LF-AmazonTitles-131K", 0.6, 2.6),
        ("Wiki-500K", 0.5, 0.4),
        ("bibtex", 0.55, 1.5),
    ],
)
def test_cards_know_the_constants_of_the_published_metrics(name: str, a: float, b: float) -> None:
    known = find_card(name)
    assert (known.propensity_a, known.propensity_b) == (a, b)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        DataError, match=r"Amazon-6: must be a folder or the name of a known .* Amazon-670K, "
    ):
        find_card("Amazon-6")


def test_a_name_close_to_a_known_one_is_asked_about() -> None:
    with pytest.raises(DataError, match=r"found neither; did you mean Amazon-670K\? known are "):
        find_card("amazon670k")
    with pytest.raises(DataError, match=r"found neither; known are "):
        find_card("zzzzzzzz")


def test_the_shipped_set_opens_by_name_and_matches_its_card(cache: Path) -> None:
    dataset = open_dataset("wordnet-mini")
    known = find_card("wordnet-mini")
    assert known.counts is not None
    assert dataset.test is not None
    assert (dataset.train.instances, dataset.test.instances, dataset.label_count) == (
        known.counts.train,
        known.counts.test,
        known.counts.labels,
    )
    assert dataset.train.filter_pairs is not None
    assert (card.cards_folder() / "wordnet-mini" / "LICENSE").is_file()
    assert (
        sum((card.cards_folder() / "wordnet-mini" / name).stat().st_size for name in known.files) < 1_000_000
    )


def test_an_installed_package_carries_its_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "xmlc" / "datasets"
    (folder / "own").mkdir(parents=True)
    (folder / "own" / "dataset.toml").write_text(CARD)
    monkeypatch.setattr(xmlc, "__file__", str(tmp_path / "xmlc" / "__init__.py"))
    assert [known.name for known in list_cards()] == ["own"]


def test_missing_cards_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xmlc, "__file__", str(tmp_path / "xmlc" / "__init__.py"))
    with pytest.raises(
        DataError, match="must hold the cards of known data sets, found none; install xmlc again"
    ):
        list_cards()


def test_files_that_are_not_shipped_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XMLC_DATA", raising=False)
    with pytest.raises(
        DataError,
        match=r"bibtex: .* lie in \$XMLC_DATA/bibtex, found XMLC_DATA not set; "
        r"put train.txt.gz, .* into a folder bibtex and set XMLC_DATA to .* To get them: Get bibtex",
    ):
        open_dataset("bibtex")
    monkeypatch.setenv("XMLC_DATA", str(tmp_path))
    with pytest.raises(
        DataError, match=rf"found no folder {tmp_path}/bibtex; put train\.txt\.gz, test\.txt\.gz"
    ):
        open_dataset("bibtex")


def test_files_are_found_under_xmlc_data(write: Write, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(XMC, "Amazon-670K")
    monkeypatch.setenv("XMLC_DATA", str(folder.parent))
    with pytest.warns(
        DataWarning, match=r"card Amazon-670K, found train 1, not 490449; test 1, not 153025; labels"
    ):
        dataset = open_dataset("Amazon-670K")
    assert (dataset.name, dataset.propensity_a, dataset.propensity_b) == ("Amazon-670K", 0.6, 2.6)


def test_a_card_in_the_folder_gives_name_and_propensity(write: Write, cache: Path) -> None:
    dataset = open_dataset(write({**XMC, "dataset.toml": CARD}))
    assert (dataset.name, dataset.propensity_a, dataset.propensity_b) == ("own", 0.6, 2.6)


def test_a_folder_without_a_card_keeps_its_name(write: Write, cache: Path) -> None:
    dataset = open_dataset(write(XMC))
    assert (dataset.name, dataset.propensity_a, dataset.propensity_b) == ("set", 0.55, 1.5)


def test_a_file_with_another_checksum_is_refused(write: Write, cache: Path) -> None:
    wrong = CARD.replace('"train.txt" = ""', f'"train.txt" = "{"0" * 64}"')
    with pytest.raises(DataError, match=r"train\.txt: must have the SHA-256 of dataset\.toml, 0{64}, found"):
        open_dataset(write({**XMC, "dataset.toml": wrong}))


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ('title = "Own data"', "", "title: Field required"),
        ('title = "Own data"', 'titel = "Own data"', "title: Field required|titel: Extra inputs"),
        (
            'title = "Own data"',
            'title = "x"\nmore = 1',
            "more: Extra inputs are not permitted, found 1; correct the card",
        ),
        ("labels = 3", "labels = 0", "counts.labels: Input should be greater than or equal to 1, found 0"),
        (
            'kind = "sparse"',
            'kind = "other"',
            "kind: Input should be 'sparse', 'dense' or 'text', found 'other'",
        ),
        ("labels = 3", "labels = ", "a card must be TOML, found: Invalid value"),
        ("propensity_a = 0.6", "propensity_a = nan", "propensity_a: Input should be .*, found nan"),
        ("propensity_a = 0.6", "propensity_a = 1e300", "propensity_a: Input should be less .*, found 1e"),
        ("propensity_b = 2.6", "propensity_b = -5.0", "propensity_b: Input should be greater .*, found -5"),
        ("propensity_b = 2.6", "propensity_b = inf", "propensity_b: Input should be less .*, found inf"),
        ("labels = 3", f"labels = {'9' * 5000}", "a card must be TOML, found: Exceeds the limit"),
        ("labels = 3", f"labels = {'[' * 5000}", "a card must be TOML, found: too deep nesting"),
    ],
)
def test_a_wrong_card_is_refused_by_its_key(
    write: Write, cache: Path, old: str, new: str, found: str
) -> None:
    with pytest.raises(DataError, match=rf"dataset\.toml: ({found})"):
        open_dataset(write({**XMC, "dataset.toml": CARD.replace(old, new)}))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "a\\\\b", ""])
def test_a_card_lists_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    text = 'name = "s"\ntitle = "S"\nkind = "sparse"\nlicence = "x"\nsource = "x"\nobtain = "x"\n'
    (tmp_path / "dataset.toml").write_text(text + f'[files]\n"{name}" = ""\n')
    with pytest.raises(DataError, match=r"dataset\.toml: files\."):
        card.read_card(tmp_path / "dataset.toml")


def test_a_pipe_or_folder_among_the_files_of_a_card_is_refused_at_once(write: Write, cache: Path) -> None:
    """The checksum of a pipe was waited for, for ever; a folder as a card was passed over in silence."""
    folder = write({**XMC, "dataset.toml": CARD.replace('"train.txt" = ""', f'"other" = "{"0" * 64}"')})
    os.mkfifo(folder / "other")
    with pytest.raises(DataError, match="other: must be a regular file, found a pipe"):
        open_dataset(folder)
    (folder / "dataset.toml").unlink()
    (folder / "dataset.toml").mkdir()
    with pytest.raises(DataError, match=r"dataset\.toml: must be a regular file, found a folder"):
        open_dataset(folder)
    assert any("found a folder" in problem for problem in check_data(folder).problems)
