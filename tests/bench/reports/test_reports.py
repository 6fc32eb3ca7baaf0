"""Reports of made results and of a real run: what they say, in which order, and what their plots hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest

from octavo.bench.ablation.result import AblationResult
from octavo.bench.ablation.table import markdown
from octavo.bench.reports.ablation_report import ablation_report
from octavo.bench.reports.report import Report
from octavo.bench.reports.run_report import run_report
from octavo.bench.runs import Run
from octavo.core.errors import ResultError
from tests.bench.ablation.made import AGAIN, OTHER, made_run, record, twice_as_fast
from tests.bench.measured import timed

FIGURES = ("ratios", "latencies", "kv-shares", "kv-over-time", "queue-and-batch", "step-parts")


@pytest.fixture(scope="module")
def a_run() -> Run:
    return timed("paged", "chunked")


class Drawn:
    """What was drawn, by kind of drawing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        for name in ("barh", "step", "plot", "axvspan", "stackplot", "set_title"):
            monkeypatch.setattr(matplotlib.axes.Axes, name, self._kept(name, getattr(matplotlib.axes.Axes, name)))

    def _kept(self, name: str, draw: Any) -> Any:
        def kept(axes: Any, *args: Any, **options: Any) -> Any:
            self.calls.setdefault(name, []).append((args, options))
            return draw(axes, *args, **options)

        return kept


def test_a_run(a_run: Run) -> None:
    """Speed, pool, load and with what; a run that holds has no warning."""
    report = run_report(a_run)
    assert "self-check" not in report.markdown and "FAILED" not in report.markdown
    headings = re.findall("^## (.*)$", report.markdown, flags=re.MULTILINE)
    assert headings == ["Speed", "Stability", "KV pool", "Load", "Self-checks", "Measured with"]
    assert "* passed: shares sum to 100, pool empty at the end, " in report.markdown and "not applicable" not in report.markdown
    assert f"| {a_run.account.shares.token_states:.1f} %" in report.markdown
    heads, pool = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report.markdown.partition("## KV pool")[2].splitlines()
        if line.startswith("| ")
    ][:2]
    found = dict(zip(heads, pool, strict=True))
    assert found["recomputed"] == f"{a_run.account.num_recomputed}" != "0" and found["copies"] == found["evictions"] == "0"
    assert found["prefix hits spare"] == "0 ms"
    named = re.findall(r"\]\((.*)\)$", report.markdown, flags=re.MULTILINE)
    assert sorted(named) == sorted(report.figures) and len(named) == len(FIGURES) - 1


