"""Reads weights from the safetensors of a model folder: checked before anything is copied, converted on the way, never all held twice.

Of the files no more is mapped than the tensors that were asked for and are not let go of: those of one packed weight.
Must not know: which tensors a model has.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from octavo.core.errors import ModelSourceError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Place(NamedTuple):
    """Where a tensor lies, and as what."""

    file: Path
    start: int  # bytes from the file's begin
    dtype: torch.dtype


class Weights:
    """The tensors of one model folder, delivered as `dtype` on `device`."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Read the headers of the folder's files. Raises ModelSourceError: no safetensors, a shard is missing, a file is damaged."""
        self.folder = folder
        self.dtype = dtype
        self.device = device
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, _Place] = {}
        for file in _files(folder):
            try:
                with safe_open(file, framework="pt"):
                    pass  # its header is sound and fits the file
                self._note(file, *_header(file))
            except (SafetensorError, OSError) as error:
                raise ModelSourceError(f"cannot read weights from {file}: {error}. Fetch the file again.") from error

    def _note(self, file: Path, data: int, header: dict[str, Any]) -> None:
        for name, entry in header.items():
            dtype = entry["dtype"]
            if dtype not in _PLAIN:
                raise ModelSourceError(
                    f"tensor {name} in {file} has dtype {dtype}; supported are {', '.join(sorted(_PLAIN))}: quantised weights are not"
                )
            self.shapes[name] = tuple(entry["shape"])
            self._places[name] = _Place(file, data + entry["data_offsets"][0], _PLAIN[dtype])

    def check(self, expected: Mapping[str, tuple[int, ...]], *, ignored: tuple[str, ...] = ()) -> None:
        """Raise a ModelSourceError that names every tensor that is missing, unexpected or of another shape than the config says.

        Names that end in one of `ignored` may be there.
        """
        wrong = [f"missing: {name} {list(expected[name])}" for name in expected if name not in self.shapes]
        wrong += [f"unexpected: {name}" for name in self.shapes if name not in expected and not name.endswith(ignored)]
        wrong += [
            f"shape of {name}: {list(self.shapes[name])}, config.json asks for {list(shape)}"
            for name, shape in expected.items()
            if self.shapes.get(name, shape) != shape
        ]
        if wrong:
            shown = "".join(f"\n  - {line}" for line in wrong[:20]) + (f"\n  - and {len(wrong) - 20} more" if len(wrong) > 20 else "")
            raise ModelSourceError(f"the weights in {self.folder} do not fit its config.json:{shown}")

    def load(self, *names: str, mapped: bool = False) -> torch.Tensor:
        """The named tensors one below the other (joined along the first dimension) in one new tensor.

        `mapped`: for somebody who copies it. A single tensor that is as wanted in its file is then not copied here, but seen there.
        """
        if mapped and len(names) == 1 and self._places[names[0]].dtype is self.dtype and self.device.type == "cpu":
            return self._mapped(names[0])
        rows = sum(self.shapes[name][0] for name in names)
        out = torch.empty((rows, *self.shapes[names[0]][1:]), dtype=self.dtype, device=self.device)
        start = 0
        for name in names:
            stop = start + self.shapes[name][0]
            out[start:stop].copy_(self._mapped(name))
            start = stop
        return out

    def _mapped(self, name: str) -> torch.Tensor:
        """A view of the file, in its own dtype, which keeps these pages alone mapped as long as it lives; writing to it leaves the file."""
        (file, start, dtype), shape = self._places[name], self.shapes[name]
        begin = start - start % mmap.ALLOCATIONGRANULARITY
        with file.open("rb") as opened:
            pages = mmap.mmap(opened.fileno(), start - begin + prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY, offset=begin)
        return torch.frombuffer(pages, dtype=dtype, count=prod(shape), offset=start - begin).view(shape)


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a sound file begin, and what its header says of each tensor: dtype, shape, data_offsets from there."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights: those of the index where there is one, else the usual single file, else all there are."""
    index = folder / _INDEX
    if not index.exists():
        found = [folder / _SINGLE] if (folder / _SINGLE).exists() else sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelSourceError(f"{folder} has no safetensors file: weights are read from no other format")
        return found
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(f"{index} is not an index of safetensors files: {error!r}. Fetch the file again.") from error
    if missing := sorted(name for name in names if not (folder / name).exists()):
        raise ModelSourceError(f"{index} names files that are not there: {', '.join(missing)}. Fetch them again.")
    return [folder / name for name in sorted(names)]
