"""Bad input of every kind ends with one line on stderr, exit code 2, nothing on stdout and no traceback."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import problems
import pytest
from click.testing import Result

from xmlc import native
from xmlc.data.reader import files

Xmlc = Callable[..., Result]


def refused(result: Result) -> str:
    """Return the line that a refused command said."""
    assert result.exit_code == 2, (result.exit_code, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("xmlc: ")
    return line


def usage(result: Result) -> str:
    """Return the last line of a command that was called wrongly."""
    assert result.exit_code == 2
    assert result.stderr.startswith("Usage: ")
    return result.stderr.splitlines()[-1]


@pytest.fixture
def train(xmlc: Xmlc, home: Path, tmp_path: Path) -> Callable[..., Result]:
    def call(*flags: object, data: object = home / "dense data", out: object = tmp_path / "run") -> Result:
        return xmlc("train", data, "--out", out, "--config", home / "config.toml", *flags)

    return call


# ---- called wrongly --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["train"], "Missing argument 'DATA'"),
        (["train", "wordnet-mini"], "Missing option '--out'"),
        (["train", "x", "--out", "y", "--preset", "icml"], "'icml' is not one of 'default', 'ecml23'"),
        (["train", "x", "--out", "y", "--frobnicate"], "No such option"),
        (["eval"], "Missing argument 'RUN'"),
        (["eval", "x", "-k", "0"], "0 is not in the range"),
        (["eval", "x", "-k", "1001"], "1001 is not in the range"),
        (["eval", "x", "--split", "dev"], "'dev' is not one of"),
        (["eval", "x", "--propensity-a", "much"], "'much' is not a valid float"),
        (["predict", "x", "-k", "-1"], "-1 is not in the range"),
        (["predict", "x", "no such file"], "'no such file': No such file or directory"),
        (["predict", "x", "."], "Is a directory"),
        (["profile", "--labels", "9223372036854775807"], "is not in the range"),
        (["profile", "--labels", "9", "--width", "99999999999999999999"], "is not in the range"),
        (["report"], "Missing argument 'RUN'"),
        (["data", "bogus"], "No such command 'bogus'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_call_is_answered_with_the_usage(arguments: list[str], words: str, xmlc: Xmlc) -> None:
    assert words in usage(xmlc(*arguments))


# ---- train -----------------------------------------------------------------------------------------------


def test_data_that_are_nowhere(train: Callable[..., Result], tmp_path: Path) -> None:
    line = refused(train(data="no-such-data"))
    assert "no-such-data: must be a folder or the name of a known data set" in line
    assert "wordnet-mini" in line
    assert "must be a folder with a data set" in refused(train(data=tmp_path / "none"))


def test_a_folder_without_data(train: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "must hold train.txt (XMC text), trn.json" in refused(train(data=tmp_path / "empty"))


def test_a_file_in_place_of_data(train: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "must be a folder" in refused(train(data=tmp_path / "file"))


def test_malformed_data_by_file_and_line(train: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("2 3 4\n0 1:1\n0 7:1\n")
    assert "train.txt:3: " in refused(train(data=tmp_path / "data"))


def test_data_that_count_from_one_are_refused_with_the_way_out(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("2 3 4\n1,4 1:1\n2 3:1\n")
    line = refused(train(data=tmp_path / "data"))
    assert "train.txt:2: a label must be at most 3, found '4'; indices count from 0" in line
    assert line.endswith("where they count from 1, pass --index-base 1 to `xmlc data convert`")
    assert not (tmp_path / "run").exists()


def test_a_config_that_cannot_be_read(train: Callable[..., Result], tmp_path: Path) -> None:
    assert "none.toml: the config must be a readable file" in refused(
        train("--config", tmp_path / "none.toml")
    )
    (tmp_path / "bad.toml").write_text("[model\n")
    assert "bad.toml: the config must be TOML" in refused(train("--config", tmp_path / "bad.toml"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.epochs", "--set must be SECTION.KEY=VALUE, found 'training.epochs'"),
        ("training.epoch=1", "unknown key training.epoch; did you mean training.epochs?"),
        ("training.epochs=0", "training.epochs: "),
        ("model.fan_in=65", "model: fan_in must be at most width = 64, found 65"),
    ],
)
def test_settings_that_cannot_be(override: str, words: str, train: Callable[..., Result]) -> None:
    assert words in refused(train("--set", override))


def test_a_loss_that_explodes(train: Callable[..., Result]) -> None:
    line = refused(
        train("--set", "output_optimizer.kind=sgd", "--set", "output_optimizer.learning_rate=1e30")
    )
    assert "the loss must stay finite" in line


def test_a_model_that_no_memory_holds(train: Callable[..., Result]) -> None:
    """It once ended in torch's own traceback."""
    line = refused(train("--set", "model.width=1000000000000"))
    assert "model: the weights must fit into this machine's memory of" in line
    assert "lower model.width, model.hidden or model.fan_in" in line


