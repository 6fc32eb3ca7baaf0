"""OpenAI's JavaScript client, where node and npm are there: the main routes, as a smoke test."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.async_llm import AsyncLLM
from tests.server.test_chat import HELLO

NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH")
HERE = Path(__file__).parent / "npm"


@pytest.fixture
def shared_engine(wide_engine: AsyncLLM) -> AsyncLLM:
    """One with room for what the template says of tools."""
    return wide_engine


@pytest.mark.slow
def test_the_npm_client(address: str, offline: LLM, tmp_path: Path) -> None:
    """Models, chat whole and streamed with usage, completions, a forced call, and a refusal with its fields."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("node and npm are not installed (on Debian: apt-get install nodejs npm)")
    for name in ("package.json", "package-lock.json", "smoke.mjs"):
        shutil.copy(HERE / name, tmp_path)
    installed = subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    if installed.returncode and any(code in installed.stderr for code in NO_NETWORK):
        pytest.skip(f"npm reaches no registry: {installed.stderr[:300]}")
    assert installed.returncode == 0, installed.stderr
    ran = subprocess.run(["node", "smoke.mjs", address], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (chat,), (text,) = offline.chat(HELLO, greedy, use_tqdm=False), offline.generate("Hello", greedy, use_tqdm=False)
    assert told["models"] == ["tiny"]
    assert told["whole"] == told["streamed"] == chat.outputs[0].text and told["text"] == text.outputs[0].text
    assert told["usage"]["completion_tokens"] == 8
    assert (told["called"], told["with"]) == ("now", {})
    assert told["refused"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}
