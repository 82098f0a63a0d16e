"""Write ``docs/laws.md``: the laws of the contract, and the rules of the reference and the adapter.

    python docs/make_laws.py           # write the page
    python docs/make_laws.py --check   # exit 1 if the page is not up to date

Laws come from ``kvview/laws.toml``, and rules from the module docstrings of reference and adapter.
Each is listed with its checks, injected faults and tests, and with an example that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from docs.law_examples import Example, examples, faults
from docs.parts import ROOT, with_parts, write
from kvview.laws import laws as laws_of_the_contract
from kvview.testing import all_checks

PAGE = ROOT / "docs/laws.md"

_CONTRACT = ("KEY", "POOL", "GEO", "EVENT", "OFF", "XFER", "CONN", "HAND", "GUARD", "TIER")
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
        path: The module that the law is about.
        title: Empty for a rule of the reference or the adapter.
        hint: The usual remedy, or empty.
    """

    number: str
    text: str
    path: str
    title: str = ""
    hint: str = ""
    checks: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
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
    """Return every law and rule, in the order of the page.

    Raises:
        ValueError: Two laws have the same number.
    """
    found = {
        number: Law(number, law.text, law.path, law.title, law.hint)
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
    for number, fault in faults():
        if number in found:
            found[number].faults.append(fault.fault)
    for file in sorted((ROOT / "tests").rglob("*.py")):
        path = file.relative_to(ROOT).as_posix()
        if not path.startswith(_NOT_ABOUT_ONE_LAW):
            for number in named_laws(file.read_text(encoding="utf-8")) & found.keys():
                found[number].tests.add(path)
    return dict(sorted(found.items(), key=_place))


def _place(item: tuple[str, Law]) -> tuple[int, str, int]:
    family, _, number = item[0].partition("-")
    rank = _CONTRACT.index(family) if family in _CONTRACT else len(_CONTRACT)
    return rank, family, int(number)


def named_laws(source: str) -> set[str]:
    """Return the laws that a module names, as ``POOL-1`` or as ``test_pool_1_...``."""
    in_names = _IN_A_NAME.findall(source)
    return {*_NAMED.findall(source), *(f"{name.upper()}-{number}" for name, number in in_names)}


def _trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def page(all_laws: Iterable[Law]) -> str:
    """Return the text of ``docs/laws.md``."""
    families: defaultdict[str, list[Law]] = defaultdict(list)
    for law in all_laws:
        families[law.family].append(law)
    shown = examples()
    lines = []
    for name, family in families.items():
        paths = ", ".join(_link(path) for path in dict.fromkeys(law.path for law in family))
        lines += [f"- **{name}** ({paths})"]
        lines += [f"    - [{law.head}](#{law.number.lower()})" for law in family if law.title]
        if untitled := [f"[{law.head}](#{law.number.lower()})" for law in family if not law.title]:
            lines.append(f"    - {', '.join(untitled)}")
    for name, family in families.items():
        lines += ["", f"## {name}"]
        for law in family:
            anchor = f'<a id="{law.number.lower()}"></a>'
            lines += ["", anchor, "", f"### {law.head}", "", law.text, ""]
            if law.hint:
                lines += [f"*Usual remedy:* {law.hint}", ""]
            if example := shown.get(law.number):
                lines += _example(example)
            rows = [f"- {kind}: {', '.join(names)}" for kind, names in _named_by(law) if names]
            lines += ['<details markdown="1"><summary>Module, checks and tests</summary>', ""]
            lines += [*rows, "", "</details>"]
    return with_parts(PAGE, laws="\n".join(lines))


def _example(example: Example) -> list[str]:
    language = "python" if example.body else "sh"
    return [
        f'<details markdown="1"><summary>Broken by {example.fault}</summary>',
        *("", example.source),
        *("", f"```{language}", example.script.rstrip(), "```"),
        *("", "</details>", ""),
    ]


def _named_by(law: Law) -> Iterator[tuple[str, list[str]]]:
    yield "module", [_link(law.path)]
    yield "checks", [f"`{name}`" for name in sorted(set(law.checks))]
    yield "injected faults", [f"`{name}`" for name in sorted(law.faults)]
    yield "tests", [_link(path) for path in sorted(law.tests)]


def _link(path: str) -> str:
    return f"[`{path}`](../{path})"


def _markdown(text: str) -> str:
    text = re.sub(r":[a-z]+:`~?([^`]+)`", lambda m: f"``{m[1].removeprefix('kvview.')}``", text)
    return text.replace("``", "`")


if __name__ == "__main__":
    sys.exit(write({PAGE: page(laws().values())}))
