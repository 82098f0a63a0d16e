"""The examples of the laws page: an injected fault, and the shortest script that shows it.

The scripts are in ``law_examples.toml``, and the faults in ``tests/mutants``.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import ndiff
from inspect import ismodule
from pathlib import Path

import kvview
from tests.mutants.edits import Base, Variant, read_variants

ROOT = Path(__file__).parents[1]
_DATA = Path(__file__).with_suffix(".toml")
_FAULTS = ROOT / "tests/mutants"
_NO_BASE = Base("", ())  # of texts that are only read
_MODULES = {
    "FileStore": "kvview_reference.tier",
    "GatedComputeStream": "kvview.testing",
    "Namespace": "kvview.tier",
    "Path": "pathlib",
    "ThreadPoolExecutor": "concurrent.futures",
    "UncheckedView": "tests.guard.pools",
    "collect": "gc",
    "copy": "copy",
    "current_thread": "threading",
    "getLogger": "logging",
    "int8": "torch",
    "mkdtemp": "tempfile",
    "raises": "pytest",
    "replace": "dataclasses",
    "sleep": "time",
    "suppress": "contextlib",
    "zeros": "torch",
    **dict.fromkeys(
        (name for name, value in vars(kvview).items() if not ismodule(value)), "kvview"
    ),
}
"""The module of each name that a script may use."""


@dataclass(frozen=True)
class Example:
    """A wrong class, and a way to show its fault.

    Args:
        fault: Name of the class.
        mistake: The fault in words.
        module: Module of the class.
        source: The class, or its difference from the right one, as a Markdown block.
        right: Target of the right class that takes the same calls; empty for a connector.
        body: Calls that fail with the wrong class, and pass with the right one as ``Subject``;
            empty for a connector or one of its halves.
    """

    fault: str
    mistake: str
    module: str
    source: str
    right: str = ""
    body: str = ""

    @property
    def imports(self) -> str:
        """The imports of the body."""
        names = {n.id for n in ast.walk(ast.parse(self.body)) if isinstance(n, ast.Name)}
        found: dict[str, list[str]] = {}
        for name in sorted(names & _MODULES.keys()):
            found.setdefault(_MODULES[name], []).append(name)
        lines = [f"from {m} import {', '.join(names)}\n" for m, names in sorted(found.items())]
        return "".join(sorted(lines, key=lambda line: "kvview" in line))

    @property
    def script(self) -> str:
        """The whole script, or the command that checks a wrong connector."""
        if not self.body:
            option = " --pd" if self.module == "tests.mutants.handoff" else ""
            return f"kvview check {self.module}:{self.fault}{option}\n"
        wrong = f"from {self.module} import {self.fault} as Subject  # not {self.right}"
        return f"{self.imports}{wrong}\n\n{self.body}"


def examples() -> Mapping[str, Example]:
    """Return the example of each law that has one."""
    data = tomllib.loads(_DATA.read_text("utf-8"))
    families = data.pop("families")
    found: dict[str, Example] = {}
    for law, example in sorted(faults(), key=lambda item: len(item[1].source)):
        if law in data and data[law]["fault"] == example.fault:
            row = families[law.partition("-")[0]] | data[law]
            body = f"{row['start']}\n{row['script']}\n"
            found[law] = replace(example, right=row["right"], body=body)
        elif law.startswith(("CONN-", "HAND-")):
            found.setdefault(law, example)
    return found


def faults() -> Iterator[tuple[str, Example]]:
    """Yield each fault with its law."""
    for path in sorted(_FAULTS.rglob("*.txt")):
        folder = path.parent if path.parent.name == "connector" else path.with_suffix("")
        module = ".".join(folder.relative_to(ROOT).parts)
        for variant in read_variants(path, _NO_BASE):
            if variant.name and variant.law:
                yield variant.law, Example(variant.name, variant.what, module, _diff(variant))


def _diff(variant: Variant) -> str:
    lines = []
    for old, new in variant.edits:
        lines += [line for line in ndiff(old.splitlines(), new.splitlines()) if line[0] != "?"]
    return "\n".join(["```diff", *lines, "```"])
