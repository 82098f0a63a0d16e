"""The processes that play a connector: the report does not depend on their number, and all end."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from kvview import Connector, SchedulerConnector
from kvview.testing import ExpectedFailure, run_checks
from kvview.testing.connector import check_connector
from kvview.testing.connector.half.process import can_fork
from kvview.testing.connector.processes import Died, Processes, Task, default_processes
from kvview.testing.connector.scenario.seed_order import FIRST_SEEDS, in_order
from kvview_reference.store_connector import StoreConnector
from tests.mutants.connector import load_named

pytestmark = pytest.mark.skipif(not can_fork(), reason="no fork")

PARENT = os.getpid()
LEAKS = load_named("NeverFreesAfterFailure")


def on_finish(act: Callable[[], object]) -> type[Connector]:
    """A connector that does something when a request ends."""

    class Acts(StoreConnector):
        def make_scheduler(self) -> SchedulerConnector:
            half = super().make_scheduler()
            finish = half.on_request_finished

            def on_request_finished(*args: Any) -> Any:
                act()
                return finish(*args)

            half.on_request_finished = on_request_finished  # type: ignore[assignment,method-assign]
            return half

    return Acts


# --- the processes alone ---


def _call(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)


def calls(arguments: Iterable[Any]) -> Iterator[Task]:
    return (Task(_call, (argument,)) for argument in arguments)


def results_of(made: Processes, arguments: Iterable[Any]) -> Iterator[Any]:
    return (result for _, result in made.map(calls(arguments)))


def test_results_come_in_order_and_on_demand() -> None:
    def slow_if_even(number: int) -> int:
        time.sleep(0.02 * (number % 2 == 0))
        return number * number

    with Processes(slow_if_even, 3) as made:
        assert list(results_of(made, range(20))) == [number * number for number in range(20)]
        with closing(made.map(calls(count()))) as results:
            assert [next(results)[1], next(results)[1]] == [0, 1], "and there is no last task"
        assert list(results_of(made, [5, 6, 7, 8])) == [25, 36, 49, 64], "none of those left undone"
        assert list(results_of(made, [])) == []


def test_an_exception_is_raised_in_the_parent() -> None:
    class Own(Exception):
        """Does not pickle: its class is nowhere to be found."""

    def refuse(number: int) -> int:
        if number == 1:
            raise ValueError("one")
        if number == 2:
            raise Own("two")
        return number

    with Processes(refuse, 2) as made:
        results = results_of(made, [0, 1])
        assert next(results) == 0
        with pytest.raises(ValueError, match="one"):
            next(results)
        with pytest.raises(RuntimeError, match="Own: two"):
            list(made.map(calls([2])))
        assert list(results_of(made, [3])) == [3]


def test_a_process_that_dies_is_a_result_and_is_replaced() -> None:
    def die(how: int) -> int:
        faulthandler.disable()  # pytest's, which would print the stacks of a planned crash
        if how < 0:
            os.kill(os.getpid(), -how)
        if how > 0:
            os._exit(how)
        return how

    with Processes(die, 2) as made:
        results = list(results_of(made, [0, -signal.SIGKILL, 0, 3, 0, -signal.SIGSEGV, 0]))
    assert [answer for answer in results if answer != 0] == [
        Died("by SIGKILL"),
        Died("with exit code 3"),
        Died("by SIGSEGV"),
    ]
    assert results.count(0) == 4


def test_no_fork_beside_other_threads() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    assert default_processes() == 0
    stop.set()
    thread.join()


# --- a connector in them ---


@pytest.mark.slow
@pytest.mark.parametrize("connector", [StoreConnector, LEAKS])
@pytest.mark.parametrize("keep_going", [False, True])
def test_the_number_of_processes_changes_nothing(
    connector: type[Connector], keep_going: bool
) -> None:
    one, other = (
        check_connector(
            connector, seeds=7, processes=processes, keep_going=keep_going, max_shrink_runs=10
        )
        for processes in (0, 3)
    )
    assert one.coverage == other.coverage
    assert (one.num_seeds, one.notes) == (other.num_seeds, other.notes)
    assert [(f.seed, f.script) for f in one.failures] == [
        (f.seed, f.script) for f in other.failures
    ]
    assert bool(one.failures) == (connector is LEAKS)
    if one.failures:
        assert one.num_seeds == 7 if keep_going else one.num_seeds < 7
        assert keep_going or len(one.failures) == 1


class Refuses(StoreConnector):
    """Fails at the start of each run, so that its failure is shrunk at once."""

    def make_scheduler(self) -> SchedulerConnector:
        raise OSError("no such host")


def test_an_expected_failure_does_not_end_the_runs() -> None:
    expected = [ExpectedFailure("exceptions", "a host that is known", "https://example.com/1")]
    report = run_checks(Refuses, seeds=3, expected=expected)
    assert report.runs is not None
    assert not report.runs.is_cut_short
    assert not report.failures
    report = run_checks(Refuses, seeds=3)
    assert report.runs is not None
    assert report.runs.is_cut_short
    assert [result.check.law for result in report] == ["exceptions"]
    assert report.num_selected == 31


def test_a_connector_that_ends_its_process_fails_its_seed() -> None:
    def end() -> None:
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)

    runs = check_connector(on_finish(end), seeds=4, processes=2, max_shrink_runs=6)
    (failure,) = runs.failures
    assert (failure.law, failure.seed) == ("CONN-3", in_order(0, 4)[0])
    assert "died by SIGKILL" in failure.message


def test_an_interruption_in_a_hook_interrupts() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    runs = check_connector(on_finish(interrupt), seeds=4, processes=2)
    assert runs.is_interrupted
    assert runs.progress() == "0 of 4 seeds, 0 failed"


LEAVES_TRACES = """
import os
import sys
import tempfile
from pathlib import Path
from kvview_reference.store_connector import StoreConnector


class Leaves(StoreConnector):
    def make_scheduler(self):
        Path(r"{folder}", str(os.getpid())).write_text(tempfile.mkdtemp())
        return super().make_scheduler()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_command_leaves_its_result_and_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "target.py").write_text(LEAVES_TRACES.format(folder=pids))
    command = [sys.executable, "-m", "kvview", "check", f"{tmp_path / 'target.py'}:Leaves"]
    command += ["--seeds=5000", "--json", str(tmp_path / "report.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not list(pids.iterdir()) and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)  # the processes play
    process.send_signal(number)
    stdout, _ = process.communicate(timeout=120)
    assert process.returncode == 130, stdout
    assert "of 5000 seeds, 0 failed, interrupted" in stdout
    assert json.loads((tmp_path / "report.json").read_text())["is_interrupted"]
    end = time.monotonic() + 30
    while any(Path("/proc", file.name).exists() for file in pids.iterdir()):
        assert time.monotonic() < end, "a process outlives the command"
        time.sleep(0.05)
    for folder in filter(None, (file.read_text() for file in pids.iterdir())):  # "": not written
        assert not Path(folder).exists(), "a folder that a process left"


# --- the order ---


def test_the_first_seeds_are_those_that_find_most() -> None:
    assert sorted(in_order(0, 200)) == list(range(200))
    assert list(in_order(0, 200)[: len(FIRST_SEEDS)]) == list(FIRST_SEEDS)
    assert in_order(10**6, 3) == [10**6, 10**6 + 1, 10**6 + 2]
    assert sorted(in_order(3, 9)) == list(range(3, 12))
