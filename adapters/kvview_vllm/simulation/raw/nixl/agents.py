"""NIXL in one process: agents that read each other's memory over the simulated network.

The agents replace the NIXL library. The TCP side channel and the clock of vLLM's NIXL connectors
are replaced as well. The producer's memory is read only when the network delivers the read, so a
block that was overwritten in the meantime is detected. The transport is reliable like NIXL's. A
lost message causes a transfer error, and no message is cut, changed or repeated.

Source: the calls of ``nixl_agent`` in vllm/distributed/kv_transfer/kv_connector/v1/nixl, 0.32.0 and
0.33.0.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from kvview.testing.handoff.harness import EngineLife
from kvview.testing.handoff.network import Network
from kvview_vllm.releases import reading
from kvview_vllm.releases.compat.versions import vllm

_PACKAGE = "distributed.kv_transfer.kv_connector.v1.nixl"
_MODULES = ("base_scheduler", "base_worker", "pull_scheduler", "pull_worker")
_PATIENCE = 4  # seconds until a transfer without an answer is an error
Block = tuple[int, int]  # address and number of bytes


@dataclass(eq=False)
class _Transfer:
    peer: str
    local: Sequence[Block]
    remote: Sequence[Block]
    notice: bytes
    state: str = "PROC"
    ends_at: float = 0.0


class SimulatedAgent:
    """The agent of a worker; it has the methods of ``nixl_agent`` that vLLM calls.

    Args:
        fabric: The process.
        life: The engine of the worker.
        name: Name of the agent.
    """

    def __init__(self, fabric: Fabric, life: EngineLife, name: str) -> None:
        self._fabric, self._name = fabric, name
        self._address = life.me.address
        self._wire: Any = life.wires[0]
        self._lists: dict[int, tuple[str, list[Block]]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._notices: defaultdict[str, list[bytes]] = defaultdict(list)
        self._numbers = count(1)
        fabric.agents[name] = self

    @property
    def is_alive(self) -> bool:
        """Whether the life of the engine to which the agent belongs has not ended."""
        return not self._wire.is_dead

    # --- memory and peers ---

    def get_reg_descs(self, ranges: Any, mem_type: str) -> Any:
        """Return memory ranges."""
        return ranges

    def register_memory(self, descs: Any, backends: Sequence[str] = ()) -> None:
        """Do nothing, because all memory is in this process."""

    def deregister_memory(self, descs: Any) -> None:
        """Do nothing."""

    def get_agent_metadata(self) -> bytes:
        """Return the name."""
        return self._name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        """Connect to an agent."""
        self._peer(metadata.decode())
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        """Do nothing."""

    def check_remote_metadata(self, name: str) -> bool:
        """Whether an agent is connected."""
        return self._fabric.is_alive(name)

    def get_xfer_descs(self, blocks: Any, mem_type: str | None = None) -> Any:
        """Return the blocks unchanged, for releases up to 0.32."""
        return blocks

    def prep_xfer_dlist(self, name: str, rows: Any, mem_type: str | None = None) -> int:
        """Make a list of blocks from rows, each of which may stand for several blocks."""
        blocks: list[Block] = []
        for address, size, _, *strided in ([*map(int, row)] for row in rows):
            stride, number = strided or (0, 1)
            blocks += [(address + stride * place, size) for place in range(number)]
        self._lists[(handle := next(self._numbers))] = name, blocks
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        """Drop a list."""
        self._lists.pop(handle, None)

    # --- transfers ---

    def make_prepped_xfer(
        self,
        operation: str,
        local: int,
        local_ids: Any,
        remote: int,
        remote_ids: Any,
        notif_msg: bytes = b"",
    ) -> int:
        """Prepare a read of blocks; an index beyond the list raises an error."""
        if operation != "READ":
            raise RuntimeError(f"NIXL_ERR_NOT_SUPPORTED: {operation}")
        (_, mine), (peer, theirs) = self._lists[local], self._lists[remote]
        transfer = _Transfer(
            peer,
            [mine[int(place)] for place in local_ids],
            [theirs[int(place)] for place in remote_ids],
            notif_msg,
        )
        self._transfers[(handle := next(self._numbers))] = transfer
        return handle

    def transfer(self, handle: int) -> str:
        """Start a read."""
        transfer = self._transfers[handle]
        transfer.ends_at = self._fabric.network.now + _PATIENCE
        pages = [_memory(block) for block in transfer.remote]
        self._peer(transfer.peer).send(self._name, ("pages", handle), pages)
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        """Return DONE, PROC or ERR."""
        self._receive()
        transfer = self._transfers[handle]
        is_late = self._fabric.network.now >= transfer.ends_at
        if transfer.state == "PROC" and (is_late or not self._fabric.is_alive(transfer.peer)):
            transfer.state = "ERR"
        return transfer.state

    def get_xfer_telemetry(self, handle: int) -> SimpleNamespace:
        """Return zeros."""
        return SimpleNamespace(xferDuration=0, postDuration=0, totalBytes=0, descCount=0)

    def release_xfer_handle(self, handle: int) -> None:
        """Drop a transfer, and discard pages that arrive after this call."""
        self._transfers.pop(handle, None)

    # --- messages ---

    def send_notif(self, name: str, notif_msg: bytes) -> None:
        """Send a notification to an agent."""
        self._peer(name)
        self.send(name, ("notice", notif_msg), [])

    def get_new_notifs(self) -> Mapping[str, list[bytes]]:
        """Return the notifications that have arrived, by sender."""
        self._receive()
        notices, self._notices = self._notices, defaultdict(list)
        return notices

    def send(self, to: str, content: tuple[str, Any], pages: Sequence[memoryview]) -> None:
        """Send a message to another agent."""
        header = pickle.dumps((to, self._name, *content))
        self._wire.send(self._fabric.agents[to]._address, [header, *pages])

    def _receive(self) -> None:
        for header, *pages in self._wire.receive():
            to, sender, kind, content = pickle.loads(header)
            if to != self._name:
                continue  # for an older life of the engine
            if kind == "notice":
                self._notices[sender].append(content)
            elif (transfer := self._transfers.get(content)) and transfer.state == "PROC":
                for block, page in zip(transfer.local, pages, strict=True):
                    _memory(block)[:] = page
                transfer.state = "DONE"
                if transfer.notice and self._fabric.is_alive(sender):
                    self.send(sender, ("notice", transfer.notice), [])

    def _peer(self, name: str) -> SimulatedAgent:
        if not self._fabric.is_alive(name):
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return self._fabric.agents[name]


@dataclass
class Fabric:
    """The agents, the side channels and the handshakes of one process.

    Args:
        network: The network, which has the clock.
    """

    network: Network
    agents: dict[str, SimulatedAgent] = field(default_factory=dict)
    _served: dict[str, Mapping[tuple[int, int], bytes]] = field(default_factory=dict)
    _handshakes: list[Callable[[], None]] = field(default_factory=list)
    _built: Any = None

    def is_alive(self, name: str) -> bool:
        """Whether an agent exists and the life of its engine has not ended."""
        return name in self.agents and self.agents[name].is_alive

    def run_handshakes(self) -> None:
        """Run the handshakes that workers have started."""
        handshakes = [*self._handshakes]
        self._handshakes.clear()
        for handshake in handshakes:
            handshake()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let vLLM's NIXL connectors use the simulated agents."""
        with reading("NIXL", "the modules of its connectors"):
            nixl = {name: vllm(f"{_PACKAGE}.{name}") for name in _MODULES}
        worker, scheduler = nixl["base_worker"], nixl["base_scheduler"]
        clock = SimpleNamespace(perf_counter=lambda: self.network.now)
        platform = type(vllm("platforms").current_platform)
        replaced: dict[str, Any] = {
            "NixlWrapper": lambda name, config: SimulatedAgent(self, self._built, name),
            "nixl_agent_config": None,
            "zmq_ctx": lambda _, path: self._connect(worker, path),
            "ThreadPoolExecutor": lambda **_: _Executor(self._handshakes),
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
        }
        listener = scheduler.NixlBaseConnectorScheduler
        with ExitStack() as stack:
            for module in nixl.values():
                stack.enter_context(patch.object(module, "time", clock))
            stack.enter_context(patch.multiple(worker, **replaced))
            stack.enter_context(patch.object(platform, "discover_numa_topology", list))
            stack.enter_context(patch.object(listener, "_nixl_handshake_listener", self._serve))
            yield

    @contextmanager
    def building(self, life: EngineLife) -> Iterator[None]:
        """Give an engine the agents and the side channel that the ``with`` block makes."""
        self._built = life
        host, _, port = life.me.address.rpartition(":")
        address = {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": port}
        with patch.dict("os.environ", address):
            yield

    def _serve(
        self, data: Mapping[tuple[int, int], bytes], ready: Any, stop: Any, host: str, port: int
    ) -> None:
        """Replaces the thread that serves handshakes."""
        self._served[f"tcp://{host}:{port}"] = data
        ready.set()

    @contextmanager
    def _connect(self, worker: Any, path: str) -> Iterator[_SideChannel]:
        """Replaces ``zmq_ctx`` of a consumer."""
        yield _SideChannel(self.network, self._served.get(path), worker)


class _SideChannel:
    """The consumer's socket for a handshake.

    Args:
        network: The network.
        data: The metadata of each rank; None if no engine serves metadata at the address.
        worker: vLLM's module of workers, which imports the message libraries.
    """

    def __init__(self, network: Network, data: Mapping[Any, bytes] | None, worker: Any) -> None:
        self._network, self._data = network, data
        self._packing, self._zmq = worker.msgspec.msgpack, worker.zmq

    def setsockopt(self, *_: int) -> None:
        """Do nothing, because no call waits for the network."""

    def send(self, message: bytes) -> None:
        """Request the metadata of a rank, which has no stage up to 0.25."""
        _, *rank = self._packing.decode(message)
        self._rank = tuple(rank) if len(rank) > 1 else rank[0]

    def recv(self) -> bytes:
        """Return the metadata without the clock, as up to 0.25."""
        return self.recv_multipart()[0]

    def recv_multipart(self) -> list[bytes]:
        """Return the metadata and the producer's clock, or raise the error of a timeout."""
        network = self._network
        is_cut_off = network.now < network.cut_off_until
        network.num_faults += is_cut_off
        if is_cut_off or self._data is None:
            raise self._zmq.Again
        return [self._data[self._rank], self._packing.encode(network.now)]


class _Executor:
    """Replaces the thread for handshakes, which run before the next step instead."""

    def __init__(self, jobs: list[Callable[[], None]]) -> None:
        self._jobs = jobs

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*args))
            except Exception as error:
                future.set_exception(error)

        self._jobs.append(run)
        return future

    def shutdown(self, **_: Any) -> None:
        """Do nothing."""


def _memory(block: Block) -> memoryview:
    address, size = block
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
