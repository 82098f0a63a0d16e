"""The translation of a manager's media into the media of the installed vLLM.

- VOFF-6 A medium that the manager declares (:class:`~kvview.SupportsMedia`) and that vLLM does not
  have is refused at start. An undeclared medium of an event that vLLM does not have is published as
  ``"CPU"`` and logged once, because an event must never end the engine.

Up to 0.26 any string is a medium; in later releases ``Medium`` lists the media.

Source: ``Medium``, vllm/v1/kv_offload/base.py.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from kvview import MEDIUM_CPU, ConfigError, OffloadingEvent, OffloadingManager, SupportsMedia
from kvview_vllm.releases import engine_version
from kvview_vllm.releases.calls import known_media, make_medium

_logger = logging.getLogger(__name__)
_KNOWN = known_media()


class Media:
    """Renames the media of one manager's events.

    1. If several media have one name in vLLM, a key is published under this name as long as one of
       these media holds the key (EVENT-1, EVENT-2).

    Args:
        manager: The manager of the events.
        names: A map from the manager's media to vLLM's, for the media that differ.

    Raises:
        ConfigError: vLLM does not have a medium of ``names``, or a medium that the manager
            declares.
    """

    def __init__(self, manager: OffloadingManager, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._held: dict[str, set[bytes]] = {}  # by the manager's medium
        named: Collection[str] = manager.media if isinstance(manager, SupportsMedia) else ()
        for medium in [*names, *([named] if isinstance(named, str) else named)]:
            if not _is_known(self._names.setdefault(medium, medium)):
                raise ConfigError(
                    f"media: vLLM {engine_version()} has no medium {self._names[medium]!r}, only "
                    f"{', '.join(_KNOWN or ())}; map the medium to one of these: "
                    f'"media": {{"{medium}": "{(_KNOWN or [MEDIUM_CPU])[-1]}"}}'
                )

    def publish(self, event: OffloadingEvent) -> Iterator[tuple[list[bytes], Any, bool]]:
        """Yield the event as vLLM's: keys, medium, and whether the keys were removed."""
        name = self._name(event.medium)
        held = self._held.setdefault(event.medium, set())
        others = [
            keys
            for medium, keys in self._held.items()
            if medium != event.medium and self._name(medium) == name
        ]
        keys: list[bytes] = list(event.keys)
        (held.difference_update if event.removed else held.update)(keys)
        if others:
            keys = [key for key in keys if not any(key in other for other in others)]
        if keys:
            yield keys, make_medium(name), event.removed

    def _name(self, medium: str) -> str:
        if medium not in self._names:
            self._names[medium] = medium if _is_known(medium) else MEDIUM_CPU
            if self._names[medium] != medium:
                _logger.warning(
                    "VOFF-6: events name medium %r, which vLLM %s does not know and the "
                    "manager's media do not list; they are published as %r",
                    *(medium, engine_version(), MEDIUM_CPU),
                )
        return self._names[medium]


def _is_known(medium: str) -> bool:
    return _KNOWN is None or medium in _KNOWN
