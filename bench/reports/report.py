"""`Report`: Markdown with figures, and how it is written: `report.md`, `figures/*.svg`, and `report.html`, which holds all of it.

Must not know: how its content is made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from octavo.bench.reports.html import to_html
from octavo.bench.whole_files import write_whole
from octavo.core.errors import ResultError

MARKDOWN, HTML, FIGURES = "report.md", "report.html", "figures"


@dataclass(slots=True)
class Report:
    """`figures` are SVG documents by the path that the Markdown names."""

    lines: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    def figure(self, name: str, svg: str, caption: str) -> list[str]:
        """Keep a figure; the lines that show it."""
        slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        path = f"{FIGURES}/{slug}.svg"
        number = 1
        while path in self.figures:
            number += 1
            path = f"{FIGURES}/{slug}-{number}.svg"
        self.figures[path] = svg
        caption = caption.replace("[", "(").replace("]", ")")
        return [f"![{caption}]({path})", ""]

    @property
    def markdown(self) -> str:
        """All of it as text."""
        return "\n".join(self.lines).rstrip() + "\n"

    def write(self, folder: str | Path) -> list[Path]:
        """The files, in place of an older report's, its figures among them. Raises ResultError where they cannot be written."""
        folder = Path(folder)
        written = {folder / path: svg for path, svg in self.figures.items()}
        written |= {folder / MARKDOWN: self.markdown, folder / HTML: to_html(self.markdown, self.figures)}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            older = _figures_of(folder)
            for path, text in written.items():
                path.parent.mkdir(exist_ok=True)
                write_whole(path, text)
            for path in older - written.keys():
                path.unlink(missing_ok=True)
            if older and (folder / FIGURES).is_dir() and not any((folder / FIGURES).iterdir()):
                (folder / FIGURES).rmdir()
        except OSError as error:
            raise ResultError(f"the report cannot be written to {folder}: {error.strerror}") from error
        return [folder / HTML, folder / MARKDOWN]


def _figures_of(folder: Path) -> set[Path]:
    """Those that the report which is there shows; other files are somebody else's."""
    try:
        text = (folder / MARKDOWN).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return set()
    return {folder / FIGURES / name for name in re.findall(rf"\]\({FIGURES}/([\w-]+\.svg)\)$", text, flags=re.MULTILINE)}
