"""What a command or a plugin list needs imports without torch (design: layers); each module is tried in its own process."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.models import tiny

ROOT = Path(__file__).parents[2]
# The only modules of core that may import torch. A new module is light, or its author adds it here.
TORCH = {
    *("assembly", "attention", "devices", "fetching", "inputs", "kv_tensors", "logits_processing", "model", "out_of_memory"),
    *("reference_attention", "quantization", "sampler", "sampling_blocks", "sampling_contenders", "sampling_filters", "scoring"),
    *("torch_handle", "torch_runner"),
}
# What the file plan promises to be without torch, so that no rename takes a module out of this test unseen.
PROMISED = [
    *("errors", "clock", "sampling_params", "request", "plan", "plan_builder", "kv", "scheduling", "forks", "execution", "outputs"),
    *("engine", "options", "descriptors", "hookspecs", "registry", "settings.config", "compat", "memory"),
]
# Listing plugins needs these, so they do without numpy and the rest too.
LISTING = ("errors", "options", "descriptors", "hookspecs", "registry")
HEAVY = ("torch", "numpy", "transformers", "triton")


def exists(name: str) -> bool:
    return (ROOT / "core" / f"{name.replace('.', '/')}.py").exists()


def core_modules() -> list[str]:
    """Every module of core but those that may import torch."""
    core = ROOT / "core"
    files = (file.relative_to(core).with_suffix("").parts for file in core.rglob("*.py"))
    paths = sorted(".".join(part for part in parts if part != "__init__") for parts in files)
    return [f"octavo.core.{path}".rstrip(".") for path in paths if path.partition(".")[0] not in TORCH]


def entry_modules() -> list[str]:
    """The built-in plugins' descriptor modules, as declared."""
    return sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["octavo"].values())


def plugin_modules() -> list[str]:
    """The built-in plugins' descriptor modules, as they lie on disk: what lies in a kind's folder and implements a hook."""
    folders = [folder for folder in (ROOT / "plugins").iterdir() if (folder / "__init__.py").exists()]
    return sorted(
        f"octavo.plugins.{folder.name}.{entry.stem}" for folder in folders for entry in folder.iterdir() if "@hookimpl" in _source(entry)
    )


def _source(entry: Path) -> str:
    file = entry / "__init__.py" if entry.is_dir() else entry
    return file.read_text() if file.suffix == ".py" and file.exists() else ""


def imported_by(module: str, *, among: tuple[str, ...]) -> list[str]:
    code = f"import sys, {module}; print(*[name for name in {among!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", core_modules())
def test_core_imports_without_torch(module):
    """Engine, scheduling and configuration are plain Python."""
    assert imported_by(module, among=("torch", "transformers", "triton")) == []


@pytest.mark.parametrize("module", ["octavo", "octavo.__main__", "octavo.cli", *map("octavo.core.{}".format, filter(exists, LISTING))])
def test_listing_plugins_imports_nothing_heavy(module):
    """`octavo plugins` answers at once."""
    assert imported_by(module, among=HEAVY) == []


@pytest.mark.parametrize("module", plugin_modules())
def test_a_descriptor_imports_nothing_heavy(module):
    """A descriptor's `build` imports its implementation; the module that holds it does not."""
    assert imported_by(module, among=HEAVY) == []


def test_the_probe_sees_a_heavy_import():
    """A module that imports numpy is reported."""
    assert imported_by("numpy", among=HEAVY) == ["numpy"]


def test_the_promised_modules_exist():
    """Every module that the file plan calls torch-free is there."""
    assert [name for name in PROMISED if not exists(name)] == []


def test_every_built_in_plugin_is_an_entry_point():
    """What lies in plugins/<kind>/ is declared, and what is declared lies there."""
    assert entry_modules() == plugin_modules()


def test_a_first_token_needs_few_packages(tmp_path):
    """From a folder or the cache to an answer: no transformers, no compiler, no server, no hub client. Their imports take seconds."""
    unwanted = ("transformers", "accelerate", "gguf", "sentencepiece", "triton", "huggingface_hub", "llguidance", "jinja2")
    unwanted += ("fastapi", "starlette", "uvicorn", "prometheus_client", "matplotlib", "sympy", "torch._dynamo", "torch._inductor")
    unwanted += ("filelock",)
    code = (
        "import sys; from octavo.cli import main\n"
        "assert main(['generate', 'w260 w261', '--max-tokens', '2', '--model', sys.argv[1], '--set', 'engine.device=cpu']) == 0\n"
        f"print(*[name for name in {unwanted!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny("llama_gqa"))], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout, done.stderr
    assert done.stderr.splitlines()[-1] == ""


def test_a_named_model_is_not_looked_for_with_the_hub_client(tmp_path, monkeypatch):
    """Where the cache that Hugging Face's programs share lacks the model, its client, which takes a fifth of a second, is not imported."""
    code = (
        "import sys; from octavo.core.sources.hub import find_cached\n"
        "assert find_cached('nobody/nothing', name='x', revision=None, trust_remote_code=False) is None\n"
        "print('huggingface_hub.hf_api' in sys.modules)"
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub").mkdir()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
