"""The code that the author of a connector wrote, and its statements that no seed reached.

The code of a connector is each class and each function of its author that ran in part, or that a
line that ran names. Other code in the same files (a second connector, a test, a command) does not
count as code of the connector.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from kvview.connector.hooks import TARGET_PREFIX
from kvview.targets import is_connector
from kvview.testing.connector.exercised.coverage import FEWEST_SEEDS
from kvview.testing.connector.exercised.lines import Lines, Region, regions_of, why_not
from kvview.testing.results.law_broken import Gap, Unrun

_LIBRARIES = {"site-packages", "dist-packages"}
_DEFINITION = re.compile(r"\s*(async|def|class|from|import|@)")
_FUNCTION = re.compile(r"\s*(async\s+)?def\b")
_TO_REACH = (
    "to reach the code that never ran: give the option of a limit a size (--option "
    "NAME='{blocks}/4'), set the option that leads there, or remove conditions that are never "
    "true; or name lines that cannot run, with a reason, in --expected"
)


class AuthorCode:
    """The files and functions of a connector's author, and the lines that ran, seed after seed.

    Args:
        connector_class: The connector; the code of a connector of an engine is not measured.
    """

    def __init__(self, connector_class: type[Any]) -> None:
        self._connector_class = connector_class
        self.ran: dict[str, set[int]] = {}
        """The lines that ran, by file."""
        self._why_not = why_not()
        modules = {sys.modules.get(base.__module__) for base in connector_class.__mro__}
        named = [one for module in modules if module for one in list(vars(module).values())]
        kinds = [connector_class, *named] if is_connector(connector_class) else []
        folders = {
            folder
            for kind in kinds
            if isinstance(kind, type) and any(_is_kvviews(base.__module__) for base in kind.__mro__)
            for base in kind.__mro__
            if (folder := _folder_of(base)) and (base is connector_class or not _is_library(folder))
        }
        self._modules = {
            str(path): (module, folder)
            for module in list(sys.modules.values())
            if (path := _path_of(module)) is not None and not _is_kvviews(module.__name__)
            for folder in folders
            if path.is_relative_to(folder) and not _is_library(path.relative_to(folder))
        }
        self.is_complete = not self._modules
        """Whether further seeds need not be measured, because all code ran."""

    @property
    def paths(self) -> list[str]:
        """Return the author's files; empty if the code is kvview's own or has no file."""
        return sorted(self._modules)

    def add(self, lines: Lines) -> None:
        """Add the lines that ran in the process of a seed."""
        has_new_lines = False
        for path, new in lines.items():
            known = self.ran.setdefault(path, set())
            has_new_lines |= not known.issuperset(new)
            known.update(new)
        if has_new_lines:
            vars(self).pop("unrun", None)
            vars(self).pop("num_statements", None)
            self.is_complete = not any(one.is_judged for one in self.unrun)

    @cached_property
    def num_statements(self) -> int:
        """Number of statements in the functions of the code; 0 without a measurement."""
        return sum(len(region.statements) for _, _, region, _ in self._functions())

    @cached_property
    def unrun(self) -> Sequence[Unrun]:
        """Statements that no seed reached, in the order of the files."""
        return [
            one
            for path, name, region, is_called in self._functions()
            for one in self._unrun_in(path, name, region, is_called)
        ]

    def gaps(self, num_seeds: int) -> list[Gap]:
        """Return the statements that a complete check must reach, each as a named gap.

        A few seeds reach few statements. With few seeds, the only possible gap is therefore a small
        number of statements that ran.

        Args:
            num_seeds: Number of seeds that were run.
        """
        if num_seeds >= FEWEST_SEEDS:
            return [_gap(one) for one in self.unrun if one.is_judged]
        num_unrun = sum(one.num_statements for one in self.unrun)
        if 2 * num_unrun <= self.num_statements:
            return []
        text = f"{self.num_statements - num_unrun} of {self.num_statements} statements ran"
        return [Gap("code", f"{text} in {num_seeds} seeds")]

    def notes(self, gaps: Sequence[Gap]) -> Iterator[str]:
        """Report that the code could not be measured, or how more code is reached.

        Args:
            gaps: The gaps that are reported.
        """
        if self._modules and self._why_not is not None:
            yield f"the code that never ran cannot be listed: {self._why_not}"
        elif {gap.name for gap in gaps}.intersection(one.place for one in self.unrun):
            yield _TO_REACH
        elif any(gap.name == "code" for gap in gaps):
            yield f"run at least {FEWEST_SEEDS} --seeds to list the lines that never ran"

    def _functions(self) -> Iterator[tuple[str, str, Region, bool]]:
        """Yield file, name and statements of each function, and whether the code calls it."""
        ran = {path: lines for path, lines in self.ran.items() if path in self._modules}
        if not ran:
            return
        lines = {path: Path(path).read_text(encoding="utf-8").splitlines() for path in ran}
        used = {word for path in ran for word in _names_used(lines[path], ran[path])}
        kinds = [*self._kinds(ran)]
        called = used | self._hooks(kinds)
        replaced = self._replaced(kinds, used)
        for path, regions in regions_of(ran).items():
            module = self._modules[path][0].__name__
            running = {name for name, region in regions.items() if region.executed}
            owners = running | {name.rpartition(".")[0] for name in running} - {""}
            for name, region in regions.items():
                owner, _, function = name.rpartition(".")
                is_named = (owner.rpartition(".")[2] or function) in used
                if name in running or owner in owners or is_named:
                    is_called = function in called and (module, name) not in replaced
                    yield path, name, region, is_called or function.startswith("__")

    def _unrun_in(self, path: str, name: str, region: Region, is_called: bool) -> Iterator[Unrun]:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        for group in region.unrun():
            first = group[0]
            while group[0] == region.statements[0] and not _FUNCTION.match(lines[first - 1]):
                first -= 1  # none of the function ran
            is_an_error = lines[group[-1] - 1].lstrip().startswith("raise")
            yield Unrun(
                f"{Path(path).relative_to(self._modules[path][1])}:{first}",
                name,
                len(group),
                lines[first - 1].strip(),
                bool(region.missing.intersection(group)) and is_called and not is_an_error,
            )

    def _kinds(self, ran: Lines) -> Iterator[type[Any]]:
        """Yield the classes in the files of which lines ran."""
        for path in ran:
            module = self._modules[path][0]
            for found in list(vars(module).values()):
                if isinstance(found, type) and found.__module__ == module.__name__:
                    yield found

    def _hooks(self, kinds: Collection[type[Any]]) -> set[str]:
        """Return the names of methods that override a method of another author's base class."""
        own = {module.__name__ for module, _ in self._modules.values()}
        bases = {base for kind in kinds for base in kind.__mro__ if base is not object}
        return {name for base in bases if base.__module__ not in own for name in vars(base)}

    def _replaced(
        self, kinds: Collection[type[Any]], used: Collection[str]
    ) -> set[tuple[str, str]]:
        """Return the methods, by module and name, of a base class that only exists as a base.

        A method is included if a class of the author overrides it, and no line that ran uses the
        base class.
        """
        return {
            (base.__module__, f"{base.__qualname__}.{method}")
            for kind in kinds
            for base in kind.__mro__[1:]
            if base is not self._connector_class and base.__name__ not in used
            for method in vars(base).keys() & vars(kind).keys()
        }


