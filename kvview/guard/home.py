"""What every call of a guard checks: its process, its thread, and that it is open.

GUARD-4, GUARD-6 and POOL-10. The ident of a thread, or of a process, is reused once that has
ended, so each thread of each process has an object of its own here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident, local
from typing import ClassVar

from kvview.errors import KVViewError, WrongThreadError
from kvview.guard.ledger import GuardStats, LedgerView
from kvview.guard.not_copyable import NotCopyable


class Home:
    """One thread of one process."""

    process: ClassVar[object] = object()
    """This process; another object in a forked child."""

    def __init__(self) -> None:
        self.made_in = Home.process
        self.ident = get_ident()


class _Here(local):
    def __init__(self) -> None:
        self.home = Home()


here = _Here()
"""``here.home`` is the :class:`Home` of the calling thread."""


def _begin_child() -> None:
    """A forked child begins with the thread that forked, which is another one from now on."""
    Home.process = object()
    here.home = Home()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


class AtHome(NotCopyable):
    """Belongs to the thread that made it.

    Args:
        owner: Named in errors.
        view: Through which it holds blocks.
    """

    def __init__(self, owner: str, view: LedgerView) -> None:
        self.owner = owner
        self.stats = view.stats = GuardStats()
        self._view = view
        self._home = here.home

    @property
    def is_open(self) -> bool:
        """Whether neither the guard nor the view under it was closed."""
        return self._view.is_open

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that made the guard (GUARD-6)."""
        return self._home.made_in is Home.process

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a call that is refused."""
        try:
            yield
        except KVViewError:
            self.stats.refused += 1
            raise

    def _check_open(self) -> None:
        home, caller = self._home, here.home
        if caller is not home:
            self.stats.refused += 1
            if not self.is_at_home:
                raise WrongThreadError(
                    f"GUARD-6: the guard of {self.owner!r} came here by a fork, and what it holds "
                    f"is its first process's: open a pool and a guard of this process's own"
                )
            later = " (a later thread with the same ident)" if caller.ident == home.ident else ""
            raise WrongThreadError(
                f"GUARD-4: the guard of {self.owner!r} belongs to thread {home.ident}, called "
                f"from {caller.ident}{later}: call it on the scheduler's thread only"
            )
        self._view.check_open()
