"""One client under one engine: steps of both, the client's decisions, and its seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvview import GuardedView

from .serving import BLOCK_SIZE, EnginePool, Request, Serving, Step
from .simple_offload import SimpleOffload

Decisions = list[tuple[Any, ...]]


class Run:
    """A client in an engine; ``seconds`` is the CPU time of the client alone."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.decisions: Decisions = []
        self.seconds = 0.0

    def steps(self, num_steps: int) -> None:
        """Step the engine, and record the decisions of the client."""
        for _ in range(num_steps):
            step = self.serving.step()
            start = time.process_time()
            self.decisions.append(self.decide(step))
            self.seconds += time.process_time() - start

    def decide(self, step: Step) -> tuple[Any, ...]:
        raise NotImplementedError


class SimpleOffloadRun(Run):
    """A host cache like SimpleCPUOffload."""

    def __init__(self, serving: Serving, client: SimpleOffload) -> None:
        super().__init__(serving)
        self.client = client

    def decide(self, step: Step) -> tuple[Any, ...]:
        client = self.client
        for request in step.finished:
            client.forget(request.request_id)
        loads = []
        for request in step.arrived:
            host_blocks = client.match(request.block_hashes, request.num_hit)
            if host_blocks:
                gpu_blocks = request.block_ids[request.num_hit :][: len(host_blocks)]
                client.load(host_blocks, gpu_blocks)
                loads.append((request.request_id, tuple(host_blocks)))
        running = {name: request.block_ids for name, request in self.serving.running.items()}
        return (tuple(loads), client.plan(running))


class LMCacheRun(Run):
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
        super().__init__(serving)
        self.chunk = chunk
        self.manager = manager
        self.store = store
        self.due: list[list[str]] = [[], []]
        self.num_stored = 0

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


def serving_over(pool: EnginePool, num_blocks: int, seed: int, *, large: bool = False) -> Serving:
    """Make an engine over a pool; ``large`` is for pools of thousands of blocks."""
    return Serving(pool, num_blocks, seed, (40, 200) if large else (4, 40))
