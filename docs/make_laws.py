"""Write ``docs/laws/``: the laws of the contract, one page for each family.

    python docs/make_laws.py           # write the pages
    python docs/make_laws.py --check   # exit 1 if a page is not up to date

Laws come from ``kvview/laws.toml``, and each has an example that breaks it. The rules of reference
and adapter are in the docstrings of their modules, and on no page.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from docs.law_examples import Example, examples
from docs.parts import ROOT, with_parts, write
from kvview.laws import laws as laws_of_the_contract
from kvview.testing import all_checks
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
_LAW = re.compile(r"^- ([A-Z]+-\d+) (.*(?:\n  .*)*)", re.MULTILINE)
_NAMED = re.compile(r"(?<![A-Za-z0-9_-])[A-Z]{2,}-\d+(?![\d-])")
_IN_A_NAME = re.compile(r"\bdef test_([a-z]+)_(\d+)(?=[_(])")
_NOT_ABOUT_ONE_LAW = ("tests/house/test_laws.py", "tests/mutants/")


@dataclass
class Law:
    """A law or rule, with the checks and tests that name it.

    Args:
        number: ``"POOL-4"`` for example.
        text: In Markdown.
        path: The file that defines it.
        title: Empty for a rule of the reference or the adapter.
        hint: The usual remedy, or empty.
    """

    number: str
    text: str
    path: str
    title: str = ""
    hint: str = ""
    checks: list[str] = field(default_factory=list)
    tests: set[str] = field(default_factory=set)

    @property
    def family(self) -> str:
        """The letters of its number."""
        return self.number.partition("-")[0]

    @property
    def head(self) -> str:
        """The number, with the title if there is one."""
        return f"{self.number} {self.title}".strip()


def laws() -> dict[str, Law]:
    """Return every law and rule, in the order of the pages.

    Raises:
        ValueError: Two laws have the same number.
    """
    found = {
        number: Law(number, law.text, "kvview/laws.toml", law.title, law.hint)
        for number, law in laws_of_the_contract().items()
    }
    for path, tree in _trees("reference", "adapters"):
        for number, text in _LAW.findall(ast.get_docstring(tree) or ""):
            if number in found:
                raise ValueError(f"{number} is defined in {found[number].path} and in {path}")
            found[number] = Law(number, _markdown(" ".join(text.split())), path)
    for check in all_checks():
        if check.law in found:
            found[check.law].checks.append(check.name)
    for file in sorted((ROOT / "tests").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith(_NOT_ABOUT_ONE_LAW):
            for number in named_laws(file.read_text(encoding="utf-8")) & found.keys():
                found[number].tests.add(path)
    return dict(sorted(found.items(), key=_place))


def _place(item: tuple[str, Law]) -> tuple[int, str, int]:
    family, _, number = item[0].partition("-")
    rank = [*LAW_FAMILIES, family].index(family)
    return rank, family, int(number)


def named_laws(source: str) -> set[str]:
    """Return the laws that a module names, as ``POOL-1`` or as ``test_pool_1_...``."""
    in_names = _IN_A_NAME.findall(source)
    return {*_NAMED.findall(source), *(f"{name.upper()}-{number}" for name, number in in_names)}


def _trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def pages(all_laws: Iterable[Law]) -> Mapping[Path, str]:
    """Return the text of each page: one for each family of laws, and the list."""
    families: defaultdict[str, list[Law]] = defaultdict(list)
    for law in all_laws:
        if law.title:
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
        text += f'\n<a id="{law.number.lower()}"></a>\n\n## {law.head}\n\n{law.text}\n'
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


def _markdown(text: str) -> str:
    text = re.sub(r":[a-z]+:`~?([^`]+)`", lambda m: f"``{m[1].removeprefix('kvview.')}``", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.exit(write(pages(laws().values())))
