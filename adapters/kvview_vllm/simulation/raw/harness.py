"""One real ``Scheduler``, one real worker's side, and a connector that nobody has adapted.

The worker is driven by the release's own ``KVConnectorModelRunnerMixin`` in its own forward
context, layer by layer. The two roles are built from configurations of their own.

- VSIM-3 A connector **must** be asked for nothing that vLLM does not ask for, and what a step
  computes **must** be written into its slots alone: reuse of blocks goes through the scheduler,
  on which a connector may rely.

Source: ``execute_model`` of vllm/v1/worker/gpu_model_runner.py and
vllm/v1/worker/kv_connector_model_runner_mixin.py, 0.12.0 to 0.33.0.
"""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from typing_extensions import override

from kvview import OffloadKey
from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.geometry import read_geometry
from kvview_vllm.releases.calls import handle_preemptions
from kvview_vllm.releases.worker_caches import (
    allocate,
    has_pending_work,
    make_config,
    supports_several_groups,
)
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.engine import LaunchedStep, VLLMConnectorHarness, named
from kvview_vllm.simulation.raw.token_bytes import TokenCompute, Wrong, attention_metadata
from kvview_vllm.simulation.raw.watched import Watch, make_watched
from kvview_vllm.simulation.stream_order import Forward

if TYPE_CHECKING:
    from kvview.testing.connector.harness import ConnectorHarness
    from kvview.testing.connector.scenario import Scenario
    from kvview_vllm.simulation.raw.stand_ins import StandIns

_STATE = "vllm.distributed.kv_transfer.kv_transfer_state"


