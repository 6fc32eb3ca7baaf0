"""`octavo serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import argparse
import logging
from typing import Any, cast

from octavo.cli import COMMANDS
from octavo.cli.settings import add_config_arguments, config_arguments, say
from octavo.core.registry import Registry
from octavo.core.settings.config import load_config
from octavo.core.settings.layers import merge
from octavo.server.settings import ServerSettings

SERVER_FLAGS: dict[str, Any] = {
    "host": str,
    "port": int,
    "timeout_s": float,
    "max_timeout_s": float,
    "drain_timeout_s": float,
    "step_timeout_s": float,
    "client_timeout_s": float,
    "max_body_bytes": int,
    "on_death": str,
    "metrics_prefix": str,
    "log_format": str,
    "log_file": str,
    "flight_steps": int,
    "flight_dir": str,
}
MANY = {"api_key": "KEY", "served_model_name": "NAME"}
ENGINE_FLAGS: dict[str, Any] = {
    "dtype": str,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "gpu_memory_utilization": float,
    "block_size": int,
    "swap_space": float,
    "kv_cache_memory": str,
    "num_kv_slots": int,
    "seed": int,
    "device": str,
    "revision": str,
}
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "trust_remote_code")


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser = subparsers.add_parser("serve", help=COMMANDS["serve"], description=COMMANDS["serve"])
    parser.add_argument("source", nargs="?", metavar="MODEL", help="the model, as --model")
    add_config_arguments(parser)
    engine = parser.add_argument_group("engine")
    for name, kind in ENGINE_FLAGS.items():
        engine.add_argument(_flag(name), type=kind, metavar=kind.__name__.upper())
    for name in SWITCHES:
        engine.add_argument(_flag(name), action=argparse.BooleanOptionalAction, default=None)
    server = parser.add_argument_group("server")
    for name, kind in SERVER_FLAGS.items():
        server.add_argument(_flag(name), type=kind, metavar=kind.__name__.upper(), help=_help(name))
    for name, metavar in MANY.items():
        server.add_argument(_flag(name), action="append", metavar=metavar, help=_help(name))
    server.add_argument("--log-prompts", action="store_true", default=None, help=_help("log_prompts"))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(name: str) -> str:
    return (ServerSettings.model_fields[name].description or "").replace("%", "%%")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    import asyncio

    registry = Registry.discover()
    args.model = args.model or args.source
    flat = {name: getattr(args, name) for name in (*ENGINE_FLAGS, *SWITCHES)}
    names = (*SERVER_FLAGS, "log_prompts")
    server: dict[str, Any] = {name: value for name in names if (value := getattr(args, name)) is not None}
    server |= {name: tuple(value) for name in MANY if (value := getattr(args, name)) is not None}
    overrides = merge(config_arguments(args, flat=flat), {"server": server} if server else {})
    config = load_config(registry, file=args.config, overrides=overrides, server=ServerSettings)
    settings = cast(ServerSettings, config.server)
    from octavo.server.lifecycle import listen
    from octavo.server.logs import set_up

    set_up(settings)
    listener = listen(settings.host, settings.port)
    from octavo.async_llm import AsyncLLM
    from octavo.core.assembly import build_engine, load_model
    from octavo.server.lifecycle import Lifecycle, leave, leaving_on_signals
    from octavo.server.served import Served

    with listener:
        with leaving_on_signals():
            llm = AsyncLLM.from_builder(lambda: build_engine(registry, config, load_model(registry, config, report=say), report=say))
        here = Served(llm, settings, settings.served_model_name or (config.source,))
        host, port = listener.getsockname()[:2]
        say(f"serving {here.model_names[0]} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        logging.getLogger("octavo.server").info("ready")
        status = asyncio.run(Lifecycle(here).run(listener))
        if not llm.engine_loop.ended:
            leave(status)
        return status
