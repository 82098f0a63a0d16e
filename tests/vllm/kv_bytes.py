"""Comparison of the KV cache with that of an engine without a connector, after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from kvview_vllm.inference.serve import ServeJob, serve
from kvview_vllm.inference.server import Server
from kvview_vllm.inference.traffic import SeededTraffic, Served

WRONG_BLOCKS = "wrong blocks"
_TOLERANCE = 1e-2  # KV depends a little on the tokens that are computed in one step

Block = tuple[bytes, int, Sequence[str]]
"""Hash of a block, its number, and its layers."""
_truth: dict[tuple[bytes, str], torch.Tensor] = {}
"""KV by hash and layer; workers are forked, so that they have it."""


def serve_and_compare(file: Path, job: ServeJob, on_progress: Callable[[str], None]) -> Served:
    """Serve a job, and count the blocks of the prefix cache with other bytes than in the file.

    Args:
        file: File for the KV of an engine without a connector, which writes it.
        job: The job.
        on_progress: Called at short intervals, with a text about the progress.
    """
    step, change_weights = SeededTraffic.step, Server.change_weights
    function = _compare if job.config else _record
    if job.config:
        _truth.update(torch.load(file))
    wrong: set[bytes] = set()
    weights = b""

    def step_and_read(traffic: SeededTraffic, count: int = 1) -> bool:
        has_output = False
        for _ in range(count):
            has_output |= step(traffic)
            if not traffic.server.num_steps_in_flight():
                arguments = (weights, _cached_blocks(traffic.server))
                for found in traffic.server.llm.collective_rpc(function, args=arguments):
                    wrong.update(found)
        return has_output

    def change(server: Server, shift: int) -> None:
        nonlocal weights
        weights = b"" if weights else b"other weights"
        change_weights(server, shift)

    with (
        patch.object(SeededTraffic, "step", step_and_read),
        patch.object(Server, "change_weights", change),
    ):
        served = serve(job, on_progress)
    if not job.config:
        torch.save(_truth, file)
    served.coverage[WRONG_BLOCKS] = len(wrong)
    return served


def _cached_blocks(server: Server) -> list[Block]:
    groups = server.scheduler.kv_cache_config.kv_cache_groups
    return [
        (bytes(name[:-4]), block.block_id, groups[int.from_bytes(name[-4:])].layer_names)
        for block in server.pool.blocks
        if (name := block.block_hash) is not None  # ends with the number of the group
    ]


def _record(worker: Any, weights: bytes, blocks: Sequence[Block]) -> list[bytes]:
    for name, block_id, layers in blocks:
        for layer in layers:
            if (weights + name, layer) not in _truth:
                _truth[weights + name, layer] = _kv(worker, layer, block_id).clone()
    return []


def _compare(worker: Any, weights: bytes, blocks: Sequence[Block]) -> list[bytes]:
    return [
        name
        for name, block_id, layers in blocks
        for layer in layers
        if (right := _truth.get((weights + name, layer))) is not None
        and not torch.allclose(_kv(worker, layer, block_id), right, _TOLERANCE, _TOLERANCE)
    ]


def _kv(worker: Any, layer: str, block_id: int) -> torch.Tensor:
    runner = worker.model_runner
    cache = runner.compilation_config.static_forward_context[layer].kv_cache
    cache = cache[0] if isinstance(cache, list | tuple) else cache
    kv: torch.Tensor = cache.select(
        list(cache.shape).index(runner.kv_cache_config.num_blocks), block_id
    )
    return kv
