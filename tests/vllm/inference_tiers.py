"""Checks that a tier below the host never changes tokens, over restarts of a real engine.

    python tests/vllm/inference_tiers.py [--json FILE]

Needs the CPU build, as ``kvview check --inference`` does. Each *life* is an engine in a process of
its own, forked off this one, which has imported vLLM. It starts on the stores of the earlier lives,
serves some prompts, and ends. The scheduler, vLLM's tiering manager, the host's shared memory, the
bridge, the guard and the stores are the real ones; only the copies between blocks and host memory
are stand-ins for CUDA.

The exit code is 1 if a life does not end as required. Two lives are controls: without the guard's
checksum, and with other weights under the same name, the damage must change tokens.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kvview_vllm.inference.server import Server, prepare
from kvview_vllm.simulation.raw.stand_ins import StandIns

LIMIT_S = 120
NUM_TOKENS = 12
NUM_BLOCKS = 40
HOST_BYTES = 8 << 20
SHIFT = 7  # columns of the embedding, to change the weights
COMMON = list(range(10, 74))
PROMPTS = [[*COMMON, *range(first, first + 70)] for first in range(80, 480, 80)]

FOLDER = f"{Path(__file__).parents[2]}/examples/folder_store.py:FolderStore"
FILES = "kvview_reference.tier:FileStore"
OBJECTS = "kvview_reference.tier:ObjectStore"


@dataclass
class Life:
    """An engine from its start to its end.

    Args:
        tier: The entry in ``secondary_tiers``; None serves without a connector.
        wants: A condition for its counters, in addition to right tokens.
        other_weights: Whether the embedding is changed.
        before: Called before it starts.
        seed: ``PYTHONHASHSEED``; None without.
        more: Arguments of ``vllm.LLM``.
        is_control: Whether its tokens must be wrong, otherwise the other lives prove nothing.
    """

    tier: dict[str, Any] | None
    wants: Callable[[dict[str, Any]], bool] = lambda seen: True
    other_weights: bool = False
    before: Callable[[], None] = lambda: None
    seed: str | None = "0"
    more: dict[str, Any] = field(default_factory=dict)
    is_control: bool = False


def entry(store: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return an entry of ``secondary_tiers``."""
    return {"store": store, "options": options, "weights": "1", **more}


def zero_a_sector(root: Path) -> None:
    """Overwrite a sector of each file that is large enough, behind its header."""
    for path in root.rglob("*"):
        if path.is_file() and path.stat().st_size > 12_288:
            with path.open("r+b") as file:
                file.seek(8192)
                file.write(bytes(4096))


def stored(seen: dict[str, Any]) -> bool:
    """Return whether all chunks of the prompts were stored."""
    return bool(seen["puts"] == 12 and not seen["failed"])


def loaded(seen: dict[str, Any]) -> bool:
    """Return whether all chunks of the prompts were loaded from the tier."""
    return bool(seen["gets"] == 12 and seen["cached_tokens"] == 128 * len(PROMPTS))


def lives(folder: Path) -> dict[str, Life]:
    """Return the lives, each of which finds the pages of the earlier ones."""
    files = {"root": str(folder / "files")}
    events = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
    objects = {"url": (folder / "objects").as_uri()}
    plain = {"root": str(folder / "folder")}
    bare = entry(FOLDER, {"root": str(folder / "bare")}, checksum="none")
    return {
        "no tier": Life(None),
        "other weights, no tier": Life(None, other_weights=True),
        "first start": Life(
            entry(FILES, files), lambda seen: stored(seen) and seen["advertised"] == 12, more=events
        ),
        "restart": Life(
            entry(FILES, files), lambda seen: loaded(seen) and seen["advertised"] == 12, more=events
        ),
        "a restart under other weights": Life(
            entry(FILES, files, weights="2"), lambda seen: not seen["gets"], other_weights=True
        ),
        "control: other weights under the same name": Life(
            entry(FILES, files), other_weights=True, is_control=True
        ),
        "a random hash root": Life(
            entry(FILES, files),
            lambda seen: seen["is_out_of_use"] and not seen["gets"],
            seed=None,
            more={"prefix_caching_hash_algo": "xxhash"},
        ),
        "first start, object store": Life(entry(OBJECTS, objects), stored),
        "restart, object store": Life(entry(OBJECTS, objects), loaded),
        "first start, folder": Life(entry(FOLDER, plain), stored),
        "one sector of each file damaged": Life(
            entry(FOLDER, plain),
            lambda seen: seen["damaged"] > 0,
            before=lambda: zero_a_sector(folder / "folder"),
        ),
        "first start, no checksum": Life(bare, stored),
        "control: damage and no checksum": Life(
            bare, before=lambda: zero_a_sector(folder / "bare"), is_control=True
        ),
    }


# --- one life ---


