"""Are a model folder's files whole, and of kinds that are safe to open? Only headers are read, never weights.

The safetensors layout is the one of https://huggingface.co/docs/safetensors: 8 bytes little-endian header length N,
N bytes of JSON with each tensor's `data_offsets`, then the data without gaps.

Must not know: where a folder came from, torch.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelSourceError

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself
_DTYPES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32", "F64": "fp64"}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelSourceError` where it cannot be read or is no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelSourceError(f"{path} is not valid JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise ModelSourceError(f"{path} holds a JSON {type(value).__name__}, not an object. Fetch it again.")
    return value


def check_weights(folder: Path) -> str:
    """Check every weight file of `folder` and the index that spreads tensors over them; return the main dtype (`bf16`)."""
    index = folder / INDEX
    sizes: Counter[str] = Counter()
    if index.is_file():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not placed:
            raise ModelSourceError(f"{index} has no weight_map. Fetch it again.")
        wanted: dict[str, set[str]] = {}
        for tensor, file in placed.items():
            if Path(str(file)).name != file:
                raise ModelSourceError(f"{index} names the weight file {file!r}, which is not a plain file name. Refused.")
            wanted.setdefault(file, set()).add(tensor)
        missing = sorted(file for file in wanted if not (folder / file).is_file())
        if missing:
            raise ModelSourceError(
                f"{folder} lacks {len(missing)} of {len(wanted)} weight files of its index: {', '.join(missing)}. Fetch them."
            )
        for file, tensors in sorted(wanted.items()):
            header = read_safetensors_header(folder / file)
            lost = sorted(tensors - header.keys())
            if lost:
                raise ModelSourceError(
                    f"{folder / file} lacks {len(lost)} tensors that the index places there, first {lost[0]}. Fetch it again."
                )
            _count(header, sizes)
    else:
        for path in _unindexed(folder):
            _count(read_safetensors_header(path), sizes)
    dtype = sizes.most_common(1)[0][0] if sizes else "none"
    return _DTYPES.get(dtype, dtype.lower())


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {dtype, shape, data_offsets}. Raises `ModelSourceError` for a cut or damaged file."""
    again = "Fetch it again."
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if start.startswith(b"version "):
                raise ModelSourceError(f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in its folder.")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise ModelSourceError(f"{path} is cut short or no safetensors file: {size} bytes do not hold its header. {again}")
            header: dict[str, dict[str, Any]] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        spans = sorted((int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for entry in header.values())
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ModelSourceError(f"{path} has a damaged safetensors header ({error}). {again}") from error
    end = 0
    for begin, stop in spans:
        if begin != end or stop < begin:
            raise ModelSourceError(f"{path} has a damaged safetensors header (tensors overlap or leave gaps at byte {end}). {again}")
        end = stop
    if 8 + length + end != size:
        raise ModelSourceError(f"{path} is damaged: its header describes {8 + length + end} bytes, the file has {size}. {again}")
    return header


def check_tokenizer(folder: Path) -> None:
    """`tokenizer.json` is there and whole, judged by its first and last character."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelSourceError(
            f"{folder} has no tokenizer.json. Write one with "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`, or fetch it from where the model came from."
        )
    try:
        with path.open("rb") as file:
            first = file.read(1)
            file.seek(max(0, path.stat().st_size - 16))
            last = file.read().rstrip()[-1:]
    except OSError as error:
        raise ModelSourceError(f"{path} cannot be read: {error.strerror}") from error
    if (first, last) != (b"{", b"}"):
        raise ModelSourceError(f"{path} is damaged or cut short. Fetch it again.")


def _unindexed(folder: Path) -> list[Path]:
    """The weight files where no index names them: model.safetensors, else every *.safetensors."""
    single = folder / "model.safetensors"
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ModelSourceError(
            f"{folder} has its weights only as pickles ({', '.join(pickles)}), which can run any code when opened. Refused. "
            "Take a safetensors version of the model, or convert it where you trust it: "
            "`AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`."
        )
    raise ModelSourceError(f"{folder} has no weights: no *.safetensors and no .gguf file. Fetch them, or give another folder.")


def _count(header: dict[str, dict[str, Any]], sizes: Counter[str]) -> None:
    for entry in header.values():
        sizes[str(entry.get("dtype"))] += entry["data_offsets"][1] - entry["data_offsets"][0]
