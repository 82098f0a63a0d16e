"""The recorder: a ring of the last calls of a connector's hooks, in bounded memory.

1. A recorder never raises into the server: an exception is counted, and the first one is logged.
2. A record holds numbers only. Requests and hashes are represented by :func:`hash` in memory, and
   by numbers in the order of their appearance in an incident.
3. A recorder has no lock, because a signal may interrupt it: each side of a connector, and each
   rank, has its own recorder, which is called by one thread.
"""

from __future__ import annotations

import json
import logging
import marshal
import os
import signal
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvview import ConfigError
from kvview_vllm.recorder import facts
from kvview_vllm.recorder.export import export

LEAST_BYTES = 1 << 16
"""Smallest limit of a recorder."""

_SHARE_OF_RECORDS = 0.75  # of the limit; the rest is for descriptions of requests
_BYTES_PER_RECORD = 24  # a place in the ring and its share of the ring's blocks
_BYTES_PER_REQUEST = 400  # an entry of the table, with the key
_MARSHAL = 2  # the last version without references, which cost more time than they save bytes

_logger = logging.getLogger(__name__)


class Recorder:
    """Records the hooks of one side of a connector, and writes incidents.

    Args:
        limit_bytes: Memory of the ring and of the descriptions of requests.
        folder: Folder of the incidents, which is created with the first incident.
        max_files: Number of incidents that the folder keeps: the first one and the newest ones.

    Raises:
        ConfigError: The limit is too small for a record, or ``max_files`` is less than 2.
    """

    def __init__(self, limit_bytes: int, folder: str | Path, max_files: int = 16) -> None:
        if limit_bytes < LEAST_BYTES:
            raise ConfigError(f"limit_bytes must be at least {LEAST_BYTES}, got {limit_bytes}")
        if max_files < 2:
            raise ConfigError(f"max_files must be at least 2, got {max_files}")
        self.limit_bytes = limit_bytes
        self.num_hooks = 0
        """Hooks that were recorded or counted so far."""
        self.num_errors = 0
        """Exceptions of the recorder itself, which are not raised."""
        self._folder = Path(folder)
        self._max_files = max_files
        self._num_written = 0
        self._setup: dict[str, Any] = {}
        self._records: deque[bytes] = deque()
        self._record_bytes = 0
        self._most_record_bytes = int(limit_bytes * _SHARE_OF_RECORDS)
        self._num_records = 0
        self._requests: OrderedDict[int, bytes] = OrderedDict()
        self._request_bytes = 0
        self._has_dropped_requests = False
        self._num_layers_saved = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the records and descriptions, at most ``limit_bytes``."""
        return self._record_bytes + self._request_bytes

    # --- recording ---

    def note(
        self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
    ) -> None:
        """Record a call that has returned.

        Args:
            hook: Name of the method; ``"__init__"`` for the constructor, whose arguments describe
                the engine.
            args: Positional arguments, without ``self``.
            kwargs: Keyword arguments.
            result: The returned value.
        """
        try:
            self.num_hooks += 1
            if read := facts.reader_of(hook):
                found = read(args, kwargs, result)
                if found is not None:
                    self._note(hook, args, kwargs, found)
            elif hook == "save_kv_layer":
                self._num_layers_saved += 1
        except Exception as error:
            self._on_error(f"hook {hook}", error)

    def _note(
        self, hook: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: facts.Facts
    ) -> None:
        if hook == "__init__":
            self._setup = facts.read_setup(args, kwargs)
            return
        if hook == "wait_for_save":
            found, self._num_layers_saved = (self._num_layers_saved,), 0
        elif (request := facts.request_of(hook, args, kwargs)) is not None:
            self._describe(request)
        self._add(marshal.dumps((time.monotonic_ns(), hook, *found), _MARSHAL))

    def _add(self, record: bytes) -> None:
        self._num_records += 1
        self._records.append(record)
        self._record_bytes += sys.getsizeof(record) + _BYTES_PER_RECORD
        while self._record_bytes > self._most_record_bytes:
            self._record_bytes -= sys.getsizeof(self._records.popleft()) + _BYTES_PER_RECORD

    def _describe(self, request: Any) -> None:
        """Keep the description of a request at its first call."""
        key = hash(request.request_id)
        if key in self._requests:
            return
        text = marshal.dumps(facts.describe(request), _MARSHAL)
        self._requests[key] = text
        self._request_bytes += sys.getsizeof(text) + _BYTES_PER_REQUEST
        while self._request_bytes > self.limit_bytes - self._most_record_bytes:
            _, dropped = self._requests.popitem(last=False)
            self._request_bytes -= sys.getsizeof(dropped) + _BYTES_PER_REQUEST
            self._has_dropped_requests = True

    # --- incidents ---

    def write(self, reason: str, details: Mapping[str, Any] | None = None) -> Path | None:
        """Write an incident file, whole or not at all.

        Args:
            reason: Why the incident is written.
            details: Numbers and short texts, such as the broken ``law``. Ids of requests, block
                hashes and other long words are replaced.

        Returns:
            The path of the file; None if it could not be written, which is logged.
        """
        try:
            return self._write(reason, details or {})
        except Exception as error:
            self._on_error("an incident", error)
            return None

    def _write(self, reason: str, details: Mapping[str, Any]) -> Path:
        records = [marshal.loads(record) for record in self._records.copy()]
        requests = {key: marshal.loads(text) for key, text in self._requests.copy().items()}
        window = {
            "num_hooks": self.num_hooks,
            "num_records": len(records),
            "is_whole": len(records) == self._num_records and not self._has_dropped_requests,
            "limit_bytes": self.limit_bytes,
            "num_errors": self.num_errors,
        }
        incident = export(reason, details, self._setup, window, requests, records)
        self._num_written += 1
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        name = f"recorded-{stamp}-{os.getpid()}-{id(self):x}-{self._num_written}.json"
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / name
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(incident), encoding="utf-8")
        partial.replace(path)
        for old in sorted(self._folder.glob("recorded-*.json"))[1 : 1 - self._max_files]:
            old.unlink(missing_ok=True)
        return path

    def write_on_signal(self, number: int = signal.SIGUSR2) -> bool:
        """Write an incident at each signal of this process.

        Returns:
            Whether the handler was installed; it is not if the process handles the signal already,
            or outside of the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        if signal.getsignal(number) is not signal.SIG_DFL:
            return False
        signal.signal(number, lambda *_: self.write("signal", {"signal": number}))
        return True

    def _on_error(self, where: str, error: Exception) -> None:
        self.num_errors += 1
        if self.num_errors == 1:
            _logger.warning(
                "the recorder could not record %s: %s: %s; further errors are only counted",
                where,
                type(error).__name__,
                error,
            )
