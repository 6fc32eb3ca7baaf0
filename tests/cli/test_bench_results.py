"""`octavo bench report`, `compare` and `keep`: from a saved result to files, tables and statuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.__main__ import main
from octavo.bench.figures import Figures, read_figures
from octavo.bench.runs import Run
from octavo.bench.self_checks import TABLE, TWICE
from tests.bench.ablation.made import AGAIN, BASE, FAST, PARENTS, made, twice_as_fast
from tests.bench.measured import timed
from tests.bench.test_compare import cell, figures, with_identity


@pytest.fixture(autouse=True)
def _there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def bench(*words: str) -> int:
    return main(["bench", *words])


def test_the_report_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In its folder, or where it is told; without plots, no picture. The run can still be loaded."""
    timed("paged", "chunked").save("run")
    assert bench("report", "run") == 0
    assert "wrote run/report.html" in capsys.readouterr().err
    assert {path.name for path in Path("run").iterdir()} >= {"report.html", "report.md", "figures"} and Run.load("run").steps
    assert bench("report", "run", "--out", "elsewhere", "--no-plots") == 0
    assert {path.name for path in Path("elsewhere").iterdir()} == {"report.html", "report.md"}


def test_the_report_of_an_ablation() -> None:
    """Its scenarios."""
    result = twice_as_fast()
    for key, run in list(result.runs.items()):
        result.add("ablation", key, run)
    result.save("ablation")
    assert bench("report", "ablation", "--no-plots") == 1  # the made runs' pool is not empty at the end
    assert "## s: 2 x random" in Path("ablation/report.md").read_text()


def test_a_report_of_a_contradiction_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """It is written, says so, and the status is 1."""
    run = timed("paged", "chunked")
    Run(work=run.work, records=[replace(one, ended=one.ended + 5) for one in run.records], steps=run.steps).save("run")
    for flags in ([], ["--allow-noise"]):
        assert bench("report", "run", "--no-plots", *flags) == 1
        assert "self-check failed: TTFT + gaps = end to end: the report says where" in capsys.readouterr().err
    assert "contradict each other" in Path("run/report.md").read_text()


def test_a_report_of_a_table_that_contradicts_itself_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """More requests are in the system than were sent at once: no other check sees that, and the status is 1."""
    run = timed("paged", "chunked")
    run.settings = {"max_concurrency": 1}
    run.save("run")
    for flags in ([], ["--allow-noise"]):
        assert bench("report", "run", "--no-plots", *flags) == 1
        assert f"self-check failed: {TABLE}: the report says where" in capsys.readouterr().err
    text = Path("run/report.md").read_text()
    assert text.index("contradict each other") < text.index(f"{TABLE}: 12 requests of") < text.index("## Speed")
    assert "but at most 1 were sent at once" in text and text.count("FAILED") == 1


def test_a_report_of_a_busy_machine_fails_unless_that_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose steps' parts leave a part out, and an ablation whose baseline differs from itself."""
    run = timed("paged", "chunked")
    run.steps = [replace(line, seconds={"forward": 0.0}) for line in run.steps]
    run.save("run")
    result = made({"base": BASE, f"base{AGAIN}": FAST}, parents=PARENTS)
    for key, one in list(result.runs.items()):
        one.steps.clear()
        result.add("ablation", key, one)
    result.save("ablation")
    for folder, check in (("run", "step parts cover the steps"), ("ablation", TWICE)):
        for status, flags in ((1, []), (0, ["--allow-noise"])):
            assert bench("report", folder, "--no-plots", *flags) == status
            assert f"self-check failed: {check}: the report says where" in capsys.readouterr().err


