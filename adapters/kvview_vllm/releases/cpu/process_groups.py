"""vLLM's process groups for one rank, which cannot communicate with the other ranks.

The groups only state ranks and sizes, which a connector reads, because real groups of several ranks
need several processes.

Source: ``get_tp_group`` and its siblings in vllm/distributed/parallel_state.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.releases.compat.versions import vllm

_ALONE = ("_DCP", "_PCP")  # groups of context parallelism, which no check varies
_OF_TORCH = ("cpu_group", "device_group")
CANNOT_COMMUNICATE = "the simulated ranks cannot communicate"


class _Group:
    """A group of ranks; collective operations of a group of one rank return their argument."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _OF_TORCH:  # torch's own collective operations take them
            return self._use(name)

        # A connector may pass the operation on and never call it, as LMCache does.
        def operation(*args: Any, **kwargs: Any) -> Any:
            self._use(name)
            return args[0] if args else None

        return operation

    def _use(self, name: str) -> None:
        if self.world_size > 1:
            raise InvariantBroken(
                "ENGINE",
                f"the connector uses {name} of a group of ranks, and {CANNOT_COMMUNICATE}; check "
                f"it with --inference",
            )


def _groups(ranks: tuple[int, int], rank: int) -> dict[str, _Group]:
    """Return the groups of a rank, by their names in vLLM's module."""
    tensor, pipeline = ranks
    groups = {
        "_WORLD": _Group(rank, tensor * pipeline),
        "_TP": _Group(rank % tensor, tensor),
        "_PP": _Group(rank // tensor, pipeline),
    }
    return groups | {name: _Group(0, 1) for name in _ALONE}


@contextmanager
def process_groups(ranks: tuple[int, int] = (1, 1), rank: int = 0) -> Iterator[None]:
    """Provide the groups to connectors while the block runs.

    Args:
        ranks: Tensor-parallel and pipeline-parallel size.
        rank: Of the worker.
    """
    state = vllm("distributed.parallel_state")
    with ExitStack() as stack:
        for name, group in _groups(ranks, rank).items():
            if hasattr(state, name):
                stack.enter_context(patch.object(state, name, group))
        yield


def join(ranks: tuple[int, int], rank: int) -> None:
    """Give the groups to connectors until this process ends.

    Args:
        ranks: Tensor-parallel and pipeline-parallel size.
        rank: Of the worker.
    """
    vars(vllm("distributed.parallel_state")).update(_groups(ranks, rank))
