"""Raw connectors with faults that only real tokens show, and one that hangs."""

from __future__ import annotations

import time
from typing import Any

from tests.vllm.raw_connectors import HostConnector


class LosesTheLastToken(HostConnector):
    """Loads zeros as the KV of the last token of each block."""

    def load(self, copies: Any) -> None:
        super().load(copies)
        for _, block_id in copies:
            for layer in self.layers:
                block = self.blocks(layer)[block_id]
                block.select(block.shape.index(self.block_size), -1).zero_()


class RemembersOtherWeights(HostConnector):
    """Keeps its KV over a reset."""

    def reset_cache(self) -> bool:
        return True


class NeverReturns(HostConnector):
    """Waits in a hook of the worker for an event that never comes."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        while self._get_connector_metadata().loads:
            time.sleep(0.01)


class TakesOneArgument(HostConnector):
    """Has the parameters that Model Runner V1 passes to ``start_load_kv``; V2 passes more."""

    def start_load_kv(self, forward_context: Any) -> None:  # type: ignore[override]
        super().start_load_kv(forward_context)


class MisreadsTheBatch(HostConnector):
    """Takes the tokens of the batch, which only Model Runner V2 passes, as the tokens to load."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if "num_tokens" in kwargs:
            meta = self._get_connector_metadata()
            num_blocks = kwargs["num_tokens"] // self.block_size
            meta.loads = {name: copies[:num_blocks] for name, copies in meta.loads.items()}
        super().start_load_kv(forward_context)
