"""vLLM's process groups for one rank, without the other ranks.

A connector reads its ranks from these groups, and a group of several ranks needs their processes.

Source: ``get_tp_group`` and its siblings in vllm/distributed/parallel_state.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvview_vllm.releases.versions import vllm

_ALONE = ("_DCP", "_PCP")  # groups of context parallelism, which the check does not vary


@contextmanager
def process_groups(ranks: tuple[int, int] = (1, 1), rank: int = 0) -> Iterator[None]:
    """Provide the groups to connectors while the block runs.

    Args:
        ranks: Tensor-parallel and pipeline-parallel size.
        rank: Of the worker.
    """
    state = vllm("distributed.parallel_state")
    tensor, pipeline = ranks
    groups = {"_TP": (rank % tensor, tensor), "_PP": (rank // tensor, pipeline)}
    groups |= dict.fromkeys(_ALONE, (0, 1))
    with ExitStack() as stack:
        for name, place in groups.items():
            if hasattr(state, name):
                stack.enter_context(patch.object(state, name, _group(*place)))
        yield


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(
        rank_in_group=rank,
        world_size=size,
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        broadcast=lambda tensor, src: tensor,
        broadcast_object=lambda value, src: value,
    )
