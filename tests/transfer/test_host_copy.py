"""Copies in CPU memory by address."""

from __future__ import annotations

import numpy as np
import pytest

from kvview_reference.transfer import host_copy


def rows_of(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and sizes of its rows."""
    rows = array.ctypes.data + np.arange(len(array)) * array.strides[0]
    return rows, np.full(len(array), array.strides[0])


@pytest.mark.parametrize("wait", [-1.0, 1e9])
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("to_host", [True, False])
def test_every_way_to_copy_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, wait: float, kernel: bool, to_host: bool
) -> None:
    # One call of the kernel ends without an error after 2 GiB: 1,024 pages of 4 MiB are more.
    monkeypatch.setattr(host_copy, "_MAX_CALL_BYTES", 100)
    monkeypatch.setattr(host_copy, "_LONG_WAIT_S", wait)
    if not kernel:
        monkeypatch.setattr(host_copy, "_copy_by_kernel", None)
    source = np.arange(64 * 5, dtype=np.int64).reshape(64, 5)
    into = np.zeros_like(source)
    (rows, sizes), (into_rows, _) = rows_of(source), rows_of(into)
    host_copy.copy_all(into_rows[::-1], rows, sizes, to_host)
    assert (into[::-1] == source).all()
