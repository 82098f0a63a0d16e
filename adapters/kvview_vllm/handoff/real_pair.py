"""Two engine processes with a connector of vLLM, and a router between them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvview import ConfigError

LEASE_SECONDS = 12
_WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class RealEngine:
    """One engine in a separate process.

    Args:
        name: Name of the engine, which is also its engine id.
        model: Folder of the model.
        config: ``kv_transfer_config``, without the engine id; ``{port}`` in it stands for a free
            port.
        folder: Folder for the log of the engine.
    """

    def __init__(self, name: str, model: Path, config: dict[str, Any], folder: Path) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        given = json.dumps({**config, "engine_id": f"engine-{name}"})
        given = given.replace("{port}", str(self.port))
        self._command = [sys.executable, "-m", "kvview_vllm.handoff.pd_child", str(model), given]
        self.start()

    def start(self) -> None:
        """Start the process; the first call of :meth:`ask` waits until the engine is ready."""
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port),
        }
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            env={**os.environ, **environment},
        )
        self._is_up = False

    def ask(self, **job: Any) -> dict[str, Any]:
        """Run a job; see :func:`~kvview_vllm.handoff.pd_child.serve`.

        Returns:
            Result of the job, or ``{"died": error}``; an engine that has died or hangs is started
            again.

        Raises:
            ConfigError: The engine does not start.
        """
        if not self._is_up:
            self._is_up = self._read() == "up"
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = self._read()
        if "died" in result or "hung" in result:
            self.kill()
            self.start()
        return result

    def _read(self) -> Any:
        assert self._process.stdout is not None, "it is a pipe"
        while line := self._process.stdout.readline():
            try:
                return json.loads(line)
            except ValueError:
                continue  # a line of a library
        raise ConfigError(f"engine {self.name} has ended; its log is {self.log}")

    def prefill(self, ids: list[int], name: str) -> dict[str, Any]:
        """Compute a prompt under a request id, and return the parameters of its handoff."""
        params: dict[str, Any] = self.ask(ids=ids, n=1, kv=_WANTED, id=name)["kv"]
        return params

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()
