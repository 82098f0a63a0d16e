"""One engine of a partition check: the real scheduler, real hashes, and a connector.

Source: vllm/v1/engine/core.py (the making of hashes), 0.11.0 to 0.33.0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvview import CacheGeometry, FullAttention
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.scenario.scenario import Scenario
from kvview_vllm.connector import KVViewConnector
from kvview_vllm.partition.pairs import PROMPT, EngineSettings
from kvview_vllm.pool import NULL_BLOCK_ID
from kvview_vllm.releases.build.samples import hash_function, make_request
from kvview_vllm.releases.compat.calls import idle_steps_report
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.releases.cpu.worker_caches import layouts, use_layout
from kvview_vllm.simulation.raw.call_recorder import CallRecorder
from kvview_vllm.simulation.raw.raw_engine import RawHarness, RawSettings
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.scheduler import cpu_scheduler
from kvview_vllm.simulation.scheduler.requests import PlannedRequest

NUM_BLOCKS = 64
"""Blocks of the pool."""

_SECONDS_TO_END = 120.0  # long, because a busy machine must not decide a verdict
_STEPS_TO_STORE = 50  # after the end of a request
_SECONDS_BETWEEN_STEPS = 0.002  # threads of a store work meanwhile
_ENCODER_TOKENS = 256


class PartitionEngine:
    """An engine that serves requests one after the other, with real hashes.

    Args:
        connector_class: A ``KVConnectorBase_V1``.
        transfer_config: Arguments of ``KVTransferConfig`` except its class.
        engine: Settings that decide the bytes of KV.
        stand_ins: Replacements for code that needs CUDA.
    """

    def __init__(
        self,
        connector_class: type,
        transfer_config: Mapping[str, Any],
        engine: EngineSettings,
        stand_ins: StandIns,
    ) -> None:
        self._block_size = size = engine.block_size
        self._recorder = CallRecorder()
        self._num_requests = 0
        self.last_hashes: tuple[bytes, ...] = ()
        geometry = CacheGeometry(size, size, (FullAttention(size),))
        scenario = Scenario(geometry, NUM_BLOCKS, (), max_tokens_per_step=cpu_scheduler.MAX_TOKENS)
        settings = RawSettings(
            engine.ranks,
            engine.rank,
            engine.kind,
            is_plain=not issubclass(connector_class, KVViewConnector),
            adjust=partial(_use, engine),
        )
        self._engine = RawHarness(
            scenario, connector_class, transfer_config, self._recorder, stand_ins, settings
        )
        self._scheduler = scheduler = self._engine.scheduler.real
        self.close = self._engine.worker.close
        self.shutdown = self._engine.shutdown
        utils = vllm("v1.core.kv_cache_utils")
        function = hash_function(engine.hash_algorithm)
        utils.init_none_hash(function)  # reads PYTHONHASHSEED
        self._make_hashes = utils.get_request_block_hasher(
            self._engine.scheduler.geometry.hash_block_size, function
        )
        self._touched: set[int] = {NULL_BLOCK_ID}
        encoder = vllm("v1.core.encoder_cache_manager")
        scheduler.max_num_encoder_input_tokens = _ENCODER_TOKENS  # the model is text only
        scheduler.encoder_cache_manager = encoder.EncoderCacheManager(_ENCODER_TOKENS)

    def serve(self, arguments: Mapping[str, Any], kv_seed: int) -> int:
        """Serve a request to its end, and wait for its stores.

        Args:
            arguments: Of vLLM's ``Request``.
            kv_seed: Seed of the simulated KV; requests with equal tokens and equal seeds have equal
                KV.

        Returns:
            Number of tokens that the connector loaded, or tried to load.

        Raises:
            InvariantBroken: The request read KV of another request (``XFER-1``), or the
                connector broke another law.
        """
        before = self._recorder.coverage["tokens to load"]
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        planned = _VariedRequest(name, arguments, kv_seed, self._make_hashes, self._block_size)
        self._engine.scheduler.add(planned)
        self.last_hashes = tuple(map(bytes, planned.request.block_hashes))
        ends = time.monotonic() + _SECONDS_TO_END
        while name in self._scheduler.requests:
            self._step_slowly()
            if time.monotonic() > ends:
                raise InvariantBroken("ENGINE", f"{name} has not ended after {_SECONDS_TO_END} s")
        for _ in range(_STEPS_TO_STORE):
            self._step_slowly()
        return self._recorder.coverage["tokens to load"] - before

    def _step_slowly(self) -> None:
        self._engine.step()
        for tables in self._engine.last_tables.values():
            self._touched.update(*tables)
        time.sleep(_SECONDS_BETWEEN_STEPS)

    def forget_gpu(self) -> None:
        """Drop all KV on the GPU, but not the KV that the connector stores.

        Raises:
            InvariantBroken: The connector holds blocks although every request has ended.
        """
        if not idle_steps_report():
            self.serve({"prompt_token_ids": [*PROMPT[:1]]}, kv_seed=1)
        ends = time.monotonic() + _SECONDS_TO_END
        while not self._engine.scheduler.pool.reset_prefix_cache():
            self._step_slowly()
            if time.monotonic() > ends:
                raise InvariantBroken("CONN-4", "blocks are held although every request has ended")
        for slots in self._engine.worker.caches.slots:
            slots.zero_()  # a load may get the same blocks, which would have the right bytes
        self._before = [slots.clone() for slots in self._engine.worker.caches.slots]
        self._touched = {NULL_BLOCK_ID}

    def check_other_blocks(self) -> None:
        """Check that since :meth:`forget_gpu` only blocks of requests were written.

        Raises:
            InvariantBroken: The connector wrote into a block that no request has (``XFER-2``).
        """
        others = sorted({*range(NUM_BLOCKS)} - self._touched)
        for layer, before in enumerate(self._before):
            changed = (self._engine.worker.caches.slots[layer][others] != before[others]).nonzero()
            if len(changed):
                number, state = changed[0].tolist()[:2]
                raise InvariantBroken(
                    "XFER-2",
                    f"a load wrote into block {others[number]}, which no request has: layer "
                    f"{layer}, token {state} of the block",
                )


def _use(engine: EngineSettings, config: Any) -> None:
    """Set the settings of an engine in a ``VllmConfig``."""
    import torch

    model, cache = config.model_config, config.cache_config
    model.model = model.served_model_name = engine.model
    model.revision = engine.revision
    model.dtype = getattr(torch, engine.dtype)
    cache.cache_dtype = engine.cache_dtype
    cache.prefix_caching_hash_algo = engine.hash_algorithm
    config.parallel_config.rank = engine.rank
    use_layout(config, engine.layout or layouts()[0])
    if engine.kind is not None and engine.kind.has_states:
        cache.mamba_cache_mode = "align"


class _VariedRequest(PlannedRequest):
    """A request with real hashes and any further arguments of vLLM's ``Request``."""

    def __init__(
        self,
        request_id: str,
        arguments: Mapping[str, Any],
        kv_seed: int,
        hasher: Callable[[Any], list[Any]],
        block_size: int,
    ) -> None:
        prompt = arguments.get("prompt_token_ids") or PROMPT
        super().__init__(request_id, prompt, 0, 1, None, block_size)
        self.kv_seed = kv_seed
        self.request = make_request(request_id, prompt, 1, block_hasher=hasher, **arguments)
