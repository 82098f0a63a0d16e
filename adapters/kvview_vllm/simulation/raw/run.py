"""A simulated run of a raw connector, and the controls after a failure.

- VSIM-6 A failure **may** only be attributed to a connector after the run was repeated without the
connector and with its loads off. A failure without the connector is a failure of vLLM (``ENGINE``).
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from typing_extensions import override

from kvview import Mamba
from kvview.errors import ConfigError
from kvview.testing.connector.exercised.coverage import IN_REAL_TIME
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.run.drain import SECONDS_A_STEP
from kvview.testing.connector.run.simulate import Run
from kvview.testing.placeholders import in_folder, in_size
from kvview.testing.supervision import watchdog
from kvview_vllm.canary.call_laws import (
    stuck_aborts,
    stuck_ends,
    stuck_loads,
    stuck_queries,
)
from kvview_vllm.releases.cpu.process_groups import CANNOT_COMMUNICATE, process_groups
from kvview_vllm.releases.cpu.worker_caches import BLOCK_BYTES
from kvview_vllm.simulation.raw.call_recorder import REFUSAL, CallRecorder, refused_settings
from kvview_vllm.simulation.raw.raw_engine import RawHarness
from kvview_vllm.simulation.raw.raw_scenarios import RawEngines
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.transfer_config import classes_of, split_options
from kvview_vllm.simulation.scheduler import capabilities

if TYPE_CHECKING:
    from kvview.testing.connector.result import SimulationResult
    from kvview.testing.connector.run.engine import SimulatedEngine
    from kvview.testing.connector.scenario.scenario import Scenario


_MOST_WAITS = 100  # in all 5 s, because a save over a network may take a second
_MOST_WAITS_WITHOUT_THREADS = 30
_IN_VAIN: WeakSet[type] = WeakSet()  # connectors for which waiting did not help


class RawRun(Run):
    """Runs a scenario with a connector of vLLM.

    Args:
        connector_class: A ``KVConnectorBase_V1``.
        scenario: The events, whether they are already fitted or not.
        options: The ``kv_connector_extra_config``; its key ``kv_transfer_config`` has the other
            fields.
        without: The part that is off in a control run, ``"connector"`` or ``"loads"``.
    """

    def __init__(
        self,
        connector_class: type,
        scenario: Scenario,
        options: Mapping[str, Any],
        *,
        without: str = "",
    ) -> None:
        engines: Any = RawEngines(capabilities.engine_name())
        super().__init__(connector_class, scenario, [dict(options)], True, engines)
        self._connector_class = connector_class
        self._options = options
        self._is_connected = without != "connector"
        size = max(1, self.scenario.cpu_blocks)  # because few connectors accept a tier of none
        self._transfer_config = split_options(in_size(options, size, BLOCK_BYTES))
        self._recorder = CallRecorder(loads=without != "loads")
        self._stand_ins = StandIns(self.scenario.fates)
        self._num_threads = threading.active_count()  # before the connector starts any
        self._work_left: object = None
        self._num_waits = 0  # without a change of the remaining work
        for name in [name for name in self.coverage if name.startswith("seeds/")]:
            del self.coverage[name]  # because the ends of loads are not known

    @override
    def run(self) -> SimulationResult:
        # Threads of a connector may still write to the folder.
        with tempfile.TemporaryDirectory(prefix="kvview-", ignore_cleanup_errors=True) as folder:
            self._transfer_config = in_folder(self._transfer_config, folder)
            result = self._run()
        if (why := self._why_one_rank(result)) is not None:
            scenario = replace(self.scenario, ranks=(), ends_abruptly=False)
            return self._run_less(scenario, f"several ranks: {why}")
        if self._lacks_a_block(result):
            geometry = self.scenario.geometry
            groups = tuple(group for group in geometry.groups if not isinstance(group, Mamba))
            scenario = replace(self.scenario, geometry=replace(geometry, groups=groups))
            why = "vLLM allocates one block more than it counts"
            return self._run_less(scenario, f"loads within a step with Mamba groups: {why}")
        self._raise_refusal(result)
        return result

    def _run_less(self, scenario: Scenario, left_out: str) -> SimulationResult:
        less = RawRun(self._connector_class, scenario, self._options).run()
        return replace(less, coverage={**less.coverage, f"left out: {left_out}": 1})

    def _lacks_a_block(self, result: SimulationResult) -> bool:
        """Whether vLLM itself ran out of blocks, as it may for loads within a step and Mamba."""
        failure = result.failure
        has_states = any(isinstance(group, Mamba) for group in self.scenario.geometry.groups)
        return failure is not None and has_states and "free blocks from the pool" in failure.message

    def _why_one_rank(self, result: SimulationResult) -> str | None:
        """Return why the connector runs in one rank only; None if it can run in the scenario."""
        if result.failure is None or not self.scenario.ranks:
            return None
        message = result.failure.message
        if CANNOT_COMMUNICATE in message:
            return f"the connector uses their process group, and {CANNOT_COMMUNICATE}"
        if self.stage.built is None and (refusal := REFUSAL.search(message)):
            return f"the connector refuses them: {refusal[1]}"
        return None

    def _raise_refusal(self, result: SimulationResult) -> None:
        """Raise an error if the constructor refuses the settings, as vLLM's own constructors do."""
        message = result.failure.message if result.failure else ""
        if self.stage.built is None and (reason := refused_settings(message)) is not None:
            raise ConfigError(
                f"{self._connector_class.__name__} refuses these settings: {reason}; change "
                "them with --option or --kv-transfer-config"
            )

    def _run(self) -> SimulationResult:
        classes = classes_of(self._connector_class, self._transfer_config)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors are small, and more threads wait for each other
        try:
            with watchdog.watching(), process_groups(), self._stand_ins.installed(classes):
                result = super().run()
        finally:
            if self.stage.built is not None:
                self.harness.worker.close()
            torch.set_num_threads(num_threads)
        coverage = {**result.coverage, **self._recorder.coverage}
        left_out = {f"left out: {part}" for part in self._recorder.left_out}
        coverage |= dict.fromkeys(self._stand_ins.used | self._recorder.seen | left_out, 1)
        return replace(result, coverage=coverage)

    @override
    def _configure(self, connector_class: Any, options_of_each: Sequence[dict[str, Any]]) -> None:
        """Do nothing, because vLLM builds both roles."""

    @override
    def _build_engine(self) -> SimulatedEngine:
        self.harness = RawHarness(
            self.scenario,
            self._connector_class,
            self._transfer_config,
            self._recorder,
            self._stand_ins,
            is_connected=self._is_connected,
        )
        return self.harness

    @override
    def _play_round(self, place: int) -> None:
        super()._play_round(place)
        self._note_threads()

    @override
    def _num_tokens_loaded(self) -> int:
        return self._recorder.coverage["tokens to load"]

    @override
    def _raise_stuck(self) -> None:
        recorder, engine = self._recorder, self.harness
        unfinished, held = engine.unfinished(), engine.held_blocks()
        loading = [name for name, status in unfinished.items() if status == "loading"]
        ended = engine.finished_requests()
        if self._may_go_on((dict(unfinished), list(ended), dict(held))):
            time.sleep(SECONDS_A_STEP)
            return
        aborted = [name for name in ended if name in recorder.laws.loading]
        waiting = [name for name in unfinished if name in recorder.laws.unanswered]
        law, message = "CONN-3", "has_pending_push_work stays true forever"
        if loading:
            law, message = stuck_loads(loading)
        elif aborted:
            law, message = stuck_aborts(aborted)
        elif ended:
            law, message = stuck_ends(ended)
        elif waiting:
            law, message = stuck_queries(waiting)
        elif held:
            law, message = "CONN-4", self._message_of_held(held)
        elif again := engine.preempted_again_and_again():
            law, message = (
                "ENGINE",
                f"requests {again} preempt each other forever: vLLM 0.27 to 0.29 drops the tokens "
                f"that they compute meanwhile, and frees their blocks some steps later, with a "
                f"connector whose requires_kv_delivery is true, the default with kv_both (#49674). "
                f"A connector that is a cache returns False",
            )
        elif unfinished:
            law, message = (
                "ENGINE",
                f"requests {list(unfinished)} wait forever, and the connector has no work",
            )
        raise InvariantBroken(law, message)

    def _may_go_on(self, work: object) -> bool:
        """Whether a thread, a process or a service may still end a transfer of the work left.

        Without a thread, the first run that waits in vain is the last one that waits.
        """
        if work != self._work_left:
            if self._num_waits:
                self._recorder.seen.add(IN_REAL_TIME)
            self._work_left, self._num_waits = work, 0
        self._note_threads()
        self._num_waits += 1
        if IN_REAL_TIME in self._recorder.seen:
            return self._num_waits <= _MOST_WAITS
        if self._num_waits > _MOST_WAITS_WITHOUT_THREADS:
            _IN_VAIN.add(self._connector_class)
        return self._connector_class not in _IN_VAIN

    def _note_threads(self) -> None:
        """Note threads of the scheduler's process; a worker reports its own."""
        if threading.active_count() > self._num_threads:
            self._recorder.seen.add(IN_REAL_TIME)

    def _message_of_held(self, held: Mapping[int, int]) -> str:
        places = self._recorder.laws.places
        by = {place for block, place in places.items() if block in held}
        touched = f"; last touched by {', '.join(sorted(by)[:3])}" if by else ""
        return (
            f"blocks {sorted(held)[:10]} of the pool are held when everything has ended{touched}. "
            f"view.touch_blocks(ids) counts the holds, with their owners and their ages"
        )


