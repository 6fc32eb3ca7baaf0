"""Who takes part: which environment, which files, which settings. Pools are as large, threads as many for all.

Must not know: what they are asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.peers.claims import HUGGING_FACE, INT4, INT8, LLAMA_CPP, OCTAVO, VLLM
from octavo.bench.peers.worker import Contender
from octavo.core.errors import ConfigError
from octavo.core.sources import resolve
from octavo.core.sources.cache import Report, home
from octavo.core.sources.catalogue import CATALOGUE, DEFAULT_MODEL
from octavo.core.sources.gguf_header import file_sha256
from octavo.core.sources.wheel import fetch_gguf
from octavo.core.threads import allowed_cpus

KV_GIB = 4
KV_OF_ONE = "1GiB"  # of engines that are given one request at a time: all pools must fit into memory together
QUANTISED = {INT8: "int8", INT4: "int4"}
SLOW_WAIT_S = 3600.0  # torch's linears in bf16 take minutes for what they take seconds for where the processor has bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """One model twice: as a folder of bf16 safetensors for all, and as the GGUF file that it was made from, for llama.cpp."""

    folder: Path
    gguf: Path | None
    weight_bytes: int
    vocab_size: int
    context: int
    origin: str


def find_files(model: Path | None, *, report: Report) -> Files:
    """Of a GGUF file or a folder, by default the catalogue's wheel: its Q4_1 file, and what that becomes in bf16.

    Raises ModelSourceError.
    """
    model = model or _catalogue_gguf(report)
    source = resolve(model, report=report)
    return Files(
        folder=source.path.absolute(),
        gguf=model.absolute() if model.suffix == ".gguf" else None,
        weight_bytes=sum(file.stat().st_size for file in source.path.glob("*.safetensors")),
        vocab_size=int(source.config["vocab_size"]),
        context=int(source.config["max_position_embeddings"]),
        origin=source.origin,
    )


def _catalogue_gguf(report: Report) -> Path:
    entry = CATALOGUE[DEFAULT_MODEL]
    folder = home() / "peers"
    file = folder / Path(entry.gguf_name).name
    if not file.is_file() or file_sha256(file) != entry.gguf_sha256:
        folder.mkdir(parents=True, exist_ok=True)
        fetch_gguf(entry, folder, report=report)
    return file


def contenders(files: Files, *, longest: int, threads: int, vllm: Path | None, llama_cpp: Path | None) -> dict[str, Contender | str]:
    """By name: each, or why it cannot take part. `longest` is that of a sequence, in tokens. Raises ConfigError for a wrong path."""
    length = min(files.context, -(-longest // 128) * 128)
    ours: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": length, "kv_cache_memory": f"{KV_GIB}GiB", "num_threads": threads}
    environ = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def octavo(name: str, **options: Any) -> Contender:
        return Contender(
            name=name, python=Path(sys.executable), module="octavo", model=files.folder, options=ours | options, environ=environ
        )

    found: dict[str, Contender | str] = {OCTAVO: octavo(OCTAVO)}
    for name, kind in QUANTISED.items():
        found[name] = octavo(name, kv_cache_memory=KV_OF_ONE, model_plugin={"plugin": "llama", "quantization": kind})
    found[VLLM] = "no environment was given: --vllm PATH"
    if vllm is not None:
        found[VLLM] = Contender(
            name=VLLM,
            python=_python(vllm, "vllm"),
            module="vllm",
            model=files.folder,
            options={"dtype": "bfloat16", "max_model_len": length, "enable_prefix_caching": True},
            environ=environ
            | {
                "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(allowed_cpus())[:threads])),  # which are its threads: not OMP's
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
            },
            warmups=2,
        )
    found[LLAMA_CPP] = "no environment was given: --llama-cpp PATH"
    if llama_cpp is not None:
        python, options = _python(llama_cpp, "llama_cpp"), {"n_ctx": length, "n_threads": threads, "n_threads_batch": threads}
        found[LLAMA_CPP] = "the model is no GGUF file"
        if files.gguf is not None:
            found[LLAMA_CPP] = Contender(
                name=LLAMA_CPP, python=python, module="llama_cpp", model=files.gguf, options=options, environ=environ
            )
    found[HUGGING_FACE] = Contender(
        name=HUGGING_FACE,
        python=Path(sys.executable),
        module="huggingface",
        model=files.folder,
        options={"dtype": "bfloat16"},
        environ=environ,
        warmups=0,
        run_wait_s=SLOW_WAIT_S,
    )
    return found


def chosen(found: dict[str, Contender | str], names: Iterable[str]) -> tuple[dict[str, Contender], dict[str, str]]:
    """Those of these names that can take part, and why the others cannot."""
    can: dict[str, Contender] = {}
    cannot: dict[str, str] = {}
    for name in names:
        one = found[name]
        if isinstance(one, Contender):
            can[name] = one
        else:
            cannot[name] = one
    return can, cannot


def _python(environment: Path, package: str) -> Path:
    python = environment.expanduser().absolute() / "bin" / "python"  # not resolved: the link is what makes it the environment's
    if not python.exists():
        raise ConfigError(f"{environment} is no virtual environment: there is no {python}")
    if not any(environment.expanduser().glob(f"lib/python*/site-packages/{package}")):
        raise ConfigError(f"{environment} has no {package}: install it there, see docs/howto/benchmark.md")
    return python