class RawHarness(VLLMConnectorHarness):
    """A scheduler and a worker with a connector, or without one.

    Args:
        scenario: Sizes, as fitted.
        connector_class: A ``KVConnectorBase_V1``; None for none.
        transfer_config: Arguments of ``KVTransferConfig`` beside its class.
        watch: Told what it does.
        stand_ins: What moves bytes where there is no CUDA.
    """

    _compute: Any

    def __init__(
        self,
        scenario: Scenario,
        connector_class: type | None,
        transfer_config: Mapping[str, Any],
        watch: Watch,
        stand_ins: StandIns,
    ) -> None:
        self._connector_class = connector_class
        self._transfer_config = transfer_config
        self._watch = watch
        self._stand_ins = stand_ins
        self._to_verify: dict[str, tuple[int, int]] = {}  # what a load has yet to bring
        super().__init__(scenario, (), lambda: 0.0)
        watch.watch_pool(self._pool)

    @override
    def _build(self, scenario: Scenario, connectors: object, clock: object) -> None:
        watched = self._connector_class and make_watched(self._connector_class, self._watch)
        transfer_config: dict[str, Any] | None = None
        if watched is not None:
            transfer_config = {"kv_role": "kv_both", **self._transfer_config}
            transfer_config |= {
                "kv_connector": watched.__name__,
                "kv_connector_module_path": __name__,
            }
            setattr(sys.modules[__name__], watched.__name__, watched)
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            self._config = cpu_scheduler.make_vllm_config(
                Path(folder),
                transfer_config,
                block_size=self._geometry.hash_block_size,
                num_groups=1,
                num_blocks=scenario.num_gpu_blocks,
                max_num_seqs=scenario.max_running,
                max_num_batched_tokens=scenario.max_tokens_per_step,
            )
        with registered(watched):
            if watched is not None and not supports_several_groups(watched, self._config):
                self._config.scheduler_config.disable_hybrid_kv_cache_manager = True
        cache_config = make_config(self._config, scenario.num_gpu_blocks)
        geometry = read_geometry(self._config, cache_config)
        with named("building the scheduler"), registered(watched):
            self._scheduler = cpu_scheduler.make_scheduler(
                copy.deepcopy(self._config), copy.deepcopy(cache_config), geometry, plain=True
            )
        self.caches = allocate(self._config, cache_config)
        self._layers = [name for g in cache_config.kv_cache_groups for name in g.layer_names]
        self._compute = TokenCompute(self.caches.slots)
        self._state: Any = importlib.import_module(_STATE)
        self._mixin: Any = importlib.import_module(
            "vllm.v1.worker.kv_connector_model_runner_mixin"
        ).KVConnectorModelRunnerMixin
        self._context: Any = importlib.import_module("vllm.forward_context")
        self._worker = None
        if watched is not None:
            with named("building the worker's side"), registered(watched):
                self._worker = cpu_scheduler.make_worker_connector(self._config, cache_config)
                self._worker.register_kv_caches(self.caches.tensors)

    # --- what is asked ---

    @property
    def connector(self) -> Any:
        """The scheduler's side of the connector; None without one."""
        return self._scheduler.connector

    def finished_requests(self) -> list[str]:
        """Requests that have ended, whose blocks the connector said it would free later."""
        requests = self._scheduler.requests
        return [name for name, request in requests.items() if request.is_finished()]

    @override
    def has_work(self) -> bool:
        return bool(
            self._launched
            or self._scheduler.requests
            or has_pending_work(self._scheduler.connector)
            or self.held_blocks()
        )

    @override
    def _has_requests(self) -> bool:
        return bool(self._scheduler.has_requests()) or has_pending_work(self._scheduler.connector)

    @override
    def held_blocks(self) -> Mapping[int, int]:
        """References that are neither of requests nor of the scenario."""
        refs = {block.block_id: block.ref_cnt for block in self._pool.blocks if block.ref_cnt > 0}
        refs.pop(0, None)
        return +(Counter(refs) - self.engine_refs())

    @override
    def free_block_ids(self) -> Sequence[int]:
        """The free queue by its links, which a connector may have broken."""
        queue = self._pool.free_block_queue
        tail = queue.fake_free_list_tail
        block = queue.fake_free_list_head
        free: list[int] = []
        while block.next_free_block is not tail:
            before, block = block, block.next_free_block
            if block is None or block.prev_free_block is not before or len(free) > self.num_blocks:
                raise InvariantBroken(
                    "POOL-2",
                    f"the free queue of the raw pool is broken behind {free[-3:]}: its links do "
                    f"not fit. Who changes blocks changes links: view.touch_blocks(ids) and "
                    f"view.free_blocks(ids) keep them",
                )
            free.append(block.block_id)
        if queue.num_free_blocks != len(free):
            raise InvariantBroken(
                "POOL-2",
                f"the free queue of the raw pool has {len(free)} blocks and counts "
                f"{queue.num_free_blocks}",
            )
        return free

    @override
    def expected_keys(self, request_id: str) -> dict[int, OffloadKey]:
        return {}

    @override
    def block_keys(self, block_ids: Sequence[int]) -> list[tuple[OffloadKey, ...]]:
        return [tuple(keys) for keys in self._look.block_keys(block_ids)]

    @override
    def shutdown(self) -> Mapping[int, int]:
        with named("shutdown"):
            self._scheduler.shutdown()
            if self._worker is not None:
                self._worker.shutdown()
        return self.held_blocks()

    @override
    def alias(self) -> bool:
        return False

    @override
    def _overwrite(self, block_ids: Sequence[int]) -> None:
        """Nobody writes into what the scheduler did not hand out (VSIM-3)."""

    # --- one step ---

    @override
    def _launch(self) -> Any:
        self._stand_ins.tick()
        output = self._schedule()
        sampled = self._sample(output)
        self._note_loads()
        with named("the worker's side"):
            transfers, wrong = self._execute(output)
        answer = cpu_scheduler.make_model_output(output, sampled, transfers)
        invalid = cpu_scheduler.invalid_blocks(transfers)
        for one in wrong:
            if one.block_id not in invalid:
                self._raise_wrong(one)
        planned = {request_id: self._added[request_id] for request_id in sampled}
        self._launched.append(LaunchedStep(output, answer, Forward(), invalid, planned))
        return output

    def _execute(self, output: Any) -> tuple[Any, list[Wrong]]:
        """What a model runner does with a step."""
        scheduled: dict[str, int] = output.num_scheduled_tokens
        if self._worker is None:
            return None, self._forward(output, None) if scheduled else []
        handle_preemptions(self._worker, output, output.kv_connector_metadata)
        self._state._KV_CONNECTOR_AGENT = self._worker
        try:
            if not scheduled:
                no_forward = self._mixin.kv_connector_no_forward(output, self._config)
                return no_forward.kv_connector_output, []
            attention = attention_metadata(
                self._compute,
                scheduled,
                cpu_scheduler.computed_before(output),
                self._tables(output),
            )
            with (
                self._context.set_forward_context(
                    dict.fromkeys(self._layers, attention),
                    self._config,
                    num_tokens=output.total_num_scheduled_tokens,
                ),
                self._mixin.maybe_get_kv_connector_output(output) as transfers,
            ):
                wrong = self._forward(output, attention)
            return transfers, wrong
        finally:
            self._state._KV_CONNECTOR_AGENT = None

    def _forward(self, output: Any, attention: Any) -> list[Wrong]:
        """Layer after layer: wait, write, read, save."""
        compute: TokenCompute = self._compute
        starts = cpu_scheduler.computed_before(output)
        tables = self._tables(output)
        batch = [
            (self._added[name], starts[name], starts[name] + number)
            for name, number in output.num_scheduled_tokens.items()
        ]
        import torch

        slots = torch.cat(
            [compute.slots_of(tables[p.request.request_id][0], s, e) for p, s, e in batch]
        )
        wrong: list[Wrong] = []
        for number, layer in enumerate(self._layers):
            if self._worker is not None:
                self._worker.wait_for_layer_load(layer)
            compute.write(number, slots, batch)
            for planned, start, _ in batch:
                table = tables[planned.request.request_id][0]
                one = compute.first_wrong(planned, table, 0, start, number)
                wrong += [one] if one is not None else []
            if self._worker is not None:
                self._worker.save_kv_layer(layer, self.caches.tensors[layer], attention)
        for planned, start, _ in batch:
            if planned.request.request_id in self._to_verify and start:
                self._to_verify.pop(planned.request.request_id)
                # What comes back was saved: a connector's store is empty at the start.
                self._watch.coverage.update(["loads", "stores"])
        return wrong

    def _note_loads(self) -> None:
        """Which loads of this step have to bring bytes that are not there by chance."""
        to_load, self._watch.to_load = self._watch.to_load, {}
        for name, (start, end) in to_load.items():
            if name not in self._scheduler.requests:
                continue
            table = self._manager.get_block_ids(name)[0]
            if len(table) * self._geometry.hash_block_size < end:
                raise InvariantBroken(
                    "CONN-2",
                    f"get_num_new_matched_tokens promised tokens {start} to {end} of {name!r}, "
                    f"which has {len(table)} blocks of {self._geometry.hash_block_size}",
                )
            if not self._compute.holds(self._added[name], table, start, end):
                self._to_verify[name] = start, end

    def _raise_wrong(self, wrong: Wrong) -> None:
        self.stats.mismatches += 1
        start, number, _ = self._watch.promised.get(wrong.request_id, (0, 0, False))
        is_load = start <= wrong.position < start + number
        source = "a block that was hit or computed"
        if is_load:
            source = f"get_num_new_matched_tokens promised tokens {start} to {start + number} of it"
        raise InvariantBroken(
            "XFER-1",
            f"request {wrong.request_id!r} reads wrong bytes at token {wrong.position}, in block "
            f"{wrong.block_id}, layer {wrong.layer}: there is {wrong.found} ({source})",
        )


def _factory() -> Any:
    module: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    return module.KVConnectorFactory


@contextmanager
def registered(connector_class: type | None) -> Iterator[None]:
    """Have vLLM build this class: up to 0.21 a name that it knows goes before a module's path."""
    if connector_class is None:
        yield
        return
    with patch.dict(_factory()._registry, {connector_class.__name__: lambda: connector_class}):
        yield


if TYPE_CHECKING:
    _: type[ConnectorHarness] = RawHarness
