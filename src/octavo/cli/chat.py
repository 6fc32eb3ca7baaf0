"""`octavo chat`: a conversation in the terminal; answers appear as they are made. An empty line or Ctrl-D ends it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from octavo.cli import COMMANDS
from octavo.cli.sampling import add_sampling_arguments, sampling_params_from
from octavo.cli.settings import add_config_arguments, open_llm
from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("chat", help=COMMANDS["chat"], description=COMMANDS["chat"])
    parser.add_argument("message", nargs="?", metavar="MESSAGE", help="ask this and leave; none: a conversation")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument("--json", action="store_true", help="the answer as one JSON object a turn, for machines")
    add_sampling_arguments(parser, max_tokens=None)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Ask until nothing is asked. A turn that does not fit the context is refused; the conversation stays as it was."""
    params = sampling_params_from(args)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    with open_llm(args) as llm:
        if args.message is not None:
            _turn(llm, messages, args.message, params, as_json=args.json)
            return 0
        while text := _ask():
            try:
                _turn(llm, messages, text, params, as_json=args.json)
            except RequestError as error:
                print(f"octavo: {error}", file=sys.stderr)
    return 0


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input cannot be read: {error}", field="messages") from None


def _turn(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams, *, as_json: bool) -> None:
    asked = [*messages, {"role": "user", "content": text}]
    pieces, ids, reason = [], list[int](), None
    for output in llm.stream(asked, params):
        piece = output.outputs[0]
        pieces.append(piece.text)
        ids += piece.token_ids
        reason = piece.finish_reason
        if not as_json:
            print(piece.text, end="", flush=True)
    answer = "".join(pieces)
    print(json.dumps({"text": answer, "token_ids": ids, "finish_reason": reason}, ensure_ascii=False) if as_json else "")
    messages[:] = [*asked, {"role": "assistant", "content": answer}]
