"""A tier without page numbers satisfies the contracts, and the kit can check it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from kvview import LoadStoreSpec
from kvview.testing import BoundCheck, Capability, parametrize_with_checks, run_checks
from kvview_reference.harness import ReferenceManager, ReferenceTransfer
from tests.offloading.keyed_tier import KeyedManager, KeyedWorker, KeySpec


class KeyedTransfer(ReferenceTransfer):
    """The worker by key, over the tensors of the reference's harness."""

    capabilities = ReferenceTransfer.capabilities - {Capability.HOST_BYTES, Capability.WORKERS} | {
        Capability.TIER_SPEC
    }

    def make_worker(self) -> Any:
        return KeyedWorker(
            self.kv_caches, self.num_cpu_blocks, blocks_per_chunk=self.blocks_per_chunk
        )

    def tier_spec(self, pages: Sequence[int]) -> LoadStoreSpec:
        return KeySpec([b"page %d" % page for page in pages])


class TestKeyedManager(ReferenceManager):
    Manager = KeyedManager
    lacks = ("arc", "pages")


@parametrize_with_checks(KeyedTransfer, seeds=5)
def test_worker(check: BoundCheck) -> None:
    check()


def test_a_script_names_pages_as_the_harness_does() -> None:
    class Wrong(KeyedTransfer):
        def tier_spec(self, pages: Sequence[int]) -> LoadStoreSpec:
            return KeySpec([b"one page for all" for _ in pages])

    (result,) = run_checks(Wrong, select=["XFER-1"]).failures
    assert result.failure is not None
    assert "h.tier_spec([" in result.failure.script
