"""The configuration of a connector in a run: the options given, and how much its tier holds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from kvview import ConfigError, Connector, ConnectorConfig
from kvview.connector.hook_errors import build_connector
from kvview.errors import line_of
from kvview.testing.connector.scenario import Scenario
from kvview.testing.placeholders import has_whole_size, in_size, is_sized

_ROOMIER = (16, 64, 256, 1024)  # blocks, for a tier that takes no fewer


def configure(
    connector_class: type[Connector], scenario: Scenario, options: Mapping[str, Any]
) -> bytes:
    """A configuration that the connector takes, pickled.

    Args:
        connector_class: That is built with it, to see.
        scenario: Says how much the tier holds, where an option has a placeholder for it or
            one is named ``cpu_blocks``; a tier that refuses so little gets the least it takes.
        options: Of the connector; ``enable_events`` is added where it is taken.

    Raises:
        ConfigError: The connector refuses the options, or one of them does not pickle.
    """
    refusal: ConfigError | None = None
    for given in _candidates(scenario, options):
        try:
            config = ConnectorConfig(scenario.geometry, given)
            connector = build_connector(connector_class, config)
            if not scenario.cpu_blocks and given != options:
                _refuse_late(connector)
            return _pickled(config)
        except ConfigError as error:
            refusal = error
    assert refusal is not None, "there is a candidate"
    raise refusal


def _candidates(scenario: Scenario, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    events = {"enable_events": True}
    size = scenario.cpu_blocks
    if not is_sized(options):
        cpu_blocks = {"cpu_blocks": size}
        for extra in ({**cpu_blocks, **events}, cpu_blocks, events, {}):
            yield {**extra, **options}
        return
    for num_blocks in (size, *(more for more in _ROOMIER if more > size)):
        sized = in_size(options, num_blocks, scenario.block_bytes)
        yield {**events, **sized}
        yield sized


def is_of_size(given: Mapping[str, Any], scenario: Scenario, options: Mapping[str, Any]) -> bool:
    """Whether a tier holds as many blocks as the scenario says, and the check knows it.

    Args:
        given: What :func:`configure` gave.
        scenario: Of the run.
        options: Of the user.
    """
    if not is_sized(options):
        return given.get("cpu_blocks") == scenario.cpu_blocks
    sized = in_size(options, scenario.cpu_blocks, scenario.block_bytes)
    is_given = all(given.get(name) == value for name, value in sized.items())
    return is_given and has_whole_size(options)


def _refuse_late(connector: Connector) -> None:
    """Let a connector refuse the size of its tier when its halves are made."""
    try:
        connector.make_scheduler()
        connector.make_worker()
    except ConfigError:
        raise
    except Exception:
        return  # the run reports it when it makes them


def _pickled(config: ConnectorConfig) -> bytes:
    for name, value in config.options.items():
        try:
            pickle.loads(pickle.dumps(value))
        except Exception as error:
            raise ConfigError(
                f"option {name!r} does not survive pickling ({line_of(error)}): each half is built "
                f"in a process of its own, from an equal configuration. Give what it is made from"
            ) from error
    return pickle.dumps(config)
