"""`describe`: what an engine is made of and runs on, so that what was measured with it can be told from what was measured with another.

Must not know: what is measured, who asks.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from octavo.core.assembly import BuiltEngine
from octavo.core.processor import cpu_name
from octavo.core.sources import ModelSource

PACKAGES = ("octavo", "torch", "transformers", "triton", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Of one engine. Hashes are sha256 in hex."""

    versions: dict[str, str]  # of python and packages; "" where one is not installed
    model: str  # as the user named it
    model_origin: str
    model_revision: str  # commit of the hub, sha256 of a GGUF file, or of the folder's weights
    dtype: str
    kv_dtype: str
    max_model_len: int
    stack: dict[str, str]  # kind to plugin name
    options: dict[str, dict[str, Any]]  # of each plugin, and of the engine
    config_hash: str  # of stack, options, types and lengths
    pool_slots: int
    pool_bytes: int
    device: str
    driver: str  # "" on a CPU
    cpu: str
    cores: int
    threads: int  # that the engine computes with on the CPU
    memory: int  # bytes of RAM


def describe(built: BuiltEngine) -> Description:
    """Of this engine, now. The first time, the weights of a folder without a revision are read for their hash."""
    config, facts, pool, source = built.config, built.loaded.facts, built.pool, built.loaded.source
    options = {part.kind: part.options.model_dump(mode="json") for part in config.stack.parts}
    options["engine"] = config.engine.model_dump(mode="json")
    decided = {
        "stack": config.stack.names,
        "options": options,
        "dtype": facts.dtype,
        "kv_dtype": facts.kv_dtype,
        "max_model_len": config.max_model_len,
        "pool_slots": pool.num_slots,
    }
    return Description(
        versions=versions(),
        model=source.name,
        model_origin=source.origin,
        model_revision=weights_revision(source),
        dtype=facts.dtype,
        kv_dtype=facts.kv_dtype,
        max_model_len=config.max_model_len,
        stack=config.stack.names,
        options=options,
        config_hash=hash_of(decided),
        pool_slots=pool.num_slots,
        pool_bytes=pool.num_bytes,
        device=torch.cuda.get_device_name(facts.device) if facts.device_type == "cuda" else facts.device,
        driver=driver_version() if facts.device_type == "cuda" else "",
        cpu=cpu_name(),
        cores=os.cpu_count() or 0,
        threads=built.num_threads,
        memory=psutil.virtual_memory().total,
    )


def hash_of(content: Any) -> str:
    """sha256 of anything that JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@cache
def versions() -> dict[str, str]:
    """Of python and of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def weights_revision(source: ModelSource) -> str:
    """What tells these weights from others: the source's own revision, or a hash of the folder's weights where it has none."""
    if source.revision not in ("", "local"):
        return source.revision
    files = sorted(source.path.glob("*.safetensors"))
    return "sha256:" + hash_of([_sha256(file, file.stat().st_size, file.stat().st_mtime_ns) for file in files])


@cache
def _sha256(path: Path, size: int, changed: int) -> str:
    """Of a file, once in this process while it is not written to."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def driver_version() -> str:
    """Of the GPU's driver, and the CUDA version that torch was built for; "" where nothing says it."""
    try:
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        driver = ""
    return " ".join(part for part in (driver, f"CUDA {torch.version.cuda}" if torch.version.cuda else "") if part)
