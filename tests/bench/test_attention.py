"""The comparison of kernels on a CPU: its cases are what they say, and what cannot run is told."""

from __future__ import annotations

import pytest
import torch

from octavo.bench.attention import Case, main


def test_prints_one_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    """Decoding rows with the bytes read, prompts without; heads and type as asked."""
    small = [
        "--heads",
        "4",
        "--kv-heads",
        "2",
        "--head-size",
        "8",
        "--dtype",
        "float32",
        "--layers",
        "2",
        "--seconds",
        "0",
        "--rounds",
        "1",
    ]
    assert main(["--kernels", "sdpa", "naive", "--case", "2x17", "3+4", *small]) == 0
    title, header, _, decoding, prompt = capsys.readouterr().out.splitlines()
    assert title.startswith("ms of 2 layers in float32, 4 heads over 2 of 8")
    assert header == "| case | sdpa | naive | naive : sdpa | sdpa GB/s |"
    assert decoding.startswith("| 2x17 |")
    assert float(decoding.split("|")[-2]) >= 0
    assert prompt.startswith("| 3+4 |")
    assert prompt.endswith("|  |")


def test_a_case_is_a_step() -> None:
    """Rows, lengths and queries; each row has blocks of its own."""
    meta = Case.parse("256+1000").metadata()
    assert (meta.num_rows, meta.max_query_len, meta.max_seq_len) == (1, 256, 1256)
    meta = Case.parse("3x40").metadata()
    assert meta.seq_lens.tolist() == [40, 40, 40]
    assert meta.block_table is not None
    assert len(torch.unique(meta.block_table)) == meta.block_table.numel() == 9


def test_what_cannot_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A case that says nothing, and a kernel of another device."""
    for arguments, message in (
        (["--case", "many"], 'write "ROWSxPOSITIONS"'),
        (["--kernels", "triton_paged"], "kernel 'triton_paged' does not run here: it needs device:cuda"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