def _gap(unrun: Unrun) -> Gap:
    return Gap(unrun.place, f"{unrun.place} in {unrun.function} never ran: {unrun.source}")


def _is_library(path: Path) -> bool:
    return not _LIBRARIES.isdisjoint(path.parts)


def _folder_of(kind: type[Any]) -> Path | None:
    """Return the folder of an author's modules: the top package's folder, or else the file's.

    Returns:
        The folder; None for a class of kvview or of Python.
    """
    module = sys.modules.get(kind.__module__)
    path = _path_of(module)
    if module is None or path is None or _is_kvviews(module.__name__):
        return None
    package = module.__name__.partition(".")[0]
    if package in sys.stdlib_module_names:
        return None
    top = _path_of(sys.modules.get(package)) if "." in module.__name__ else None
    return (top or path).parent


def _is_kvviews(module_name: str) -> bool:
    """Whether a module is part of kvview; the names of modules of authors start with a prefix."""
    return module_name.startswith("kvview") and not module_name.startswith(TARGET_PREFIX)


def _path_of(module: object) -> Path | None:
    name = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
    path = Path(name) if isinstance(name, str) else None
    return path if path is not None and path.suffix == ".py" and path.exists() else None


def _names_used(lines: list[str], ran: Collection[int]) -> Iterator[str]:
    """Yield the names in lines that ran; definitions are excluded, because they call nothing."""
    for number in ran:
        if number <= len(lines) and not _DEFINITION.match(lines[number - 1]):
            yield from re.findall(r"\w+", lines[number - 1])
