"""The examples of the laws page: an injected fault, and the shortest script that shows it.

The scripts are in ``law_examples.toml``, and the faults in ``tests/mutants``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import ndiff
from pathlib import Path

from tests.mutants.edits import Base, Variant, read_variants

ROOT = Path(__file__).parents[1]
_DATA = Path(__file__).with_suffix(".toml")
_FAULTS = ROOT / "tests/mutants"
_NO_BASE = Base("", ())  # of texts that are only read


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
        imports: The imports of the body.
    """

    fault: str
    mistake: str
    module: str
    source: str
    right: str = ""
    body: str = ""
    imports: str = ""

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
            found[law] = replace(
                example, right=row["right"], body=body, imports=row.get("imports", "")
            )
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