def test_a_report_needs_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no folder, and a folder that is none."""
    assert bench("report", "nowhere") == 2 and "nowhere is no folder" in capsys.readouterr().err
    Path("empty").mkdir()
    assert bench("report", "empty") == 2 and "no saved run" in capsys.readouterr().err


def test_plots_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What to install, or leave out; and tables need none."""
    timed("paged", "chunked").save("run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("report", "run") == 2 and "pip install octavo[bench]" in capsys.readouterr().err
    assert bench("report", "run", "--no-plots") == 0


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (0.7, 0), (1.3, 1)])
def test_comparing(factor: float, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """For CI: 0 is no regression, 1 is one."""
    figures().save("old.json")
    figures(factor).save("new.json")
    assert bench("compare", "old.json", "new.json") == status
    said = capsys.readouterr().out
    assert f"{4 * status} of 4 slower, 0 too noisy to say." in said and "| s/base | output tok/s |" in said


def test_what_cannot_be_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """2: another device, or noise alone; and a tolerance that is none."""
    figures().save("old.json")
    Figures(cells={"s/base": cell(identity=replace(cell().identity, device="H200"))}).save("other.json")
    figures(values=(1.0,)).save("once.json")
    assert bench("compare", "old.json", "other.json") == 2 and "device is 'H200', was 'cpu'" in capsys.readouterr().err
    assert bench("compare", "old.json", "once.json") == 2 and "4 too noisy to say" in capsys.readouterr().out
    assert bench("compare", "old.json", "old.json", "--tolerance", "-1") == 2
    figures(1.04).save("bit.json")
    assert bench("compare", "old.json", "bit.json") == 0 and bench("compare", "old.json", "bit.json", "--tolerance", "1") == 1


def test_comparing_what_fails_a_self_check(capsys: pytest.CaptureFixture[str]) -> None:
    """1, with its name. Figures that contradict each other have no table; those of a busy machine have one, and may be allowed."""
    figures().save("good.json")
    replace(figures(), problems=["s/base/0: pool empty at the end: no"]).save("wrong.json")
    replace(figures(), doubts=[f"s/base/{n}: Little's law: no" for n in range(5)]).save("busy.json")
    for status, flags in ((1, []), (1, ["--allow-noise"])):
        assert bench("compare", "good.json", "wrong.json", *flags) == status
        said = capsys.readouterr()
        assert "failed in the new result, so that it says nothing: s/base/0: pool empty" in said.err and "slower" not in said.out
    for old, new in (("busy.json", "good.json"), ("good.json", "busy.json")):
        for status, flags in ((1, []), (0, ["--allow-noise"])):
            assert bench("compare", old, new, *flags) == status
            said = capsys.readouterr()
            which = "old" if old == "busy.json" else "new"
            assert f"self-check failed in the {which} result: s/base/0: Little's law: no" in said.err
            assert f"and 2 more in the {which} result" in said.err and "0 of 4 slower" in said.out


def test_keeping_what_fails_a_self_check(capsys: pytest.CaptureFixture[str]) -> None:
    """It is kept with that, and the status says so; what a busy machine can fail may be allowed."""
    run = with_identity(timed("paged", "chunked"), 0)
    run.steps = [replace(line, seconds={"forward": 0.0}) for line in run.steps]
    run.save("runs/0")
    for status, flags in ((1, []), (0, ["--allow-noise"])):
        assert bench("keep", "runs", "kept.json", "--force", *flags) == status
        assert "self-check failed: seed 0: step parts cover the steps: " in capsys.readouterr().err
    assert read_figures("kept.json").doubts and not read_figures("kept.json").problems


def test_keeping(capsys: pytest.CaptureFixture[str]) -> None:
    """A small file that compares like the result itself, and that is not written over."""
    with_identity(timed("paged", "chunked"), 0).save("runs/0")
    assert bench("keep", "runs", "kept.json") == 0 and "1 cells with up to 1 repeats" in capsys.readouterr().err
    assert bench("keep", "runs", "kept.json") == 2 and bench("keep", "runs", "kept.json", "--force") == 0
    assert bench("compare", "kept.json", "runs") == 2  # one repeat
    assert "1.00x" in capsys.readouterr().out


def test_help_imports_neither_torch_nor_matplotlib() -> None:
    """Declaring arguments is quick."""
    code = (
        "import sys; from octavo.cli import build_parser; build_parser('bench'); sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
