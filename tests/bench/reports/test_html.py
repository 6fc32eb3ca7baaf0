"""HTML of our own Markdown: everything that it says, nothing from elsewhere, and text that cannot break out."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

from octavo.bench.reports.html import to_html

MARKDOWN = """# A title & more

> **1 self-check failed.**
> shares: 99 <b>

Words on
two lines, with `code`.

| name    | time   |
|---------|--------|
| a \\| b | 1.5 ms |
| <i>     | never  |

| part | share           | p99    |
|------|-----------------|--------|
| one  | 12.5 % (1.5 ms) | 3 ms * |

* one
  below it
* two

![What it shows](figures/one.svg)

```
as it < stands
```
"""
SVG = '<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>'


class Seen(HTMLParser):
    """Tags in order, checked for being closed, and where anything is loaded from."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_block() -> None:
    """Headings, warnings, paragraphs, tables, lists, code and figures, with numbers to the right."""
    page = to_html(MARKDOWN, {"figures/one.svg": SVG})
    seen = Seen(page)
    assert {"h1", "blockquote", "p", "code", "table", "th", "td", "ul", "li", "figure", "img", "pre"} <= set(seen.tags)
    assert "<title>A title &amp; more</title>" in page and "<p>Words on two lines, with <code>code</code>.</p>" in page
    assert '<td class="k">a | b</td>' in page and '<td class="n">1.5 ms</td>' in page and '<td class="n">never</td>' in page
    assert '<td class="n">12.5 % (1.5 ms)</td>' in page and '<td class="n">3 ms *</td>' in page
    assert "<li>one<br>below it</li>" in page and "<pre>as it &lt; stands</pre>" in page
    assert "<blockquote><p><strong>1 self-check failed.</strong></p><p>shares: 99 &lt;b&gt;</p></blockquote>" in page
    assert "<i>" not in page and "<b>" not in page


def test_it_loads_nothing() -> None:
    """No script, no style sheet, no font: the figure is in the page, and has its caption for those who cannot see it."""
    page = to_html(MARKDOWN, {"figures/one.svg": SVG})
    seen = Seen(page)
    assert not {"script", "link", "iframe", "object"} & set(seen.tags) and not re.search(r"@import|url\(", page)
    [source] = seen.loaded
    assert base64.b64decode(source.removeprefix("data:image/svg+xml;base64,")).decode() == SVG
    assert 'alt="What it shows"' in page and "<figcaption>What it shows</figcaption>" in page
