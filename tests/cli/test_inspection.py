"""`octavo plugins`, `stacks` and `schema`: what they print, and that they import nothing heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.cli import COMMANDS
from octavo.core.testing.fake_plugins import write_package

SOURCE = """
from octavo.core.hookspecs import hookimpl
from octavo.core.testing.fake_plugins import *

@hookimpl
def octavo_schedulers(): return [fake_scheduler()]
@hookimpl
def octavo_allocators(): return [fake_allocator("contiguous", layout="region"), fake_allocator()]
@hookimpl
def octavo_kernels(): return [fake_kernel("x", provides=frozenset({"paged_kv"}))]
@hookimpl
def octavo_ops(): return [fake_ops()]
@hookimpl
def octavo_models(): return [fake_model(architecture="LlamaForCausalLM")]
"""
COMMAND = """
import sys
from octavo.cli import main
status = main(sys.argv[1:])
heavy = {"torch", "numpy", "transformers", "triton"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else status)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a complete set of fake plugins as the distribution `octavo`: first on the path, it stands in for the real one."""
    write_package(tmp_path, "octavo", "1.2", fake_set=SOURCE)
    return tmp_path


def octavo_command(site: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own; it fails if something heavy was imported."""
    path = os.pathsep.join([str(site), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        capture_output=True,
        text=True,
        cwd=site,  # Python looks in the current folder first, and the checkout holds the real distribution's metadata
        env={**os.environ, "PYTHONPATH": path, "OCTAVO_NO_PLUGINS": "1", **environ},
        timeout=60,
        check=False,
    )


def test_plugins_lists_each_with_provider_and_options(site: Path) -> None:
    """A line a plugin under its kind, with summary, provider and options; nothing heavy is imported."""
    done = octavo_command(site, "plugins")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0:2] == ["model", "  llama            a fake model (octavo 1.2)"]
    assert "  contiguous       a fake allocator (octavo 1.2)" in lines
    assert any(line.strip().startswith("options: max_num_seqs=256, max_num_batched_tokens=None, order='fcfs'") for line in lines)


def test_plugins_for_machines(site: Path) -> None:
    """The same as JSON, with defaults and descriptions."""
    done = octavo_command(site, "plugins", "--json")
    listed = json.loads(done.stdout)
    assert [(row["kind"], row["name"], row["distribution"], row["version"]) for row in listed["plugins"]] == [
        ("model", "llama", "octavo", "1.2"),
        ("scheduler", "continuous", "octavo", "1.2"),
        ("allocator", "contiguous", "octavo", "1.2"),
        ("allocator", "paged", "octavo", "1.2"),
        ("kernel", "x", "octavo", "1.2"),
        ("ops", "torch", "octavo", "1.2"),
    ]
    assert listed["plugins"][1]["options"]["max_num_seqs"] == {"default": 256, "description": "most sequences that run at once"}
    assert listed["observers"] == listed["problems"] == []


def test_plugins_shows_broken_packages_and_fails(site: Path) -> None:
    """A package that cannot be used is listed with its reason, and the status tells a script so."""
    write_package(site, "octavo-broken", "0.1", broken="import nowhere_to_be_found")
    done = octavo_command(site, "plugins", OCTAVO_NO_PLUGINS="0")
    assert done.returncode == 1
    reason = "octavo-broken 0.1 (entry point 'broken'): ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert f"\nNot usable:\n  - {reason}\n" in done.stdout


def test_stacks_explains(site: Path) -> None:
    """A line a stack, the reasons and the mend below those that don't run."""
    done = octavo_command(site, "stacks", "--explain")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "continuous + contiguous + x + torch + llama  does not run",
        "      - allocator 'contiguous' needs contiguous_kv, which kernel 'x' does not provide",
        '      One change that would make it run: allocator = "paged"',
        "continuous + paged + x + torch + llama       runs",
        "1 of 2 stacks run",
    ]


def test_stacks_for_machines_and_other_devices(site: Path) -> None:
    """JSON carries reasons and changes; `--device` judges for a device that need not be there."""
    kernel = 'fake_kernel("gpu", needs=lambda options, facts: {"device:cuda"})'
    (site / "fake_set.py").write_text(SOURCE.replace('fake_kernel("x", provides=frozenset({"paged_kv"}))', kernel))
    on_cpu, on_gpu = octavo_command(site, "stacks", "--json"), octavo_command(site, "stacks", "--json", "--device", "cuda:0")
    assert (on_cpu.returncode, on_gpu.returncode) == (1, 0)
    assert json.loads(on_cpu.stdout)[0] == {
        "scheduler": "continuous",
        "allocator": "contiguous",
        "kernel": "gpu",
        "ops": "torch",
        "model": "llama",
        "runs": False,
        "problems": ["kernel 'gpu' needs device:cuda, but device is cpu"],
        "changes": [],
    }
    assert [row["runs"] for row in json.loads(on_gpu.stdout)] == [True, True]


def test_stacks_of_a_model_folder(site: Path, tmp_path: Path) -> None:
    """`--model` judges for the config.json in a folder; a folder without one is said."""
    done = octavo_command(site, "stacks", "--model", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.startswith(f"octavo: --model {tmp_path / 'nowhere'}: needs a folder with a config.json (")
    (tmp_path / "config.json").write_text('{"architectures": ["Unknown"]}')
    assert octavo_command(site, "stacks", "--model", str(tmp_path)).stdout == "0 of 0 stacks run\n"


def test_schema_is_json_with_the_installed_plugins(site: Path) -> None:
    """What is printed is a JSON schema that names the plugins."""
    schema = json.loads(octavo_command(site, "schema").stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {"allocator_paged", "allocator_contiguous", "kernel_x", "kernel_auto"} <= schema["$defs"].keys()


def test_errors_are_printed_without_a_traceback(site: Path) -> None:
    """An error of ours is one message and status 2."""
    done = octavo_command(site, "plugins", OCTAVO_NO_PLUGINS="maybe")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "octavo: OCTAVO_NO_PLUGINS must be 1 (no third-party plugins) or 0, not 'maybe'\n"


@pytest.mark.parametrize("words", [("--help",), ("plugins", "--help"), ("stacks", "--help"), ("schema", "--help")])
def test_help(site: Path, words: tuple[str, ...]) -> None:
    """Every command explains itself; the list of commands imports none of them."""
    done = octavo_command(site, *words)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: octavo")
    assert all(command in done.stdout for command in COMMANDS) or len(words) == 2


@pytest.mark.parametrize(("words", "complaint"), [((), "COMMAND"), (("plugin",), "invalid choice: 'plugin'")])
def test_wrong_commands(site: Path, words: tuple[str, ...], complaint: str) -> None:
    """No command, or one that doesn't exist, is argparse's error."""
    done = octavo_command(site, *words)
    assert done.returncode == 2
    assert complaint in done.stderr
