"""Verification of a target and its harness before any check runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvview.errors import ConfigError, line_of
from kvview.targets import is_connector, is_engine_connector, require_connector
from kvview.testing.suites.capability import Capability, Contract, capabilities_of
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
                names = [name for name in vars(protocol) if not name.startswith("_")]
                problems += _lacking([f"{on}.{name}" for name in names], parts)
            for capability in suite.capabilities():
                lacking = _lacking(capability.needs, parts)
                problems += lacking
                absent += [repr(capability.value)] * bool(lacking)
    except Exception as error:
        raise ConfigError(f"{name} cannot make its object: {line_of(error)}") from error
    if absent:
        problems.append(f"define them, or declare their absence: lacks = {{{', '.join(absent)}}}")
    if problems:
        raise ConfigError(f"{name}: {'; '.join(problems)}")
    return suite.contract, frozenset(suite.capabilities())


def _lacking(needs: Iterable[str], parts: Mapping[str, object]) -> list[str]:
    """Name the methods and attributes that objects lack."""
    found = []
    for need in needs:
        on, _, name = need.partition(".")
        if not hasattr(parts[on], name):
            found.append(f"{type(parts[on]).__name__} lacks {name}")
    return found
