"""A tier without page numbers satisfies the contracts, and the kit can check it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

pytest.importorskip("torch")

from kvview import LoadStoreSpec
from kvview.testing import BoundCheck, Capability, parametrize_with_checks
from kvview_reference.harness import ReferenceManager, ReferenceTransfer
from tests.offloading.keyed_tier import KeyedManager, KeyedWorker, KeySpec


class TestKeyedTransfer(ReferenceTransfer):
    """The worker by key."""

    lacks = frozenset({Capability.HOST_BYTES})
    settings = settings(max_examples=5)

    def make(self, kv_caches: Any, num_cpu_blocks: int, blocks_per_chunk: int) -> KeyedWorker:
        return KeyedWorker(kv_caches, num_cpu_blocks, blocks_per_chunk=blocks_per_chunk)

    def tier_spec(self, pages: Sequence[int]) -> LoadStoreSpec:
        return KeySpec([b"page %d" % page for page in pages])


class KeyedManagerHarness(ReferenceManager):
    Manager = KeyedManager

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities - {Capability.PAGES}


@parametrize_with_checks(KeyedManagerHarness, seeds=20)
def test_manager(check: BoundCheck) -> None:
    check()
