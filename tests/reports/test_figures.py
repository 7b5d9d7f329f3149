"""From records to charts and tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from records import entry, old_entry

from xmlc.reports.charts import BarChart, LineChart, Series
from xmlc.reports.figures import (
    NO_VALIDATION,
    NOT_RECORDED,
    active_figure,
    connections,
    decile_figure,
    decile_table,
    epoch_table,
    figures,
    loss_figure,
    memory_figure,
    phase_figure,
    phase_table,
    redistribution_figure,
    redistribution_table,
    tables,
    validation_figure,
)
from xmlc.reports.run import Run, read_run

Write = Callable[..., Path]


@pytest.fixture
def read(write: Write) -> Callable[..., Run]:
    return lambda *entries, **options: read_run(write(*entries, **options))


Read = Callable[..., Run]


def line(figure: Any) -> LineChart:
    (chart,) = figure.charts
    assert isinstance(chart, LineChart)
    return chart


def test_the_loss_is_drawn_by_epoch(read: Read) -> None:
    chart = line(loss_figure(read(entry(1), entry(2))))
    assert chart.series == (Series("loss", ((1.0, 5.0), (2.0, 2.5))),)
    assert chart.mark == (2, "best")


def test_validation_is_drawn_in_percent(read: Read) -> None:
    chart = line(validation_figure(read(entry(1), entry(2))))
    assert [series.name for series in chart.series] == ["P@1", "P@5", "PSP@1", "PSP@5"]
    assert chart.series[0].points == ((1.0, 10.0), (2.0, 20.0))


def test_epochs_without_a_metric_are_left_out(read: Read) -> None:
    chart = line(validation_figure(read(entry(1), entry(2, validation={"P@1": 0.5}), entry(3))))
    assert [len(series.points) for series in chart.series] == [3, 2, 2, 2]


def test_deciles_are_those_of_the_best_epoch(read: Read) -> None:
    figure = decile_figure(read(entry(1), entry(2), entry(3, best=False)))
    assert "after epoch 2" in figure.caption
    shares, ratios = figure.charts
    assert isinstance(shares, BarChart)
    assert isinstance(ratios, BarChart)
    assert shares.categories == tuple(map(str, range(1, 11)))
    assert [series.name for series in shares.series] == ["P@1", "P@5"]
    assert [series.name for series in ratios.series] == ["PSP@5", "coverage@5"]
    assert shares.series[0].points[3] == (3, 3.0)


def test_the_paper_protocol_is_named(read: Read) -> None:
    run = read(entry(1), settings=("training.paper_protocol=true",))
    for figure in (validation_figure(run), decile_figure(run)):
        assert "the test set, which chose the epoch" in figure.caption


def test_active_gradients_are_drawn_where_recorded(read: Read) -> None:
    chart = line(active_figure(read(entry(1, active_share=None), entry(2))))
    assert chart.series[0].points == ((2.0, 2.0),)


def test_every_redistribution_is_drawn_and_summed(read: Read) -> None:
    run = read(entry(1), entry(2), settings=("model.fan_in=10", "model.group_size=16"))
    figure = redistribution_figure(run)
    assert line(figure).series[0].points == ((5, 50), (10, 30), (17, 50), (22, 30))
    assert figure.caption == "Redistributed 4 times; 160 connections moved in all, of 20."


def test_connections_are_counted_by_group(read: Read) -> None:
    assert connections(read(entry(1), settings=("model.fan_in=10",))) == 240
    assert connections(read(entry(1), name="unknown", data={"labels": None})) is None


@pytest.mark.parametrize("output", ["dense", "bottleneck"])
def test_a_dense_output_has_no_connections(output: str, read: Read) -> None:
    run = read(entry(1, redistributions=None), settings=(f"model.output={output}",))
    assert redistribution_figure(run).charts == ()
    assert "dense" in redistribution_figure(run).caption


def test_no_redistribution_so_far_is_no_chart(read: Read) -> None:
    figure = redistribution_figure(read(entry(1, redistributions=[])))
    assert (figure.charts, figure.caption) == ((), "None has moved so far.")


def test_phases_are_stacked_in_their_order(read: Read) -> None:
    (chart,) = phase_figure(read(entry(1), entry(2))).charts
    assert isinstance(chart, BarChart)
    assert chart.stacked
    assert [series.name for series in chart.series] == [
        "data (25.0 %)",
        "forward (25.0 %)",
        "output step (50.0 %)",
        "checkpoint (0.0 %)",
    ]
    assert chart.series[2].points == ((0, 1.0), (1, 1.0))


def test_memory_is_drawn_from_zero(read: Read) -> None:
    chart = line(memory_figure(read(entry(1))))
    assert chart.from_zero
    assert chart.series[0].points == ((1.0, 300.0),)


def test_the_epoch_table_has_every_value(read: Read) -> None:
    table = epoch_table(read(entry(1), entry(2, best=False), settings=("training.metric=PSP@3",)))
    first, second = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert first == {
        "epoch": "1 *",
        "step": "12",
        "loss": "5",
        "rate factor": "1",
        "P@1 %": "10.00",
        "P@3 %": "11.00",
        "P@5 %": "12.00",
        "PSP@1 %": "13.00",
        "PSP@3 %": "14.00",
        "PSP@5 %": "15.00",
        "active %": "2.000",
        "moved": "80",
        "training s": "2.5",
        "peak MiB": "300",
    }
    assert second["epoch"] == "2"


def test_the_metric_that_chose_has_a_column(read: Read) -> None:
    metrics = {"P@1": 0.1, "nDCG@7": 0.25}
    table = epoch_table(read(entry(1, validation=metrics), settings=("training.metric=nDCG@7",)))
    assert dict(zip(table.header, table.rows[0], strict=True))["nDCG@7 %"] == "25.00"


def test_the_other_tables_have_every_value(read: Read) -> None:
    run = read(entry(1), entry(2), settings=("model.fan_in=10",))
    assert decile_table(run).rows[1] == ("2", "4", "20", "1.00", "2.00", "50.00", "90.00")
    assert phase_table(run).rows[-1] == ("all", "1.000", "1.000", "2.000", "0.000")
    assert redistribution_table(run).rows[0] == ("5", "1", "50", "20.833")
    assert [len(table.rows) for table in tables(run)] == [2, 10, 3, 4]


def test_an_old_run_says_what_was_not_recorded(read: Read) -> None:
    run = read(old_entry(1), old_entry(2))
    missing = [figure.title for figure in figures(run) if figure.caption == NOT_RECORDED]
    assert missing == [
        "Validation by label frequency",
        "Share of active gradients",
        "Connections pruned and regrown",
        "Time by phase",
    ]
    assert all(bool(figure.charts) == (figure.title not in missing) for figure in figures(run))
    (table,) = tables(run)
    assert dict(zip(table.header, table.rows[0], strict=True))["moved"] == "-"


def test_a_run_resumed_by_a_newer_version_shows_what_there_is(read: Read) -> None:
    run = read(old_entry(1), entry(2))
    (chart,) = phase_figure(run).charts
    assert chart.series[0].points == ((1, 0.5),)
    assert [row[0] for row in phase_table(run).rows] == ["2", "all"]


def test_a_run_without_validation_says_so(read: Read) -> None:
    run = read(entry(1, validation=None, validation_deciles=None))
    assert validation_figure(run).caption == decile_figure(run).caption == NO_VALIDATION
    assert line(loss_figure(run)).mark is None
