"""`octavo demo`: the answer, a row or a reason for every installed stack, and a status that a script can trust."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench import stack_table
from octavo.bench.run_totals import RunTotals
from octavo.bench.stack_table import Reference, Row
from octavo.cli import demo, main
from octavo.core.compat import StackReport
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.stack import Choice, Stack
from octavo.core.testing.fake_plugins import write_package
from octavo.llm import LLM
from tests.models import tiny

PROMPTS, NEW_TOKENS = demo.PROMPTS, demo.NEW_TOKENS  # the real ones; `short` replaces them

KERNELS = """
from octavo.core.hookspecs import hookimpl
from octavo.core.testing.fake_plugins import fake_kernel

@hookimpl
def octavo_kernels():
    return [fake_kernel("of_the_future", needs=lambda options, facts: {"device:cuda"}), *BROKEN]
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of four tokens, and the built-ins alone unless a test says otherwise."""
    monkeypatch.setattr(demo, "PROMPTS", ("Hello", "안녕하세요"))
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    monkeypatch.setenv("OCTAVO_NO_PLUGINS", "1")


@pytest.fixture
def words(chat_model: Path) -> list[str]:
    return ["demo", "--model", str(chat_model), "--set", "engine.device=cpu"]


def rows_of(printed: str) -> dict[str, list[str]]:
    """The table's cells by stack."""
    lines = [line for line in printed.splitlines() if line.endswith("/2")]
    return {" ".join(line.split()[:9]): line.split()[9:] for line in lines}


