"""Read the built site in a headless Chromium, on a wide and a narrow screen, light and dark.

The colors are read on the wide screen only, and everything else in light only, because contrast
depends on the scheme and layout on the width.

    python docs/check_site.py [FOLDER] [PAGE ...]    (default: all pages of site/)

Exit code 1 if axe-core finds a violation, a narrow page scrolls sideways, a wide page clips a
table, a word, a number or a line of a code block is broken inside, a text shows Markdown, or the
text of a diagram is too small.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

_NO_COLORS = {"rules": {"color-contrast": {"enabled": False}}}
_COLORS = {"runOnly": ["color-contrast"]}
SCREENS: tuple[tuple[Literal["light", "dark"], int, dict[str, Any]], ...] = (
    ("light", 1400, {}),
    ("light", 390, _NO_COLORS),
    ("dark", 1400, _COLORS),
)
"""The scheme, the width in pixels, and the rules of axe-core."""
WORDS = (
    *("Redis", "S3", "SSD", "disk", "TTFT", "latency", "throughput", "hit rate", "eviction"),
    *("corruption", "garbled", "leak", "OOM", "hangs", "deadlock", "crashes", "timeout", "sleep"),
    *("preemption", "LoRA", "quantization", "NIXL", "Mooncake", "LMCache", "SGLang", "checksum"),
)
"""Words that people look for; a search must find each of them outside of the API."""
MIN_TEXT_PX = 9
"""Height of the smallest readable text of a diagram."""

_BROKEN_WORDS = r"""() => {
  const broken = new Set(), range = document.createRange();
  const walker = document.createTreeWalker(
    document.querySelector("article"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    for (const word of node.data.matchAll(/[A-Za-z]{2,}|\d+(?:[.,]\d+)*/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (tops.size > 1) broken.add(word[0]);
    }
  }
  return [...broken];
}"""
_BROKEN_BLOCKS = r"""() => {
  const range = document.createRange();
  return [...document.querySelectorAll("article pre code")].filter(code => {
    range.selectNodeContents(code);
    const lines = code.textContent.trimEnd().split("\n").length;
    const height = parseFloat(getComputedStyle(code).lineHeight);
    return range.getBoundingClientRect().height > (lines + 0.8) * height;
  }).map(code => code.textContent.trim().split("\n")[0]);
}"""
_CLIPPED = r"""() => [...document.querySelectorAll("article .scrolling")]
  .filter(part => part.querySelector("table") && part.scrollWidth > part.clientWidth + 1)
  .map(part => part.textContent.trim().split("\n")[0])"""
_MARKDOWN = r"""() => [...document.querySelectorAll("article td, article li, article p")]
  .map(node => node.cloneNode(true)).map(copy => {
    copy.querySelectorAll("code, li, p, td").forEach(part => part.remove());
    return copy.textContent.trim();
  }).filter(text => /\\[|<_*{]|\|\s*:?--|^\|/.test(text)).map(text => text.slice(0, 60))"""
_NOT_THE_THEME = {"exclude": [[".md-code__nav"]]}
"""Buttons that the theme adds to each code block, as landmarks without names."""
_DIAGRAMS = """() => [...document.querySelectorAll("article img[src$='.svg']")].map(
  image => [image.getAttribute("src"), image.src, image.clientWidth])"""


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


def problems(page: Page, rules: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of a page on one screen."""
    if rules is not _COLORS:
        yield from layout_problems(page)
    for found in Axe().run(page, _NOT_THE_THEME, rules).response["violations"]:
        nodes = [node["html"][:120] for node in found["nodes"][:3]]
        yield f"{found['id']}: {found['help']}: {nodes}"


def missing_words(root: Path) -> Iterator[str]:
    """Yield the words that the index of the site's search does not have."""
    index = json.loads((root / "search/search_index.json").read_text("utf-8"))
    texts = [
        f"{one['title']} {one['text']}" for one in index["docs"] if "api/" not in one["location"]
    ]
    for word in WORDS:
        if not re.search(rf"\b{word}\b", " ".join(texts), re.IGNORECASE):
            yield word


def layout_problems(page: Page) -> Iterator[str]:
    """Yield the problems that only the laid-out page shows."""
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        yield "the page scrolls sideways"
    if words := page.evaluate(_BROKEN_WORDS):
        yield f"broken words: {', '.join(words[:8])}"
    if blocks := page.evaluate(_BROKEN_BLOCKS):
        yield f"lines of code blocks break: {', '.join(blocks[:4])}"
    if tables := page.evaluate("innerWidth > 1000") and page.evaluate(_CLIPPED):
        yield f"tables are clipped on a wide screen: {', '.join(tables[:4])}"
    if texts := page.evaluate(_MARKDOWN):
        yield f"text shows Markdown: {', '.join(texts[:4])}"
    for name, source, width in page.evaluate(_DIAGRAMS):
        text = page.request.get(source).text()
        drawn = re.findall(r'viewBox="0 0 (\d+)', text)[0]
        smallest = min(map(float, re.findall(r"font-size: ([\d.]+)px", text)))
        if (pixels := smallest * width / float(drawn)) < MIN_TEXT_PX:
            yield f"{name} has text of {pixels:.1f} px"


def main() -> int:
    """Check all pages and print the problems."""
    folder, *names = sys.argv[1:] or ["site"]
    root = Path(folder)
    pages = names or sorted(p.parent.relative_to(root).as_posix() for p in root.rglob("index.html"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_QuietHandler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    num_problems = len(words := [*missing_words(root)])
    print(*(f"search does not find {word!r}" for word in words), sep="\n", end="\n" * bool(words))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, width, rules in SCREENS:
            page = browser.new_page(
                color_scheme=scheme,
                reduced_motion="reduce",
                viewport={"width": width, "height": 900},
            )
            for name in pages:
                page.goto(f"http://127.0.0.1:{server.server_port}/{name}/", wait_until="load")
                for problem in problems(page, rules):
                    num_problems += 1
                    print(f"{name}, {scheme}, {width} px: {problem}", flush=True)
        browser.close()
    print(f"{len(pages)} pages, {num_problems} problems")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
