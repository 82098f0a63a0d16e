"""Incidents: one log line, a counter and, with a folder, a JSON file each."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_logger = logging.getLogger(__name__)
_MOST_FILES = 50


class HookRecorder(Protocol):
    """Records the hooks of one half, and writes them down at an incident."""

    def note(self, hook: str, args: Any, kwargs: Any, result: Any) -> None:
        """Record a call of a hook, after it has returned."""

    def write(self, reason: str, details: Mapping[str, Any]) -> object:
        """Write the recorded calls."""


class NoRecorder:
    """Records nothing."""

    def note(self, hook: str, args: Any, kwargs: Any, result: Any) -> None:
        """Do nothing."""

    def write(self, reason: str, details: Mapping[str, Any]) -> None:
        """Do nothing."""


class Incidents:
    """Reports the incidents of one half.

    Args:
        connector: Name of the wrapped connector.
        half: "scheduler", or "rank" and its number.
        folder: Folder of the files; None for log lines only.
        recorder: Receives each incident.
    """

    def __init__(
        self, connector: str, half: str, folder: str | None, recorder: HookRecorder
    ) -> None:
        self._connector = connector
        self._half = half
        self._folder = None if folder is None else Path(folder)
        self._recorder = recorder
        self.num_reported = 0

    def report(self, law: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        """Report an incident."""
        self.num_reported = number = self.num_reported + 1
        _logger.error("canary: %s: connector %s, %s: %s", law, self._connector, self._half, message)
        if number > _MOST_FILES:
            return
        incident = {
            "law": law,
            "message": message,
            "connector": self._connector,
            "half": self._half,
            "number": number,
            "unix_time": time.time(),
            **(details or {}),
        }
        self._recorder.write(f"{law}: {message}", incident)
        if self._folder is not None:
            name = f"incident-{self._half.replace(' ', '')}-{os.getpid()}-{number}.json"
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / name).write_text(json.dumps(incident, indent=1), encoding="utf-8")
