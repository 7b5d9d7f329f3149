"""The page: whole, escaped, self-contained, and written at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from records import entry, old_entry

from xmlc.errors import CheckpointError
from xmlc.reports import write_report
from xmlc.reports.figures import Table
from xmlc.reports.page import changed_settings, highlights, page, table_html
from xmlc.reports.run import read_run

Write = Callable[..., Path]

VOID = {"meta"}


class Checked(HTMLParser):
    """Requires that every element is closed, and collects elements and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Checked:
    parser = Checked()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("line", [entry, old_entry])
def test_the_page_is_whole_and_needs_nothing_else(line: Callable[..., Any], write: Write) -> None:
    parser = checked(page(read_run(write(line(1), line(2)))))
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in parser.seen}
    for _, attributes in parser.seen:
        assert not {"src", "href", "style"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in page(read_run(write(line(1), name="other")))


def test_it_has_a_picture_for_each_figure(write: Write) -> None:
    parser = checked(page(read_run(write(entry(1), entry(2)))))
    assert [attributes["aria-label"] for tag, attributes in parser.seen if tag == "svg"] == [
        "Training loss",
        "Validation",
        "Validation by label frequency",
        "Validation by label frequency",
        "Share of active gradients",
        "Connections pruned and regrown",
        "Time by phase",
        "Peak memory",
    ]
    text = "".join(parser.text)
    for words in ("toy", "x86_64", "avx2", "xmlc0.1.0", "torch 2.6.0", "Not recorded: git commit"):
        assert words in text


def test_names_are_escaped_everywhere(write: Write) -> None:
    name = '"><script>alert(1)</script>&amp;'
    run = write(
        entry(1, phase_seconds={name: 1.0}, validation={"P@1": 0.5, name: 0.5}),
        name="<b>&run",
        data={"name": name, "kind": name},
    )
    (run / "config.toml").write_text("[training]\nmetric = '" + name + "'\n['</pre>']\nx = '<i>'\n")
    text = page(read_run(run))
    parser = checked(text)
    assert not {"script", "b", "i"} & {tag for tag, _ in parser.seen}
    assert name in "".join(parser.text)
    assert "Run <b>&run" in "".join(parser.text)


def test_it_tells_no_paths(write: Write, tmp_path: Path) -> None:
    text = page(read_run(write(entry(1))))
    assert "/home" not in text
    assert str(tmp_path) not in text


def test_the_same_files_give_the_same_page(write: Write) -> None:
    run = write(entry(1))
    assert page(read_run(run)) == page(read_run(run))


def test_highlights_are_those_of_the_best_epoch(write: Write) -> None:
    run = read_run(write(entry(1), entry(2, best=False), settings=("training.epochs=7",)))
    assert highlights(run) == {
        "epochs": "2 of 7",
        "best epoch": "1",
        "validation P@1": "10.00 %",
        "validation P@5": "12.00 %",
        "validation PSP@1": "13.00 %",
        "validation PSP@5": "15.00 %",
        "loss": "2.5",
        "training": "5 s",
        "peak memory": "300 MiB",
        "output step": "50 % of the time",
    }


def test_settings_that_differ_are_named_with_their_default() -> None:
    assert changed_settings({"model.fan_in": 32, "training.epochs": 7, "model.wings": True}) == [
        ("training.epochs", "7", "20"),
        ("model.wings", "true", "unknown to this version"),
    ]


# ---- the file --------------------------------------------------------------------------------------------


def test_it_lands_in_the_run_folder_or_where_it_is_told_to(write: Write, tmp_path: Path) -> None:
    run = write(entry(1))
    assert write_report(run) == run / "report.html"
    assert write_report(run, tmp_path / "my.html") == tmp_path / "my.html"
    assert (tmp_path / "my.html").read_bytes() == (run / "report.html").read_bytes()


def test_a_report_replaces_the_one_before_at_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(entry(1))
    (run / "report.html").write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"must be writable, found: .*No space left"):
            write_report(run)
    assert (run / "report.html").read_text() == "old"
    before = {path.name for path in run.iterdir()}
    write_report(run)
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert {path.name for path in run.iterdir()} == before, "nothing temporary stays"


def test_a_refused_run_leaves_the_report_before(write: Write) -> None:
    run = write(entry(1))
    write_report(run)
    before = (run / "report.html").read_bytes()
    (run / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(CheckpointError):
        write_report(run)
    assert (run / "report.html").read_bytes() == before


def test_a_place_that_cannot_be_written_is_refused(write: Write, tmp_path: Path) -> None:
    run = write(entry(1))
    for out in (tmp_path, Path()):
        with pytest.raises(CheckpointError, match="the report must be a file, found a folder"):
            write_report(run, out)
    with pytest.raises(CheckpointError, match=r"the report must lie in a folder, found no .*none; make it"):
        write_report(run, tmp_path / "none" / "report.html")


def test_a_folder_whose_name_is_no_unicode_is_reported_on(write: Write, tmp_path: Path) -> None:
    run = write(entry(1)).rename(tmp_path / os.fsdecode(b"caf\xe9"))
    assert b"Run caf?" in write_report(run).read_bytes()


def test_columns_of_text_are_read_from_their_left_and_numbers_from_their_right() -> None:
    rows = (("weights <a>", "1,024", "12 *"), ("bias", "-0.5", "-"))
    seen = checked(table_html(Table("parts", ("part", "bytes", "epoch"), rows))).seen
    styles = [attributes.get("class") for tag, attributes in seen if tag in ("th", "td")]
    assert styles == ["text", None, None] * 3
