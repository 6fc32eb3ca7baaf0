"""`octavo bench`: each flag arrives, what is printed and kept, and what is refused before anything is loaded."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from octavo import __version__
from octavo.async_llm import AsyncLLM
from octavo.bench import drive as driving
from octavo.bench.interrupts import RunFailed, RunInterrupted
from octavo.bench.records import RequestRecord
from octavo.bench.runs import Run
from octavo.bench.self_checks import Checked, failed_checks
from octavo.bench.startup import FIRST_TOKEN, STAGES, Start
from octavo.bench.work import Work
from octavo.bench.workloads import WORKLOADS
from octavo.cli import build_parser, main
from octavo.cli.bench import measuring, offline, startup
from octavo.cli.bench.json_figures import SCHEMA_VERSION
from octavo.cli.bench.workload_flags import arrivals_from, loop_lines, work_from
from octavo.server.app import create_app
from octavo.server.served import Served
from octavo.server.settings import ServerSettings

SMALL = ["--num-prompts", "5", "--random-input-len", "12", "--random-output-len", "3"]


def parsed(*words: str) -> Any:
    return build_parser("bench").parse_args(["bench", *words])


def serve(*words: str) -> int:
    """Its status; these machines are busy, and these steps take less than a millisecond."""
    return main(["bench", "serve", "--allow-noise", *words])


def figures(table: str) -> dict[str, float]:
    """Of the lines `name: number`; what is not known is left out."""
    return {name: float(value) for name, value in re.findall(r"^([^:\n]+): +([^-\s]\S*)$", table, flags=re.MULTILINE)}


OPTIONS = [(w.name, name) for w in WORKLOADS.values() for name in w.options.model_fields if name != "path"]


@pytest.mark.parametrize(("workload", "option"), OPTIONS)
def test_each_option_of_a_workload_has_a_flag(workload: str, option: str) -> None:
    """Named after both; what is given there arrives, and with another workload it is refused."""
    field = WORKLOADS[workload].options.model_fields[option]
    flag = f"--{workload}-{option.replace('_', '-')}"
    value: Any = {bool: False, float: 0.5, int: 7}.get(type(field.default), 7)
    if (workload, option) == ("near-limit", "context"):
        value = 100
    words = [flag.replace("--", "--no-", 1)] if value is False else [flag, str(value)]
    args = parsed("serve", "--dataset-name", workload, "--num-prompts", "2", *words)
    if WORKLOADS[workload].options.model_fields.keys() & {"path"}:
        assert getattr(args, f"{workload} {option}") == value
    else:
        work = work_from(args, vocab_size=1000, encode=None, max_model_len=None)
        assert work.made_from[option] == value
    other = "random" if workload != "random" else "chat"
    assert serve("--dataset-name", other, *words) == 2


def test_the_flags_of_vllm() -> None:
    """B1's command line, and its seed."""
    words = "--model M --dataset-name random --random-input-len 1024 --random-output-len 256 --request-rate 20 --num-prompts 2000 --seed 3"
    args = parsed("serve", *words.split())
    work = work_from(args, vocab_size=1000, encode=None, max_model_len=None, arrivals=arrivals_from(args))
    assert len(work.items) == 2000 and work.seed == 3 and args.model == "M"
    assert {(len(item.prompt), item.output_len) for item in work.items} == {(1024, 256)}
    assert work.items[-1].at == pytest.approx(100, rel=0.1)
    assert loop_lines(args) == [("Request rate configured (RPS)", "20.00")]


def test_bursts() -> None:
    """`--burstiness` is the gamma distribution's; `inf` is even."""
    args = parsed("serve", "--request-rate", "2", "--burstiness", "inf", "--num-prompts", "3", "--random-input-len", "1")
    work = work_from(args, vocab_size=1000, encode=None, max_model_len=None, arrivals=arrivals_from(args))
    assert [item.at for item in work.items] == [0.0, 0.5, 1.0]