def serve(life: Life, model: Path) -> dict[str, Any]:
    """Start an engine, serve, and end; returns its tokens and counters."""
    if life.seed is None:
        os.environ.pop("PYTHONHASHSEED", None)
    else:
        os.environ["PYTHONHASHSEED"] = life.seed
    import torch

    torch.set_num_threads(1)
    connector: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
    config = life.tier and {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVViewTieringSpec",
            "spec_module_path": "kvview_vllm.tier",
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [{"type": "kvview", **life.tier}],
        },
    }
    kinds = (
        [connector.KVConnectorFactory.get_connector_class_by_name("OffloadingConnector")]
        if config
        else []
    )
    stand_ins = StandIns(())
    seen: dict[str, Any] = {"cached_tokens": 0, "tokens": {}}
    with stand_ins.installed(kinds):
        server = Server(model, config, NUM_BLOCKS, **life.more)
        published: list[Any] = []
        server.scheduler.kv_event_publisher.publish = published.append
        if life.other_weights:
            server.change_weights(SHIFT)
        for number, prompt in enumerate(PROMPTS):
            server.add(str(number), prompt, NUM_TOKENS)
        while server.engine.has_unfinished_requests():
            stand_ins.tick()
            for output in server.engine.step():
                if output.finished:
                    seen["tokens"][output.request_id] = list(output.outputs[0].token_ids)
                    seen["cached_tokens"] += output.num_cached_tokens or 0
        if config is not None:
            manager = server.scheduler.connector.connector_scheduler.manager
            tier = manager.secondary_tiers[0]
            while server.scheduler.has_requests() or tier.has_pending_work():
                stand_ins.tick()
                server.engine.step()
            stats = tier.guard.stats
            seen |= {name: getattr(stats, name) for name in stats.__slots__}
            seen["is_out_of_use"] = not tier.guard.is_healthy
        seen["advertised"] = sum(
            len(event.block_hashes)
            for batch in published
            for event in batch.events
            if type(event).__name__ == "BlockStored" and event.medium == "STORAGE"
        )
        seen["leaked_blocks"] = server.leaked_blocks()
        server.llm.llm_engine.engine_core.shutdown()
    return seen


def play(name: str, life: Life, model: Path) -> dict[str, Any]:
    """Run one life in a fork; ``broken`` is the error that ended it."""
    life.before()
    print(f"== {name}", flush=True)
    context = get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(there, life, model))
    child.start()
    there.close()
    seen: dict[str, Any] = {"broken": f"no end after {LIMIT_S} s"}
    with suppress(EOFError):
        if here.poll(LIMIT_S):
            seen = {"broken": "its process died"}
            seen = here.recv()
    child.join(10)
    child.kill()
    child.join()
    return seen


def _child(pipe: Any, life: Life, model: Path) -> None:
    logging.captureWarnings(True)
    try:
        pipe.send(serve(life, model))
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"broken": f"{type(error).__name__}: {error}"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def why_wrong(life: Life, seen: dict[str, Any], truth: dict[bool, Any]) -> str:
    """Return the error of a life, empty if it is right."""
    if "broken" in seen:
        if (
            life.seed is None and "VTIER-1" in seen["broken"]
        ):  # before 0.29 the engine does not start
            return ""
        return str(seen["broken"])
    right = truth.setdefault(life.other_weights, seen["tokens"])
    same = sum(seen["tokens"].get(name) == tokens for name, tokens in right.items())
    if life.is_control:
        return "" if same < len(right) else "the tokens are right, so the lives prove nothing"
    if same < len(right):
        return f"{len(right) - same} of {len(right)} responses are wrong"
    if seen["leaked_blocks"]:
        return f"{seen['leaked_blocks']} blocks are held at the end"
    return "" if life.wants(seen) else "the counters of the tier are wrong"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the lives, and print a line each."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args(argv)
    prepare()
    for module in ("entrypoints.llm", "v1.worker.cpu_worker", "model_executor.model_loader"):
        importlib.import_module(f"vllm.{module}")
    gc.freeze()  # vLLM collects several times in each life
    results: dict[str, dict[str, Any]] = {}
    truth: dict[bool, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = "import pathlib, sys; from kvview_vllm.inference.models import make_model; "
        script += "make_model('llama', pathlib.Path(sys.argv[1]))"
        # In another process, because torch's threads do not survive a fork.
        command = [sys.executable, "-c", script, str(folder / "model")]
        subprocess.run(command, check=True, capture_output=True)
        for name, life in lives(folder).items():
            seen = play(name, life, folder / "model")
            wrong = why_wrong(life, seen, truth)
            results[name] = seen | {"wrong": wrong}
            shown = {k: v for k, v in seen.items() if k != "tokens" and v}
            print(f"{name}: {wrong or 'as required'} {shown}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if any(seen["wrong"] for seen in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
