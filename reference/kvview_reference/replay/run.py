"""The main job: a request trace, through the engine, with a connector beside it.

Requests come in the order of the trace, as many at once as ``concurrency``
allows; arrival times are not waited for. Memory holds the requests in flight
and nothing that grows with the trace.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from kvview import (
    CacheGeometry,
    CacheGroup,
    ChunkedLocalAttention,
    ConfigError,
    Connector,
    ConnectorConfig,
    ConnectorError,
    FullAttention,
    Mamba,
    SlidingWindow,
)
from kvview.connector.raising import build_connector, watch_hooks
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request
from kvview_reference.replay.conversations import Conversations
from kvview_reference.replay.traces import TraceRequest

_GROUP = re.compile(r"(?P<kind>[a-z]+)(:(?P<tokens>\d+))?(@(?P<multiple>\d+))?")
_GROUP_KINDS = "full, window:TOKENS, chunked:TOKENS, mamba; each may end in @K for blocks K times"


@dataclass(frozen=True)
class ReplayConfig:
    """Sizes of the engine.

    Args:
        gpu_blocks: Blocks of the GPU pool, the null block included; None takes
            as many as hold about a million tokens.
        block_bytes: Bytes of one block, a multiple of 8.
        concurrency: Requests in the engine at once.
        groups: KV-cache groups, as :func:`parse_groups` reads them.
        options: For the connector.
    """

    gpu_blocks: int | None = None
    block_bytes: int = 1024
    concurrency: int = 16
    groups: str = "full"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplayReport:
    """What came of a replay; the names are those of the JSON report.

    Args:
        blocks: Hash ids of all prompts: what the hit rates are shares of.
        holds_at_end: GPU blocks not free when everything had drained; must be 0.
        blocks_per_s: ``blocks`` over ``seconds``.
    """

    requests: int
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
    steps: int
    preemptions: int
    failed_transfers: int

    @property
    def is_clean(self) -> bool:
        """Whether every byte was right and every block came back."""
        return not self.mismatches and not self.holds_at_end


@dataclass(frozen=True)
class ReplayFile(ReplayReport):
    """What ``kvview replay --json FILE`` writes.

    Args:
        malformed_rows: Rows and files of the trace that could not be read.
        lost: Each of them, and why.
        schema_version: Grows when a field goes or means something else.
    """

    malformed_rows: int
    lost: list[str]
    schema_version: Literal[1] = 1


def parse_groups(text: str, block_size: int) -> tuple[CacheGroup, ...]:
    """Read KV-cache groups such as ``full,window:4096,mamba@2``.

    Args:
        text: Kinds, separated by commas; sizes in tokens.
        block_size: Tokens of one block of the trace; ``@K`` makes it K times larger.

    Raises:
        ConfigError: A kind or a size that is not known; lists the known ones.
    """
    groups: list[CacheGroup] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        kind, tokens = (match["kind"], match["tokens"]) if match else ("", None)
        size = block_size * int(match["multiple"] or 1) if match else 0
        if kind == "full" and tokens is None:
            groups.append(FullAttention(size))
        elif kind == "mamba" and tokens is None:
            groups.append(Mamba(size))
        elif kind == "window" and tokens is not None:
            groups.append(SlidingWindow(size, int(tokens)))
        elif kind == "chunked" and tokens is not None:
            groups.append(ChunkedLocalAttention(size, int(tokens)))
        else:
            raise ConfigError(f"bad KV-cache group {part.strip()!r}; known: {_GROUP_KINDS}")
    return tuple(groups)


def make_geometry(groups: str, block_size: int) -> CacheGeometry:
    """The geometry of a replay: the one place where the common multiple is taken."""
    parsed = parse_groups(groups, block_size)
    return CacheGeometry(math.lcm(*(group.block_size for group in parsed)), block_size, parsed)


def replay(
    trace: Iterable[TraceRequest],
    block_size: int,
    connector: type[Connector],
    config: ReplayConfig,
    on_progress: Callable[[int], None] = lambda num_requests: None,
    on_step: Callable[[Engine], None] | None = None,
    *,
    takes_events: bool = True,
) -> ReplayReport:
    """Run a trace to its end, and until the connector has nothing left to do.

    Args:
        trace: Requests, read one by one.
        block_size: Tokens of one hash id.
        connector: The connector's class.
        config: Sizes and options.
        on_progress: Told of the requests started so far, now and then.
        on_step: Shown the engine after each step, to take its events; without one
            the pool records none.
        takes_events: Whether it takes them.

    Raises:
        ConfigError: A size is impossible, or a request does not fit in the pool.
        TraceError: A row is malformed and the trace was opened to raise.
        ConnectorError: The connector broke its contract, or a hook of it raised.
    """
    if config.concurrency < 1:
        raise ConfigError(f"concurrency must be at least 1, got {config.concurrency}")
    geometry = make_geometry(config.groups, block_size)
    default_blocks = 2**20 // block_size * len(geometry.groups)
    engine = Engine(
        geometry,
        watch_hooks(build_connector(connector, ConnectorConfig(geometry, config.options))),
        num_gpu_blocks=default_blocks if config.gpu_blocks is None else config.gpu_blocks,
        page_bytes=config.block_bytes,
        max_running=config.concurrency,
        enable_events=takes_events and on_step is not None,
    )
    start = time.perf_counter()
    try:
        blocks = _run(engine, _requests(trace, geometry), config.concurrency, on_progress, on_step)
        pool = engine.kv_cache.pool
        holds = pool.num_blocks - 1 - pool.num_free_blocks()
    except BaseException:
        with suppress(ConnectorError):  # what came first is told
            engine.shutdown()
        raise
    engine.shutdown()
    seconds = time.perf_counter() - start
    stats = engine.stats
    return ReplayReport(
        requests=stats.requests,
        blocks=blocks,
        gpu_hit_blocks=stats.gpu_hit_blocks,
        cpu_hit_blocks=stats.cpu_hit_blocks,
        offloaded_blocks=stats.offloaded_blocks,
        loaded_blocks=stats.loaded_blocks,
        bytes_verified=stats.bytes_verified,
        mismatches=stats.mismatches,
        holds_at_end=holds,
        seconds=seconds,
        blocks_per_s=blocks / seconds,
        gpu_hit_rate=stats.gpu_hit_blocks / max(1, blocks),
        cpu_hit_rate=stats.cpu_hit_blocks / max(1, blocks),
        steps=stats.steps,
        preemptions=stats.preemptions,
        failed_transfers=stats.failed_transfers,
    )


def _run(
    engine: Engine,
    requests: Iterator[tuple[Request, TraceRequest]],
    concurrency: int,
    on_progress: Callable[[int], None],
    on_step: Callable[[Engine], None] | None,
) -> int:
    blocks = 0
    more = True
    while more or engine.has_work():
        while more and engine.num_unfinished_requests() < concurrency:
            item = next(requests, None)
            if item is None:
                more = False
                break
            request, row = item
            try:
                engine.add_request(request)
            except ConfigError as error:
                raise ConfigError(f"line {row.line} of the trace: {error}") from None
            blocks += len(row.hash_ids)
        engine.step()
        if on_step is not None:
            on_step(engine)
        on_progress(engine.stats.requests)
    return blocks


def _requests(
    trace: Iterable[TraceRequest], geometry: CacheGeometry
) -> Iterator[tuple[Request, TraceRequest]]:
    conversations = Conversations(geometry.hash_block_size)
    for row in trace:
        yield conversations.make_request(row), row
