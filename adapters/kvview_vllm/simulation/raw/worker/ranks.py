"""The workers of several ranks, each in a separate process.

The ranks have other heads (tensor parallelism), other layers (pipeline parallelism) or both. vLLM's
own ``KVOutputAggregator`` merges their reports. The ranks run a step in any order, and with several
steps in flight some ranks run ahead of others. The ranks cannot communicate with each other, so a
connector that uses their process group runs in one rank instead.

Source: vllm/v1/executor/multiproc_executor.py, 0.11.0 to 0.33.0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvview_vllm.releases.cpu.worker_caches import NUM_LAYERS
from kvview_vllm.simulation.raw.worker.role import RemoteRawWorker, StepAnswer
from kvview_vllm.simulation.scheduler import model_runner
from kvview_vllm.simulation.scheduler.vllm_scheduler import named


def sizes_of_ranks(ranks: Sequence[int]) -> tuple[int, int]:
    """Return the tensor-parallel and the pipeline-parallel size of a fitted scenario's ranks."""
    tensor = sum(ranks) // NUM_LAYERS
    return tensor, len(ranks) // tensor


class RawRanks:
    """The workers of all ranks, as one worker.

    Args:
        workers: One worker for each rank.
        scheduler: vLLM's scheduler, with the connector that the workers report to.
        tensor_size: Number of the ranks of a stage; the first of the last stage has the output.
        delays: Delays of ranks, used in turn; in a step, a rank with a smaller delay is earlier.
    """

    def __init__(
        self,
        workers: Sequence[RemoteRawWorker],
        scheduler: Any,
        tensor_size: int,
        delays: Sequence[int],
    ) -> None:
        self._workers = list(workers)
        self._aggregator = model_runner.make_aggregator(scheduler, len(workers))
        self._output_rank = len(workers) - tensor_size
        self._delays = delays or [1]
        self._num_steps = 0
        self._launched: deque[dict[int, StepAnswer]] = deque()  # answers of the early ranks

    def launch(self, step: bytes) -> None:
        """Run a step on the ranks that are not late, unless they have an earlier step to run."""
        early = {rank for rank, delay in self._delays_of_step().items() if not delay}
        for before in self._launched:
            early &= before.keys()
        self._launched.append({rank: self._workers[rank].execute(step) for rank in early})

    def execute(self, step: bytes) -> StepAnswer:
        """Run a step on all ranks that have not run it, and merge the results."""
        done = self._launched.popleft() if self._launched else {}
        order = self._delays_of_step()
        for rank in sorted(order.keys() - done.keys(), key=lambda rank: (order[rank], rank)):
            done[rank] = self._workers[rank].execute(step)
        answers = [done[rank] for rank in range(len(self._workers))]
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
            return self._aggregator.aggregate(outputs, self._output_rank).kv_connector_output

    def _delays_of_step(self) -> Mapping[int, int]:
        """Return the delay of each rank in a step."""
        self._num_steps += 1
        number = len(self._delays)
        return {
            rank: self._delays[(self._num_steps + 7 * rank) % number]
            for rank in range(len(self._workers))
        }

    def sleep(self) -> None:
        """Sleep and wake up on each rank."""
        for worker in self._workers:
            worker.sleep()

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