def test_the_answer_then_every_stack(words: list[str], chat_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The question with the model's answer, all stacks with figures and the same tokens, how to go on; status 0. Bars are our own."""
    assert main(words) == 0
    printed, said = capfd.readouterr()
    with LLM(chat_model, device="cpu", dtype="float32", max_model_len=256, num_kv_slots=512) as llm:
        stacks = [str(report.stack) for report in stack_table.installed_stacks(Registry.discover(), llm.built.loaded)]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    assert printed.startswith(f"\n> What is the capital of France?\n{output.outputs[0].text}\n\n")
    assert "2 prompts, 4 tokens out for each (EOS ignored), in float32 on cpu; " in printed
    assert "every stack has a KV pool of 512 slots and max_model_len 256.\nOne run, no benchmark" in printed
    rows = rows_of(printed)
    runnable = [name for name in stacks if f"\n  {name}\n" not in printed]
    assert list(rows) == runnable and len(runnable) >= 8
    for cells in rows.values():
        rate, steps, batch, _, peak, preempted, same = cells
        assert float(rate) > 0 and int(steps) >= 4 and float(batch) > 0 and int(peak) > 0 and (preempted, same) == ("0", "2/2")
    assert f"{len(runnable)} of {len(stacks)} stacks run; {len(runnable)} of them give the same tokens." in printed
    assert printed.endswith(f"{demo.GO_ON}\n") and "octavo chat" in demo.GO_ON and "octavo generate" in demo.GO_ON
    assert "transformers' generate: 100%" in said and "stacks: 100%" in said
    assert "Loading weights" not in said and said.count("model ") == 2  # where it is from, and that transformers loads it too


def paragraph(printed: str, start: str) -> str:
    """What begins like this, up to an empty line; "" where nothing does."""
    _, found, rest = printed.partition(f"\n\n{start}")
    return f"{start}{rest.partition(chr(10) * 2)[0]}\n" if found else ""


@pytest.mark.parametrize(("broken", "status"), [("", 0), ('fake_kernel("of_glass")', 1)])
def test_stacks_that_do_not_run(
    words: list[str], broken: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel for another device is listed with its reason and the fix; one that breaks is a failure, and the demo's status says so."""
    write_package(tmp_path, "octavo-odd", octavo_odd=KERNELS.replace("*BROKEN", broken))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "octavo_odd", raising=False)
    monkeypatch.setenv("OCTAVO_NO_PLUGINS", "0")
    assert main(words) == status
    printed = capsys.readouterr().out
    refused = paragraph(printed, "Does not run: kernel 'of_the_future' needs device:cuda, but device is cpu; would run with kernel = ")
    assert 'kernel = "naive"' in refused and "\n  static + paged + of_the_future + torch + llama\n" in refused
    failed = paragraph(
        printed, "FAILED: PluginContractError: kernel 'of_glass' could not be built: NotImplementedError: a fake plugin builds nothing\n"
    )
    assert ("  static + paged + of_glass + torch + llama\n" in failed) == bool(status)
    assert all(cells[-1] == "2/2" for cells in rows_of(printed).values())


def test_wrong_tokens_are_status_1(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where transformers says otherwise, and not by a tie."""
    right = stack_table.reference_tokens

    def wrong(*args: Any) -> Iterator[Reference]:
        for index, one in enumerate(right(*args)):
            yield Reference([(token + index) % 384 for token in one.token_ids], one.gaps)

    monkeypatch.setattr(stack_table, "reference_tokens", wrong)
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert {cells[-1] for cells in rows_of(printed).values()} == {"1/2"}
    assert "stacks run; 0 of them give the same tokens." in printed


def test_settings_are_shown_as_they_are(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`--set` wins over the demo's own, and the text above the table says so."""
    assert main([*words, "--set", "engine.max_model_len=128", "--set", "engine.num_kv_slots=160", "--scheduler", "static"]) == 0
    printed = capsys.readouterr()
    assert "a KV pool of 160 slots and max_model_len 128." in printed.out
    assert "stack: static + " in printed.err


def test_a_model_without_template_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """The question needs one."""
    assert main(["demo", "--model", str(tiny("llama_gqa")), "--set", "engine.device=cpu"]) == 2
    assert "octavo: this model has no chat template" in capsys.readouterr().err


def test_the_prompts() -> None:
    """Four, one of them Korean, each continued by 16 tokens, and all fit with their answers."""
    assert NEW_TOKENS == 16 and len(PROMPTS) == len(set(PROMPTS)) == 4
    assert any("가" <= letter <= "힣" for prompt in PROMPTS for letter in prompt)
    assert all(len(prompt.encode()) + NEW_TOKENS < demo.MAX_MODEL_LEN <= demo.POOL_SLOTS for prompt in PROMPTS)


def test_the_table() -> None:
    """Columns line up; ties are shown; stacks without figures stand below."""
    registry = Registry.discover()
    parts = {
        kind: Choice.default(registry.get(kind, name))
        for kind, name in (("model", "llama"), ("scheduler", "static"), ("allocator", "paged"), ("kernel", "sdpa"), ("ops", "torch"))
    }
    report = StackReport(Stack(**parts), (), ())
    refused = StackReport(Stack(**parts), ("it is Sunday",), (parts["kernel"], parts["ops"]))
    totals = RunTotals(steps=10, rows=25, idle_rows=3, preemptions=4, peak_slots=128)
    assert demo.table(
        [
            Row(stack=report, tokens_per_second=12.345, totals=totals, same=8, ties=1, of=8),
            Row(stack=refused, problem="it is Sunday"),
            Row(stack=refused, problem="it is Sunday"),
            Row(stack=report, problem="it broke", failed=True),
        ]
    ).splitlines() == [
        "stack                                  tok/s  steps  mean batch  idle rows  peak slots  preempted          same",
        "-------------------------------------  -----  -----  ----------  ---------  ----------  ---------  ------------",
        "static + paged + sdpa + torch + llama   12.3     10        2.50          3         128          4  8/8 (1 tied)",
        "",
        'Does not run: it is Sunday; would run with kernel = "sdpa", or ops = "torch"',
        "  static + paged + sdpa + torch + llama",
        "  static + paged + sdpa + torch + llama",
        "",
        "FAILED: it broke",
        "  static + paged + sdpa + torch + llama",
    ]
