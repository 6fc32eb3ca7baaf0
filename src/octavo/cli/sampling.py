"""Sampling parameters as flags: the same names and descriptions as the fields of `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.core.sampling_params import FIELDS, SamplingParams

_FLAGS: dict[str, Any] = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "seed": int,
    "min_tokens": int,
}


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int | None) -> None:
    """Declare the flags; `max_tokens` is what counts where the flag is absent (None: the rest of the context)."""
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
    parser.set_defaults(**defaults)


def sampling_params_from(args: argparse.Namespace) -> SamplingParams:
    """The params that the flags say; greedy unless --temperature is given. Raises RequestError."""
    given = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None}
    return SamplingParams(**{"max_tokens": args.max_tokens, **given}, stop=args.stop, ignore_eos=args.ignore_eos)
