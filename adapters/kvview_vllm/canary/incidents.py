"""Incidents: one log line, a counter and, with a folder, a JSON file each."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvview.errors import line_of

_logger = logging.getLogger(__name__)
_MOST_FILES = 32


class IncidentFolder:
    """Writes files whole or not at all, and never raises an exception into the server.

    Args:
        folder: The folder; None writes no files.
        half: "scheduler", or "rank" and its number.
    """

    def __init__(self, folder: str | None, half: str) -> None:
        self._folder = None if folder is None else Path(folder)
        self._half = half
        self._written: Counter[str] = Counter()

    def write(self, kind: str, content: Mapping[str, Any]) -> None:
        """Write a file; after 31 files of a kind, the newest replaces the one before it."""
        if self._folder is None:
            return
        self._written[kind] += 1
        number = min(self._written[kind], _MOST_FILES)
        path = self._folder / f"{kind}-{self._half}-{os.getpid()}-{number}.json"
        partial = path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(content), encoding="utf-8")
            partial.replace(path)
        except Exception as error:
            _logger.warning("canary: could not write %s: %s", path, line_of(error))


class Incidents:
    """Reports the incidents of one half.

    Args:
        connector: Name of the wrapped connector.
        half: "scheduler", or "rank" and its number.
        folder: Receives a file for each incident.
        counts: Counters of the metrics.
    """

    def __init__(
        self, connector: str, half: str, folder: IncidentFolder, counts: Counter[str]
    ) -> None:
        self._from = {"connector": connector, "half": half}
        self._folder = folder
        self._counts = counts
        self._untaken: list[tuple[str, str]] = []

    def report(self, law: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        """Report an incident."""
        _logger.error("canary: %s: connector %s, %s: %s", law, *self._from.values(), message)
        self._counts["canary_incidents"] += 1
        self._untaken.append((law, (details or {}).get("request_id", "")))
        incident = {"law": law, "message": message, **self._from, "unix_time": time.time()}
        self._folder.write("incident", incident | dict(details or {}))

    def take(self) -> list[tuple[str, str]]:
        """Return the law of each incident since the last call, and the request of a wrong load."""
        taken, self._untaken = self._untaken, []
        return taken