def test_an_engine_in_this_process(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table on standard output, the forecast on standard error, and the run as a folder that can be read again."""
    kept_in = ["--save-result", "--result-dir", str(tmp_path / "results"), "--result-filename", "one"]
    flags = ["--request-rate", "500", "--percentile-metrics", "queue,ttft,e2el", "--metric-percentiles", "50,99", "--by-prompt-length"]
    assert serve(*engine_words, *SMALL, *flags, *kept_in) == 0
    out, err = capsys.readouterr()
    found = figures(out)
    assert out.startswith("============ Serving Benchmark Result ============\n")
    assert (found["Successful requests"], found["Total input tokens"], found["Total generated tokens"]) == (5, 60, 15)
    assert found["Request rate configured (RPS)"] == 500 and found["P50 TTFT (ms)"] == found["Median TTFT (ms)"] > 0
    assert "Mean Queue (ms)" in found and "Mean TPOT (ms)" not in found
    assert re.search(r"^1-16 +5 +0 ", out, flags=re.MULTILINE)
    assert re.search(r"This will take about .*60 input and 15 output tokens need", err)
    assert f"saved in {tmp_path / 'results' / 'one'}" in err
    run = Run.load(tmp_path / "results" / "one")
    assert run.complete and len(run.records) == 5 and run.steps and run.identity is not None
    assert run.memory is not None and run.memory.weights > 0 and run.memory.num_slots == run.account.capacity
    assert all(record.token_ids and record.sent == record.due for record in run.records)
    kept = json.loads((tmp_path / "results" / "one" / "metrics.json").read_text())
    says_with_what(kept, engine_words)
    assert kept["server"] is None
    assert kept["completed"] == 5 and kept["request_rate"] == 500 and kept["duration"] == pytest.approx(run.duration)


def test_a_closed_loop_with_classes(engine_words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--max-concurrency`, classes one by one, and what does not fit the context is said and cut; `--no-probe` says nothing of time."""
    words = ["--dataset-name", "long-document", "--num-prompts", "6", "--long-document-every", "2", "--long-document-document-len", "300"]
    words += ["--long-document-chat-output-len", "4", "--long-document-document-output-len", "2", "--max-concurrency", "2", "--no-probe"]
    assert serve(*engine_words, *words) == 0
    out, err = capsys.readouterr()
    assert figures(out)["Maximum request concurrency"] == 2 and figures(out)["Successful requests"] == 6
    heads, *lines = [line.split() for line in out.splitlines()[-11:]]
    assert heads == ["class", "requests", "failed", "tok/s", "ms", "mean", "P50", "P95", "P99"]
    latencies = ("Queue", "TTFT", "TPOT", "ITL", "E2EL")
    assert [(line[0], line[1], line[4]) for line in lines] == [(name, "3", one) for name in ("chat", "document") for one in latencies]
    assert "max_model_len is 128: 3 of 6 requests are cut to fit" in err and "This will take" not in err


@pytest.mark.parametrize(("check", "allowed"), [("pool empty at the end", False), ("Little's law", True)])
def test_a_self_check_that_fails_is_status_1(
    check: str, allowed: bool, engine_words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever it is; what a busy machine can fail warns with `--allow-noise`. Those that passed, and why others do not apply, is said."""
    found = [Checked(check, problem="1 is not 2"), Checked("sent on time"), Checked("A", not_applicable="no B")]
    monkeypatch.setattr("octavo.bench.self_checks.run_checks", lambda run: found)
    for status, flags in ((1, []), (0 if allowed else 1, ["--allow-noise"])):
        assert main(["bench", "serve", *engine_words, *SMALL, "--no-probe", *flags]) == status
        said = capsys.readouterr().err
        assert f"self-check failed: {check}: 1 is not 2" in said
        assert "self-checks that passed: sent on time\n" in said and "self-checks that do not apply: A: no B\n" in said


def test_failures_are_counted_and_named(engine_words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Time-outs are in the table; where nothing was answered the status is 1."""
    assert serve(*engine_words, *SMALL, "--no-probe", "--timeout-s", "1e-6") == 1
    out, _ = capsys.readouterr()
    assert figures(out)["Failed requests"] == figures(out)["  timeout"] == 5 and "Mean E2EL (ms):                          nan" in out


def test_ctrl_c_prints_and_keeps_what_is_done(
    engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 130; the run says that it is not complete."""
    real = driving.drive

    def interrupted(*args: Any, **options: Any) -> list[RequestRecord]:
        raise RunInterrupted(real(*args, **options)[:2])

    monkeypatch.setattr(driving, "drive", interrupted)
    assert serve(*engine_words, *SMALL, "--no-probe", *saving(tmp_path)) == 130
    out, err = capsys.readouterr()
    assert figures(out)["Successful requests"] == 2 and "interrupted: 2 of 2 requests sent have their answer" in err
    assert not Run.load(tmp_path / "one").complete


def saving(folder: Path) -> list[str]:
    return ["--save-result", "--result-dir", str(folder), "--result-filename", "one"]


@pytest.mark.parametrize("part", ["bench.self_checks.run_checks", "cli.bench.serve.serving_table"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, BrokenPipeError])
def test_a_run_is_saved_before_it_is_looked_at(
    part: str, error: type[BaseException], engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a check that fails, nor a second Ctrl-C, nor `| head` loses it."""

    def broken(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(f"octavo.{part}", broken)
    monkeypatch.setattr("os.dup2", lambda *args: None)  # standard output is the test's
    words = [*engine_words, *SMALL, "--no-probe", *saving(tmp_path)]
    if error is RuntimeError:
        with pytest.raises(RuntimeError):
            serve(*words)
    else:
        assert serve(*words) == {KeyboardInterrupt: 130, BrokenPipeError: 141}[error]
    run = Run.load(tmp_path / "one")
    assert run.complete and len(run.records) == 5 and run.arguments and (tmp_path / "one" / "metrics.json").is_file()


def test_a_run_is_saved_without_its_figures(engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they cannot be made."""

    def broken(run: Run) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("octavo.bench.stability.stability", broken)
    with pytest.raises(ZeroDivisionError):
        serve(*engine_words, *SMALL, "--no-probe", *saving(tmp_path))
    assert len(Run.load(tmp_path / "one").records) == 5 and not (tmp_path / "one" / "metrics.json").exists()


def test_ctrl_c_waits_until_a_run_is_saved(engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And ends the command then."""
    real = Run.save

    def save(*args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(*args, **options)

    monkeypatch.setattr(Run, "save", save)
    assert serve(*engine_words, *SMALL, "--no-probe", *saving(tmp_path)) == 130
    assert Run.load(tmp_path / "one").complete


def test_a_run_that_cannot_be_saved_is_printed(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Since somebody else's folder has that name; status 2."""
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "letter.txt").write_text("dear")
    assert serve(*engine_words, *SMALL, "--no-probe", *saving(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert figures(out)["Successful requests"] == 5 and "holds something that is no run" in err


def test_ctrl_c_at_the_very_end_leaves_a_complete_run(engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left to go on with."""
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert serve(*engine_words, *SMALL, "--no-probe", *saving(tmp_path)) == 0
    run = Run.load(tmp_path / "one")
    assert run.complete and run.stopped_by == "" and len(run.records) == 5
    replace(run, complete=False, stopped_by="Ctrl-C").save(tmp_path / "one")  # as earlier versions kept it
    assert serve("--resume", str(tmp_path / "one")) == 0
    assert Run.load(tmp_path / "one") == run


def test_a_run_that_failed_is_kept_and_gone_on_with(
    engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1; what failed stays a failure, and what was never asked is asked when it is gone on with."""
    real = driving.drive

    def failing(engine: Any, work: Work, **options: Any) -> list[RequestRecord]:
        records = real(engine, replace(work, items=work.items[:2]), **options)
        records[1].finish_reason, records[1].error = "error", "the engine gave up: boom"
        raise RunFailed(records, RuntimeError("boom"))

    with monkeypatch.context() as patch:
        patch.setattr(driving, "drive", failing)
        assert serve(*engine_words, *SMALL, "--no-probe", *saving(tmp_path)) == 1
    out, err = capsys.readouterr()
    assert (figures(out)["Successful requests"], figures(out)["Failed requests"]) == (1, 1)
    assert f"the run failed: RuntimeError: boom; go on with: octavo bench serve --resume {tmp_path / 'one'}" in err
    run = Run.load(tmp_path / "one")
    assert (run.complete, run.failed, run.stopped_by) == (False, True, "the run failed: RuntimeError: boom")
    assert serve("--resume", str(tmp_path / "one"), "--no-probe") == 0
    run = Run.load(tmp_path / "one")
    assert (run.complete, run.failed, [record.succeeded for record in run.records]) == (True, False, [True, False, True, True, True])


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Ctrl-C comes when so many requests are over."""

    @contextmanager
    def stopping(total: int, *, shown: bool = True) -> Iterator[Callable[[RequestRecord], None]]:
        over: list[RequestRecord] = []

        def progress(record: RequestRecord) -> None:
            over.append(record)
            if len(over) == count:
                os.kill(os.getpid(), signal.SIGINT)

        yield progress

    monkeypatch.setattr(measuring, "bar", stopping)


TALK = ["--dataset-name", "chat", "--num-prompts", "6", "--chat-turns", "3", "--chat-pause", "0", "--chat-system-len", "4"]
TALK += ["--chat-input-len", "5", "--chat-output-len", "4", "--max-concurrency", "2", "--no-probe"]


UNEVEN = [*SMALL, "--random-output-len", "16", "--random-range-ratio", "0.9", "--request-rate", "inf", "--no-probe"]


@pytest.mark.parametrize("load", [UNEVEN, TALK], ids=["inf", "talk"])
@pytest.mark.parametrize("where", ["here", "http"])
def test_resume(
    where: str,
    load: list[str],
    served: str,
    chat_model: Path,
    engine_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What Ctrl-C left is gone on with until all of it is done, with the same tokens as in one piece; it says in how many parts, no key."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    words = engine_words if where == "here" else ["--base-url", served, "--model", str(chat_model), "--header", "X-Who=me"]
    named = ["--save-result", "--result-dir", str(tmp_path), "--result-filename"]
    assert serve(*words, *load, *named, "whole") == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert serve(*words, *load, *named, "part") == 130
        assert f"go on with: octavo bench serve --resume {tmp_path / 'part'}" in capsys.readouterr().err
        assert serve("--resume", str(tmp_path / "part"), "--no-probe") in (130, 0)
    assert serve("--resume", str(tmp_path / "part"), "--no-probe") == 0
    out, _ = capsys.readouterr()
    run, whole = Run.load(tmp_path / "part"), Run.load(tmp_path / "whole")
    count = len(whole.work.items)
    assert run.complete and figures(out)["Successful requests"] == count and figures(out)["Measured in parts"] == len(run.parts) >= 2
    assert [record.token_ids for record in run.records] == [record.token_ids for record in whole.records] and len(run.records) == count
    assert not [problem for problem in failed_checks(run) if not problem.of_time]
    assert json.loads((tmp_path / "part" / "metrics.json").read_text())["parts"] == len(run.parts)
    assert "X-Who" not in (tmp_path / "part" / "run.json").read_text()
    assert serve("--resume", str(tmp_path / "part")) == 0
    assert "came to its end: nothing is left to do" in capsys.readouterr().err


def test_what_cannot_be_resumed(
    engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other arguments, another engine, other work, a folder that is none; each says what is wrong, and the run stays as it was."""
    folder = tmp_path / "part"
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        words = [*engine_words, *SMALL, "--no-probe", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "part"]
        assert serve(*words, "--max-concurrency", "1") == 130
    header = json.loads((folder / "run.json").read_text())
    resume = ["bench", "serve", "--resume", str(folder)]
    assert main([*resume, "--seed", "4", "--num-prompts", "7"]) == 2
    assert "--resume goes on with what was begun; leave out --num-prompts, --seed" in capsys.readouterr().err
    changes: dict[str, dict[str, Any]] = {
        "config_hash: 'x' then": {"identity": header["identity"] | {"config_hash": "x"}},
        "workload_hash: 'x' then": {"identity": header["identity"] | {"workload_hash": "x"}},
        "identity: none then, known now": {"identity": None},
        "does not say with which arguments it was begun": {"arguments": {}},
    }
    for message, change in changes.items():
        (folder / "run.json").write_text(json.dumps(header | change))
        assert main(resume) == 2
        assert message in capsys.readouterr().err
    (folder / "run.json").write_text(json.dumps(header))
    assert len(Run.load(folder).records) == 1
    assert serve("--resume", str(tmp_path / "nowhere")) == 2
    assert "no saved run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def served(chat_model: Path) -> Iterator[str]:
    """The address of an Octavo server with the tiny model under the name of its folder; it wants the key `k`."""
    up, url, stop = threading.Event(), [], []

    async def serve() -> None:
        llm = AsyncLLM(chat_model, device="cpu", dtype="float32", max_model_len=128, num_kv_slots=1024)
        app = create_app(Served(llm, ServerSettings(api_key=("k",)), (str(chat_model),)))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        url.append(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}")
        stop.append(lambda: setattr(server, "should_exit", True))
        up.set()
        await serving
        await llm.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert up.wait(60)
    yield url[0]
    stop[0]()
    thread.join(60)


def test_a_servers_identity(served: str, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Octavo's own says what its engine is, so that such a run can be kept and compared; and what it counted meanwhile."""
    words = ["--base-url", served, "--api-key", "k", "--tokenizer", str(chat_model), *SMALL, "--no-probe"]
    assert serve(*words, "--save-result", "--result-dir", str(tmp_path), "--result-filename", "one") == 0
    out = capsys.readouterr().out
    found = figures(out)
    assert (found["HTTP 5xx"], found["Retries"], found["Preemptions"], found["Restarts"], found["Failed"]) == (0, 0, 0, 0, 0)
    assert re.search(r"^Highest stable concurrency: +[1-5-]$", out, flags=re.MULTILINE)  # none lasts in answers as short as these
    run = Run.load(tmp_path / "one")
    assert run.identity is not None and run.server is not None
    assert (run.identity.max_model_len, run.identity.pool_slots, run.identity.dtype) == (128, 1024, "float32")
    assert run.identity.workload_hash == run.work.digest == run.server.workload_hash
    assert run.identity.versions["octavo"] == run.server.version == __version__
    kept = json.loads((tmp_path / "one" / "metrics.json").read_text())
    assert (kept["server"]["software"], kept["identity"]["pool_slots"]) == ("octavo", 1024)
    assert (run.server.software, run.server.max_model_len, run.server.unknown) == ("octavo", 128, {})
    assert run.counted == {"restarts": 0, "preemptions": 0, "failed steps": 0, "steps out of memory": 0}
    assert main(["bench", "keep", str(tmp_path / "one"), str(tmp_path / "kept.json"), "--allow-noise"]) == 0
    assert main(["bench", "report", str(tmp_path / "one"), "--no-plots", "--allow-noise"]) == 0
    report = (tmp_path / "one" / "report.md").read_text()
    assert "| software         | octavo" in report and "## Stability" in report


@pytest.mark.parametrize("error", [KeyboardInterrupt, IndexError])
def test_a_server_is_asked_in_vain_what_it_counted(
    error: type[BaseException], served: str, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That loses these counts, and not the run."""
    asked: list[float] = []

    async def count(target: Any) -> dict[str, float]:
        asked.append(1.0)
        if len(asked) == 2:
            raise error
        return {"preemptions": 0.0}

    monkeypatch.setattr("octavo.bench.load.server_look.count", count)
    words = ["--base-url", served, "--api-key", "k", "--tokenizer", str(chat_model), *SMALL, "--no-probe"]
    assert serve(*words, *saving(tmp_path)) == 0
    run = Run.load(tmp_path / "one")
    assert run.complete and len(run.records) == 5 and set(run.counted.values()) == {None}


def test_a_chat_endpoint(served: str, chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Conversations as messages; without a tokenizer that is refused before anything is sent."""
    short = ["--chat-turns", "2", "--chat-input-len", "3", "--chat-system-len", "2"]  # text of random ids has more tokens than these
    words = ["--base-url", served, "--api-key", "k", *TALK, *short]
    assert serve(*words, "--endpoint", "chat") == 1
    assert "takes text: a tokenizer must make it (--tokenizer SOURCE)" in capsys.readouterr().err
    words += ["--tokenizer", str(chat_model), "--save-result", "--result-dir", str(tmp_path), "--result-filename", "talk"]
    for endpoint in ("chat", "/v1/chat/completions"):
        assert serve(*words, "--endpoint", endpoint) == 0
        out, err = capsys.readouterr()
        assert figures(out)["Successful requests"] == 6, err
    run = Run.load(tmp_path / "talk")
    assert run.server is not None and run.server.endpoint == "/v1/chat/completions"
    lengths = [item.output_len for item in run.work.items]
    assert [record.num_output_tokens for record in run.records] == [len(record.token_ids) for record in run.records] == lengths
    first, second = run.records[0], next(record for record in run.records if run.work.items[record.index].after == 0)
    assert second.num_prompt_tokens > first.num_prompt_tokens


@pytest.mark.parametrize("loop", [["--request-rate", "200"], ["--max-concurrency", "3"]])
def test_a_server(
    served: str, chat_model: Path, engine_words: list[str], loop: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over HTTP the same requests have the same tokens as in this process."""
    answers = []
    for name, where in (("http", ["--base-url", f"{served}/v1", "--api-key", "k", "--model", str(chat_model)]), ("here", engine_words)):
        words = [*where, *SMALL, *loop, "--save-result", "--result-dir", str(tmp_path), "--result-filename", name]
        assert serve(*words) == 0
        assert figures(capsys.readouterr().out)["Successful requests"] == 5
        answers.append([record.token_ids for record in Run.load(tmp_path / name).records])
    assert answers[0] == answers[1] and all(len(ids) == 3 for ids in answers[0])


def test_a_servers_conversations(
    served: str, chat_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turn after turn; host and port say the same as a URL, the key may come from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    port = served.rpartition(":")[2]
    words = ["--host", "127.0.0.1", "--port", port, "--tokenizer", str(chat_model), "--dataset-name", "chat", "--num-prompts", "4"]
    words += ["--chat-turns", "2", "--chat-pause", "0", "--chat-system-len", "4", "--chat-input-len", "5", "--chat-output-len", "4"]
    assert serve(*words) == 0
    out, err = capsys.readouterr()
    assert figures(out)["Successful requests"] == 4 and f"model {chat_model}" in err


def test_a_server_that_refuses(served: str, chat_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a key, and where no such path is: status 1 and the server's own words."""
    url = ["--base-url", served, "--model", str(chat_model), *SMALL]
    assert serve(*url) == 1
    assert "does not answer a short request: 401" in capsys.readouterr().err
    assert serve(*url, "--api-key", "k", "--endpoint", "/v1/nothing") == 1
    assert "/v1/nothing does not answer a short request: 404" in capsys.readouterr().err


def says_with_what(kept: dict[str, Any], engine_words: list[str]) -> None:
    """Its schema version, and with what it was measured: a program need not know the command that wrote it."""
    assert list(kept)[:2] == ["schema_version", "identity"] and kept["schema_version"] == SCHEMA_VERSION
    identity = kept["identity"]
    assert identity["versions"]["octavo"] == __version__ and identity["versions"]["torch"]
    assert (identity["model"], identity["device"], identity["dtype"]) == (engine_words[1], "cpu", "float32")
    assert identity["model_revision"] and identity["workload_hash"] == kept.get("workload_hash", identity["workload_hash"])


def test_offline(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests and tokens a second, in vLLM's words, and as JSON."""
    assert main(["bench", "offline", *engine_words, *SMALL, "--output-json", str(tmp_path / "o.json")]) == 0
    out, err = capsys.readouterr()
    assert re.match(r"Throughput: \d+\.\d\d requests/s, \d+\.\d\d total tokens/s, \d+\.\d\d output tokens/s\n", out)
    assert figures(out) == {"Total num prompt tokens": 60, "Total num output tokens": 15} and "This will take about" in err
    kept = json.loads((tmp_path / "o.json").read_text())
    says_with_what(kept, engine_words)
    assert kept["total_num_tokens"] == 75 and kept["tokens_per_second"] == pytest.approx(75 / kept["elapsed_time"])
    assert main(["bench", "offline", *engine_words, "--dataset-name", "chat", "--num-prompts", "4", "--no-probe"]) == 2
    assert "measure it with `octavo bench serve`" in capsys.readouterr().err


CLOSED = ["serve", "--allow-noise", "--max-concurrency", "1"]


@pytest.mark.parametrize(("kind", "room"), [(CLOSED[:2], 2), (CLOSED, 1), (["offline"], 2)])
def test_the_forecast_is_of_what_the_pool_holds(
    kind: list[str], room: int, engine_words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once where each request reserves half of the pool, whatever `max_num_seqs` allows; or as many as are sent at once."""
    seen: list[int] = []
    for module in (measuring, offline):
        monkeypatch.setattr(module, "forecast", lambda pace, work, *, seats, open_loop: seen.append(seats))
    assert main(["bench", *kind, *engine_words, *SMALL, "--allocator", "contiguous"]) == 0
    assert seen == [room]


def test_latency(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of so many batches, those for warming up not counted; the time to come is said after the first."""
    words = ["--input-len", "6", "--output-len", "3", "--batch-size", "2", "--num-iters", "4", "--num-iters-warmup", "1"]
    assert main(["bench", "latency", *engine_words, *words, "--seed", "1", "--output-json", str(tmp_path / "l.json")]) == 0
    out, err = capsys.readouterr()
    assert re.fullmatch(r"Avg latency: \d+\.\d{4} seconds\n(\d+% percentile latency: \d+\.\d{4} seconds\n){6}", out)
    assert "the first of 5 batches took" in err
    kept = json.loads((tmp_path / "l.json").read_text())
    says_with_what(kept, engine_words)
    assert kept["complete"] and len(kept["latencies"]) == 4 and kept["avg_latency"] == pytest.approx(sum(kept["latencies"]) / 4)
    assert main(["bench", "latency", *engine_words, "--input-len", "126", "--output-len", "8", "--num-iters", "1"]) == 1
    assert "request 0 of the batch has no answer: 126 prompt tokens + max_tokens 8" in capsys.readouterr().err


@pytest.mark.parametrize(("over", "printed"), [(1, 0), (3, 1), (4, 2)])
def test_ctrl_c_keeps_batches_that_are_over(
    over: int,
    printed: int,
    engine_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C when so many batches are over, of two for warming up and three that count: status 130, and figures of what is done."""
    real, calls = driving.drive, list[int]()

    def drive(*args: Any, **options: Any) -> list[RequestRecord]:
        calls.append(1)
        stop = (lambda record: os.kill(os.getpid(), signal.SIGINT)) if len(calls) == over + 1 else None
        return real(*args, progress=stop, **options)

    monkeypatch.setattr(driving, "drive", drive)
    words = ["--input-len", "6", "--output-len", "3", "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "2"]
    assert main(["bench", "latency", *engine_words, *words, "--output-json", str(tmp_path / "l.json")]) == 130
    out, err = capsys.readouterr()
    assert f"interrupted: {printed} of 3 batches are over" in err
    assert out.startswith("Avg latency: ") is (tmp_path / "l.json").exists() is bool(printed)
    if printed:
        kept = json.loads((tmp_path / "l.json").read_text())
        says_with_what(kept, engine_words)
        assert len(kept["latencies"]) == printed and not kept["complete"]


@pytest.mark.parametrize("over", [0, 2])
def test_ctrl_c_keeps_starts_that_are_over(
    over: int, engine_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three processes: status 130, and figures of those that made a token, with the versions and what the first said of itself."""
    started: list[Start] = []

    def start_once(words: list[str]) -> Start:
        if len(started) == over:
            raise KeyboardInterrupt
        seconds = {stage: 1.0 + len(started) for stage in (*STAGES, FIRST_TOKEN)}
        started.append(Start(seconds, said={"weights": "0.01 GiB in float32 on cpu"}))
        return started[-1]

    monkeypatch.setattr(startup, "start_once", start_once)
    assert main(["bench", "startup", *engine_words, "--num-iters", "3", "--output-json", str(tmp_path / "s.json")]) == 130
    out, err = capsys.readouterr()
    assert f"interrupted: {over} of 3 processes came to their end" in err
    assert bool(out) is (tmp_path / "s.json").exists() is bool(over)
    if over:
        assert re.search(r"^first token +1.50 +1.00 +2.00$", out, flags=re.MULTILINE)
        kept = json.loads((tmp_path / "s.json").read_text())
        assert kept["seconds"]["first token"] == [1.0, 2.0] and (kept["num_iters"], kept["complete"]) == (2, False)
        assert kept["schema_version"] == SCHEMA_VERSION and kept["identity"]["versions"]["octavo"] == __version__
        assert kept["identity"]["weights"] == "0.01 GiB in float32 on cpu" and kept["identity"]["cpu"]


@pytest.mark.slow
def test_startup(engine_words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages of a fresh process, one after the other."""
    assert main(["bench", "startup", *engine_words, "--num-iters", "1", "--output-json", str(tmp_path / "s.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    stages = ["model found", "weights loaded", "engine ready", "first token"]
    assert [line[:40].strip() for line in lines[1:]] == stages
    medians = [float(line.split()[-3]) for line in lines[1:]]
    assert medians == sorted(medians) and medians[0] > 0
    kept = json.loads((tmp_path / "s.json").read_text())
    assert list(kept["seconds"]) == stages and kept["complete"]
    assert kept["identity"]["model"].startswith(engine_words[1]) and " in float32 on cpu" in kept["identity"]["weights"]
    assert "cpu" in kept["identity"]["stack"] or "torch" in kept["identity"]["stack"]


@pytest.mark.slow
def test_a_start_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """What the process said is shown."""
    assert main(["bench", "startup", "--model", "./nowhere", "--num-iters", "1"]) == 1
    assert "made no token" in (err := capsys.readouterr().err) and "there is no file or folder nowhere" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--request-rate", "1", "--max-concurrency", "2"], "are two experiments, an open and a closed loop: give one of them"),
        (["serve", "--request-rate", "0"], "a request rate must be above 0, not 0.0"),
        (["serve", "--burstiness", "2"], "--burstiness is of arrivals at a rate: give --request-rate too"),
        (["serve", "--max-concurrency", "0"], "--max-concurrency must be at least 1, not 0"),
        (["serve", "--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["serve", "--dataset-name", "radom"], "there is no workload 'radom' (did you mean random?)"),
        (["serve", "--chat-turns", "2"], "--chat-turns is of the workload 'chat', this run's is 'random'"),
        (["serve", "--random-input-len", "0"], "random.input_len: Input should be greater than or equal to 1"),
        (["serve", "--dataset-path", "x"], "--dataset-path is of the workloads sharegpt and trace, not of 'random'"),
        (["serve", "--dataset-name", "trace"], "the workload 'trace' reads a file: name it with --dataset-path"),
        (["serve", "--dataset-name", "trace", "--dataset-path", "nowhere"], "--dataset-path nowhere: there is no such file"),
        (["serve", "--percentile-metrics", "ttft,speed"], "--percentile-metrics: there is no 'speed'; there are: queue, ttft"),
        (["serve", "--metric-percentiles", "99,101"], "'99,101' is not numbers from 0 to 100"),
        (["serve", "--metric-percentiles", "x"], "'x' is not numbers from 0 to 100"),
        (["serve", "--timeout-s", "0"], "--timeout-s must be above 0, not 0"),
        (["serve", "--base-url", "http://x", "--port", "1"], "--base-url says the address; leave --host and --port out"),
        (["serve", "--header", "A=b"], "--header is of a server: give its --base-url too"),
        (["serve", "--base-url", "http://127.0.0.1:1", "--header", "A: b"], "--header: 'A: b' is not NAME=VALUE"),
        (["serve", "--endpoint", "/x"], "--endpoint is of a server: give its --base-url too"),
        (["serve", "--base-url", "http://127.0.0.1:1", "--preset", "chat"], "--preset is of an engine in this process"),
        (["serve", "--result-dir", "x"], "--result-dir says where a result goes: give --save-result too"),
        (["serve", "--save-result", "--result-dir", "/dev/null/x"], "--result-dir /dev/null/x cannot be made: Not a directory"),
        (["latency", "--batch-size", "0"], "--batch-size must be at least 1, not 0"),
        (["startup", "--num-iters", "0"], "--num-iters must be at least 1, not 0"),
        (["offline", "--num-prompts", "-1"], "--num-prompts must be at least 1, not -1"),
    ],
)
def test_what_contradicts_itself_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, before a model is loaded."""
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_server_there(capsys: pytest.CaptureFixture[str]) -> None:
    """One line."""
    assert serve("--base-url", "http://127.0.0.1:9", *SMALL) == 1
    assert "octavo: no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    """All kinds of help, and flags that are wrong, are answered before torch or numpy is loaded."""
    code = (
        "import sys\nfrom octavo.cli import main\n"
        "for words in (['--help'], ['serve', '--help'], ['offline', '--help'], ['latency', '--help'], ['startup', '--help'],\n"
        "              ['serve', '--burstiness', '1']):\n"
        "    try: main(['bench', *words])\n"
        "    except SystemExit: pass\n"
        "try: main(['trace', 'anonymise', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(f\"{ {'torch', 'numpy', 'transformers', 'triton'} & sys.modules.keys() or 'light'}\")"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "light"
