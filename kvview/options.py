"""A connector's options, from the user's text to a checked pydantic model.

``import kvview`` does not import this module, because pydantic takes longer to import than kvview.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvview.errors import ConfigError, line_of

MadeT = TypeVar("MadeT")
OptionsT = TypeVar("OptionsT", bound=BaseModel)


def parse_options(model: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
    """Check a connector's options against its pydantic model.

    Args:
        model: Model of the options; with ``extra="forbid"`` a typo is an error.
        options: The user's options.

    Raises:
        ConfigError: An option is wrong; the message lists every wrong option and the known options,
            in one line.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'options'}: {item['msg']} (got {item['input']!r})"
            for item in error.errors(include_url=False)
        )
        known = ", ".join(model.model_fields)
        raise ConfigError(f"bad connector options: {problems}. Known options: {known}") from None


def read_options(given: Iterable[str], flag: str = "--option") -> dict[str, Any]:
    """Read options of the form ``KEY=VALUE`` from a command line; the value is JSON or text.

    Args:
        given: The options as typed; if several options have the same key, the last one counts.
        flag: Name of the command-line flag, for the error.

    Raises:
        ConfigError: An option does not have the form ``KEY=VALUE``.
    """
    options: dict[str, Any] = {}
    for option in given:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} {option!r}: expected KEY=VALUE")
        try:
            options[key] = json.loads(value)
        except (ValueError, RecursionError):
            options[key] = value
    return options


def make_with_options(
    make: Callable[..., MadeT], options: Mapping[str, Any], *args: Any, flag: str, **fixed: Any
) -> MadeT:
    """Call a class or a factory with fixed arguments and a user's options.

    Args:
        make: The class or factory.
        options: The user's options.
        args: Fixed positional arguments.
        flag: Name of the flag or setting that contains the options, for the error.
        fixed: Fixed keyword arguments.

    Raises:
        ConfigError: An option is unknown, missing, or of a wrong type.
    """
    try:
        return make(*args, **fixed, **options)
    except TypeError as error:
        name = getattr(make, "__qualname__", type(make).__name__)
        raise ConfigError(
            f"{flag} {sorted(options)} do not fit {name}: {line_of(error)}"
        ) from error
