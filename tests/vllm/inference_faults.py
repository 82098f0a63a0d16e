"""Lets a connector fail in a real engine, hook by hook, and checks the first line and the end.

    python tests/vllm/inference_faults.py [--policy fail] [--hooks NAME ...]

Needs the CPU build, as ``kvview check --inference`` does. Each case runs ``vllm.LLM`` in a process
of its own, a fork of this one, which has imported vLLM. The connector is
``faulty_connectors.py:BrokenConnector``, which raises in every call of one hook. ``worker killed``
kills the process of one of two workers.

The exit code is 1 if a case does not end as the failure policy requires, or if the first line about
it is not the adapter's line with target, file and hook.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvview import Connector, SchedulerConnector, WorkerConnector
from kvview.connector.hooks import hooks_of
from kvview_vllm.inference.server import Server, prepare

TARGET = f"{Path(__file__).with_name('faulty_connectors.py')}:BrokenConnector"
AT_START = {
    *("__init__", "make_scheduler", "make_worker", "options"),
    *("SchedulerConnector.bind_gpu_block_pool_view", "SchedulerConnector.on_engine_ready"),
    "WorkerConnector.register_kv_caches",
}
KILLED = "worker killed"
HOOKS = [
    *("options", "__init__", *sorted(hooks_of(Connector))),
    *(
        f"{half.__name__}.{name}"
        for half in (SchedulerConnector, WorkerConnector)
        for name in hooks_of(half)
        if name != "wait"  # loads end between steps in all releases that have a CPU build
    ),
    KILLED,
]
LIMIT_S = 300
NUM_TOKENS = 12
NUM_BLOCKS = 13
# Each starts a block while it decodes, and together they use all blocks: one is preempted.
PROMPTS = [list(range(first, first + 95)) for first in range(10, 390, 95)]


@dataclass
class Outcome:
    """The end of a case.

    Args:
        hook: The hook that raised.
        policy: `kv_load_failure_policy`.
        first_line: The first line about the error, empty without one.
        num_answered: Requests with a response.
        num_sent: Requests that were sent.
        output: The whole output.
    """

    hook: str
    policy: str
    first_line: str
    num_answered: int
    num_sent: int
    output: str

    @property
    def continues(self) -> bool:
        """Whether every request has a response."""
        return self.num_answered == self.num_sent > 0

    def why_wrong(self) -> str:
        """Return the error of this outcome, empty if it is right."""
        if self.hook == KILLED:
            return "the engine continues without a worker" if self.continues else ""
        name = self.hook.rpartition(".")[2]
        words = [f"connector {TARGET}", f"{Path(TARGET.partition(':')[0]).name}:"]
        words += ["unknown"] if name == "options" else [f"{name} raised RuntimeError: planted"]
        missing = [word for word in words if word not in self.first_line]
        if missing:
            return f"the first line lacks {missing}"
        must_continue = self.hook not in AT_START and (
            self.policy == "recompute" or name == "shutdown"
        )
        if self.continues != must_continue:
            return f"{self.num_answered} of {self.num_sent} requests have a response"
        return ""


def transfer_config(hook: str, policy: str) -> dict[str, Any]:
    """Return the `kv_transfer_config` of a connector with one broken hook."""
    options: dict[str, Any] = {"cpu_blocks": 200, "fails_in": hook}
    if hook == "options":
        options["unknown_option"] = 1
    return {
        "kv_connector": "KVViewConnector",
        "kv_connector_module_path": "kvview_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connector": TARGET, "options": options},
    }


def first_line(output: str) -> str:
    """Return the first line about an error, of kvview or of vLLM."""
    words = ("planted", "Traceback", "unknown_option", "cannot start", "died unexpectedly")
    return next((s for s in output.splitlines() if any(word in s for word in words)), "")


def in_process(hook: str, policy: str, model: Path, report: Path) -> None:
    """Serve with the connector, and write the number of responses whenever it grows."""
    answers = 0

    def note(number: int, asked: int) -> None:
        report.write_text(json.dumps([number, asked]))

    asked = 4 * len(PROMPTS)
    note(0, asked)
    more: dict[str, Any] = {}
    if hook == KILLED:
        more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    server = Server(model, transfer_config(hook, policy), NUM_BLOCKS, **more)
    for turn in range(2):
        for together in (PROMPTS, *([prompt] for prompt in PROMPTS)):
            for number, prompt in enumerate(together):
                server.add(f"{turn}-{answers + number}", prompt, NUM_TOKENS)
            while server.engine.has_unfinished_requests():
                answers += sum(output.finished for output in server.engine.step())
            note(answers, asked)
        while server.scheduler.has_requests():  # until the connector is idle
            server.engine.step()
        server.llm.reset_prefix_cache()  # the next prompts are loaded
        if hook == KILLED:
            worker = server.llm.llm_engine.engine_core.engine_core.model_executor.workers[1]
            os.kill(worker.proc.pid, signal.SIGKILL)
        elif hook.endswith("reset_cache"):
            server.scheduler.reset_prefix_cache(reset_connector=True)
    server.llm.llm_engine.engine_core.shutdown()


def _fork(run: Callable[[], object], output: Path) -> int:
    """Run a function in a fork that leads a process group; its output goes into a file."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        run()
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def play(hook: str, policy: str, model: Path) -> Outcome:
    """Run one case in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report")
        child = _fork(lambda: in_process(hook, policy, model, report), log)
        deadline = time.monotonic() + LIMIT_S
        try:
            while time.monotonic() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0):
                time.sleep(0.1)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # the fork and its children
        answers, asked = json.loads(report.read_text()) if report.exists() else (0, 1)
        output = log.read_text(errors="replace")
    return Outcome(hook, policy, first_line(output), answers, asked, output)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, and print one line each."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--policy", choices=("recompute", "fail"), default="recompute")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=HOOKS, metavar="NAME")
    parser.add_argument("--verbose", action="store_true", help="print the output of wrong cases")
    arguments = parser.parse_args(argv)
    prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # kills the running case
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        made = "import pathlib, sys; from kvview_vllm.inference.models import make_model; "
        made += "make_model('llama', pathlib.Path(sys.argv[1]))"
        # In another process, because torch's threads do not survive a fork.
        command = [sys.executable, "-c", made, str(model)]
        subprocess.run(command, check=True, capture_output=True)
        importlib.import_module("vllm.entrypoints.llm")
        for hook in arguments.hooks:
            began = time.monotonic()
            outcome = play(hook, arguments.policy, model)
            why = outcome.why_wrong()
            wrong += bool(why)
            ends = "continues" if outcome.continues else "ends"
            print(f"{hook}: {ends}; {why or 'as required'} ({time.monotonic() - began:.0f} s)")
            print(f"    {outcome.first_line.strip()[:300]}", flush=True)
            if why and arguments.verbose:
                print(outcome.output)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
