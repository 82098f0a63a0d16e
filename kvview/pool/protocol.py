"""``Protocol`` for what a view can do: asked often, so fast to ask.

On Python 3.11 ``isinstance`` takes 9 to 21 us with ``typing``, 0.7 to 15 with typing_extensions
(measured on ``BlockPoolView``; the longer is a no). From 3.12 on both are the same.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol, runtime_checkable
else:
    try:
        from typing_extensions import Protocol, runtime_checkable
    except ImportError:  # the contract can be imported where nothing is installed
        from typing import Protocol, runtime_checkable

__all__ = ["Protocol", "runtime_checkable"]
