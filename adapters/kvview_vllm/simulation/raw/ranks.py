"""The workers of several ranks of tensor parallelism, each in a separate process.

vLLM's own ``KVOutputAggregator`` merges their reports. The ranks cannot communicate with each
other: a connector that calls a collective operation of their group ends the run as ``ENGINE``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from kvview.testing.connector.invariants import InvariantBroken
from kvview_vllm.releases.versions import vllm
from kvview_vllm.simulation import scheduler as cpu_scheduler
from kvview_vllm.simulation.engine import named
from kvview_vllm.simulation.raw.worker import RemoteRawWorker, StepAnswer


class _Group:
    """A group of ranks without communication."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = self.rank_in_group = self.local_rank = rank
        self.world_size = size
        self.ranks = list(range(size))
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1

    def __getattr__(self, name: str) -> Any:
        raise InvariantBroken(
            "ENGINE",
            f"the connector calls {name} of a group of ranks, and the simulated ranks cannot "
            f"communicate; check it with --inference",
        )


def set_ranks(vllm_config: Any, size: int) -> None:
    """Set the number of ranks of tensor parallelism in a configuration."""
    # Set after the construction, because vLLM compares the number with the GPUs of the machine.
    vllm_config.parallel_config.tensor_parallel_size = size
    vllm_config.parallel_config.world_size = size


def join(rank: int, size: int) -> None:
    """Give this process its rank in vLLM's process groups."""
    state = vllm("distributed.parallel_state")
    state._TP = state._WORLD = _Group(rank, size)
    state._PP = _Group(0, 1)


class RawRanks:
    """The workers of all ranks, as one worker.

    Args:
        workers: One worker for each rank.
    """

    def __init__(self, workers: Sequence[RemoteRawWorker]) -> None:
        self._workers = list(workers)
        self._aggregator = cpu_scheduler.make_aggregator(len(workers))

    def execute(self, step: bytes) -> StepAnswer:
        """Run a step on each rank, and merge the results."""
        answers = [worker.execute(step) for worker in self._workers]
        return StepAnswer(
            self._merge([answer.transfers for answer in answers]),
            [wrong for answer in answers for wrong in answer.wrong],
            min(answer.num_loads for answer in answers),
            {part for answer in answers for part in answer.seen},
        )

    def _merge(self, transfers: Sequence[Any]) -> Any:
        if all(one is None for one in transfers):  # without a connector
            return None
        outputs = [SimpleNamespace(kv_connector_output=one) for one in transfers]
        with named("merging the outputs of the ranks"):
            return self._aggregator.aggregate(outputs).kv_connector_output

    def kill_last(self) -> None:
        """Kill the process of the last rank."""
        self._workers.pop().close()

    def shutdown(self) -> Collection[str]:
        """Shut the role down on each rank whose process runs."""
        return {part for worker in self._workers for part in worker.shutdown()}

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.close()
