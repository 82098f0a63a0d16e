"""Hooks of ``mkdocs build``, for pages that are also readable on a code host.

1. A relative link that leaves ``docs/`` leads to the code host.
2. Cross references of docstrings (``:class:`~kvview.Leak```) become links into the API pages.
3. The number of a law links to its anchor.
4. The charts are drawn again before each build.
5. Wide tables and diagrams scroll by themselves, also with the keyboard. Long code and long words
   break at punctuation only.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from docs.make_charts import write as draw_charts
from kvview.urls import PROJECT_URL

ROOT = Path(__file__).parents[1]
_LAW_HEAD = re.compile(r'^<a id="(\S+)"></a>\n\n(## (\S+).*)$', re.MULTILINE)
_LAWS = [
    head[2]
    for path in sorted((ROOT / "docs/laws").glob("*.md"))
    for head in _LAW_HEAD.findall(path.read_text("utf-8"))
]
_LAW = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(_LAWS, reverse=True))})(?![\w-])")
_LEAVES = re.compile(r"(?<=\]\()((?:\.\./)+[^)#\s]*)")
_ROLE = re.compile(r":[a-z]+:<code>(~?)([\w.]+)(?:\(\))?</code>")
_TAG = re.compile(r"(<[^>]*>)")
_CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
_CONTENTS = re.compile(r'<nav class="md-nav" aria-label="[^"]*"')
_PARAMETER = re.compile(r"\[(?=<autoref|<span title)")  # of a type
_EMPTY_HEAD = re.compile(r"<th([^>]*)></th>")
_BLOCK = re.compile(r"(<pre\b.*?</pre>)", re.DOTALL)  # a browser keeps its lines as they are
_INLINE_CODE = re.compile(r"<code>[^<]{12,}</code>")
_LONG_WORD = re.compile(r"(?<=[>\s])[^\s<>\"]{24,}(?=[<\s])")
_PUNCTUATION = re.compile(r"(?<=[a-z\d\]])([._/:,=([]+)(?=[A-Za-z\d_\"'\[])")
_WIDE = re.compile(r"<table>.*?</table>|<p><img [^>]*\.svg[^>]*></p>", re.DOTALL)


def on_pre_build(**_: Any) -> None:
    """Draw the charts."""
    draw_charts()


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links that leave the site to the code host."""
    here = posixpath.dirname(f"docs/{page.file.src_uri}")

    def absolute(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, found[1]))
        if path.startswith("docs/"):
            return found[1]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{PROJECT_URL}/{kind}/main/{path}"

    markdown = _LAW_HEAD.sub(r"\2 { #\1 }", markdown)  # code hosts know no such attribute
    return _LEAVES.sub(absolute, markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the names and laws in docstrings."""
    html = _ROLE.sub(_reference, html)
    html = _CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), html)  # Markdown keeps it in code
    html = _EMPTY_HEAD.sub(r"<td\1></td>", html)
    html = _WIDE.sub(r'<div class="scrolling" tabindex="0">\g<0></div>', html)
    html = "".join(map(_breakable, _BLOCK.split(html)))
    return html if page.file.src_uri.startswith("laws/") else _with_laws(html)


def on_post_page(html: str, **_: Any) -> str:
    """Give landmarks of the theme one name each, for screen readers."""
    html = _CONTENTS.sub('<nav class="md-nav" role="none"', html)
    return html.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _breakable(html: str) -> str:
    """Let long code and long words outside of code blocks break at punctuation."""
    if html.startswith("<pre"):
        return html
    for long in (_INLINE_CODE, _LONG_WORD):
        html = long.sub(lambda text: _PUNCTUATION.sub(r"\1<wbr>", text[0]), html)
    return _PARAMETER.sub("[<wbr>", html)


def _reference(found: re.Match[str]) -> str:
    name = found[2].rpartition(".")[2] if found[1] else found[2]
    return f'<autoref optional identifier="{found[2]}"><code>{name}</code></autoref>'


def _with_laws(html: str) -> str:
    parts, inside = _TAG.split(html), 0
    for number, part in enumerate(parts):
        if re.match(r"<(?:a|autoref|pre|h\d)\b", part):
            inside += 1
        elif re.match(r"</(?:a|autoref|pre|h\d)>", part):
            inside -= 1
        elif not inside and not part.startswith("<"):
            parts[number] = _LAW.sub(_link, part)
    return "".join(parts)


def _link(found: re.Match[str]) -> str:
    return f'<autoref identifier="{found[0].lower()}">{found[0]}</autoref>'
