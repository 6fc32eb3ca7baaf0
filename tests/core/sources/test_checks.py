"""A model folder that is cut, damaged, pickled or wants to run code is refused, with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources import resolve
from octavo.core.sources.checks import read_safetensors_header


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


def refusal(source: Path | str) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve(source)
    return str(caught.value)


def test_a_whole_folder_is_taken_as_it_is(folder: Path) -> None:
    """No copy is made, and origin, configs and revision are those of the folder."""
    found = resolve(folder)
    assert found.path == folder
    assert found.origin == f"local folder {folder} (weights fp32)"
    assert found.revision == "local"
    assert found.config["model_type"] == "llama"
    assert found.generation_config["eos_token_id"] == 2


def test_headers_agree_with_the_safetensors_library(folder: Path) -> None:
    """Our header reader sees the names and shapes that the library does."""
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as theirs:
            expected = {name: theirs.get_slice(name).get_shape() for name in theirs.keys()}  # noqa: SIM118 - no dict
        assert {name: entry["shape"] for name, entry in read_safetensors_header(path).items()} == expected


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_weights_are_named(folder: Path, keep: int) -> None:
    """Cut inside the length, the header or the data: the file and its fate are said."""
    victim = sorted(folder.glob("*.safetensors"))[0]
    data = victim.read_bytes()
    victim.write_bytes(data[:keep])
    text = refusal(folder)
    assert str(victim) in text and "Fetch it again." in text
    assert ("is cut short" if keep >= 0 else f"its header describes {len(data)} bytes, the file has {len(data) - 1}") in text


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"not json", "has a damaged safetensors header"),
        (b'{"a": {"dtype": "F32"}}', "has a damaged safetensors header ('data_offsets')"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "tensors overlap or leave gaps at byte 0"),
        (b"[1, 2]", "has a damaged safetensors header"),
    ],
)
def test_damaged_headers_are_named(folder: Path, header: bytes, text: str) -> None:
    """Whatever stands in a header, the error is ours."""
    victim = sorted(folder.glob("*.safetensors"))[0]
    victim.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    assert text in refusal(folder)


def test_a_git_lfs_pointer_is_recognised(folder: Path) -> None:
    """A clone without git-lfs holds pointers, a common trap."""
    sorted(folder.glob("*.safetensors"))[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "is a Git LFS pointer, not the weights. Run `git lfs pull`" in refusal(folder)


def test_a_missing_shard_and_a_missing_tensor_are_named(folder: Path) -> None:
    """The index is compared with the files, and with what is in them."""
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    shard = sorted(set(values["weight_map"].values()))[0]
    values["weight_map"]["model.extra.weight"] = shard
    index.write_text(json.dumps(values))
    assert f"{folder / shard} lacks 1 tensors that the index places there, first model.extra.weight" in refusal(folder)
    (folder / shard).unlink()
    text = refusal(folder)
    assert f"{folder} lacks 1 of " in text and shard in text


def test_an_index_cannot_lead_out_of_the_folder(folder: Path) -> None:
    """A weight file's name is a name, not a path."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    assert "'../secret.safetensors', which is not a plain file name" in refusal(folder)


def test_pickles_are_refused(folder: Path) -> None:
    """Weights that can run code are never opened, and the way out is said."""
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    assert "has no weights: no *.safetensors and no .gguf file" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    text = refusal(folder)
    assert "has its weights only as pickles (pytorch_model.bin), which can run any code when opened. Refused." in text
    assert "save_pretrained(new_folder)" in text


def test_remote_code_is_off_unless_asked_for(folder: Path) -> None:
    """`auto_map` is refused; asked for, the folder is taken."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X"}
    (folder / "config.json").write_text(json.dumps(config))
    assert "asks to run the model's own Python code (`auto_map`), which is off by default" in refusal(folder)
    assert resolve(folder, trust_remote_code=True).path == folder


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", None, "has no config.json, so it is no Hugging Face model folder"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json holds a JSON list, not an object"),
        ("generation_config.json", "{'", "generation_config.json is not valid JSON"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0", "added', "tokenizer.json is damaged or cut short"),
        ("model.safetensors.index.json", "{}", "has no weight_map"),
    ],
)
def test_missing_and_damaged_files_are_named(folder: Path, name: str, content: str | None, text: str) -> None:
    """Each file that a model needs has its own error, which also names the default model."""
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    message = refusal(folder)
    assert text in message and str(folder) in message
    assert 'source = "smollm2-135m" under [model]' in message


def test_a_folder_without_generation_config_is_fine(folder: Path) -> None:
    """The file is optional."""
    (folder / "generation_config.json").unlink()
    assert resolve(folder).generation_config == {}
