"""The fields of a JSON object, each of which is checked when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from kvview.errors import ConfigError

_MOST = 2**31 - 1
_SHOWN = 40
_NAMES = {int: "whole numbers", str: "texts"}
_T = TypeVar("_T", int, str)


def shown(value: object) -> str:
    """Format a value for an error message, shortened to one line."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to format an integer of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def require_number(
    name: str, value: object, where: str, *, least: int = 1, most: int = _MOST
) -> int:
    """Check a number that was read from a file.

    Raises:
        ConfigError: The value is not a whole number from ``least`` to ``most``.
    """
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            f"{where}: {name} must be a whole number from {least} to {most:,}, got {shown(value)}"
        )
    return value


class Fields:
    """A JSON object that records the fields that were read.

    Args:
        values: The object.
        where: Name of the object, for error messages.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self.where = values, where
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return a field without a check; None if it is missing or null."""
        self._read.add(name)
        return self._values.get(name)

    def number(
        self, name: str, *, least: int = 1, most: int = _MOST, missing: int | None = None
    ) -> int:
        """Return a whole number.

        Args:
            name: Field.
            least: Lowest value allowed.
            most: Highest value allowed.
            missing: Default for a field that is missing or null; without a default such a field is
                an error.
        """
        value = self.get(name)
        if value is None:
            if missing is None:
                raise ConfigError(f"{self.where}: {name} is missing")
            return missing
        return require_number(name, value, self.where, least=least, most=most)

    def text(self, name: str, missing: str) -> str:
        """Return a text; ``missing`` if the field is missing or null."""
        value = self.get(name)
        if value is None:
            return missing
        if not isinstance(value, str):
            raise ConfigError(f"{self.where}: {name} must be a text, got {shown(value)}")
        return value

    def sequence(self, name: str, kind: type[_T]) -> list[_T] | None:
        """Return a list of numbers or of texts; None if the field is missing or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ConfigError(
                f"{self.where}: {name} must be a list of {_NAMES[kind]}, got {shown(value)}"
            )
        return value

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield the fields that were never read, and their values."""
        return ((name, v) for name, v in self._values.items() if name not in self._read)
