"""The checks before every call of a guard: the right thread, the right process, an open guard.

Laws: GUARD-2, GUARD-4 and POOL-10. A system reuses the idents of threads and processes that have
ended, so a :class:`Home` object identifies each thread of each process instead.
"""

from __future__ import annotations

import os
from threading import get_ident, local
from typing import ClassVar

from kvview.errors import WrongThreadError
from kvview.guard.ledger import GuardStats, LedgerView
from kvview.guard.not_copyable import NotCopyable


class Home:
    """One thread of one process."""

    process: ClassVar[object] = object()
    """An object that identifies this process; a forked child has another one."""

    def __init__(self) -> None:
        self.made_in = Home.process
        self.ident = get_ident()


class _Here(local):
    def __init__(self) -> None:
        self.home = Home()


here = _Here()
"""Thread-local storage: ``here.home`` is the :class:`Home` of the calling thread."""


def _begin_child() -> None:
    """Make a new process object and a new home for the only thread of a forked child."""
    Home.process = object()
    here.home = Home()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_child)


class AtHome(NotCopyable):
    """An object that belongs to the thread that made it.

    Args:
        owner: Name of the owner, for errors.
        view: The ledger view through which the object holds blocks.
    """

    def __init__(self, owner: str, view: LedgerView) -> None:
        self.owner = owner
        self.stats = view.stats = GuardStats()
        self._view = view
        self._home = here.home

    @property
    def is_open(self) -> bool:
        """Whether the guard and the view under it are open."""
        return self._view.is_open

    @property
    def is_at_home(self) -> bool:
        """Whether this is the process that made the guard (GUARD-4)."""
        return self._home.made_in is Home.process

    def _enter(self) -> None:
        if here.home is not self._home or not self._view.is_open:  # faster, as it is called often
            self._check_open()

    def _check_open(self) -> None:
        home, caller = self._home, here.home
        if caller is not home:
            self.stats.refused += 1
            if not self.is_at_home:
                raise WrongThreadError(
                    f"GUARD-4: the guard of {self.owner!r} was copied by a fork, and its blocks "
                    f"belong to the parent process; make a pool and a guard in this process"
                )
            later = " (a later thread with the same ident)" if caller.ident == home.ident else ""
            raise WrongThreadError(
                f"GUARD-2: the guard of {self.owner!r} belongs to thread {home.ident} and was "
                f"called from {caller.ident}{later}; call it on the scheduler's thread only"
            )
        self._view.check_open()
