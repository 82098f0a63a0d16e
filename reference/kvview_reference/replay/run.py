"""The replay of a request trace through the engine, with a connector.

The replay is a closed loop: a fixed number of requests is in the engine, and the next request of
the trace starts as soon as another one ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from kvview import (
    CacheGeometry,
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
)
from kvview.connector.hook_errors import build_connector, watch_hooks
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Status
from kvview_reference.replay.conversations import TurnQueue
from kvview_reference.replay.transfers import end_each_step
from kvview_reference.traces.trace import TraceRequest

_COUNTED = (  # by the engine
    *("requests", "gpu_hit_blocks", "cpu_hit_blocks", "offloaded_blocks", "loaded_blocks"),
    *("bytes_verified", "mismatches", "steps", "preemptions"),
    *("failed_transfers", "first_failure"),
)


@dataclass(frozen=True)
class ReplayConfig:
    """Sizes of the engine.

    Args:
        gpu_blocks: Number of blocks of the GPU pool, including the null block; None for enough
            blocks for about a million tokens.
        block_bytes: Bytes of one block, a multiple of 8.
        closed_loop: Number of requests that are in the engine at once.
        options: Options of the connector.
    """

    gpu_blocks: int | None = None
    block_bytes: int = 1024
    closed_loop: int = 16
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayReport:
    """The result of a replay, and the report of ``kvview replay --json FILE``.

    Args:
        requests_too_large: Requests that were skipped because they do not fit on the GPU.
        blocks: Number of hash ids of all prompts; the hit rates are shares of this number.
        computed_rate: Share of the blocks that were neither on the GPU nor in the connector.
        cpu_hit_blocks: Blocks that came from the connector, from any medium.
        failed_transfers: Failures of the connector itself; a replay injects no failures.
        first_failure: The first failed transfer, and the error in its result.
        media: Media that the connector moved blocks to or from, by the names of its specs.
        holds_at_end: Number of GPU blocks that were not free at the end; must be 0.
        blocks_per_s: ``blocks`` over ``seconds``.
        closed_loop: Number of requests in the engine at once.
        malformed_rows: Requests of the trace that could not be read.
        lost: The first 10,000 reasons.
        schema_version: Version of the JSON format, which grows when a field is removed or changes
            its meaning.
    """

    requests: int
    requests_too_large: int
    blocks: int
    gpu_hit_blocks: int
    cpu_hit_blocks: int
    offloaded_blocks: int
    loaded_blocks: int
    bytes_verified: int
    mismatches: int
    holds_at_end: int
    seconds: float
    blocks_per_s: float
    gpu_hit_rate: float
    cpu_hit_rate: float
    computed_rate: float
    steps: int
    preemptions: int
    failed_transfers: int
    closed_loop: int
    first_failure: str | None = None
    media: list[str] = field(default_factory=list)
    malformed_rows: int = 0
    lost: list[str] = field(default_factory=list)
    schema_version: Literal[1] = 1

    @property
    def tier(self) -> str:
        """The media of the connector, by the names of its specs."""
        return "+".join(self.media) or "connector's"

    @property
    def is_clean(self) -> bool:
        """Whether every byte was right and every block was released."""
        return not self.mismatches and not self.holds_at_end


def replay(
    trace: Iterable[TraceRequest],
    block_size: int,
    connector: type[Connector],
    config: ReplayConfig,
    on_progress: Callable[[int], None] = lambda num_requests: None,
) -> ReplayReport:
    """Run a trace to its end, and then step until the connector has no pending work.

    Args:
        trace: The requests, which are read one by one.
        block_size: Number of tokens of one hash id.
        connector: The connector's class.
        config: Sizes and options.
        on_progress: Called after each step with the number of requests so far.

    Raises:
        ConfigError: A size is invalid, or no request fits in the pool.
        ConnectorError: The connector broke the contract, or one of its hooks raised an exception.
    """
    if config.closed_loop < 1:
        raise ConfigError(f"closed_loop must be at least 1, got {config.closed_loop}")
    geometry = CacheGeometry.single(block_size)
    built = watch_hooks(build_connector(connector, ConnectorConfig(geometry, config.options)))
    engine = Engine(
        geometry,
        end_each_step(built),
        num_gpu_blocks=2**20 // block_size if config.gpu_blocks is None else config.gpu_blocks,
        page_bytes=config.block_bytes,
        max_running=config.closed_loop,
    )
    run = _Run(engine, TurnQueue(trace, block_size), config.closed_loop, on_progress)
    start = time.perf_counter()
    try:
        run.to_end()
        pool = engine.kv_cache.pool
        holds = pool.num_blocks - 1 - pool.num_free_blocks()
    except BaseException:
        with suppress(ConnectorError):  # the first error is reported
            engine.shutdown()
        raise
    engine.shutdown()
    return run.report(time.perf_counter() - start, holds)


class _Run:
    """One replay, which has counters in addition to the counters of the engine."""

    def __init__(
        self,
        engine: Engine,
        queue: TurnQueue,
        closed_loop: int,
        on_progress: Callable[[int], None],
    ) -> None:
        self._engine, self._queue = engine, queue
        self._closed_loop = closed_loop
        self._on_progress = on_progress
        self._num_blocks = self._num_too_large = 0
        self._too_large: ConfigError | None = None

    def to_end(self) -> None:
        """Run until the trace has ended and no work is left."""
        engine = self._engine
        while True:
            while engine.num_unfinished_requests() < self._closed_loop and self._add_next():
                pass
            if not engine.has_work():
                break
            engine.step()
            self._on_progress(engine.stats.requests)
        if self._too_large is not None and not engine.stats.requests:
            raise self._too_large

    def _add_next(self) -> bool:
        if (taken := self._queue.take()) is None:
            return False
        request, row = taken
        try:
            self._engine.add_request(request)
        except ConfigError as error:
            request.status = Status.ABORTED
            self._num_too_large += 1
            self._too_large = self._too_large or ConfigError(
                f"line {row.line} of the trace: {error}"
            )
            return True
        self._num_blocks += len(row.hash_ids)
        return True

    def report(self, seconds: float, holds_at_end: int) -> ReplayReport:
        """Make the report."""
        stats, blocks = self._engine.stats, self._num_blocks
        return ReplayReport(
            **{name: getattr(stats, name) for name in _COUNTED},
            requests_too_large=self._num_too_large,
            blocks=blocks,
            holds_at_end=holds_at_end,
            seconds=seconds,
            blocks_per_s=blocks / seconds,
            gpu_hit_rate=stats.gpu_hit_blocks / max(1, blocks),
            cpu_hit_rate=stats.cpu_hit_blocks / max(1, blocks),
            computed_rate=1 - (stats.gpu_hit_blocks + stats.cpu_hit_blocks) / max(1, blocks),
            media=list(stats.media),
            closed_loop=self._closed_loop,
        )
