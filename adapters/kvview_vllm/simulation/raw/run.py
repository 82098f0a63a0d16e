"""A simulated run of a raw connector, and who is to blame when it fails.

- VSIM-6 Nobody **may** be blamed before the run was repeated without the connector and with
  its loads off; what fails without it is vLLM's: ``ENGINE``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from kvview.testing import watchdog
from kvview.testing.connector.invariants import InvariantBroken
from kvview.testing.connector.run import Run
from kvview.testing.placeholders import in_folder
from kvview_vllm.releases import engine_version
from kvview_vllm.simulation.raw.fit import RawEngines
from kvview_vllm.simulation.raw.harness import RawHarness
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.target import classes_of, split_options
from kvview_vllm.simulation.raw.watched import Watch

if TYPE_CHECKING:
    from kvview.testing.connector.harness import ConnectorHarness
    from kvview.testing.connector.result import SimulationResult
    from kvview.testing.connector.scenario import Scenario


class RawRun(Run):
    """Plays a scenario with a connector of vLLM.

    Args:
        connector_class: A ``KVConnectorBase_V1``.
        scenario: What happens, as fitted or not.
        options: Its ``kv_connector_extra_config``; under ``kv_transfer_config`` the rest.
        without: ``"connector"`` or ``"loads"``, for the controls.
    """

    def __init__(
        self,
        connector_class: type,
        scenario: Scenario,
        options: Mapping[str, Any],
        *,
        without: str = "",
    ) -> None:
        super().__init__(connector_class, scenario, [dict(options)], True, _engines())
        self._connector_class = connector_class
        self._is_connected = without != "connector"
        self._transfer_config = split_options(options)
        self._raw_watch = Watch(loads=without != "loads")
        self._stand_ins = StandIns(self.scenario.fates)
        for name in [name for name in self.coverage if name.startswith("seeds/")]:
            del self.coverage[name]  # the ends of loads are not known

    @override
    def run(self) -> SimulationResult:
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            self._transfer_config = in_folder(self._transfer_config, folder)
            return self._run()

    def _run(self) -> SimulationResult:
        classes = classes_of(self._connector_class, self._transfer_config)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # small tensors: more of them wait for each other
        try:
            with watchdog.watching(), self._stand_ins.installed(classes):
                result = super().run()
        finally:
            if self.stage.built is not None:
                self.harness.worker.close()
            torch.set_num_threads(num_threads)
        coverage = {**result.coverage, **self._raw_watch.coverage}
        left_out = {f"left out: {what}" for what in self._raw_watch.left_out}
        for what in self._stand_ins.used | self._raw_watch.seen | left_out:
            coverage[what] = 1
        return replace(result, coverage=coverage)

    @override
    def _configure(self, connector_class: Any, options_of_each: Sequence[dict[str, Any]]) -> None:
        """There are no halves to make: vLLM builds both roles."""

    @override
    def _build_engine(self) -> ConnectorHarness:
        self.harness = RawHarness(
            self.scenario,
            self._connector_class,
            self._transfer_config,
            self._raw_watch,
            self._stand_ins,
            is_connected=self._is_connected,
        )
        return self.harness

    @override
    def _num_tokens_loaded(self) -> int:
        return self._raw_watch.coverage["tokens to load"]

    @override
    def _raise_stuck(self) -> None:
        watch, engine = self._raw_watch, self.harness
        unfinished = engine.unfinished()
        held = engine.held_blocks()
        if loading := [name for name, status in unfinished.items() if status == "loading"]:
            raise InvariantBroken(
                "CONN-3",
                f"requests {loading} wait for ever for their loads: get_num_new_matched_tokens "
                f"promised them, and get_finished of the worker never names the requests",
            )
        if ended := engine.finished_requests():
            raise InvariantBroken(
                "CONN-4",
                f"requests {ended} have ended and keep their blocks: request_finished said that "
                f"they are freed later, and get_finished of the worker never names them",
            )
        if waiting := [name for name in unfinished if name in watch.unanswered]:
            raise InvariantBroken(
                "CONN-2",
                f"requests {waiting} wait for ever: get_num_new_matched_tokens always returns None",
            )
        if held:
            self._raise_held(held)
        if again := engine.preempted_again_and_again():
            raise InvariantBroken(
                "ENGINE",
                f"requests {again} preempt each other for ever: vLLM 0.27 to 0.29 drops what they "
                f"compute meanwhile, and frees their blocks some steps later, beside a connector "
                f"whose requires_kv_delivery is true, as by default with kv_both (#49674). A "
                f"connector that is a cache says False",
            )
        if unfinished:
            raise InvariantBroken(
                "ENGINE",
                f"requests {list(unfinished)} wait for ever, and the connector has nothing",
            )
        raise InvariantBroken("CONN-3", "has_pending_push_work is true for ever")

    def _raise_held(self, held: Mapping[int, int]) -> None:
        places = self._raw_watch.places
        by = {place for block, place in places.items() if block in held}
        told = f"; last touched by {', '.join(sorted(by)[:3])}" if by else ""
        raise InvariantBroken(
            "CONN-4",
            f"blocks {sorted(held)[:10]} of the pool are held when everything has ended{told}. "
            f"view.touch_blocks(ids) and view.lease(ids) count what is held, by whom, and for "
            f"how long",
        )


def _engines() -> Any:
    return RawEngines(f"vllm {engine_version()}")


def judge(
    connector_class: type, result: SimulationResult, options: Mapping[str, Any]
) -> SimulationResult:
    """Repeat a failed run without the connector, and with its loads off (VSIM-6).

    Args:
        connector_class: What failed.
        result: How.
        options: As it ran.
    """
    failure = result.failure
    assert failure is not None, "only what failed is judged"

    def told_without(what: str) -> Any:
        return RawRun(connector_class, result.scenario, options, without=what).run().failure

    if bare := told_without("connector"):
        message = f"without the connector too: {bare.law}: {bare.message}"
        return replace(result, failure=replace(failure, law="ENGINE", message=message))
    off = told_without("loads")
    told = "with its loads off as well" if off is None else f"with its loads off: {off.law}"
    message = f"{failure.message}. Without the connector the run is green, {told}"
    return replace(result, failure=replace(failure, message=message))
