"""Write ``docs/laws/``: the laws of the contract, one page for each family.

    python docs/make_laws.py           # write the pages
    python docs/make_laws.py --check   # exit 1 if a page is not up to date

Laws come from ``kvview/laws.toml``, and each has an example that breaks it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from docs.law_examples import Example, examples
from docs.parts import ROOT, with_parts, write
from kvview.laws import Law, laws, titled
from kvview.urls import LAW_FAMILIES

PAGES = ROOT / "docs/laws"

_HEAD = """# {title}

<!-- Written by docs/make_laws.py from kvview/laws.toml. -->
"""
_SCRIPTS = """
If you unfold a mistake, you see a script that fails because of it. You can run it in a checkout.
{how}
"""
_HOW_TO_PASS = "If you import the class in the comment instead, it passes."
_DIFF = "For a wrong connector it is a command, shown with the wrong lines."


def pages() -> Mapping[Path, str]:
    """Return the text of each page: one for each family of laws, and the list."""
    families: defaultdict[str, list[Law]] = defaultdict(list)
    for law in laws().values():
        families[law.family].append(law)
    shown = examples()
    listed = [
        f"- [{name}]({name.lower()}.md), {LAW_FAMILIES[name]}: {len(family)} laws"
        for name, family in families.items()
    ]
    index = PAGES / "index.md"
    texts = {
        PAGES / f"{name.lower()}.md": _page(name, laws, shown) for name, laws in families.items()
    }
    return texts | {index: with_parts(index, families="\n".join(listed))}


def _page(name: str, family: Iterable[Law], shown: Mapping[str, Example]) -> str:
    text = _HEAD.format(title=f"{name}: {LAW_FAMILIES[name]}")
    its = [shown[law.number] for law in family if law.number in shown]
    if its:
        bodies = {bool(example.body) for example in its}
        how = [
            line for is_body, line in ((True, _HOW_TO_PASS), (False, _DIFF)) if is_body in bodies
        ]
        text += _SCRIPTS.format(how=" ".join(how))
    for law in family:
        text += f'\n<a id="{law.number.lower()}"></a>\n\n## {titled(law.number)}\n\n{law.text}\n'
        if law.hint:
            text += f"\n*Usual remedy:* {law.hint}\n"
        if example := shown.get(law.number):
            text += _example(example)
    return text


def _example(example: Example) -> str:
    mistake = f"Mistake: {example.mistake[0].lower()}{example.mistake[1:]}"
    head = f'\n<details markdown="1"><summary>{mistake}</summary>\n\n'
    if example.body:
        return f"{head}```python\n{example.script.rstrip()}\n```\n\n</details>\n"
    return f"{head}{example.source}\n\n```sh\n{example.script.rstrip()}\n```\n\n</details>\n"


if __name__ == "__main__":
    sys.exit(write(pages()))
