"""The workers of several ranks of tensor parallelism, each in a separate process.

vLLM's own ``KVOutputAggregator`` merges their reports. The ranks cannot communicate with each
other, so a connector that uses their process group runs in one rank instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

from kvview_vllm.simulation.raw.worker.role import RemoteRawWorker, StepAnswer
from kvview_vllm.simulation.scheduler import model_runner
from kvview_vllm.simulation.scheduler.vllm_scheduler import named


class RawRanks:
    """The workers of all ranks, as one worker.

    Args:
        workers: One worker for each rank.
        scheduler: vLLM's scheduler, with the connector that the workers report to.
    """

    def __init__(self, workers: Sequence[RemoteRawWorker], scheduler: Any) -> None:
        self._workers = list(workers)
        self._aggregator = model_runner.make_aggregator(scheduler, len(workers))

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
