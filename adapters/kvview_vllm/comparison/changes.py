"""What changed between two releases of what a connector uses, by their sources alone.

1. A connector that imports nothing of vLLM, a kvview connector for example, uses nothing.
2. An attribute is matched by its name: what is read off an object of another class with a
   field of that name is told as well. Only ``self`` is known to be the connector.
3. ``breaks`` is said of what fails as it is written; all else is for the author to look at.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from pathlib import Path

from kvview.testing.upgrade import Change
from kvview_vllm.comparison.connector_source import ConnectorSource, read_connector
from kvview_vllm.comparison.surfaces import BASE, WATCHED, Member, has_name, members, parameters

_ALIKE = 0.6


def changes(target: str, old: Path, new: Path) -> list[Change]:
    """What changed, of what a connector uses.

    Args:
        target: ``path/to/file.py:Class`` or ``package.module:Class``; one of vLLM's own is
            taken as the old release has it.
        old: The sources of a release.
        new: Of a later one.

    Returns:
        Changes by class, the base class first; what breaks is marked.

    Raises:
        ConfigError: The source of the target is not found.
    """
    source = read_connector(target, old)
    if not source.imports:
        return []
    found = [*_imports(source, old, new), *_base(source, old, new)]
    for owner in WATCHED:
        if owner != BASE:
            found += _owner(source, owner, members(old, owner), members(new, owner), new)
    return found


def _imports(source: ConnectorSource, old: Path, new: Path) -> Iterator[Change]:
    for (module, name), where in source.imports.items():
        if has_name(old, module, name) and not has_name(new, module, name):
            what = "is gone" if has_name(new, module, None) else "is gone with its module"
            yield Change(module, name or "", f"what is imported {what}", True, where)


def _base(source: ConnectorSource, old: Path, new: Path) -> Iterator[Change]:
    before, after = members(old, BASE), members(new, BASE)
    for name, member in after.items():
        earlier = before.get(name)
        if name in source.overrides:
            function, where = source.overrides[name]
            if earlier is None and not name.startswith("__"):
                told = f"new in the base class: it is called from now, as {member.text}"
                told, breaks = _fit(told, function, member)
                yield Change(BASE, name, told, breaks, where)
            elif earlier is not None and earlier.text != member.text:
                told, breaks = _fit(f"{earlier.text} is now {member.text}", function, member)
                yield Change(BASE, name, told, breaks, where)
        elif member.is_abstract and (earlier is None or not earlier.is_abstract):
            told = f"now abstract: the class cannot be built without {name}{member.text}"
            yield Change(BASE, name, told, True, "")
        elif earlier is not None and earlier.text != member.text and name in source.reads_of_self:
            told = f"{earlier.text} is now {member.text}"
            yield Change(BASE, name, told, False, source.reads_of_self[name])
    came = [n for n in after if n not in before and n[0] != "_" and n not in source.overrides]
    if hooks := [name for name in came if after[name].function and not after[name].is_abstract]:
        told = f"new hooks, which need not be there: {', '.join(hooks)}"
        yield Change(BASE, "*", told, False, "")
    for name in before.keys() - after.keys():
        if name in source.overrides:
            told = "gone from the base class: vLLM calls yours no more" + _renamed(
                name, before, after
            )
            yield Change(BASE, name, told, False, source.overrides[name][1])
        elif name in source.reads_of_self and name not in source.defines:
            breaks = name not in source.asks
            told = "is gone" + _renamed(name, before, after)
            yield Change(BASE, name, told, breaks, source.reads_of_self[name])


def _fit(told: str, override: object, member: Member) -> tuple[str, bool]:
    """Whether an override takes what the base class does: by position, else by name."""
    assert isinstance(override, ast.FunctionDef | ast.AsyncFunctionDef), "a method is overridden"
    if member.function is None:
        return told, False
    wanted, taken = parameters(member.function), parameters(override)
    given = [name for name in wanted if not name.startswith("*")]
    own = [name for name in taken if not name.startswith("*")]
    takes_more = any(name.startswith("*") and name != "*" for name in taken)
    lacks = given[len(own) :] if not takes_more else []
    asks = [name for name in own[len(given) :] if not name.endswith("=")]
    if lacks:
        told += f"; yours takes no {', '.join(name.rstrip('=') for name in lacks)}"
    if asks:
        told += f"; yours asks for {', '.join(asks)}"
    return told, bool(asks) or any(not name.endswith("=") for name in lacks)


def _owner(
    source: ConnectorSource,
    owner: str,
    before: dict[str, Member],
    after: dict[str, Member],
    new: Path,
) -> Iterator[Change]:
    for name, member in before.items():
        if name not in source.reads or name.startswith("__"):
            continue
        where, later = source.reads[name], after.get(name)
        if later is None:
            is_elsewhere = any(name in members(new, other) for other in WATCHED)
            is_sure = not is_elsewhere and name not in source.defines | source.asks
            told = "is gone" + _renamed(name, before, after)
            yield Change(owner, name, told, is_sure, where)
        elif member.text and later.text and member.text != later.text:
            yield Change(owner, name, f"{member.text} is now {later.text}", False, where)


def _renamed(name: str, before: dict[str, Member], after: dict[str, Member]) -> str:
    """A guess at the new name: what came, of the same kind, with a name that is alike."""
    came = [
        other
        for other, member in after.items()
        if other not in before and (member.function is None) == (before[name].function is None)
    ]
    close = difflib.get_close_matches(name, came, 1, _ALIKE)
    return f"; new there, and alike: {close[0]}" if close else ""
