"""A tiny model with a chat template, and an `LLM` around it that all tests of this folder share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.llm import LLM
from tests.models import tiny

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "debug": True, "max_model_len": 128, "block_size": 4, "max_num_seqs": 8}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the tiny model."""
    folder = tmp_path_factory.mktemp("chat") / "tiny-chat"
    shutil.copytree(tiny("llama_gqa"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def is_empty(llm: LLM) -> bool:
    """Nobody is in the engine and no slot is held."""
    usage = llm.engine.kv.usage()
    return not llm.engine.requests and usage.filled == usage.held == 0


@pytest.fixture(scope="session")
def shared_llm(folder: Path) -> Iterator[LLM]:
    """For `llm`."""
    with LLM(model=folder, num_kv_slots=1024, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """An ample pool, NaN in unwritten slots, invariants checked. Each test must leave it empty."""
    yield shared_llm
    assert is_empty(shared_llm)


@pytest.fixture
def new_llm(folder: Path) -> Iterator[Callable[..., LLM]]:
    """Make one with settings of its own; it is closed after the test."""
    made: list[LLM] = []

    def make(model: Path = folder, **settings: Any) -> LLM:
        made.append(LLM(model=model, **{"num_kv_slots": 1024, **SETTINGS, **settings}))
        return made[-1]

    yield make
    for llm in made:
        llm.close()
