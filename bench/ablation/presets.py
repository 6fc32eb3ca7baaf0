"""Ablations that come with Octavo, by name: the TOML files of this folder's `presets`.

Must not know: engines, what they compare.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from octavo.bench.ablation.spec import AblationSpec, load_spec
from octavo.core.errors import InvalidOptionsError
from octavo.core.suggest import did_you_mean

FOLDER = Path(str(files("octavo.bench.ablation"))) / "presets"


def preset_names() -> list[str]:
    """In alphabetical order."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_spec(text: str) -> AblationSpec:
    """A preset's, or that of a file. Raises InvalidOptionsError."""
    if (FOLDER / f"{text}.toml").is_file():
        return load_spec(FOLDER / f"{text}.toml")
    if Path(text).suffix != ".toml" and not Path(text).exists():
        names = preset_names()
        raise InvalidOptionsError(
            f"no ablation is called {text!r}{did_you_mean(text, names)}: name a .toml file, or one of {', '.join(names)}"
        )
    return load_spec(text)
