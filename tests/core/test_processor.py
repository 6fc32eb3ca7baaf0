"""A processor is told from another by its name and by what its vectors can do."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.processor import cpu_name, describe

ZEN_3 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fma f16c avx avx2\n\nprocessor\t: 1\nmodel name\t: other\nflags\t: avx512f\n"
ZEN_4 = ZEN_3.replace("avx2\n", "avx2 avx512f avx512_bf16\n", 1)

SAPPHIRE_RAPIDS = (
    "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) Processor\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16 avx512_fp16 amx_tile\n"
)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (ZEN_3, "AMD EPYC (AVX2)"),
        (ZEN_4, "AMD EPYC (AVX-512 bf16)"),
        (ZEN_4.replace(" avx512_bf16", ""), "AMD EPYC (AVX-512)"),
        (SAPPHIRE_RAPIDS, "Intel(R) Xeon(R) Processor (AVX-512 bf16, AMX)"),
        ("processor\t: 0\nmodel name\t: Old\nflags\t: sse2\n", "Old"),
        ("processor\t: 0\nFeatures\t: asimd\n", ""),
    ],
)
def test_one_name_is_not_two_machines(cpuinfo: str, name: str) -> None:
    assert describe(cpuinfo) == name


def test_this_machine_has_a_name() -> None:
    assert cpu_name()
    if Path("/proc/cpuinfo").exists() and " avx2 " in Path("/proc/cpuinfo").read_text():
        assert "AVX" in cpu_name()
