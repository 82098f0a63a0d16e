"""Compares the events of vLLM's own ZMQ publisher with the loadable blocks, in real inference.

    python tests/vllm/inference_events.py [--seed N]

Needs the CPU build, as ``kvview check --inference`` does. Each arrangement is an engine in a
process of its own, with the traffic of ``kvview check --inference``: evictions, preemptions,
aborts, resets. It has three listeners: the first receives everything; the second listens through a
network that drops messages; the third through that network, with vLLM's replay endpoint.

1. After every step, the fold of the first equals the blocks that the pool and each tier can load,
   by medium and group, and each block of the GPU is counted.
2. The gaps that the second finds are exactly the dropped messages.
3. The third has the same fold as the first whenever a message reached it.
4. The first of these finds a connector that publishes no evictions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from kvview import MEDIUM_CPU, LookupResult, OffloadKey, ReqContext, make_offload_key
from kvview.events.channel import Listener
from kvview.events.recording import Message, Recording
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.events.stream_fold import StreamFold
from kvview_vllm.inference.engines import run_engines
from kvview_vllm.inference.models import make_model
from kvview_vllm.inference.serve import NUM_BLOCKS
from kvview_vllm.inference.server import Server, prepare, require_vllm
from kvview_vllm.inference.traffic import SeededTraffic, Served
from kvview_vllm.simulation.scheduler.cpu_scheduler import connector_config, multi_config

_STORE = "kvview_reference.store_connector:StoreConnector"
_DISK = "DISK"
_DEADLINE_S = 20.0
_TOKENS_PER_STEP = 64
_DROPPED = 0.3
Held = dict[str, Counter[tuple[int, int | None]]]


def _offload(target: str) -> dict[str, Any]:
    return connector_config(target, cpu_blocks=56, enable_events=True)


@dataclass(frozen=True)
class Arrangement:
    """One engine.

    Args:
        name: In the output.
        kind: Of the model.
        config: ``kv_transfer_config``.
        media: Of the connectors, in order; a reader joins the connectors of one medium.
        folder: For its sockets and its recording.
        model: Its folder.
        seed: Of the traffic and of the dropped messages.
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    media: tuple[str, ...]
    folder: Path
    model: Path
    seed: int

    def __str__(self) -> str:
        return self.name


def arrangements(folder: Path, models: Mapping[str, Path], seed: int) -> list[Arrangement]:
    """Return two groups with a window; two connectors under MultiConnector; and a wrong one."""
    file = Path(__file__).with_name("disk_connector.py")
    one = _offload(_STORE)
    two = multi_config(one, _offload(f"{file}:DiskConnector"))
    wrong = _offload(f"{file}:HidesEvictions")
    made = [
        ("two groups", "gemma", one, (MEDIUM_CPU,)),
        ("two connectors", "llama", two, (MEDIUM_CPU, _DISK)),
        ("hidden evictions", "llama", wrong, (_DISK,)),
    ]
    return [
        Arrangement(name, kind, config, media, folder, models[kind], seed)
        for name, kind, config, media in made
    ]


