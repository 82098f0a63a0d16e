"""A kvview manager that checks the calls of vLLM's OffloadingConnector."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvview import OffloadKey, PrepareStoreOutput, ReqContext
from kvview_reference.offloading import CPUOffloadingManager


class StrictManager(CPUOffloadingManager):
    """The reference manager, which refuses a call that names a key twice."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.touched: list[list[OffloadKey]] = []
        self.evicted: list[OffloadKey] = []

    def touch(self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /) -> None:
        _refuse_repeated(keys)
        self.touched.append(list(keys))
        super().touch(keys, ctx)

    def prepare_store(
        self, keys: Collection[OffloadKey], ctx: ReqContext | None = None, /
    ) -> PrepareStoreOutput | None:
        _refuse_repeated(keys)
        output = super().prepare_store(keys, ctx)
        self.evicted += output.evicted_keys if output else []
        return output


def _refuse_repeated(keys: Collection[OffloadKey]) -> None:
    if len(set(keys)) < len(keys):
        raise ValueError(f"a key is named twice: {keys}")
