"""How many threads an engine computes with: the physical cores that this process may use.

Two threads of one core share its units and its cache, and a thread more than a quota allows is stopped in the middle of a step while the
others wait for it. Must not know: torch, plugins, requests.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from octavo.core.errors import ConfigError

_ROOT = Path("/")


def choose_threads(asked: int | None) -> int:
    """Of an engine with `num_threads = asked`. Raises ConfigError: it is not a number of CPUs that this process may run on."""
    allowed = len(allowed_cpus())
    if asked is None:
        return default_threads()
    if not 1 <= asked <= allowed:
        raise ConfigError(
            f"engine.num_threads = {asked}, but this process may run on {allowed} CPU{'s' if allowed > 1 else ''}: set 1 to {allowed}, or "
            f"leave it out for {default_threads()} (physical cores, within a container's quota and OMP_NUM_THREADS)"
        )
    return asked


def default_threads(*, root: Path = _ROOT, environ: Mapping[str, str] | None = None) -> int:
    """Physical cores among the CPUs that the process may run on, at most what its control group may use and OMP_NUM_THREADS says."""
    limits = [float(physical_cores(allowed_cpus(), root=root))]
    if (quota := cpu_quota(root=root)) is not None:
        limits.append(quota)
    named = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if named.isdecimal() and int(named) > 0:  # OpenMP passes over anything else too, with a message
        limits.append(float(named))
    return max(1, math.floor(min(limits)))


def allowed_cpus() -> frozenset[int]:
    """Numbers of the CPUs that the system lets this process run on (taskset, cpusets); all, where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def physical_cores(cpus: frozenset[int], *, root: Path = _ROOT) -> int:
    """Cores that these CPUs belong to; a CPU whose siblings are not told counts as one."""
    return len({_read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def cpu_quota(*, root: Path = _ROOT) -> float | None:
    """CPUs that the process's control group, or one above it, may use at a time; None: no limit. Version 1 and version 2.

    Docs: https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max) and .../scheduler/sched-bwc.html (cpu.cfs_quota_us).
    """
    quotas = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        if not controllers:
            base, files = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, files = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):  # in a container the path may be the host's: then only the last, the root, is there
            words = " ".join(_read(base / folder / file) or "" for file in files).split()
            if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
                quotas.append(int(words[0]) / int(words[1]))  # "max" and -1: no limit
    return min(quotas, default=None)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
