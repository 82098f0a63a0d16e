"""Verification of a target and its harness before any check runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

from kvview.errors import ConfigError, line_of
from kvview.targets import is_connector, is_engine_connector, require_connector
from kvview.testing.suites.capability import (
    Capability,
    Contract,
    Need,
    capabilities_of,
    members,
)
from kvview.testing.suites.conformance import Conformance


def inspect_target(target: Any) -> tuple[Contract, frozenset[Capability]]:
    """Verify a target, and the properties of its objects on which the checks rely.

    Args:
        target: A class of connectors, or a suite.

    Returns:
        The contract, and the capabilities that are checked.

    Raises:
        ConfigError: The target cannot be checked; the message lists all faults.
    """
    name = getattr(target, "__qualname__", None) or repr(target)
    if isinstance(target, type) and issubclass(target, Conformance):
        return inspect_suite(target)
    if is_connector(target):
        require_connector(target, f"target {name}")
    elif not is_engine_connector(target):
        raise ConfigError(
            f"{name} is not a class of connectors, stores or cache policies, and not derived from "
            "a suite such as kvview.testing.PoolConformance (docs/kit.md)"
        )
    return "connector", frozenset()


def inspect_suite(suite: type[Conformance]) -> tuple[Contract, frozenset[Capability]]:
    """Verify that a suite makes an object with all methods on which the checks rely.

    Returns:
        The contract of the suite, and its capabilities.

    Raises:
        ConfigError: ``make`` raises, the object lacks a method, or ``lacks`` names no capability.
            The message lists all faults.
    """
    name, known = suite.__qualname__, capabilities_of(suite.contract)
    if unknown := [one for one in suite.lacks if one not in known]:
        raise ConfigError(
            f"{name}.lacks names {', '.join(sorted(unknown))}; the capabilities of a "
            f"{suite.contract} are {', '.join(known)}"
        )
    problems: list[str] = []
    absent: list[str] = []
    try:
        with suite().parts() as parts:
            for on, protocol in suite.protocols.items():
                for need in members(on, protocol):
                    problems += _problems_with(need, parts[on])
            for capability in suite.capabilities():
                found = [_problems_with(need, parts[need.on]) for need in capability.needs]
                problems += chain(*found)
                absent += [repr(capability.value)] * any(found)
    except Exception as error:
        raise ConfigError(f"{name} cannot make its object: {line_of(error)}") from error
    if absent:
        problems.append(f"define them, or declare their absence: lacks = {{{', '.join(absent)}}}")
    if problems:
        raise ConfigError(f"{name}: {'; '.join(problems)}")
    return suite.contract, frozenset(suite.capabilities())


def _problems_with(need: Need, owner: object) -> list[str]:
    shown = type(owner).__name__
    shown = shown if need.on == "suite" else f"{need.on} {shown}"
    if not hasattr(owner, need.name):
        what = need.name if need.num_args is None else f"{need.name}()"
        return [f"{shown} lacks {what}"]
    if need.num_args is None:
        return []
    method = getattr(owner, need.name)
    if not callable(method):
        return [f"{shown}.{need.name} cannot be called"]
    return _signature_problems(method, need, shown)


def _signature_problems(method: Callable[..., object], need: Need, shown: str) -> list[str]:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    try:
        signature.bind(*[None] * (need.num_args or 0), **dict.fromkeys(need.keywords))
    except TypeError:
        wanted = f"{need.num_args} positional arguments"
        if need.keywords:
            wanted += f" and {'=, '.join(need.keywords)}="
        return [f"{shown}.{need.name}{signature} must take {wanted}"]
    return []
