"""Objects that cannot be copied or pickled."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from kvview.errors import NotCopyableError


class NotCopyable:
    """Base of objects that cannot be copied, because a copy would release references twice."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotCopyableError(
            f"GUARD-4: a {type(self).__name__} cannot be copied or pickled, because the copy "
            f"would release its references again; pass block ids, and open a guard on the other "
            f"side"
        )
