"""Kill a process that writes, or let several write at once, and look at the place (TIER-9).

A program of its own, so that it may fork: it never has a thread.

    python -m kvview.testing.tier.processes killed|at_once JSON
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kvview.errors import KVViewError
from kvview.targets import load_target
from kvview.testing.tier.model import bytes_of
from kvview.tier import Namespace

_SECONDS_OF_A_JOB = 60.0
_RUNS_LOOKED_AT = 3
_MOST_HEALED = 40
_KEYS_OF_ONE, _KEYS_OF_ALL = 80, 20

Sizes = dict[bytes, int]


def killed(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Kill a process that writes, ``num`` times, and look at the place each time.

    Args:
        job: ``target``, ``options`` and ``namespace`` of the store; ``num`` and ``seed``.

    Returns:
        For each run the result of a look, and ``acknowledged`` (how many keys were reported
        stored), ``missing`` (of the last three runs) and ``kept`` (loaded keys of this run, with
        their bytes).
    """
    dice = random.Random(job["seed"])
    runs: list[dict[str, Any]] = []
    tried: list[tuple[Sizes, set[bytes]]] = []
    for _ in range(job["num"]):
        keys = _draw_keys(dice.randrange(1 << 30), 600)
        read, write = os.pipe()
        child = _forked(partial(_write, job, keys, write))
        os.close(write)
        with os.fdopen(read, "rb") as told:
            told.readline()  # the store is open
            lines = [told.readline() for _ in range(dice.randrange(60))]
            time.sleep(dice.random() * 0.002)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            lines += told.readlines()
        stored = {bytes.fromhex(line.decode()) for line in lines if line.endswith(b"\n")}
        tried = [*tried, (keys, stored)][-_RUNS_LOOKED_AT:]
        sizes = {key: size for some, _ in tried for key, size in some.items()}
        (run,) = _played([partial(_look, job, sizes)])
        loaded = {bytes.fromhex(key) for key in run.pop("loaded", [])}
        lost = [key.hex() for _, some in tried for key in some if key not in loaded]
        kept = {key.hex(): keys[key] for key in stored & loaded}
        runs.append(_NOTHING | run | {"acknowledged": len(stored), "missing": lost, "kept": kept})
    return runs


def at_once(job: dict[str, Any]) -> dict[str, Any]:
    """Let ``num`` processes write into one place at once, some keys all of them.

    Returns:
        The findings of a later process, ``acknowledged`` (how many keys each
        process was told are stored), ``missing`` (of them) and ``refused`` (the reason why a
        process could not open the place beside another).
    """
    dice = random.Random(job["seed"])
    shared, *own = [dice.randrange(1 << 30) for _ in range(job["num"] + 1)]
    of_all = _draw_keys(shared, _KEYS_OF_ALL)
    tried = [_draw_keys(seed, _KEYS_OF_ONE) | of_all for seed in own]
    told = _played([partial(_put, job, keys) for keys in tried])
    sizes = {key: size for keys in tried for key, size in keys.items()}
    stored = {bytes.fromhex(key) for one in told for key in one.get("stored", ())}
    (after,) = _played([partial(_look, job, {key: sizes[key] for key in stored})])
    errors = [one["error"] for one in (*told, after) if one["error"]]
    return {
        **after,
        "acknowledged": [len(one.get("stored", ())) for one in told],
        "missing": sorted({key.hex() for key in stored} - {*after.get("loaded", ())}),
        "refused": next((one["refused"] for one in told if one.get("refused")), ""),
        "error": next(iter(errors), ""),
    }


_NOTHING: Mapping[str, Any] = {"wrong": [], "half": [], "not_healed": []}


def _draw_keys(seed: int, num: int) -> Sizes:
    dice = random.Random(seed)
    return {dice.randbytes(20): dice.choice((700, 4096, 20_000, 65_536)) for _ in range(num)}


def _forked(body: Callable[[], None]) -> int:
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


def _played(bodies: Iterable[Callable[[dict[str, Any], Callable[[], None]], None]]) -> Any:
    """Run each body in its own process, start all together, and return their findings."""
    ends = []
    for body in bodies:
        ready, go, out = os.pipe(), os.pipe(), os.pipe()
        child = _forked(partial(_report, body, ready[1], go[0], out[1]))
        for end in (ready[1], go[0], out[1]):
            os.close(end)
        os.read(ready[0], 1)  # or it has ended
        os.close(ready[0])
        ends.append((child, go[1], out[0]))
    for _, go_end, _ in ends:
        with suppress(BrokenPipeError):  # it has ended
            os.write(go_end, b"g")
        os.close(go_end)
    found = []
    for child, _, out_end in ends:
        with os.fdopen(out_end) as text:
            found.append(json.loads(text.read() or '{"error": "it has ended"}'))
        os.waitpid(child, 0)
    return found


