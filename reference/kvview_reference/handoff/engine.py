"""The reference engine in both roles of a handoff."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from kvview import BlockIds
from kvview.handoff import HandoffScheduler, HandoffWorker, Peer, Wire
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request, Status


class PDEngine(Engine):
    """An engine that offers and accepts handoffs, after :meth:`bind_handoffs`."""

    has_wire = True

    offered: dict[str, tuple[Mapping[str, Any], BlockIds]]
    """Parameters that the router has not taken yet, and the block table, by request id."""

    def bind_handoffs(self, me: Peer, wire: Wire, lease_seconds: float) -> None:
        """Give the connector its identity and its wire."""
        self.offered = {}
        self._to_offer: set[Request] = set()
        scheduler, worker = self.scheduler_connector, self.worker_connector
        assert isinstance(scheduler, HandoffScheduler), "it has the hooks for handoffs"
        assert isinstance(worker, HandoffWorker), "it has the hooks for handoffs"
        self._handoffs = scheduler
        scheduler.bind_peer(me, lease_seconds)
        worker.bind_wire(me, wire, lease_seconds)

    @override
    def step(self) -> None:
        self._idle_steps = 0  # handoffs end by time, not by steps
        super().step()

    def add_prefill(self, request: Request) -> None:
        """Queue a request whose KV is offered when it has finished."""
        self.add_request(request)
        self._to_offer.add(request)

    def add_decode(self, request: Request, params: Mapping[str, Any]) -> None:
        """Queue a request with the parameters of a handoff."""
        self.add_request(request)
        self._handoffs.accept_params(request.info(), params)

    @override
    def _report_end(self, request: Request, block_ids: BlockIds) -> None:
        if request in self._to_offer:
            self._to_offer.remove(request)
            if request.status is Status.FINISHED:
                params = self._handoffs.offer_blocks(request.info(), block_ids)
                if params is not None:
                    self.offered[request.request_id] = params, block_ids
        super()._report_end(request, block_ids)
