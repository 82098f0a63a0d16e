"""Copies in CPU memory by address."""

from __future__ import annotations

import numpy as np
import pytest

from kvview_reference.transfer import host_copy


def test_a_call_of_the_kernel_copies_no_more_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call ends without an error after 2 GiB: 1,024 pages of 4 MiB are more."""
    monkeypatch.setattr(host_copy, "_MAX_CALL_BYTES", 100)
    source = np.arange(64 * 5, dtype=np.int64).reshape(64, 5)
    into = np.zeros_like(source)
    rows = np.arange(64) * source.strides[0]
    sizes = np.full(64, source.strides[0])
    host_copy.copy_all(into.ctypes.data + rows[::-1], source.ctypes.data + rows, sizes)
    assert (into[::-1] == source).all()
