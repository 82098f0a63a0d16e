"""Deprecated: the target that settings written to 0.x name; the module goes in 2.0."""

from __future__ import annotations

from typing_extensions import deprecated

from kvview_reference.connector import multi


@deprecated("kvview_reference.connector:MultiConnector since 1.0; this name goes in 2.0")
class MultiConnector(multi.MultiConnector):
    """See :class:`kvview_reference.connector.MultiConnector`."""