def judge(
    connector_class: type, result: SimulationResult, options: Mapping[str, Any]
) -> SimulationResult:
    """Repeat a failed run without the connector, without its loads, and in the other model runner.

    (VSIM-6)

    Args:
        connector_class: The connector that failed.
        result: The failed run.
        options: Options of the failed run.
    """
    failure = result.failure
    assert failure is not None, "only a failed run is repeated"

    def failure_in(scenario: Scenario, without: str = "") -> Any:
        return RawRun(connector_class, scenario, options, without=without).run().failure

    alone = RawRun(connector_class, result.scenario, options, without="connector")
    if bare := alone.run().failure:
        found = "without the connector too" if alone.stage.built else "the class cannot be run"
        message = f"{found}: {bare.law}: {bare.message}"
        return replace(result, failure=replace(failure, law="ENGINE", message=message))
    off = failure_in(result.scenario, "loads")
    control = "with its loads off as well" if off is None else f"with its loads off: {off.law}"
    message = f"{failure.message}. Without the connector the run is green, {control}"
    other = replace(result.scenario, other_runner=not result.scenario.other_runner)
    if capabilities.has_two_runners() and failure_in(other) is None:
        runner = "V2" if capabilities.runs_v2(result.scenario) else "V1"
        message += f". The run fails in Model Runner {runner} only"
    return replace(result, failure=replace(failure, message=message))
