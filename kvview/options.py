"""A connector's options: from what the user gave to a checked pydantic model.

Not imported by ``import kvview``: pydantic alone would take longer than all of it.
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
        model: The options; ``extra="forbid"`` makes a typo an error.
        options: What the user gave.

    Raises:
        ConfigError: One line: every option that is wrong, and the known ones.
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
    """The options of a command line: ``KEY=VALUE``, the value JSON or else text.

    Args:
        given: As they were typed; of one key the last counts.
        flag: What they are given by, for the error.

    Raises:
        ConfigError: One is not of that form.
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
    """Call a class or a factory with what it is always given, and with a user's options.

    Args:
        make: What to call.
        options: What the user gave.
        args: What it is always given.
        flag: What the options are given by, for the error.
        fixed: What it is always given, by name.

    Raises:
        ConfigError: It has no such option, needs one that is not given, or one has a wrong type.
    """
    try:
        return make(*args, **fixed, **options)
    except TypeError as error:
        name = getattr(make, "__qualname__", type(make).__name__)
        raise ConfigError(
            f"{flag} {sorted(options)} do not fit {name}: {line_of(error)}"
        ) from error