def test_what_is_drawn_of_a_run(a_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Areas sum to 100 in every step, bars are the account's shares, curves end at 100 %, and the load is that of the steps."""
    drawn = Drawn(monkeypatch)
    run_report(a_run)
    [((edges, areas), _)] = drawn.calls["stackplot"]
    assert sum(areas) == pytest.approx([100] * len(edges))
    bars = {options["label"]: args[1][0] for args, options in drawn.calls["barh"][:6]}
    assert bars["token states"] == pytest.approx(a_run.account.shares.token_states) and sum(bars.values()) == pytest.approx(100)
    lines = {options["label"]: args for args, options in drawn.calls["step"]}
    assert list(lines["rows in the batch"][1][:-1]) == [line.num_rows for line in a_run.steps]
    assert list(lines["requests waiting"][1][:-1]) == [line.num_waiting for line in a_run.steps]
    curves = [args for args, options in drawn.calls["step"] if options["label"] == "run"]
    assert len(curves) == 3 and all(heights[0] == 0 and heights[-1] == pytest.approx(100) for _, heights in curves)
    assert max(curves[0][0]) == pytest.approx(max(one.ttft for one in a_run.records if one.ttft is not None))


def test_failed_requests_are_listed_and_lower_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four has no answer: 75 % is where its line ends."""
    drawn = Drawn(monkeypatch)
    records = [*(record(index, 1.0, 2.0, 4.0) for index in range(3)), record(3, error="out of memory")]
    report = run_report(made_run(4.0, records=records))
    assert "1 of 4 requests have no whole answer" in report.markdown and "out of memory" in report.markdown
    (row,) = [line for line in report.markdown.splitlines() if line.startswith("| end to end")]
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["end to end", "4.00 s", "4.00 s", "never", "never *", "4"]
    assert "A p99 with a * is of fewer than 100 values" in report.markdown
    curves = [args for args, options in drawn.calls["step"] if options["label"] == "run"]
    assert curves[0][1][-1] == curves[2][1][-1] == pytest.approx(75)


def test_groups_of_a_run() -> None:
    """By class and by length of the prompt, as all latencies as of the whole run."""
    records = [record(0, 1.0, 2.0, 4.0, class_name="chat"), record(1, 3.0, 4.0, 5.0, class_name="batch", num_prompt_tokens=5)]
    text = run_report(made_run(5.0, records=records), plots=False).markdown
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    whole = [row[0] for row in rows if row[1:] and row[0] in ("queue", "TTFT", "TPOT", "ITL", "token gap", "end to end")]
    assert len(whole) == 6
    for group in ("chat", "batch", "65-128", "1-16"):
        found = {row[1]: row[2:] for row in rows if row[0] == group and len(row) == 7}
        assert list(found) == whole
        first, last = ("3.00 s", "5.00 s") if group in ("batch", "1-16") else ("1.00 s", "4.00 s")
        assert found["TTFT"] == [first, first, first, f"{first} *", "1"] and found["end to end"] == [last, last, last, f"{last} *", "1"]


def test_a_run_that_contradicts_itself_says_so_first(a_run: Run) -> None:
    """Before any figure; a failure that a busy machine can cause is another sentence."""
    late = [replace(one, ended=one.ended + 5) for one in a_run.records]
    text = run_report(Run(work=a_run.work, records=late, steps=a_run.steps), plots=False).markdown
    assert text.index("contradict each other") < text.index("TTFT + gaps = end to end: request 0") < text.index("## Speed")
    slow = [replace(line, seconds={"forward": 0.0}) for line in a_run.steps]
    text = run_report(Run(work=a_run.work, records=a_run.records, steps=slow), plots=False).markdown
    assert "contradict" not in text and text.index("Times do not add up") < text.index("## Speed")


def test_a_run_over_http_has_no_steps(a_run: Run) -> None:
    """And says why there is no pool to see."""
    text = run_report(Run(work=a_run.work, records=a_run.records), plots=False).markdown
    assert "No steps: the engine was behind HTTP" in text and "KV pool" not in text
    assert "* not applicable: shares sum to 100, pool empty at the end, " in text


def test_an_ablation() -> None:
    """The tables of `octavo ablate`, word for word, and six plots of each scenario."""
    result = twice_as_fast()
    report = ablation_report(result)
    assert sorted(report.figures) == sorted(f"figures/s-{name}.svg" for name in FIGURES)
    lines = report.markdown.splitlines()
    assert [line for line in markdown(result).splitlines() if line not in lines] == []


def test_the_plot_of_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points at the ratios, full where there is a verdict; lines along the intervals; the noise floor is the band behind them."""
    drawn = Drawn(monkeypatch)
    result = twice_as_fast()
    ablation_report(result)
    fast, again = result.comparisons("s")
    assert fast.interval is not None and again.interval is not None and fast.floor == again.interval
    points = [(args[0][0], options["markerfacecolor"] != "white") for args, options in drawn.calls["plot"] if "markerfacecolor" in options]
    assert points == [(fast.interval.ratio, True), (again.interval.ratio, False)]
    intervals = [args[0] for args, options in drawn.calls["plot"] if "solid_capstyle" in options]
    assert [fast.interval.low, fast.interval.high] in intervals
    [((low, high), _)] = drawn.calls["axvspan"]
    noise = max(abs(edge - 1) for edge in (again.interval.low, again.interval.high))
    assert low * high == pytest.approx(1) and high == pytest.approx(1 + noise, abs=0.001)


def test_a_cell_with_other_tokens_has_no_speed_in_the_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ratio and no curve; its pool is shown."""
    drawn = Drawn(monkeypatch)
    ablation_report(twice_as_fast(outputs={"fast": OTHER}))
    assert {options["label"] for _, options in drawn.calls["step"]} == {
        "base", f"base{AGAIN}", "rows in the batch", "requests waiting",
    }  # fmt: skip
    assert "fast" in [args[0] for args, _ in drawn.calls["set_title"]]


def test_runs_that_broke_lower_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three repeats: its requests never came, as two thirds of the cell's line say."""
    drawn = Drawn(monkeypatch)
    result = twice_as_fast(repeats=3)
    del result.runs["s", "fast", 1]
    result.broken["s/fast/1"] = "RuntimeError: no"
    ablation_report(result)
    curves = {options["label"]: args for args, options in drawn.calls["step"]}
    assert curves["fast"][1][-1] == pytest.approx(200 / 3) and curves["base"][1][-1] == pytest.approx(100)


def test_an_ablation_says_first_what_failed() -> None:
    """Its baseline differs from itself by a tenth; it is not finished."""
    result = twice_as_fast()
    for repeat in range(3):
        result.runs["s", f"base{AGAIN}", repeat] = made_run(4.4)
    result.finished = False
    text = ablation_report(result, plots=False).markdown
    assert text.index("the same stack measured twice differs by") < text.index("## s:")
    assert text.index("**Not finished**") < text.index("## s:")


def test_an_ablation_without_a_run() -> None:
    """Interrupted at once: no figure, no error."""
    result = AblationResult(spec=twice_as_fast().spec, cells=twice_as_fast().cells)
    assert not ablation_report(result).figures


def test_writing(tmp_path: Path, a_run: Run) -> None:
    """One file that holds all, Markdown beside it, and each figure as a file; two of one name do not meet."""
    report = run_report(a_run)
    paths = report.write(tmp_path / "out")
    assert [path.name for path in paths] == ["report.html", "report.md"]
    page = paths[0].read_text()
    assert page.count("data:image/svg+xml;base64,") == len(report.figures) == len(list((tmp_path / "out/figures").iterdir()))
    assert paths[1].read_text() == report.markdown
    one = Report()
    assert one.figure("a b", "<svg/>", "x") != one.figure("a-b", "<svg/>", "x") and len(one.figures) == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultError, match="the report cannot be written to"):
        report.write(tmp_path / "file")


def test_a_report_takes_the_place_of_an_older_one(tmp_path: Path, a_run: Run) -> None:
    """Its figures go where the new one has none of that name; what somebody else put beside them stays."""
    report = run_report(a_run)
    report.write(tmp_path)
    (tmp_path / "figures" / "mine.svg").write_text("<svg/>")
    one = Report(lines=["# One"])
    one.lines += one.figure("latencies", "<svg/>", "x")
    one.write(tmp_path)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["latencies.svg", "mine.svg"]
    (tmp_path / "figures" / "mine.svg").unlink()
    run_report(a_run, plots=False).write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md"]


def test_a_run_that_failed_says_why_it_is_not_complete(a_run: Run) -> None:
    """Before any figure."""
    text = run_report(replace(a_run, complete=False, failed=True, stopped_by="the run failed: RuntimeError: no"), plots=False).markdown
    assert text.index("**Not complete**: the run failed: RuntimeError: no") < text.index("## Speed")
