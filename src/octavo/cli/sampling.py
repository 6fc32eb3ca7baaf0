"""Sampling parameters and those of beam search as flags: the same names and descriptions as the fields of the params."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.core import beam_search_params
from octavo.core.beam_search_params import BeamSearchParams
from octavo.core.errors import RequestError
from octavo.core.sampling_params import FIELDS, SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams

_FLAGS: dict[str, Any] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "min_tokens": int,
    "timeout_s": float,
}


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Declare the flags; `max_tokens` is what counts where the flag is absent (None: the rest of the context). One output each."""
    group = parser.add_argument_group(
        "sampling", "Greedy unless --temperature says otherwise; the model's own defaults (generation_config.json) are for Python calls."
    )
    defaults = {"max_tokens": max_tokens, "temperature": 0.0}
    for name, kind in _FLAGS.items():
        default = f" (default: {defaults[name]:g})" if defaults.get(name) is not None else ""
        text = f"{FIELDS[name].description}{default}".replace("%", "%%")
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help=FIELDS["stop"].description)
    group.add_argument("--ignore-eos", action="store_true", help=FIELDS["ignore_eos"].description)
    structure = parser.add_argument_group("structured output")
    either = structure.add_mutually_exclusive_group()
    either.add_argument("--json-schema", metavar="FILE|TEXT", help="the answer is JSON, valid by this schema: a file, or the schema itself")
    either.add_argument("--regex", metavar="TEXT", help="the whole answer matches this regular expression")
    parser.set_defaults(**defaults, n=1)


def sampling_params_from(args: argparse.Namespace) -> SamplingParams:
    """The params that the flags say; greedy unless --temperature is given. Raises RequestError."""
    given = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    return SamplingParams(
        **{"n": args.n, "max_tokens": args.max_tokens, **given},
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        structured_outputs=_structured_outputs(args.json_schema, args.regex),
    )


def add_beam_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of a search; without --beam-width there is none."""
    fields = beam_search_params.FIELDS
    group = parser.add_argument_group("beam search")
    group.add_argument("--beam-width", type=int, metavar="K", help=f"{fields['beam_width'].description} Absent: sample instead.")
    group.add_argument("--length-penalty", type=float, metavar="FLOAT", help=fields["length_penalty"].description)


def beam_search_params_from(args: argparse.Namespace) -> BeamSearchParams | None:
    """The search that the flags ask for, if any. Raises RequestError, also for a flag that a search and sampling do not share."""
    penalty = {} if args.length_penalty is None else {"length_penalty": args.length_penalty}
    if args.beam_width is None:
        if penalty:
            raise RequestError("--length-penalty is of beam search: give --beam-width too", field="length_penalty")
        return None
    drawing = [name for name in _FLAGS if name not in ("max_tokens", "timeout_s")]
    foreign = [name for name in drawing if getattr(args, name) not in (None, 0.0)] + ["stop"] * bool(args.stop)
    foreign += [name for name in ("json_schema", "regex") if getattr(args, name) is not None]
    foreign += ["n"] * (args.n > 1)
    if foreign:
        raise RequestError(f"beam search draws nothing: --{foreign[0].replace('_', '-')} does not go with --beam-width", field=foreign[0])
    return BeamSearchParams(
        beam_width=args.beam_width, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos, timeout_s=args.timeout_s, **penalty
    )


def _structured_outputs(schema: str | None, regex: str | None) -> StructuredOutputsParams | None:
    if regex is not None:
        return StructuredOutputsParams(regex=regex)
    if schema is None:
        return None
    if not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            message = f"--json-schema {schema!r:.80} is neither a schema, which begins with {{, nor a file that can be read: {error}"
            raise RequestError(message, field="structured_outputs") from None
    return StructuredOutputsParams(json=schema)
