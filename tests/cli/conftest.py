"""The `octavo` command in this process and in one of its own, with a tiny model that has a chat template."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models import tiny

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder."""
    folder = tmp_path_factory.mktemp("cli") / "tiny-chat"
    shutil.copytree(tiny("llama_gqa"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def engine_words(chat_model: Path) -> list[str]:
    """Words of a command line for a small engine on the CPU."""
    settings = ["engine.device=cpu", "engine.dtype=float32", "engine.max_model_len=128", "engine.num_kv_slots=256"]
    return ["--model", str(chat_model), *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture
def start() -> Callable[..., subprocess.Popen[str]]:
    """Start `octavo` with these words in a process of its own."""

    def start(*words: str, **options: int) -> subprocess.Popen[str]:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OCTAVO_NO_PLUGINS": "1"}
        return subprocess.Popen([sys.executable, "-m", "octavo", *words], env=environ, text=True, stderr=subprocess.PIPE, **options)

    return start
