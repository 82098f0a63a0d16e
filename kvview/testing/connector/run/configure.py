"""The configuration of a connector in a run: its options, and the size of its tier."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from kvview import ConfigError, Connector, ConnectorConfig
from kvview.connector.hook_errors import build_connector
from kvview.errors import line_of
from kvview.testing.connector.half.hook_calls import hook, make_half
from kvview.testing.connector.scenario.scenario import Scenario
from kvview.testing.placeholders import has_whole_size, in_size, is_sized

_ROOMIER = (16, 64, 256, 1024)  # numbers of blocks to try, if a tier refuses the scenario's number


def configure(
    connector_class: type[Connector], scenario: Scenario, options: Mapping[str, Any]
) -> bytes:
    """Return a pickled configuration that the connector accepts.

    Args:
        connector_class: The connector, which is built once with the configuration as a trial.
        scenario: Scenario that has the size of the tier, for options with a placeholder and for
            ``cpu_blocks``. If the tier refuses this size as too small, the smallest accepted size
            is used.
        options: Options of the connector; ``enable_events`` is added if the connector accepts it.

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
    """Whether the check chose the size of the tier, which is then the size in the scenario.

    Args:
        given: Result of :func:`configure`.
        scenario: Scenario of the run.
        options: Options of the user.
    """
    if not is_sized(options):
        return given.get("cpu_blocks") == scenario.cpu_blocks
    sized = in_size(options, scenario.cpu_blocks, scenario.block_bytes)
    is_given = all(given.get(name) == value for name, value in sized.items())
    return is_given and has_whole_size(options)


def _refuse_late(connector: Connector) -> None:
    """Make the halves once, because a half may refuse the size of its tier."""
    try:
        connector.make_scheduler()
        connector.make_worker()
    except ConfigError:
        raise
    except Exception:
        return  # the run itself reports the error when it makes the halves


def end_before_start(connector_class: type[Connector], config: bytes) -> None:
    """Shut down two halves whose other hooks were not called, because the engine did not start.

    Raises:
        InvariantBroken: A half raised.
    """
    for name in ("scheduler", "worker"):
        half = make_half(f"make_{name}", connector_class, config)
        with hook(f"shutdown of a {name} half without any call before", "CONN-4"):
            half.shutdown()


def _pickled(config: ConnectorConfig) -> bytes:
    for name, value in config.options.items():
        try:
            pickle.loads(pickle.dumps(value))
        except Exception as error:
            raise ConfigError(
                f"option {name!r} cannot be pickled ({line_of(error)}), but each half is built "
                f"in its own process from an equal configuration; pass a value that can be "
                f"pickled, from which the connector makes the object"
            ) from error
    return pickle.dumps(config)
