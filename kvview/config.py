"""Deprecated: what connectors written to 0.x import from here; the module goes in 2.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import deprecated

from kvview import options as _options
from kvview import targets as _targets
from kvview.connector import Connector
from kvview.options import OptionsT


@deprecated("kvview.options.parse_options since 1.0; this name goes in 2.0")
def parse_options(model: type[OptionsT], options: Mapping[str, Any]) -> OptionsT:
    """See :func:`kvview.options.parse_options`."""
    return _options.parse_options(model, options)


@deprecated("kvview.targets.load_connector since 1.0; this name goes in 2.0")
def load_connector(target: str) -> type[Connector]:
    """See :func:`kvview.targets.load_connector`."""
    return _targets.load_connector(target)