def _report(
    body: Callable[[dict[str, Any], Callable[[], None]], None], ready: int, go: int, out: int
) -> None:
    def begin() -> None:
        os.write(ready, b"r")
        os.read(go, 1)

    found: dict[str, Any] = {"error": ""}
    try:
        body(found, begin)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    with os.fdopen(out, "w") as file:
        json.dump(found, file)


def _open(job: dict[str, Any]) -> Any:
    make = load_target(job["target"])
    return make(Namespace.from_json(job["namespace"]), **job["options"])


def _write(job: dict[str, Any], keys: Sizes, told: int) -> None:
    """Put keys until the process is killed, and report each key that was stored."""
    store, chosen = _open(job), [*keys]
    os.write(told, b"open\n")
    parts = [chosen[at : at + 4] for at in range(0, len(chosen), 4)]

    def tell() -> None:
        for number, flags in store.poll():
            for key, flag in zip(parts[number], flags, strict=True):
                if flag:
                    os.write(told, key.hex().encode() + b"\n")

    for number, part in enumerate(parts):
        store.put(number, part, [memoryview(bytes_of(key, keys[key])) for key in part])
        tell()
    store.drain(_SECONDS_OF_A_JOB)
    tell()
    time.sleep(_SECONDS_OF_A_JOB)


def _put(
    job: dict[str, Any], keys: Sizes, found: dict[str, Any], begin: Callable[[], None]
) -> None:
    """Put keys while other processes do the same; ``stored`` are the keys reported as stored."""
    try:
        store = _open(job)
    except KVViewError as error:  # a store that is alone in its place
        found["refused"] = str(error)
        return
    begin()
    found["stored"], chosen = [], [*keys]
    for at in range(0, len(chosen), 20):
        part = {key: keys[key] for key in chosen[at : at + 20]}
        flags = _moved(store, "put", part, {k: memoryview(bytes_of(k, n)) for k, n in part.items()})
        found["stored"] += [key.hex() for key, flag in flags.items() if flag]
    store.close()


def _look(
    job: dict[str, Any], keys: Sizes, found: dict[str, Any], begin: Callable[[], None]
) -> None:
    """Load keys: ``loaded``, ``wrong`` (other bytes), ``half`` (found, but not loaded).

    Those that are not there are stored again; ``not_healed`` are not there after that.
    """
    store = _open(job)
    begin()
    found |= {"loaded": [], **{name: [] for name in _NOTHING}}
    hits = _hits(store, [*keys])
    for is_hit in (True, False):  # apart: one that is missing may fail others (TIER-2)
        for key, is_exact in _loaded(
            store, {k: n for k, n in keys.items() if (k in hits) is is_hit}
        ):
            if is_exact is not None:
                found["loaded" if is_exact else "wrong"].append(key.hex())
            elif is_hit:
                found["half"].append(key.hex())
    lacking = [key for key in keys if key.hex() not in found["loaded"]][:_MOST_HEALED]
    again = {key: keys[key] for key in lacking}
    flags = _moved(store, "put", again, {k: memoryview(bytes_of(k, n)) for k, n in again.items()})
    if "max_bytes" not in job["options"]:  # else they may be evicted at once
        stored = {key: keys[key] for key, flag in flags.items() if flag}
        healed = _loaded(store, stored)
        found["not_healed"] = [key.hex() for key, is_exact in healed if not is_exact]
    store.close()


def _loaded(store: Any, keys: Sizes) -> list[tuple[bytes, bool | None]]:
    """Load keys in one job: each with whether its bytes are exact; None for a failed key."""
    pages = {key: memoryview(bytearray(size)) for key, size in keys.items()}
    flags = _moved(store, "get", keys, pages)
    return [(k, pages[k] == bytes_of(k, keys[k]) if flag else None) for k, flag in flags.items()]


def _moved(
    store: Any, method: str, keys: Sizes, pages: Mapping[bytes, memoryview]
) -> dict[bytes, bool]:
    getattr(store, method)(1, [*keys], [pages[key] for key in keys])
    if not store.drain(_SECONDS_OF_A_JOB):
        raise TimeoutError("a job does not end")
    [(_, flags)] = store.poll()
    return dict(zip(keys, flags, strict=True))


def _hits(store: Any, keys: list[bytes]) -> set[bytes]:
    end = time.monotonic() + _SECONDS_OF_A_JOB
    while None in (flags := [*store.lookup(keys)]) and time.monotonic() < end:
        time.sleep(0.002)
    return {key for key, flag in zip(keys, flags, strict=True) if flag}


if __name__ == "__main__":
    play: Callable[[dict[str, Any]], Any] = {"killed": killed, "at_once": at_once}[sys.argv[1]]
    json.dump(play(json.loads(sys.argv[2])), sys.stdout)
