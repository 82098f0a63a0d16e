"""Kills a process that writes into a store, opens the store again, and looks (TIER-9).

A program of its own, so that it may fork: it never has a thread.

    python -m kvview.testing.tier.killed JSON
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from kvview.targets import load_target
from kvview.testing.tier.driver import bytes_of
from kvview.tier import Namespace

_KEYS_OF_A_JOB = 4
_SECONDS_OF_A_JOB = 20.0
_RUNS_LOOKED_AT = 3
_MOST_HEALED = 40


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Play it.

    Args:
        job: ``target``, ``options`` and ``namespace`` of the store; ``num`` and ``seed``.

    Returns:
        One a run: ``acknowledged`` (keys said to be stored), ``missing`` and ``wrong`` (of the
        keys of the last three runs), ``half`` (found, and not loaded), ``not_healed`` (missing,
        stored again, and missing still), ``kept`` (loaded keys of this run, and their bytes) and
        ``error`` (why the store did not open or answer).
    """
    dice = random.Random(job["seed"])
    runs: list[dict[str, Any]] = []
    tried: list[dict[bytes, int]] = []
    acknowledged: list[set[bytes]] = []
    for number in range(job["num"]):
        read, write = os.pipe()
        seed = dice.randrange(1 << 30)
        child = forked(partial(_write, job, seed, write))
        os.close(write)
        with os.fdopen(read, "rb") as told:
            told.readline()  # it is open
            lines = [told.readline() for _ in range(dice.randrange(60))]
            time.sleep(dice.random() * 0.002)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines = [*filter(None, [*lines, *told.readlines()])]
        tried = [*tried, keys_of_run(seed)][-_RUNS_LOOKED_AT:]
        acknowledged = [
            *acknowledged,
            {bytes.fromhex(line.decode()) for line in lines if line.endswith(b"\n")},
        ]
        acknowledged = acknowledged[-_RUNS_LOOKED_AT:]
        found = _look(job, {k: v for keys in tried for k, v in keys.items()})
        loaded = {bytes.fromhex(key) for key in found["loaded"]}
        missing = [key.hex() for keys in acknowledged for key in keys if key not in loaded]
        runs.append(
            {
                "number": number,
                "acknowledged": len(lines),
                "missing": missing,
                "wrong": found["wrong"],
                "half": found["half"],
                "not_healed": found["not_healed"],
                "kept": {key.hex(): tried[-1][key] for key in acknowledged[-1] & loaded},
                "error": found["error"],
            }
        )
    return runs


def keys_of_run(seed: int) -> dict[bytes, int]:
    """What one run puts, in its order: keys, and bytes of their pages."""
    dice = random.Random(seed)
    return {dice.randbytes(20): dice.choice((700, 4096, 20_000, 65_536)) for _ in range(600)}


def forked(body: Callable[[], None]) -> int:
    """Run it in a process of its own, which ends with it; returns the process."""
    child = os.fork()
    if child:
        return child
    try:
        body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def open_store(job: dict[str, Any]) -> Any:
    """Make the store of a job."""
    make = load_target(job["target"])
    return make(Namespace.from_json(job["namespace"]), **job["options"])


def _write(job: dict[str, Any], seed: int, told: int) -> None:
    store = open_store(job)
    os.write(told, b"open\n")
    keys = list(keys_of_run(seed).items())
    jobs = {}
    for number in range(0, len(keys), _KEYS_OF_A_JOB):
        part = keys[number : number + _KEYS_OF_A_JOB]
        jobs[number] = [key for key, _ in part]
        store.put(number, jobs[number], [memoryview(bytes_of(key, size)) for key, size in part])
        _tell(store, jobs, told)
    store.drain(_SECONDS_OF_A_JOB)
    _tell(store, jobs, told)
    time.sleep(_SECONDS_OF_A_JOB)  # until it is killed


def _tell(store: Any, jobs: dict[int, list[bytes]], told: int) -> None:
    for number, flags in store.poll():
        for key, flag in zip(jobs[number], flags, strict=True):
            if flag:
                os.write(told, key.hex().encode() + b"\n")


def _look(job: dict[str, Any], keys: dict[bytes, int]) -> dict[str, Any]:
    read, write = os.pipe()

    def look() -> None:
        found: dict[str, Any] = {"loaded": [], "wrong": [], "half": [], "not_healed": []}
        found["error"] = ""
        try:
            store = open_store(job)
            hits = _hits(store, [*keys])
            for is_hit in (True, False):  # apart: one that is missing may fail others (TIER-2)
                chosen = {key: size for key, size in keys.items() if (key in hits) is is_hit}
                for key, page, flag in loaded_pages(store, chosen):
                    if flag:
                        is_exact = page == bytes_of(key, len(page))
                        found["loaded" if is_exact else "wrong"].append(key.hex())
                    elif is_hit:
                        found["half"].append(key.hex())
            lacking = [key for key in keys if key.hex() not in found["loaded"]][:_MOST_HEALED]
            pages = [memoryview(bytes_of(key, keys[key])) for key in lacking]
            store.put(2, lacking, pages)
            flags = _ended(store)
            stored = {key: keys[key] for key, flag in zip(lacking, flags, strict=True) if flag}
            if "max_bytes" not in job["options"]:  # else they may be evicted at once
                for key, page, flag in loaded_pages(store, stored):
                    if not flag or page != bytes_of(key, len(page)):
                        found["not_healed"].append(key.hex())
            store.close()
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        with os.fdopen(write, "w") as out:
            json.dump(found, out)

    child = forked(look)
    os.close(write)
    with os.fdopen(read) as told:
        text = told.read()
    os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text)
    return result


def loaded_pages(store: Any, keys: dict[bytes, int]) -> list[tuple[bytes, memoryview, bool]]:
    """Load keys in one job: each with its page, and whether it was loaded."""
    pages = {key: memoryview(bytearray(size)) for key, size in keys.items()}
    store.get(1, list(pages), list(pages.values()))
    return [
        (key, page, flag) for (key, page), flag in zip(pages.items(), _ended(store), strict=True)
    ]


def _hits(store: Any, keys: list[bytes]) -> set[bytes]:
    flags = store.lookup(keys)
    end = time.monotonic() + _SECONDS_OF_A_JOB
    while None in flags and time.monotonic() < end:
        time.sleep(0.002)
        flags = store.lookup(keys)
    return {key for key, flag in zip(keys, flags, strict=True) if flag}


def _ended(store: Any) -> list[bool]:
    if not store.drain(_SECONDS_OF_A_JOB):
        raise TimeoutError("a job does not end")
    [(_, flags)] = store.poll()
    return list(flags)


if __name__ == "__main__":
    json.dump(run(json.loads(sys.argv[1])), sys.stdout)