class Network:
    """Publishes messages again, or drops them."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(endpoint)

    def wait_for(self, subscribers: int) -> None:
        """Return once there are this many subscribers."""
        for _ in range(subscribers):
            if not self._socket.poll(int(_DEADLINE_S * 1e3)):
                raise TimeoutError("there are too few subscribers")
            self._socket.recv()

    def send(self, message: Message) -> None:
        """Publish a message."""
        number = message.sequence.to_bytes(8, "big")
        self._socket.send_multipart((message.topic.encode(), number, message.payload))


@dataclass
class Reader:
    """A listener, and its fold."""

    listener: Listener
    fold: StreamFold = field(default_factory=StreamFold)
    findings: list[str] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def read_to(self, number: int) -> None:
        """Read until this message."""
        for _ in range(int(_DEADLINE_S / 0.5)):
            if self.messages and self.messages[-1].sequence >= number:
                return
            for message in self.listener.follow(0.5, self.findings.append):
                self.messages.append(message)
                found = self.fold.apply(message.sequence, message.payload)
                self.findings += [f"{finding.law}: {finding.what}" for finding in found]
        raise InvariantBroken(
            "EVENT-3", f"message {number} did not arrive within {_DEADLINE_S:g} s"
        )


class Watched(SeededTraffic):
    """The traffic, with a comparison after every step."""

    before_step: Callable[[], None] = staticmethod(lambda: None)
    after_step: Callable[[], None] = staticmethod(lambda: None)

    def step(self, count: int = 1) -> bool:
        came = False
        for _ in range(count):
            self.before_step()
            came |= super().step()
            self.after_step()
        return came


class Comparison:
    """Compares the events with the blocks of the engine.

    Args:
        server: The engine.
        job: Its arrangement.
    """

    def __init__(self, server: Server, job: Arrangement, served: Served) -> None:
        self._server, self._job, self._served = server, job, served
        self._utils: Any = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._drops = random.Random(job.seed)
        self._dropped: list[int] = []
        self._num_published = 0
        self._is_last = False
        self._seen: dict[OffloadKey, tuple[int, int | None]] = {}
        self._requests: dict[str, Any] = {}
        self._num_groups = len(server.scheduler.kv_cache_config.kv_cache_groups)
        publisher = server.scheduler.kv_event_publisher
        publish = publisher.publish

        def count_and_publish(batch: Any) -> None:
            self._num_published += 1
            publish(batch)

        publisher.publish = count_and_publish
        events, replay, lossy = (_socket(job, name) for name in ("events", "replay", "lossy"))
        self._network = Network(lossy)
        self.whole = Reader(Listener(events, replay))
        self.lossy = Reader(Listener(lossy))
        self.healed = Reader(Listener(lossy, replay))
        self._network.wait_for(2)

    def compare(self) -> None:
        """Compare the blocks after a step."""
        self._note_keys()
        before = len(self.whole.messages)
        if self._num_published:
            self.whole.read_to(self._num_published - 1)
        for message in self.whole.messages[before:]:
            self._publish(message)
        truth, folded = self._truth(), self._folded(self.whole)
        self._served.coverage["steps compared"] += 1
        for medium, blocks in truth.items():
            self._served.coverage[f"blocks compared in {medium}"] += blocks.total()
        if truth != folded:
            raise InvariantBroken("EVENT-2", self._difference(truth, folded))
        if self.whole.findings:
            raise InvariantBroken("EVENT-1", self.whole.findings[0])

    def end(self) -> None:
        """Compare the findings of the other readers, after everything has ended."""
        gaps = [number for gap in self.lossy.fold.gaps for number in gap]
        if gaps != self._dropped:
            raise InvariantBroken("EVENT-3", f"dropped {self._dropped[:9]}, found {gaps[:9]}")
        if self.healed.findings or self.healed.fold.gaps or not self.healed.fold.knows_all:
            raise InvariantBroken("EVENT-3", f"after replays: {self.healed.findings[:3]}")
        self._served.coverage["messages"] = self._num_published
        self._served.coverage["messages dropped and found"] = len(gaps)
        self._served.coverage["gaps replayed"] = len(self.lossy.fold.gaps)
        self._served.coverage["messages replayed"] = self.healed.listener.num_replayed
        self._served.coverage.update(self.whole.fold.num_events)
        with Recording(str(self._job.folder / f"{self._job.name}.jsonl.gz")) as recording:
            for message in self.whole.messages:
                recording.write(message)

    def _publish(self, message: Message) -> None:
        is_first_or_last = (
            not message.sequence or self._is_last
        )  # no reader can notice that these are missing
        if not is_first_or_last and self._drops.random() < _DROPPED:
            self._dropped.append(message.sequence)
            return
        self._network.send(message)
        self.lossy.read_to(message.sequence)
        self.healed.read_to(message.sequence)
        if self._folded(self.healed) != self._folded(self.whole):
            raise InvariantBroken("EVENT-3", f"after message {message.sequence} and a replay")

    def compare_last(self) -> None:
        """Compare, and drop no message."""
        self._is_last = True
        self.compare()

    # --- the blocks ---

    def note_requests(self) -> None:
        """Record the requests before a step, because a request that ends in the step is gone."""
        self._requests.update(self._server.scheduler.requests)

    def _note_keys(self) -> None:
        """Record every block that any medium may hold, and its name in events."""
        for name, request in [*self._requests.items()]:
            for group in range(self._num_groups):
                for block_hash in request.block_hashes:  # groups have blocks of one size here
                    name_in_events = self._utils.maybe_convert_block_hash(block_hash)
                    key = make_offload_key(block_hash, group)
                    self._seen.setdefault(key, (name_in_events, group))
            if name not in self._server.scheduler.requests:
                del self._requests[name]

    def _truth(self) -> Held:
        gpu: Counter[tuple[int, int | None]] = Counter()
        for block in self._server.pool.blocks:
            if block.block_hash is not None:
                key = make_offload_key(
                    self._utils.get_block_hash(block.block_hash),
                    self._utils.get_group_id(block.block_hash),
                )
                gpu[self._seen[key]] += 1
        held: Held = {"GPU": gpu}
        connector = self._server.scheduler.connector
        children = getattr(connector, "_connectors", [connector])
        ctx = ReqContext("comparison")
        for medium, child in zip(self._job.media, children, strict=True):
            manager = child._scheduler_side.half._manager
            held[medium] = Counter(
                block
                for key, block in self._seen.items()
                if manager.lookup(key, ctx) is LookupResult.HIT
            )
        return {medium: blocks for medium, blocks in held.items() if blocks}

    @staticmethod
    def _folded(reader: Reader) -> Held:
        held = {medium: +blocks for medium, blocks in reader.fold.held.items()}
        return {medium: blocks for medium, blocks in held.items() if blocks}  # type: ignore[misc]

    def _difference(self, truth: Held, folded: Held) -> str:
        lines = []
        for medium in truth.keys() | folded.keys():
            loadable, advertised = truth.get(medium, Counter()), folded.get(medium, Counter())
            lines.append(
                f"{medium}: {(loadable - advertised).total()} are loadable and not advertised, "
                f"{(advertised - loadable).total()} are advertised and not loadable"
            )
        return f"after step {self._served.coverage['steps compared']}: {'; '.join(lines)}"


def _socket(job: Arrangement, name: str) -> str:
    return f"ipc://{job.folder / job.name.replace(' ', '-')}-{name}"


def serve(job: Arrangement, on_progress: Callable[[str], None]) -> Served:
    """Serve one arrangement, in this process."""
    import torch

    torch.set_num_threads(1)
    served = Served()
    events: Any = importlib.import_module("vllm.config.kv_events")
    config = events.KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=_socket(job, "events"),
        replay_endpoint=_socket(job, "replay"),
    )
    try:
        server = Server(
            job.model,
            dict(job.config),
            NUM_BLOCKS[job.kind],
            max_num_batched_tokens=_TOKENS_PER_STEP,
            kv_events_config=config,
        )
        served.is_up = True
        comparison = Comparison(server, job, served)
        traffic = Watched(server, served, job.seed, None, True, True, on_progress)
        traffic.before_step = comparison.note_requests
        traffic.after_step = comparison.compare
        traffic.play()
        traffic.rest()
        traffic.after_step = comparison.compare_last
        traffic.ask("the last", [*range(10, 200)])
        traffic.rest()
        comparison.end()
    except InvariantBroken as error:
        served.law, served.message = error.law, str(error)
    except Exception:
        served.law, served.message = "ENGINE", traceback.format_exc()[-3000:]
    return served


def main() -> None:
    """Serve each arrangement, and print the findings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the recordings")
    options = parser.parse_args()
    prepare()
    require_vllm()
    with tempfile.TemporaryDirectory(prefix="kvview-") as name:
        folder = options.keep or Path(name)
        folder.mkdir(exist_ok=True)
        models = {kind: make_model(kind, Path(name) / kind) for kind in ("llama", "gemma")}
        jobs = arrangements(folder, models, options.seed)
        is_wrong = False
        for job, served in zip(
            jobs, run_engines(jobs, serve, 240.0, lambda text: None), strict=True
        ):
            is_wrong |= (served.law == "EVENT-2") != (job.name == "hidden evictions")
            is_wrong |= served.law not in ("", "EVENT-2")
            row = {"name": job.name, "law": served.law, "message": served.message}
            print(json.dumps({**row, "coverage": served.coverage}), flush=True)
    sys.exit(1 if is_wrong else 0)


if __name__ == "__main__":
    main()
