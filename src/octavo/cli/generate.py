"""`octavo generate`: continue prompts, given as arguments, in a file, or on standard input."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli import COMMANDS
from octavo.cli.sampling import add_beam_arguments, add_sampling_arguments, beam_search_params_from, sampling_params_from
from octavo.cli.settings import add_config_arguments, open_llm, say
from octavo.core.errors import RequestError
from octavo.core.outputs import RequestOutput

if TYPE_CHECKING:
    from octavo.bench.run_totals import RunTotals
    from octavo.llm import LLM


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("generate", help=COMMANDS["generate"], description=COMMANDS["generate"])
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to continue; none: standard input is one prompt, less one newline at its end"
    )
    parser.add_argument("--file", metavar="FILE", help="one prompt a line")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, for machines")
    add_sampling_arguments(parser, max_tokens=64)
    parser.add_argument("--n", type=int, metavar="INT", help="outputs for each prompt, one after another; above 1 it needs a --temperature")
    add_beam_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print each prompt's continuation."""
    prompts, beams = _prompts(args), beam_search_params_from(args)
    params = sampling_params_from(args)
    with_bar = len(prompts) > 1 and sys.stderr.isatty()
    with open_llm(args) as llm:
        totals = _count_drafts(llm)
        outputs = llm.generate(prompts, params, use_tqdm=with_bar) if beams is None else llm.beam_search(prompts, beams, use_tqdm=with_bar)
        for output in outputs:
            if args.json:
                print(json.dumps(as_json(output), ensure_ascii=False))
            else:
                print("\n".join(f"{output.prompt}{one.text}" for one in output.outputs[: args.n]))  # of beams, the best
        if totals is not None:
            say(f"speculation: {totals.accepted} of {totals.drafted} drafts accepted ({totals.acceptance:.0%}) in {totals.steps} steps")
    return 0


def _count_drafts(llm: LLM) -> RunTotals | None:
    """What the run adds up to, where next tokens are guessed."""
    if llm.engine.scheduler.proposer is None:
        return None
    from octavo.bench.run_totals import RunTotals

    totals = RunTotals()
    llm.engine.observers.add(totals)
    return totals


def as_json(output: RequestOutput) -> dict[str, Any]:
    """An answer as plain data."""
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [
            {"index": o.index, "text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason, "stop_reason": o.stop_reason}
            | ({} if o.score is None else {"score": o.score, "cumulative_logprob": o.cumulative_logprob})
            for o in output.outputs
        ],
        "num_cached_tokens": output.num_cached_tokens,
        "num_preemptions": output.num_preemptions,
    }


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompts)
    if args.file is not None:
        try:
            prompts += [line for line in Path(args.file).read_text(encoding="utf-8").split("\n") if line]
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"--file {args.file} cannot be read: {error}", field="prompt") from None
    elif not prompts:
        prompts = [_standard_input()]
    if not prompts or not all(prompts):
        raise RequestError("the prompt is empty: give text as an argument, with --file, or on standard input", field="prompt")
    return prompts


def _standard_input() -> str:
    if sys.stdin.isatty():
        say("The prompt, and Ctrl-D at its end:")
    try:
        return sys.stdin.read().removesuffix("\n")  # `echo` adds one
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input cannot be read: {error}", field="prompt") from None
