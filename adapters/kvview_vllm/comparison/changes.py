"""The changes between two releases to the parts that a connector uses, from their sources.

1. A connector that does not import vLLM, a kvview connector for example, uses no parts.
2. An attribute is matched by its name, so a read from an object of another class with a field
   of that name is reported as well. Only ``self`` is known to be the connector.
3. ``breaks`` marks code that fails unless it is changed; the author examines the rest.
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
    """The changes to the parts that a connector uses.

    Args:
        target: ``path/to/file.py:Class`` or ``package.module:Class``; one of vLLM's own is
            taken from the old release.
        old: The sources of a release.
        new: The sources of a later release.

    Returns:
        Changes by class, the base class first; breaking changes are marked.

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
            with_module = "" if has_name(new, module, None) else " with its module"
            yield Change(module, name or "", f"removed{with_module}, but imported", True, where)


def _base(source: ConnectorSource, old: Path, new: Path) -> Iterator[Change]:
    before, after = members(old, BASE), members(new, BASE)
    for name, member in after.items():
        earlier = before.get(name)
        if name in source.overrides:
            function, where = source.overrides[name]
            if earlier is None and not name.startswith("__"):
                text = f"new in the base class: now called as {member.text}"
                text, breaks = _fit(text, function, member)
                yield Change(BASE, name, text, breaks, where)
            elif earlier is not None and earlier.text != member.text:
                text, breaks = _fit(f"{earlier.text} is now {member.text}", function, member)
                yield Change(BASE, name, text, breaks, where)
        elif member.is_abstract and (earlier is None or not earlier.is_abstract):
            text = f"now abstract: the class cannot be built without {name}{member.text}"
            yield Change(BASE, name, text, True, "")
        elif earlier is not None and earlier.text != member.text and name in source.reads_of_self:
            text = f"{earlier.text} is now {member.text}"
            yield Change(BASE, name, text, False, source.reads_of_self[name])
    added = [n for n in after if n not in before and n[0] != "_" and n not in source.overrides]
    if hooks := [name for name in added if after[name].function and not after[name].is_abstract]:
        yield Change(BASE, "*", f"new optional hooks: {', '.join(hooks)}", False, "")
    for name in before.keys() - after.keys():
        if name in source.overrides:
            text = "removed from the base class: vLLM no longer calls the override"
            text += _renamed(name, before, after)
            yield Change(BASE, name, text, False, source.overrides[name][1])
        elif name in source.reads_of_self and name not in source.defines:
            breaks = name not in source.guarded
            text = "removed" + _renamed(name, before, after)
            yield Change(BASE, name, text, breaks, source.reads_of_self[name])


def _fit(text: str, override: object, member: Member) -> tuple[str, bool]:
    """Whether an override takes the base class's arguments, and a text that names the others."""
    assert isinstance(override, ast.FunctionDef | ast.AsyncFunctionDef), "a method is overridden"
    if member.function is None:
        return text, False
    wanted, taken = parameters(member.function), parameters(override)
    given = [name for name in wanted if not name.startswith("*")]
    own = [name for name in taken if not name.startswith("*")]
    takes_more = any(name.startswith("*") and name != "*" for name in taken)
    lacks = given[len(own) :] if not takes_more else []
    extra = [name for name in own[len(given) :] if not name.endswith("=")]
    if lacks:
        text += f"; the override takes no {', '.join(name.rstrip('=') for name in lacks)}"
    if extra:
        text += f"; the override requires {', '.join(extra)}"
    return text, bool(extra) or any(not name.endswith("=") for name in lacks)


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
            is_sure = not is_elsewhere and name not in source.defines | source.guarded
            yield Change(owner, name, "removed" + _renamed(name, before, after), is_sure, where)
        elif member.text and later.text and member.text != later.text:
            yield Change(owner, name, f"{member.text} is now {later.text}", False, where)


def _renamed(name: str, before: dict[str, Member], after: dict[str, Member]) -> str:
    """A guess at the new name: a new member of the same kind with a similar name."""
    new = [
        other
        for other, member in after.items()
        if other not in before and (member.function is None) == (before[name].function is None)
    ]
    close = difflib.get_close_matches(name, new, 1, _ALIKE)
    return f"; new, with a similar name: {close[0]}" if close else ""