def test_two_starts(train: Callable[..., Result]) -> None:
    assert "only one of config, preset and recipe" in refused(train("--preset", "ecml23"))


def test_a_place_for_the_run_that_cannot_be(train: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused(train(out=tmp_path / "file"))
    assert f"{tmp_path / 'file'}: the run folder must be a folder, found a file; choose another" in line
    for out in (tmp_path / "file" / "below", "/proc/run"):
        assert "the run folder must be writable" in refused(train(out=out))


def test_a_folder_that_is_in_use(train: Callable[..., Result], tmp_path: Path, home: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    assert "a new run needs a new or empty folder" in refused(train(out=tmp_path / "full"))
    assert "or continue that run with --resume" in refused(train(out=home / "dense run"))


def test_a_resumption_that_does_not_fit(train: Callable[..., Result], home: Path, tmp_path: Path) -> None:
    run = home / "dense run"
    assert "--resume needs the folder of a run" in refused(train("--resume"))
    changed = refused(train("--resume", "--set", "training.batch_size=99", out=run))
    assert "found training.batch_size = 99 where it began with 16" in changed
    fewer = refused(train("--resume", "--set", "training.epochs=5", out=run))
    assert "training.epochs must be at least the 6 that the run has begun, found 5" in fewer
    assert "the run began on data with fingerprint" in refused(
        train("--resume", data=home / "sparse data", out=run)
    )


def test_a_cache_that_cannot_be_written(
    train: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XMLC_CACHE", str(tmp_path / "file"))
    assert "set XMLC_CACHE to a folder that is" in refused(train())


# ---- eval and predict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["eval", "predict"])
def test_a_run_that_is_none(verb: str, xmlc: Xmlc, tmp_path: Path) -> None:
    assert "must be the folder of a run, found no such folder" in refused(xmlc(verb, tmp_path / "none"))
    (tmp_path / "file").write_text("")
    assert "must be the folder of a run, found a file" in refused(xmlc(verb, tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    assert "must be the folder of a run, found no checkpoints" in refused(xmlc(verb, tmp_path / "empty"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "the run has no checkpoint yet" in refused(xmlc(verb, tmp_path / "run"))


@pytest.mark.parametrize("verb", ["eval", "predict"])
def test_a_checkpoint_that_is_damaged(verb: str, xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{")
    (folder.parent / "latest").write_text("step-1\n")
    assert "manifest.json: must be JSON" in refused(xmlc(verb, tmp_path / "run"))


def test_labels_to_add_that_are_none(xmlc: Xmlc, home: Path, towers: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    for content, message in (
        (b"", "labels: there must be at least one label, a line for each, found an empty file"),
        (b"one\n \n", "labels:2: a label must have a text, found none; remove the line"),
        (b'{"title": "", "content": ""}\n', "labels:1: a label must have a text, found none"),
        (b'{"name": "x"}\n', "labels:1: the object must hold title, content or text"),
        (b"caf\xe9\n", "labels:1: must be UTF-8 text, found other bytes"),
    ):
        labels.write_bytes(content)
        assert message in refused(xmlc("predict", towers, "--labels", labels, stdin=b"word1\n"))
    labels.write_text("one\n")
    found = refused(xmlc("predict", home / "text run", "--labels", labels, stdin=b"word1\n"))
    assert "with_labels: needs a run of model.output = two_tower, found sparse" in found
    found = refused(xmlc("predict", home / "text run", "--search", "approximate", stdin=b"word1\n"))
    assert "with_index: needs a run of model.output = two_tower, found sparse" in found
    both = xmlc("predict", towers, "--labels", "-", stdin=b"one\n")
    assert both.exit_code == 2 and "cannot both be read from stdin" in both.stderr


def test_data_to_evaluate_that_do_not_fit(xmlc: Xmlc, home: Path) -> None:
    run = home / "text run"
    assert "the run takes text instances, found dense ones" in refused(xmlc("eval", run, home / "dense data"))
    assert "must be a folder or the name of a known data set" in refused(xmlc("eval", run, "none"))
    assert "propensity: a must be at least 0" in refused(xmlc("eval", run, "--propensity-a", "nan"))


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("text", b"good\ncaf\xe9\n", ":2: must be UTF-8 text"),
        ("text", b"good\n{bad\n", ":2: a line that starts with { must be a JSON object"),
        ("sparse", b"1:1\n1:x\n", ":2: a value must be a number finite in float32"),
        ("dense", b"[1]\n", ":1: must be a JSON list of 32 numbers"),
    ],
)
def test_lines_that_do_not_fit(
    kind: str, content: bytes, words: str, xmlc: Xmlc, home: Path, tmp_path: Path
) -> None:
    run = home / f"{kind} run"
    assert words in refused(xmlc("predict", run, stdin=content))
    (tmp_path / "lines").write_bytes(content)
    assert f"{tmp_path / 'lines'}{words}" in refused(xmlc("predict", run, tmp_path / "lines"))


def test_an_endless_line_is_refused_by_its_number(
    xmlc: Xmlc, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read until memory ran out."""
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 1 << 12)
    result = xmlc("predict", home / "text run", "-k", 1, stdin=b"good\n" * 1030 + b"x" * 5000)
    assert result.exit_code == 2
    assert "1031: a line must be shorter than 4096 bytes, found a longer one" in result.stderr
    assert len(result.stdout.splitlines()) == 1024
    fits = xmlc("predict", home / "text run", "-k", 1, stdin=(b"y" * 4095 + b"\n") * 3)
    assert len(fits.stdout.splitlines()) == 3


def test_few_long_lines_are_answered_before_a_thousand_have_come(
    xmlc: Xmlc, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("xmlc.cli.predict"), "_BYTES_AT_ONCE", 10)
    result = xmlc("predict", home / "text run", "-k", 1, stdin=b"word1\nword2\n" * 2 + b"\xff\n")
    assert ":5: must be UTF-8" in result.stderr
    assert len(result.stdout.splitlines()) == 4


def test_a_message_is_one_printable_line_whatever_files_are_called(xmlc: Xmlc, tmp_path: Path) -> None:
    folder = tmp_path / "a\nb\x1b[31m\u202e"
    folder.mkdir()
    (folder / "train.txt").write_text("1\n")
    line = refused(xmlc("data", "info", folder))
    assert r"a\nb\x1b[31m\u202e" in line
    assert line.isprintable()
    assert all(each.isprintable() for each in xmlc("data", "check", folder).stdout.splitlines())


def test_a_line_far_down_is_named_by_its_number(xmlc: Xmlc, home: Path) -> None:
    result = xmlc("predict", home / "text run", "-k", 1, stdin=b"good\n" * 1500 + b"\xff\n")
    assert result.exit_code == 2
    assert ":1501: must be UTF-8" in result.stderr
    assert len(result.stdout.splitlines()) == 1024  # what was answered before stays


# ---- report ----------------------------------------------------------------------------------------------


def test_a_run_to_report_on_that_is_none(xmlc: Xmlc, tmp_path: Path) -> None:
    assert "must be the folder of a run, found no config.toml" in refused(xmlc("report", tmp_path / "none"))
    (tmp_path / "config.toml").write_text("")
    assert "a report needs at least one finished epoch" in refused(xmlc("report", tmp_path))


def test_a_damaged_line_of_metrics(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "dense run", tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], lines[2][:40], *lines[3:]]) + "\n")
    assert f"{file}:3: must be what a run records" in refused(xmlc("report", tmp_path / "run"))
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_place_for_the_report_that_cannot_be(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    place = tmp_path / "none" / "report.html"
    for command in (
        ("report", home / "dense run", "--out", place),
        ("profile", "--labels", 9, "--html", place),
    ):
        assert f"{place}: the report must lie in a folder, found no {place.parent}" in refused(xmlc(*command))


# ---- data ------------------------------------------------------------------------------------------------


def test_data_that_have_to_be_fetched_say_from_where(xmlc: Xmlc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XMLC_DATA", raising=False)
    line = refused(xmlc("data", "info", "bibtex"))
    assert "its files are not part of xmlc and must lie in $XMLC_DATA/bibtex" in line


def test_a_check_lists_problems_on_stdout_and_ends_with_2(xmlc: Xmlc, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("2 3 4\n4 1:1\n0 1:x\n")
    result = xmlc("data", "check", tmp_path / "data")
    assert result.exit_code == 2
    first, second, last = result.stdout.splitlines()
    assert "train.txt:2: a label must be at most 3, found '4'" in first
    assert "train.txt:3: a value must be a number" in second
    assert last.endswith("data: 2 problems")
    assert result.stderr == ""
    result = xmlc("data", "check", tmp_path / "data", "--json", "--limit", 1)
    assert result.exit_code == 2
    facts = json.loads(result.stdout)
    assert len(facts["problems"]) == 1
    assert facts["complete"] is False


def test_data_that_a_format_cannot_hold_or_a_place_that_is_taken(
    xmlc: Xmlc, home: Path, tmp_path: Path
) -> None:
    line = refused(xmlc("data", "convert", home / "dense data", tmp_path / "made", "--to", "xmc"))
    assert "xmc holds sparse features, found dense features; choose npz" in line
    assert "must not be there yet" in refused(
        xmlc("data", "convert", home / "dense data", tmp_path, "--to", "npz")
    )
    assert not (tmp_path / "made").exists()


def test_data_that_cannot_be_split_or_filtered(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    assert "pass --pool to split" in refused(xmlc("data", "split", home / "text data", tmp_path / "made"))
    assert "above 0 and below 1, found 2.0" in refused(
        xmlc("data", "split", home / "text data", tmp_path / "made", "--test", 2)
    )
    assert "found features; use ids" in refused(xmlc("data", "filter", home / "sparse data"))


def test_data_to_check_that_are_none(xmlc: Xmlc, tmp_path: Path) -> None:
    assert "did you mean wordnet-mini?" in refused(xmlc("data", "check", "wordnet_mini"))
    (tmp_path / "train.txt").write_text("")
    line = refused(xmlc("data", "check", tmp_path / "train.txt"))
    assert "must be a folder with a data set, found a file; name the folder that holds it" in line
    assert "is not 0, 1 or kinds such as" in usage(xmlc("data", "check", tmp_path, "--index-base", "2"))


def test_a_warning_is_a_line_on_stderr(xmlc: Xmlc, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("1 3 4\n0,0 1:1\n")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = xmlc("data", "info", tmp_path / "data", "--json")
    assert result.exit_code == 0
    json.loads(result.stdout)
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"xmlc: warning: {tmp_path / 'data'}: ")


def test_a_score_that_overflows_is_refused_by_its_line(xmlc: Xmlc, home: Path) -> None:
    """It was once printed as Infinity, which is no JSON."""
    good, huge = ("[" + ", ".join([number] * problems.HIDDEN) + "]\n" for number in ("1.0", "3e38"))
    result = xmlc("predict", home / "dense run", stdin=(good + huge).encode())
    assert result.exit_code == 2
    assert result.stderr.startswith("xmlc: stdin:2: scores must be finite, found an overflow")
    assert len(result.stdout.splitlines()) == 1


def test_a_cuda_device_that_is_not_there_is_refused_with_the_reason_and_leaves_no_run(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    reason = native.why_no_cuda()
    if reason is None:
        pytest.skip("this machine has a CUDA device and kernels for it")
    line = refused(train("--device", "cuda"))
    assert "a CUDA device and CUDA kernels for it must be there" in line and reason in line
    assert not (tmp_path / "run").exists()


# ---- profile ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["-1", "1e30", "nan", "4 kilos", "", "9" * 400, "1." + "9" * 400])
def test_a_budget_that_is_no_size(size: str, xmlc: Xmlc) -> None:
    """One of hundreds of digits used to end in an OverflowError."""
    found = refused(xmlc("profile", "--labels", "9", "--budget", size))
    assert "memory: a size must be a number with a unit such as 4GiB or 400MB" in found
