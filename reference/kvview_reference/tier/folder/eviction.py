"""``OldestFiles``: removes the files of a namespace that were used longest ago.

1. If there are many files, the oldest files of only a few shards are removed, because neither the
   medium nor the memory has an index. Every process sets the times of the files that it uses.
2. A file that cannot be removed stays, and the next oldest file is removed. If no file can be
   removed, the next attempt starts after ten times the duration of this attempt.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from kvview_reference.tier.folder.store_folder import SHARDS, StoreFolder

_log = logging.getLogger(__name__)
_LOOKED_AT = 4096  # files among which the oldest are found
_OLDEST_SHARE = 8  # one file in 8 of these is removed, if there are others
_RETRY_AFTER = 600.0  # seconds, for files that could not be removed
_MOST_STUCK = 1 << 16  # of those files that are remembered
_REST = 10


class OldestFiles:
    """The files of a folder, in the order of their removal.

    Args:
        folder: Folder of the namespace.
        show_life: Called regularly during a search for old files.
    """

    def __init__(self, folder: StoreFolder, show_life: Callable[[], object]) -> None:
        self.on_evicted: Callable[[str], object] = lambda path: None
        """Called with the path of each file that was removed."""
        self._folder = folder
        self._show_life = show_life
        self._oldest_first: deque[tuple[int, str]] = deque()  # time of use and path
        self._next_shard = os.getpid()
        self._stuck: set[str] = set()
        self._stuck_until = self._rests_until = 0.0
        self._has_warned = False

    @property
    def is_resting(self) -> bool:
        """Whether the last attempt to remove files failed."""
        return time.monotonic() < self._rests_until

    def remove(self, num_bytes: int) -> int:
        """Remove files of at least this many bytes in total, or all files; return the bytes."""
        began = time.monotonic()
        if began >= self._stuck_until:
            self._stuck.clear()
            self._stuck_until = began + _RETRY_AFTER
        removed = in_vain = 0  # bytes, and shards that were read since
        while removed < num_bytes:
            if self._oldest_first:
                if size := self._remove_file(*self._oldest_first.popleft()):
                    removed, in_vain = removed + size, 0
            elif in_vain < len(SHARDS):
                in_vain += self._look()
            else:
                if self._stuck:
                    self._warn()
                    self._stuck.clear()
                    now = time.monotonic()
                    self._rests_until = now + _REST * (now - began)
                break
        return removed

    def _remove_file(self, use: int, path: str) -> int:
        """Remove a file unless it was used again; return its bytes, or 0 if the file stays."""
        try:
            if self._folder.stat(path).st_mtime_ns != use:
                return 0
            size = self._folder.unlink(path)
        except FileNotFoundError:
            return 0
        except OSError:
            if len(self._stuck) < _MOST_STUCK:
                self._stuck.add(path)
            return 0
        self.on_evicted(path)
        return size

    def _look(self) -> int:
        """Find the files that were used longest ago, in all shards or in the next few shards.

        Returns:
            Number of shards that were read.
        """
        found: list[tuple[int, str]] = []
        num_shards, num_old = 0, 0
        while num_shards < len(SHARDS) and not num_old:
            self._show_life()
            shard = SHARDS[self._next_shard % len(SHARDS)]
            self._next_shard += 1
            num_shards += 1
            with suppress(OSError):  # the files of other shards can go
                for path, state in self._folder.entries(shard):
                    if path not in self._stuck:
                        found.append((state.st_mtime_ns, path))
            if len(found) >= _LOOKED_AT:
                num_old = len(found) // _OLDEST_SHARE
        self._oldest_first.extend(sorted(found)[: num_old or None])
        return num_shards

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "files of a tier cannot be removed (%s is one of %d), so it stays full and stores "
                "nothing more; check the permissions and attributes of its folder",
                min(self._stuck),
                len(self._stuck),
            )
