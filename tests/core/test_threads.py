"""How many threads an engine takes: cores, affinity, quotas and the environment, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core import threads
from octavo.core.assembly import build_engine
from octavo.core.errors import ConfigError, InvalidOptionsError
from octavo.core.settings.config import load_config
from octavo.core.threads import allowed_cpus, choose_threads, cpu_quota, default_threads, physical_cores
from tests.matrix.stacks import REGISTRY, loaded
from tests.models import tiny


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_siblings_count_once(tmp_path: Path) -> None:
    """Four CPUs of two cores; a CPU that says nothing is a core."""
    siblings = {0: "0,2", 2: "0,2", 1: "1,3", 3: "1,3"}
    root = written(tmp_path, {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()})
    assert physical_cores(frozenset({0, 1, 2, 3}), root=root) == 2
    assert physical_cores(frozenset({0, 2}), root=root) == 1
    assert physical_cores(frozenset({0, 1, 8, 9}), root=root) == 4


QUOTAS: dict[str, tuple[dict[str, str], float | None]] = {
    "none": ({}, None),
    "v2 without a limit": ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, None),
    "v2": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
    "v2, a group above": (
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n", "sys/fs/cgroup/a/cpu.max": "300000 100000\n"},
        3.0,
    ),
    "v2 in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4.0),
    "v1 without a limit": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/a\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "9",
        },
        None,
    ),
    "v1, the path is the host's": (
        {
            "proc/self/cgroup": "7:memory:/x\n4:cpu,cpuacct:/docker/1\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/\nrubbish\n", "sys/fs/cgroup/cpu.max": "many\n"}, None),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_quotas_of_control_groups(tmp_path: Path, case: str) -> None:
    """Both versions, as the kernel's documentation has them."""
    files, expected = QUOTAS[case]
    assert cpu_quota(root=written(tmp_path, files)) == expected


def test_the_smallest_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores, quota, OMP_NUM_THREADS; never below one."""
    monkeypatch.setattr(threads, "allowed_cpus", lambda: frozenset(range(8)))
    root = written(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "550000 100000\n"})
    assert default_threads(root=tmp_path / "nowhere", environ={}) == 8
    assert default_threads(root=root, environ={}) == 5
    assert default_threads(root=root, environ={"OMP_NUM_THREADS": "3"}) == 3
    assert default_threads(root=root, environ={"OMP_NUM_THREADS": "2,4"}) == 2
    assert default_threads(root=root, environ={"OMP_NUM_THREADS": "many"}) == 5
    written(root, {"sys/fs/cgroup/cpu.max": "20000 100000\n"})
    assert default_threads(root=root, environ={}) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_affinity_counts() -> None:
    """A process that was put on one CPU takes one thread, and refuses two."""
    code = (
        "import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n"
        "from octavo.core.threads import choose_threads, default_threads\n"
        "print(default_threads())\n"
        "try: choose_threads(2)\nexcept Exception as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    one, refused = done.stdout.splitlines()
    assert one == "1"
    assert refused.startswith("engine.num_threads = 2, but this process may run on 1 CPU: set 1 to 1, or leave it out for 1 ("), done.stderr


def test_too_many_and_too_few_are_refused() -> None:
    """By the engine, with what is possible."""
    most = len(allowed_cpus())
    assert choose_threads(most) == most
    with pytest.raises(ConfigError, match=rf"engine.num_threads = {most + 1}, but this process may run on {most} CPU"):
        LLM(str(tiny("llama_gqa")), num_threads=most + 1)
    for wrong in (0, -1):
        with pytest.raises(InvalidOptionsError, match=r"engine.num_threads.*greater than or equal to 1"):
            LLM(str(tiny("llama_gqa")), num_threads=wrong)


@pytest.mark.skipif(len(allowed_cpus()) < 2, reason="this process may use one CPU only")
def test_engines_in_one_thread_keep_their_own_number() -> None:
    """Each step computes with the number of its engine, whatever was built in between."""
    model = loaded(tiny("llama_gqa"), "llama", "torch")
    before = torch.get_num_threads()
    try:
        found = []
        built = [
            build_engine(
                REGISTRY,
                load_config(
                    REGISTRY,
                    environ={},
                    overrides={"engine": {"num_threads": n, "num_kv_slots": 64, "max_model_len": 64}, "scheduler": {"max_num_seqs": 2}},
                ),
                model,
            )
            for n in (1, 2)
        ]
        assert [one.num_threads for one in built] == [1, 2]
        for one in built:
            runner = one.engine.runner
            forward = runner.model.forward  # type: ignore[attr-defined]

            def told(*arguments: object, forward: object = forward, **named: object) -> object:
                found.append(torch.get_num_threads())
                return forward(*arguments, **named)  # type: ignore[operator]

            runner.model.forward = told  # type: ignore[attr-defined]
            try:
                one.engine.add_request([1, 2, 3], SamplingParams(max_tokens=1))
                while one.engine.has_work:
                    one.engine.step()
            finally:
                del runner.model.forward  # type: ignore[attr-defined]
        assert found == [1, 2]
    finally:
        torch.set_num_threads(before)


def test_an_idle_engine_sleeps() -> None:
    """After it has worked, it takes well under a tenth of a core: nothing spins."""
    with LLM(str(tiny("llama_gqa")), num_kv_slots=64, max_model_len=32) as llm:
        llm.generate(["hello"], SamplingParams(max_tokens=4), use_tqdm=False)
        time.sleep(0.3)  # OpenMP's workers wait a few milliseconds awake
        begun, used = time.monotonic(), time.process_time()
        time.sleep(2.0)
        used, passed = time.process_time() - used, time.monotonic() - begun
    assert used < 0.1 * passed
