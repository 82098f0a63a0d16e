"""One real vLLM ``Scheduler`` in both roles of a handoff, under simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from kvview import BlockIds, Connector
from kvview.handoff import Peer, Wire
from kvview.testing.connector.scenario import Add, Scenario
from kvview_vllm.connector.handoffs import OFFER, HandoffOptions
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.engine import LaunchedStep, VLLMConnectorHarness, reads_vllm

if TYPE_CHECKING:
    from kvview.testing.handoff.harness import EngineLife, PDHarness


class _Simulated(HandoffOptions):
    """The setting ``handoffs``, with objects of the simulation.

    Args:
        simulated: The ``EngineLife`` of the engine.
    """

    simulated: Any

    @override
    def peer(self, engine_id: str, life: str, split: str) -> Peer:
        me: Peer = replace(self.simulated.me, split=split)
        return me

    @override
    def make_wire(self, rank: int) -> Wire:
        wire: Wire = self.simulated.wires[rank]
        return wire


class HandoffEvents(VLLMConnectorHarness):
    """The events and queries that an engine needs in both roles of a handoff."""

    def __init__(self, *args: Any) -> None:
        self._prefills: set[str] = set()
        self._offered: dict[str, tuple[Mapping[str, Any], BlockIds]] = {}
        self._last_tables: Mapping[str, BlockIds] = {}
        self.num_loaded_blocks = 0
        super().__init__(*args)

    def add_prefill(self, add: Add, serial: int) -> None:
        """Queue a request whose KV is offered when it has finished."""
        self.add(add, serial, {OFFER: True})
        self._prefills.add(add.request_id)

    def add_decode(self, add: Add, serial: int, params: Mapping[str, Any]) -> None:
        """Queue a request with the parameters of a handoff."""
        self.add(add, serial, params)

    def take_offered(self) -> Mapping[str, tuple[Mapping[str, Any], BlockIds]]:
        """Return the handoffs offered since the last call, by request id."""
        offered, self._offered = self._offered, {}
        return offered

    @override
    def unfinished(self) -> Mapping[str, str]:
        """Return each request's status; a request whose loads have ended counts as waiting."""
        ended = self._scheduler.finished_recving_kv_req_ids
        return {
            name: "waiting" if name in ended else status
            for name, status in super().unfinished().items()
        }

    @override
    def _take_in(self) -> None:
        step = self._launched[0]
        self._check_loads(step.answer.kv_connector_output)
        self._last_tables = {
            name: tuple(map(list, table)) for name, table in self._tables(step.output).items()
        }
        super()._take_in()

    def _check_loads(self, transfers: Any) -> None:
        """Compare the bytes of loads that a worker reports as complete."""
        raise NotImplementedError

    @override
    def _on_outputs(self, step: LaunchedStep, outputs: Mapping[int, Any]) -> None:
        for of_client in outputs.values():
            for output in of_client.outputs:
                if output.kv_transfer_params is not None:
                    table = self._last_tables[output.request_id]
                    self._offered[output.request_id] = output.kv_transfer_params, table


@reads_vllm
class VLLMPDHarness(HandoffEvents):
    """One scheduler with a connector that offers and accepts handoffs.

    Args:
        scenario: Sizes, as fitted.
        connector: The connector.
        life: Identity, wire and clock of the engine.
    """

    def __init__(self, scenario: Scenario, connector: Connector, life: EngineLife) -> None:
        self._more_options = {
            "handoffs": _Simulated(
                wire="",
                address=life.me.address,
                lease_seconds=life.lease_seconds,
                simulated=life,
            )
        }
        super().__init__(scenario, [connector], life.clock)

    def num_wrong_blocks(self) -> int:
        """Count the cached and squeezed blocks whose bytes their owner has not written."""
        blocks = range(1, self.num_blocks)
        keys = zip(blocks, self._look.block_keys(blocks), strict=True)
        cached = {block: of_block[0] for block, of_block in keys if of_block}
        squeezed = [block.block_id for block in self._squeezed]
        kv_bytes = self._compute.kv_bytes
        num_wrong = kv_bytes.count_mismatches([*cached], [*cached.values()])
        return num_wrong + kv_bytes.count_not_poisoned(squeezed)

    @override
    def _check_loads(self, transfers: Any) -> None:
        invalid = {*cpu_scheduler.invalid_blocks(transfers)}
        failed = cpu_scheduler.failed_requests(transfers)
        for name in (transfers and transfers.finished_recving) or ():
            loaded = self.expected_keys(name)
            if name in failed or name not in self.unfinished() or not invalid.isdisjoint(loaded):
                continue
            self.num_loaded_blocks += len(loaded)
            self.stats.mismatches += self._compute.kv_bytes.count_mismatches(
                [*loaded], [*loaded.values()]
            )


if TYPE_CHECKING:
    _: type[PDHarness] = VLLMPDHarness
