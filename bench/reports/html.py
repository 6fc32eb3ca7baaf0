"""One HTML file of a report's Markdown and its figures. It loads nothing: figures are in it, and fonts are the reader's own.

The Markdown is that of our own reports: headings, paragraphs, lists, tables, code blocks, and images alone on their line. So what the
HTML says is what the Markdown says. Must not know: what is reported.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterator, Mapping

STYLE = """
@page { size: A4 landscape; margin: 14mm; }
body { font: 15px/1.45 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff;
  max-width: 1280px; margin: 2rem auto; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .8rem; padding-top: .8rem; border-top: 1px solid #bbb; }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
.wide { overflow-x: auto; margin: .9rem 0 1.2rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; text-align: left; vertical-align: baseline; border-bottom: 1px solid #ddd; }
th { border-bottom: 1.5px solid #444; font-weight: 600; }
td.n { text-align: right; white-space: nowrap; }
td.k { white-space: nowrap; }
th.n { text-align: right; }
figure { margin: 1.2rem 0 1.6rem; break-inside: avoid; }
figure img { width: 100%; max-width: 864px; height: auto; display: block; }
figcaption { font-size: 13px; color: #444; max-width: 864px; margin-top: .3rem; }
pre { font-size: 12.5px; background: #f6f6f6; padding: .7rem .9rem; overflow-x: auto; }
blockquote { margin: 1rem 0; padding: .7rem 1rem; border-left: 5px solid #a32414; background: #fbeeec; }
blockquote p { margin: .3rem 0; }
@media print { body { max-width: none; margin: 0; padding: 0; font-size: 10pt; }
  table, figcaption { font-size: 7.5pt; } .wide { overflow: visible; }
  th, td { padding: .1rem .25rem; } h2, h3 { break-after: avoid; } table { break-inside: avoid; } }
""".strip()

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""

NUMBER = re.compile(r"[-+]?(\d[\d,.]*|never|inf|-)( ?(%|ms|s|x|GiB|MiB))?( \*| \(\d[\d.]*( ms)?\))?")

SHORT = 26  # letters: a column without a longer text is not broken into lines


def to_html(markdown: str, figures: Mapping[str, str]) -> str:
    """The page. `figures`: SVG documents by the path that the Markdown's images have."""
    lines = markdown.splitlines()
    title = next((line[2:] for line in lines if line.startswith("# ")), "Report")
    return PAGE.format(title=html.escape(title), style=STYLE, body="\n".join(_blocks(lines, figures)))


def _blocks(lines: list[str], figures: Mapping[str, str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        end = at + 1
        if line.startswith("```"):
            while end < len(lines) and lines[end] != "```":
                end += 1
            yield f"<pre>{html.escape(chr(10).join(lines[at + 1 : end]))}</pre>"
            end += 1
        elif image := re.fullmatch(r"!\[(.*)\]\((.*)\)", line):
            yield _figure(image[1], figures[image[2]])
        elif heading := re.match(r"(#{1,3}) (.*)", line):
            yield f"<h{len(heading[1])}>{_text(heading[2])}</h{len(heading[1])}>"
        elif line:
            kind = _kind(line)
            while end < len(lines) and lines[end] and (_kind(lines[end]) == kind or (kind == "list" and lines[end].startswith(" "))):
                end += 1
            yield {"table": _table, "list": _list, "quote": _quote, "text": _paragraph}[kind](lines[at:end])
        at = end


def _kind(line: str) -> str:
    return {"|": "table", "*": "list", ">": "quote"}.get(line[0] if line[1:2] in (" ", "-") else "", "text")


def _figure(caption: str, svg: str) -> str:
    """As an image of its own: the ids within one SVG cannot meet those of another."""
    source = base64.b64encode(svg.encode()).decode()
    said = html.escape(caption, quote=True)
    return f'<figure><img alt="{said}" src="data:image/svg+xml;base64,{source}"><figcaption>{_text(caption)}</figcaption></figure>'


def _table(lines: list[str]) -> str:
    head, *rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rows = rows[1:]  # the rule
    numeric = [all(NUMBER.fullmatch(row[column]) for row in rows) for column in range(len(head))]
    short = [max(len(row[column]) for row in rows) <= SHORT for column in range(len(head))]
    css = [' class="n"' if number else ' class="k"' if one else "" for number, one in zip(numeric, short, strict=True)]
    heads = "".join(f"<th{one}>{_text(cell)}</th>" for cell, one in zip(head, css, strict=True))
    body = "\n".join("<tr>" + "".join(f"<td{one}>{_text(cell)}</td>" for cell, one in zip(row, css, strict=True)) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _list(lines: list[str]) -> str:
    """Each item with the lines below it that are indented."""
    items: list[list[str]] = []
    for line in lines:
        if line.startswith("* "):
            items.append([line[2:]])
        else:
            items[-1].append(line.strip())
    return "<ul>\n" + "\n".join(f"<li>{'<br>'.join(map(_text, item))}</li>" for item in items) + "\n</ul>"


def _quote(lines: list[str]) -> str:
    return "<blockquote>" + "".join(f"<p>{_text(line[2:])}</p>" for line in lines if line[2:]) + "</blockquote>"


def _paragraph(lines: list[str]) -> str:
    return f"<p>{_text(' '.join(lines))}</p>"


def _text(text: str) -> str:
    """With `code` and **bold**."""
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
