"""Every verb in its ordinary use: results on stdout, nothing else there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import problems
import pytest
import runs
from click.testing import Result

from xmlc import __version__
from xmlc.config import PRESETS, dump_config, load_config
from xmlc.data import open_dataset
from xmlc.evaluation import load
from xmlc.evaluation.run import evaluate_run, report_table
from xmlc.memory.budget import needed_bytes
from xmlc.memory.plan import plan
from xmlc.memory.process import usage
from xmlc.training.prepare import batches_of, prepare

Xmlc = Callable[..., Result]


def ok(result: Result) -> str:
    """Return stdout of a command that must have succeeded."""
    assert result.exit_code == 0, result.stderr or result.exception
    return result.stdout


# ---- help ------------------------------------------------------------------------------------------------


def test_help_lists_the_verbs_in_the_order_of_use(xmlc: Xmlc) -> None:
    text = ok(xmlc("--help"))
    places = [
        text.index(f"\n  {verb} ")
        for verb in ("train", "eval", "predict", "export", "data", "profile", "report", "info")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("verb", ["train", "eval", "predict", "export", "data", "profile", "report", "info"])
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_verb_has_help(verb: str, flag: str, xmlc: Xmlc) -> None:
    assert f" {verb} [OPTIONS]" in ok(xmlc(verb, flag)).splitlines()[0]


def test_the_version_is_that_of_the_package(xmlc: Xmlc) -> None:
    assert ok(xmlc("--version")).split() == ["xmlc,", "version", __version__]


# ---- train -----------------------------------------------------------------------------------------------


def test_train_makes_a_run_and_prints_its_folder(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a new run"
    result = xmlc("train", home / "text data", "--out", run, "--config", home / "config.toml")
    assert ok(result) == f"{run}\n"
    runs.assert_same_run(run, home / "text run")


def test_train_tells_of_every_epoch_on_stderr(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    result = xmlc("train", home / "text data", "--out", tmp_path / "run", "--config", home / "config.toml")
    lines = result.stderr.splitlines()
    assert [line.split()[:2] for line in lines] == [["epoch", f"{epoch}/6"] for epoch in range(1, 7)]
    for word in ("loss", "P@1", "PSP@5", "MiB"):
        assert word in lines[-1]


def test_train_draws_no_bars_where_stderr_is_no_terminal(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    result = xmlc("train", home / "text data", "--out", tmp_path / "run", "--config", home / "config.toml")
    assert "\r" not in result.stderr
    assert "batch/s" not in result.stderr


def test_settings_are_set_over_the_file(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    settings = ["--set", "training.epochs=1", "--set", "loss.kind=bce"]
    ok(
        xmlc(
            "train",
            home / "text data",
            "--out",
            tmp_path / "run",
            "--config",
            home / "config.toml",
            *settings,
        )
    )
    expected = load_config(home / "config.toml", ["training.epochs=1", "loss.kind=bce"])
    assert load_config(tmp_path / "run" / "config.toml") == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_start(preset: str, xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    small = ["model.width=64", "model.hidden=16", "model.fan_in=8", "training.epochs=1"]
    flags = [word for override in small for word in ("--set", override)]
    ok(xmlc("train", home / "dense data", "--out", tmp_path / "run", "--preset", preset, *flags))
    assert load_config(tmp_path / "run" / "config.toml") == load_config(None, small, preset)


def test_a_recipe_is_a_start(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "dense", train=60)
    (data / "recipe.toml").write_text(dump_config(load_config(home / "config.toml", ["training.epochs=2"])))
    ok(xmlc("train", data, "--out", tmp_path / "run", "--recipe", "--set", "training.seed=8"))
    config = load_config(tmp_path / "run" / "config.toml")
    assert (config.training.epochs, config.training.seed) == (2, 8)


def test_the_paper_protocol_has_a_flag_that_names_the_test_set(
    xmlc: Xmlc, home: Path, tmp_path: Path
) -> None:
    assert "TEST" in ok(xmlc("train", "--help"))
    flags = ["--config", home / "config.toml", "--paper-protocol", "--set", "training.epochs=1"]
    ok(xmlc("train", home / "text data", "--out", tmp_path / "run", *flags))
    assert load_config(tmp_path / "run" / "config.toml").training.paper_protocol
    assert not load_config(home / "text run" / "config.toml").training.paper_protocol


def test_resume_finishes_a_run(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ok(xmlc("train", home / "text data", "--out", run, "--config", home / "config.toml"))
    again = xmlc("train", home / "text data", "--out", run, "--resume")
    assert ok(again) == f"{run}\n"
    assert again.stderr == f"{run}: nothing left to do, training.epochs = 6 are done\n"
    runs.assert_same_run(run, home / "text run")


def test_an_early_stop_says_so_and_a_longer_patience_goes_on(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    """Both once ended without a word."""
    run = tmp_path / "run"
    rates = ["output_optimizer.learning_rate=0.0", "dense_optimizer.learning_rate=0.0"]
    flags = [word for each in [*rates, "training.patience=1"] for word in ("--set", each)]
    first = xmlc("train", home / "text data", "--out", run, "--config", home / "config.toml", *flags)
    ok(first)
    why = "stopped early after epoch 2: no gain of P@1 in training.patience = 1 evaluations, "
    why += "the best epoch is 1"
    assert first.stderr.splitlines()[-1] == f"{run}: {why}"
    again = xmlc("train", home / "text data", "--out", run, "--resume")
    ok(again)
    assert again.stderr == f"{run}: nothing left to do, {why}\n"
    more = xmlc("train", home / "text data", "--out", run, "--resume", "--set", "training.patience=2")
    ok(more)
    lines = more.stderr.splitlines()
    assert lines[0] == f"{run}: resumed with training.patience = 2, 1 before"
    assert lines[1].startswith("epoch 3/6")
    assert "stopped early after epoch 3" in lines[2]
    assert load_config(run / "config.toml").training.patience == 2


# ---- eval ------------------------------------------------------------------------------------------------


def test_eval_prints_the_table_of_percent(xmlc: Xmlc, home: Path) -> None:
    run = home / "text run"
    assert ok(xmlc("eval", run)) == report_table(evaluate_run(run)) + "\n"


@pytest.mark.parametrize("kind", problems.KINDS)
def test_eval_prints_json_and_nothing_else(kind: str, xmlc: Xmlc, home: Path) -> None:
    result = xmlc("eval", home / f"{kind} run", "--json")
    assert json.loads(ok(result)) == evaluate_run(home / f"{kind} run")
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["-k", "2"], {"k": 2}),
        (["--checkpoint", "latest"], {"which": "latest"}),
        (["--split", "train"], {"split": "train"}),
        (["--propensity-a", "0.6", "--propensity-b", "2.6"], {"propensity_a": 0.6, "propensity_b": 2.6}),
        (["--no-filter"], {"mask_filter_pairs": False}),
        (["--deciles"], {"deciles": True}),
    ],
)
def test_eval_passes_its_flags_on(flags: list[str], settings: dict[str, Any], xmlc: Xmlc, home: Path) -> None:
    found = json.loads(ok(xmlc("eval", home / "text run", "--json", *flags)))
    assert found == evaluate_run(home / "text run", **settings)


def test_eval_takes_other_data(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    other = problems.write_folder(tmp_path / "other", "text", test=30)
    assert json.loads(ok(xmlc("eval", home / "text run", other, "--json")))["instances"] == 30
    assert "note: this is not the data set" in ok(xmlc("eval", home / "text run", other))


# ---- predict ---------------------------------------------------------------------------------------------


def lines_of(kind: str) -> list[str]:
    features = problems.split(kind, 7, 5).features  # type: ignore[arg-type]
    if kind == "text":
        return list(features)
    if kind == "dense":
        return [json.dumps(row) for row in features.tolist()]
    return [
        " ".join(f"{column}:{value}" for column, value in enumerate(row) if value)
        for row in features.toarray().tolist()
    ]


def expected(home: Path, kind: str, k: int) -> list[dict[str, Any]]:
    predictions = load(home / f"{kind} run").predict(problems.split(kind, 7, 5).features, k)  # type: ignore[arg-type]
    return [{"labels": [vars(prediction) for prediction in row]} for row in predictions]


@pytest.mark.parametrize("kind", problems.KINDS)
def test_predict_answers_every_line_of_stdin_with_a_line_of_json(kind: str, xmlc: Xmlc, home: Path) -> None:
    content = "".join(f"{line}\n" for line in lines_of(kind)).encode()
    result = xmlc("predict", home / f"{kind} run", "-k", 3, stdin=content)
    assert [json.loads(line) for line in ok(result).splitlines()] == expected(home, kind, 3)
    assert result.stderr == ""


@pytest.mark.parametrize("kind", problems.KINDS)
def test_predict_reads_a_file(kind: str, xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    file = tmp_path / "my lines.txt"
    file.write_text("\n".join(lines_of(kind)))  # without a last line end
    found = ok(xmlc("predict", home / f"{kind} run", file))
    assert [json.loads(line) for line in found.splitlines()] == expected(home, kind, 5)


def test_predict_reads_json_lines(xmlc: Xmlc, home: Path) -> None:
    texts = lines_of("text")
    records = [{"text": text} if row % 2 else {"title": text, "uid": row} for row, text in enumerate(texts)]
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    found = ok(xmlc("predict", home / "text run", stdin=content))
    assert [json.loads(line) for line in found.splitlines()] == expected(home, "text", 5)


def test_predict_keeps_empty_lines_and_answers_nothing_with_nothing(xmlc: Xmlc, home: Path) -> None:
    assert len(ok(xmlc("predict", home / "text run", stdin=b"word1\n\nword2\n")).splitlines()) == 3
    assert ok(xmlc("predict", home / "text run", stdin=b"")) == ""


def test_predict_gives_all_labels_where_more_are_asked_for(xmlc: Xmlc, home: Path) -> None:
    result = xmlc("predict", home / "text run", "-k", 10**12, stdin=b"word1\n")
    (line,) = ok(result).splitlines()
    assert len(json.loads(line)["labels"]) == problems.LABELS
    note = f"k = {10**12}, but the run knows {problems.LABELS} labels; all of them are given"
    assert result.stderr == f"xmlc: note: {note}\n"


def test_predict_explains_its_scores(xmlc: Xmlc) -> None:
    text = " ".join(ok(xmlc("predict", "--help")).split())
    assert "A score is the label's logit: higher is likelier" in text


@pytest.mark.parametrize("kind", ["text", "sparse"])
def test_predict_gives_what_it_knows_nothing_of_the_labels_of_the_biases(
    kind: str, xmlc: Xmlc, home: Path
) -> None:
    unknown = {"text": b"\n   \nunheard of\n\xe6\x97\xa5\n", "sparse": b"\n  \n0:0\n\n"}[kind]
    answers = ok(xmlc("predict", home / f"{kind} run", "-k", 3, stdin=unknown)).splitlines()
    assert len(answers) == 4
    assert len(set(answers)) == 1
    assert len(json.loads(answers[0])["labels"]) == 3


def test_predict_reads_more_lines_than_it_takes_at_once(xmlc: Xmlc, home: Path) -> None:
    content = b"".join(b"word%d\n" % (number % 90) for number in range(2500))
    assert len(ok(xmlc("predict", home / "text run", "-k", 1, stdin=content)).splitlines()) == 2500


def test_predict_knows_labels_that_came_after_training(xmlc: Xmlc, towers: Path, tmp_path: Path) -> None:
    added = tmp_path / "labels"
    added.write_text('word15 word16 word90\n{"title": "a name", "content": "word3 word91"}\n')
    texts = b"word15 word16 word90\na name word3 word91\n"
    call = ("predict", towers, "-k", 1, "--labels", added)
    found = ok(xmlc(*call, stdin=texts))
    indexed = ok(xmlc(*call, "--search", "approximate", stdin=texts))
    assert indexed == found
    answers = [json.loads(line)["labels"][0] for line in found.splitlines()]
    labels = problems.LABELS
    assert [(answer["label"], answer["name"]) for answer in answers] == [
        (labels, "word15 word16 word90"),
        (labels + 1, "a name"),
    ]


def test_predict_writes_names_as_they_are(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    data = problems.write_folder(tmp_path / "data", "text", train=60)
    names = [json.dumps({"title": f"日本 {label}"}, ensure_ascii=False) for label in range(problems.LABELS)]
    (data / "lbl.json").write_text("\n".join(names), encoding="utf-8")
    flags = ["--config", home / "config.toml", "--set", "training.epochs=1"]
    ok(xmlc("train", data, "--out", tmp_path / "run", *flags))
    assert '"name": "日本 ' in ok(xmlc("predict", tmp_path / "run", stdin="日本\n".encode()))


# ---- data and info ---------------------------------------------------------------------------------------


def test_data_list_says_which_files_are_here(xmlc: Xmlc, tmp_path: Path, monkeypatch: Any) -> None:
    def row(name: str) -> list[str]:
        return next(line for line in ok(xmlc("data", "list")).splitlines() if line.startswith(name)).split()

    monkeypatch.delenv("XMLC_DATA", raising=False)
    assert row("wordnet-mini")[1] == "here"
    assert row("bibtex")[1] == "-"
    (tmp_path / "bibtex").mkdir()
    monkeypatch.setenv("XMLC_DATA", str(tmp_path))
    assert row("bibtex")[1] == "here"


@pytest.mark.parametrize("kind", problems.KINDS)
def test_data_check_ends_with_0_where_nothing_is_wrong(kind: str, xmlc: Xmlc, home: Path) -> None:
    data = home / f"{kind} data"
    assert ok(xmlc("data", "check", data)).splitlines()[-1] == f"{data}: no problems"
    assert json.loads(ok(xmlc("data", "check", data, "--json")))["problems"] == []


def test_data_convert_writes_a_folder_and_prints_its_path(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    data, made = home / "text data", tmp_path / "made"
    assert ok(xmlc("data", "convert", data, made, "--to", "npz", "--without", "label_texts")) == f"{made}\n"
    before, after = (json.loads(ok(xmlc("data", "info", each, "--json"))) for each in (data, made))
    assert after["train"] == before["train"]
    assert after["labels"] == before["labels"]


def test_data_split_and_filter_write_files(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    data, made = home / "text data", tmp_path / "made"
    assert ok(xmlc("data", "split", data, made, "--pool", "--test", 0.5, "--identical")) == f"{made}\n"
    facts = json.loads(ok(xmlc("data", "info", made, "--json")))
    assert facts["test"]["seen_in_training"] == 0
    table = ok(xmlc("data", "filter", made))
    assert table.splitlines()[1].startswith(f"{made / 'filter_labels_test.txt'}: ")


def test_no_summary_of_a_verb_is_cut(xmlc: Xmlc) -> None:
    for arguments in (["--help"], ["data", "--help"]):
        commands = ok(xmlc(*arguments)).partition("Commands:")[2]
        assert "..." not in commands


@pytest.mark.parametrize("kind", problems.KINDS)
def test_data_info_describes_a_folder(kind: str, xmlc: Xmlc, home: Path) -> None:
    facts = json.loads(ok(xmlc("data", "info", home / f"{kind} data", "--json")))
    table = ok(xmlc("data", "info", home / f"{kind} data"))
    assert facts["kind"] == kind
    for name in facts:
        assert name in table


def test_info_says_what_is_in_use(xmlc: Xmlc) -> None:
    text = ok(xmlc("info"))
    for word in ("xmlc", "python", "torch", "machine", "CPU kernels", "(in use: ", "CUDA kernels"):
        assert word in text


# ---- report ----------------------------------------------------------------------------------------------


def test_report_writes_a_page_and_prints_its_path(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    out = tmp_path / "a report.html"
    assert ok(xmlc("report", home / "text run", "--out", out)) == f"{out}\n"
    text = out.read_text()
    for words in ("text data", "Training loss", "Connections pruned and regrown", "Time by phase"):
        assert words in text
    assert "connections moved in all" in text
    assert text.count("<svg ") == 8


def test_report_goes_into_the_run_folder(xmlc: Xmlc, home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "dense run", run)
    assert ok(xmlc("report", run)) == f"{run / 'report.html'}\n"
    assert (run / "report.html").is_file()


# ---- profile ---------------------------------------------------------------------------------------------


def test_profile_plans_by_sizes_alone(xmlc: Xmlc) -> None:
    sizes = ("--labels", 670091, "--dim", 768, "--fan-in", 32, "--width", 65536, "--batch", 128)
    found = json.loads(ok(xmlc("profile", *sizes, "--json", "--explain")))
    held = {term["name"]: term["bytes"] for term in found["terms"]["checkpoint"]}
    assert held["output.indices"] == 670091 * 32 * 2
    assert held["penultimate.weight"] == 65536 * 768 * 4
    assert found["phases"]["checkpoint"] == sum(held.values())
    assert found["peak_bytes"] == max(found["phases"].values())
    text = ok(xmlc("profile", *sizes, "--explain"))
    assert "670,091 * 32 * 2" in text
    assert "65,536 * 128 * 4" in text


@pytest.mark.parametrize("kind", problems.KINDS)
def test_profile_plans_a_data_set(kind: str, home: Path, xmlc: Xmlc) -> None:
    text = ok(xmlc("profile", home / f"{kind} data", "--config", home / "config.toml"))
    assert "output_step" in text
    assert "the largest part is" in text


@pytest.mark.parametrize("sizes", [("--labels", 5, "somewhere"), ()])
def test_profile_takes_data_or_sizes(sizes: tuple[object, ...], xmlc: Xmlc) -> None:
    result = xmlc("profile", *sizes)
    assert result.exit_code == 2
    assert "name DATA, or give --labels, and not both" in result.stderr


def test_profile_names_the_smallest_budget(xmlc: Xmlc) -> None:
    result = xmlc("profile", "--labels", 670091, "--budget", "1MiB")
    assert result.exit_code == 2
    assert "memory: the budget must leave at least" in result.stderr


def test_a_budget_shrinks_settings_and_is_recorded(home: Path, tmp_path: Path, xmlc: Xmlc) -> None:
    settings = ("--config", home / "config.toml", "--set", "model.width=32768", "--set", "training.epochs=1")
    config = load_config(home / "config.toml", ["model.width=32768", "training.epochs=1"])
    prepared = prepare(open_dataset(home / "dense data"), config)
    needed = needed_bytes(plan(config, prepared.problem, batches_of(prepared)))
    budget = usage().anonymous + needed * 3 // 4
    result = xmlc("train", home / "dense data", "--out", tmp_path / "run", *settings, "--budget", budget)
    ok(result)
    assert "to fit the budget, " in result.stderr
    recorded = load_config(tmp_path / "run" / "config.toml")
    assert recorded != config
    assert recorded.training.epochs == 1


def test_enforcing_needs_a_budget(home: Path, tmp_path: Path, xmlc: Xmlc) -> None:
    result = xmlc("train", home / "dense data", "--out", tmp_path / "run", "--enforce")
    assert result.exit_code == 2
    assert "enforce needs a budget" in result.stderr
    assert not (tmp_path / "run").exists()
