"""Objects that cannot be copied or pickled."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from kvview.errors import NotCopyableError


class NotCopyable:
    """What can not be copied or pickled: a copy would give back what it never took."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotCopyableError(
            f"GUARD-6: a {type(self).__name__} can not be copied or pickled, since one reference "
            f"is given back once: hand block ids on, and open a guard of its own there"
        )
