"""Turn a GGUF file into a Hugging Face folder, and other tokenizer files into `tokenizer.json`, through transformers.

transformers knows the tensor names and quantisations of every architecture, so no list of them stands here. What it
leaves undone for a GGUF file is done here: the pre-tokenizer of vocabularies with single digits, special tokens and all
ids that end an answer, constants stored as 32-bit floats, and the notes that would make the saved folder claim to be quantised still.
What it leaves out of the config is `gguf_config`'s; that no weight was left out or made up is checked here.

Must not know: the network, the cache's layout, the catalogue. Imports torch and transformers inside its functions.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelSourceError
from octavo.core.sources.cache import NO_ROOM, Report
from octavo.core.sources.gguf_config import WAY_OUT, complete_config
from octavo.core.sources.gguf_header import DIGIT_SPLITS, GPT2_SPLITS, GGUFHeader, read_header
from octavo.core.sources.quiet import without_progress_bars

CONVERSION = 2  # raised when this file changes what comes out, so that old cached folders are not used
_NOTES = ("_name_or_path", "_model_name_or_path", "quantization_config", "is_local", "local_files_only")


def convert_gguf(gguf_file: Path, folder: Path, *, report: Report) -> None:
    """Write config, safetensors, tokenizer.json, chat template and generation config of `gguf_file` into `folder`.

    Quantised weights become bf16; a file of only F32 or F16 matrices keeps its type, bit for bit.
    Raises `ModelSourceError` where transformers does not know the architecture or the tokenizer, or something of the file would be lost.
    """
    header = read_header(gguf_file)
    report(f"converting {gguf_file.name} ({header.architecture}, {header.quantisation}) to {header.dtype} safetensors, once")
    work = folder / "source"  # the file alone, so that nothing beside it is taken for the model's
    work.mkdir()
    alone = work / "model.gguf"
    alone.symlink_to(gguf_file.absolute())
    # One bar is left, that of dequantising, which takes nearly all of the time.
    with _explained(f"{gguf_file} (GGUF, architecture {header.architecture!r})"), without_progress_bars():
        config = _read_config(alone, header)
        _convert_tokenizer(alone, folder, longest=getattr(config, "max_position_embeddings", None), header=header, report=report)
        _convert_weights(alone, folder, config=config, header=header)
    alone.unlink()
    work.rmdir()
    for name in ("config.json", "tokenizer_config.json"):
        _drop_notes(folder / name)


def make_tokenizer(source: Path, folder: Path, *, trust_remote_code: bool, report: Report) -> None:
    """Write `tokenizer.json` into `folder` from whatever tokenizer files `source` has (tokenizer.model, vocab and merges)."""
    report(f"making tokenizer.json from the other tokenizer files in {source}, once")
    if (source / "tokenizer.model").is_file():
        # Without these transformers tries the file as another format and asks for that one's package.
        needed = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}
        missing = [package for module, package in needed.items() if not _is_installed(module)]
        if missing:
            raise ModelSourceError(f"{source / 'tokenizer.model'} needs more to be converted: pip install {' '.join(missing)}")
    with _explained(f"the tokenizer in {source}"):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code, local_files_only=True)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no fast version")
        backend.save(str(folder / "tokenizer.json"))


def _read_config(alone: Path, header: GGUFHeader) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(alone.parent), gguf_file=alone.name, local_files_only=True)
    except ValueError as error:  # "GGUF model with architecture granite is not supported yet."
        raise header.refusal(f"transformers does not read it ({error}). {WAY_OUT}") from error
    complete_config(config, header)
    return config


def _convert_weights(alone: Path, folder: Path, *, config: Any, header: GGUFHeader) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        str(alone.parent),
        config=config,
        gguf_file=alone.name,
        output_loading_info=True,
        dtype=getattr(torch, header.dtype),
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    model, info = loaded
    made_up = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if made_up:
        raise header.refusal(f"it has no {made_up[0]} (one of {len(made_up)} tensors that {type(model).__name__} needs), or misshapen.")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights != header.num_weights:
        raise header.refusal(f"it has {header.num_weights} weights, of which {type(model).__name__} takes {num_weights}. {WAY_OUT}")
    # The weights are plain by now, but the model would refuse to be saved as quantised.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name, value in vars(model.config).items():
        if isinstance(value, float):
            setattr(model.config, name, _shortest(value))
    model.config.architectures = [type(model).__name__]
    generation: Any = GenerationConfig
    model.generation_config = generation(bos_token_id=header.bos_id, eos_token_id=header.eos_token_id, pad_token_id=header.pad_id)
    model.save_pretrained(str(folder))


def _convert_tokenizer(alone: Path, folder: Path, *, longest: int | None, header: GGUFHeader, report: Report) -> None:
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(alone.parent), gguf_file=alone.name, local_files_only=True)
    backend = tokenizer.backend_tokenizer
    if header.tokenizer_kind == "gpt2":
        backend.decoder = decoders.ByteLevel()  # older transformers put SentencePiece's in front, which eats a leading space
    if header.pre_tokenizer in DIGIT_SPLITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and header.pre_tokenizer not in GPT2_SPLITS:
        report(
            f"how this model splits text ({header.pre_tokenizer or 'unnamed'}) is not known, GPT-2's way is taken: "
            "answers may suffer. The model's original folder has the right tokenizer.json."
        )
    for role, token_id in (
        ("bos", header.bos_id),
        ("eos", next(iter(header.end_ids), None)),
        ("pad", header.pad_id),
        ("unk", header.unk_id),
    ):
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token_id))
    if longest:
        tokenizer.model_max_length = longest
    tokenizer.save_pretrained(str(folder))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what transformers raises into a `ModelSourceError`; a full disk stays an OSError, for the cache to explain."""
    try:
        yield
    except ModelSourceError:
        raise
    except ImportError as error:
        raise ModelSourceError(f"{what} cannot be converted: {error} Install what it names.") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        if "os error 28" in str(error):  # the safetensors library reports a full disk as text
            raise OSError(errno.ENOSPC, "No space left on device") from error
        raise ModelSourceError(f"{what} cannot be converted: {type(error).__name__}: {error}") from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package
        return False


def _shortest(value: float) -> float:
    """The shortest decimal with the same 32-bit value: GGUF stores 1e-5 as 9.999999747378752e-06."""
    (single,) = struct.unpack("f", struct.pack("f", value))
    if single != value:
        return value
    return next(
        short for short in (float(f"{value:.{digits}g}") for digits in range(1, 18)) if struct.pack("f", short) == struct.pack("f", value)
    )


def _drop_notes(path: Path) -> None:
    """Remove what transformers notes about the machine and the former quantisation."""
    values = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in values.items() if key not in _NOTES}
    path.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
