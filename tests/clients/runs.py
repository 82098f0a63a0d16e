"""LMCache's manager under one engine: steps of both, and the manager's decisions."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvview import GuardedView

from .serving import BLOCK_SIZE, Request, Serving, Step

Decisions = list[tuple[Any, ...]]


class LMCacheRun:
    """LMCache's lazy-offload manager, with the calls of its connector.

    Args:
        serving: The engine.
        manager: LMCache's, bound to a pool.
        store: Makes LMCache's metadata for a store of some blocks of a request.
        chunk: Blocks of one store; LMCache's default is 256 tokens.
    """

    def __init__(
        self,
        serving: Serving,
        manager: Any,
        store: Callable[[Request, int, int], Any],
        chunk: int = 16,
    ) -> None:
        self.serving = serving
        self.decisions: Decisions = []
        self.chunk = chunk
        self.manager = manager
        self.store = store
        self.due: list[list[str]] = [[], []]
        self.num_stored = 0

    def steps(self, num_steps: int) -> None:
        """Step the engine, and record the decisions of the manager."""
        for _ in range(num_steps):
            self.decisions.append(self.decide(self.serving.step()))

    def decide(self, step: Step) -> tuple[Any, ...]:
        manager = self.manager
        ended: list[str] = []
        done = self.due.pop(0)
        if done:
            actions = manager.on_store_results(set(), dict.fromkeys(done, 1))
            ended += actions.sessions_to_end
        for request in step.finished:
            ended += manager.on_request_finished(request.request_id).sessions_to_end
        for request in step.arrived:
            ended += manager.on_request_arrived(request.request_id).sessions_to_end
        for request in self.serving.running.values():
            while (end := request.num_offered + self.chunk) <= len(request.block_ids):
                manager.add_store_candidate(self.store(request, request.num_offered, end))
                request.num_offered = end
        new_blocks = [([ids],) for ids in step.grown.values()]
        output = SimpleNamespace(
            total_num_scheduled_tokens=1 + BLOCK_SIZE * sum(len(r.block_ids) for r in step.arrived),
            scheduled_new_reqs=[SimpleNamespace(block_ids=(r.block_ids,)) for r in step.arrived],
            scheduled_cached_reqs=SimpleNamespace(new_block_ids=[ids for (ids,) in new_blocks]),
        )
        actions = manager.on_scheduler_step(output)
        ended += actions.sessions_to_end
        stores = [
            (meta.request_id, meta.op.start, meta.op.end, tuple(meta.op.flat_block_ids))
            for meta in actions.stores_to_submit
        ]
        self.num_stored += len(stores)
        self.due.append([store[0] for store in stores])
        return (tuple(stores), tuple(ended))


def guarded(view: Any) -> GuardedView:
    """Return the view that a connector gets by default."""
    return GuardedView(view, owner="client")
