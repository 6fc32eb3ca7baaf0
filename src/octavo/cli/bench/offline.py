"""`octavo bench offline`: throughput of `LLM.generate` with all prompts known, in the words of `vllm bench throughput`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from octavo.bench.probe import forecast, probe
from octavo.bench.work import Work
from octavo.cli.bench.json_figures import write_json
from octavo.cli.bench.workload_flags import add_workload_arguments, check_workload, work_from
from octavo.cli.settings import add_config_arguments, open_llm, say
from octavo.core.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    add_workload_arguments(parser)
    parser.add_argument("--output-json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--no-probe", action="store_true", help="start at once, without a forecast and without a warm-up")
    parser.add_argument("--disable-tqdm", action="store_true", help="draw no progress bar")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print requests and tokens a second. A prompt that cannot be served ends the run before it begins, with status 2."""
    import sys

    check_workload(args)
    with open_llm(args) as llm:
        from octavo.bench.drive import drive, seats
        from octavo.bench.identity import identify

        engine, tokenizer = llm.engine, llm.built.loaded.tokenizer
        encode = None if tokenizer is None else tokenizer.encode
        work = work_from(args, vocab_size=engine.vocab_size, encode=encode, max_model_len=engine.max_model_len, turns=False)
        if not args.no_probe:
            at_once = seats(engine, work)
            pace = probe(lambda short: drive(engine, short, concurrency=len(short.items)), work, seats=at_once)
            say(forecast(pace, work, seats=at_once, open_loop=False))
            engine.kv.reset()
        params = [SamplingParams(temperature=0, max_tokens=item.output_len, ignore_eos=True) for item in work.items]
        prompts = [{"prompt_token_ids": list(item.prompt)} for item in work.items]
        begun = engine.clock.now()
        outputs = llm.generate(prompts, params, use_tqdm=not args.disable_tqdm and sys.stderr.isatty())
        seconds = engine.clock.now() - begun
        figures = _figures(work, seconds, sum(len(output.outputs[0].token_ids) for output in outputs))
        print(
            f"Throughput: {figures['requests_per_second']:.2f} requests/s, {figures['tokens_per_second']:.2f} total tokens/s, "
            f"{figures['output_tokens_per_second']:.2f} output tokens/s\n"
            f"Total num prompt tokens:  {figures['num_prompt_tokens']}\n"
            f"Total num output tokens:  {figures['num_output_tokens']}"
        )
        if args.output_json is not None:
            write_json(args.output_json, figures, identity=asdict(identify(llm.built, work)))
    return 0


def _figures(work: Work, seconds: float, outputs: int) -> dict[str, Any]:
    inputs = sum(len(item.prompt) for item in work.items)
    return {
        "elapsed_time": seconds,
        "num_requests": len(work.items),
        "num_prompt_tokens": inputs,
        "num_output_tokens": outputs,
        "total_num_tokens": inputs + outputs,
        "requests_per_second": len(work.items) / seconds,
        "tokens_per_second": (inputs + outputs) / seconds,
        "output_tokens_per_second": outputs / seconds,
        "workload": work.made_from,
        "workload_hash": work.digest,
    }
