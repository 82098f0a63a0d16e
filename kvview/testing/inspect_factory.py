"""Verification of a target and its harness before any check runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

from kvview.errors import ConfigError, line_of
from kvview.targets import is_connector, is_engine_connector, require_connector
from kvview.testing.conformance import Conformance
from kvview.testing.harness import (
    MIN_CAPACITY,
    SUBJECTS,
    Capability,
    Contract,
    Factory,
    Need,
    capabilities_of,
    members,
    required_by,
)

_SMALLEST = {
    "capacity": MIN_CAPACITY,
}


def inspect_factory(
    factory: Factory, options: Mapping[str, Any] | None = None
) -> tuple[Contract, frozenset[Capability]]:
    """Call a factory once, and verify the properties on which the checks rely.

    Args:
        factory: A factory of harnesses, or a class of connectors or stores.
        options: Options of a class of stores.

    Returns:
        The contract of the harness, and the declared capabilities.

    Raises:
        ConfigError: The factory raises or does not return a harness, or its harness lacks a method,
            has a method with other arguments, is too small, or declares an unknown capability. The
            message lists all faults.
    """
    name = getattr(factory, "__qualname__", None) or repr(factory)
    if isinstance(factory, type) and issubclass(factory, Conformance):
        return inspect_suite(factory)
    if is_engine_connector(factory):
        return "connector", frozenset()
    if is_connector(factory):
        require_connector(factory, f"target {name}")
        return "connector", frozenset()
    if not callable(factory):
        raise ConfigError(f"{name} is not a factory, because it cannot be called")
    try:
        harness: Any = factory()
    except Exception as error:
        raise ConfigError(f"factory {name} raises {type(error).__name__}: {error}") from error
    contract = _contract_of(harness, name)
    problems: list[str] = []
    capabilities = _capabilities_of(harness, contract, problems)
    needs = required_by(contract)
    for capability in capabilities:
        needs += capability.needs
    for need in dict.fromkeys(needs):
        owner = harness if need.on == "harness" else getattr(harness, need.on)
        problems += _problems_with(need, owner)
    if not problems:
        problems += _too_small(harness, contract)
    if problems:
        raise ConfigError(
            f"factory {name} makes a {type(harness).__name__}, which is not a {contract} harness: "
            + "; ".join(problems)
        )
    return contract, frozenset(capabilities)


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


def _contract_of(harness: object, name: str) -> Contract:
    for contract, (subject, *_) in SUBJECTS.items():
        if hasattr(harness, subject):
            return contract
    wanted = ", ".join(
        f"{subject!r} for {contract}" for contract, (subject, *_) in SUBJECTS.items()
    )
    raise ConfigError(
        f"factory {name} returns {type(harness).__name__}, which is not a harness; a harness "
        f"needs {wanted}"
    )


def _capabilities_of(harness: object, contract: Contract, problems: list[str]) -> list[Capability]:
    declared: Iterable[object] = getattr(harness, "capabilities", None) or ()
    if not hasattr(harness, "capabilities"):
        problems.append("it lacks 'capabilities' (may be empty)")
    known = capabilities_of(contract)
    wrong = [name for name in declared if name not in known]
    if wrong:
        problems.append(
            f"it declares {', '.join(sorted(map(str, wrong)))}; the capabilities of a {contract} "
            f"are {', '.join(known)}"
        )
    return [capability for capability in known if capability in list(declared)]


def _problems_with(need: Need, owner: object) -> list[str]:
    shown = type(owner).__name__
    shown = shown if need.on in ("harness", "suite") else f"{need.on} {shown}"
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


def _too_small(harness: object, contract: Contract) -> list[str]:
    problems = []
    for name, smallest in _SMALLEST.items():
        if Need("harness", name, None) in required_by(contract):
            size = getattr(harness, name)
            if type(size) is not int or size < smallest:
                problems.append(f"{name} must be an int of at least {smallest}, got {size!r}")
    return problems
