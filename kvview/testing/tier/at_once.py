"""Processes that write into one place at the same time, and what another one finds (TIER-9).

A program of its own, so that it may fork: it never has a thread.

    python -m kvview.testing.tier.at_once JSON
"""

from __future__ import annotations

import json
import os
import random
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from kvview.errors import KVViewError
from kvview.testing.tier.driver import bytes_of
from kvview.testing.tier.killed import forked, keys_of_run, loaded_pages, open_store

_KEYS_OF_ONE = 80
_KEYS_OF_ALL = 20
_KEYS_OF_A_JOB = 20
_SECONDS_OF_A_JOB = 120.0


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Play it.

    Args:
        job: ``target``, ``options`` and ``namespace`` of the store; ``num`` (of processes) and
            ``seed``.

    Returns:
        ``acknowledged`` (how many keys each process was told are stored), ``missing`` and
        ``wrong`` (of them, for a process that comes after), ``refused`` (why a process could not
        open the place beside another) and ``error`` (of a process that ended).
    """
    dice = random.Random(job["seed"])
    shared, *own = [dice.randrange(1 << 30) for _ in range(job["num"] + 1)]
    of_all = dict([*keys_of_run(shared).items()][:_KEYS_OF_ALL])
    tried = [dict([*keys_of_run(seed).items()][:_KEYS_OF_ONE]) | of_all for seed in own]
    said = _played([partial(_put, job, keys) for keys in tried])
    sizes = {key: size for keys in tried for key, size in keys.items()}
    told = {key for one in said for key in one.get("stored", ())}
    (after,) = _played([partial(_look, job, {key: sizes[bytes.fromhex(key)] for key in told})])
    errors = [one["error"] for one in (*said, after) if one.get("error")]
    return {
        "acknowledged": [len(one.get("stored", ())) for one in said],
        "missing": after.get("missing", []),
        "wrong": after.get("wrong", []),
        "refused": next((one["refused"] for one in said if one.get("refused")), ""),
        "error": next(iter(errors), ""),
    }


def _played(bodies: list[Any]) -> list[dict[str, Any]]:
    """What each says in a process of its own; one after the other is ready, and all begin then."""
    ends = []
    for body in bodies:
        is_ready, may_begin, says = os.pipe(), os.pipe(), os.pipe()
        child = forked(partial(_say, body, is_ready[1], may_begin[0], says[1]))
        for end in (is_ready[1], may_begin[0], says[1]):
            os.close(end)
        os.read(is_ready[0], 1)  # or it has ended
        os.close(is_ready[0])
        ends.append((child, may_begin[1], says[0]))
    for _, may_begin_end, _ in ends:
        with suppress(BrokenPipeError):  # it has ended
            os.write(may_begin_end, b"g")
        os.close(may_begin_end)
    found = []
    for child, _, says_end in ends:
        with os.fdopen(says_end) as told:
            found.append(json.loads(told.read() or '{"error": "it has ended"}'))
        os.waitpid(child, 0)
    return found


def _say(body: Any, is_ready: int, may_begin: int, says: int) -> None:
    found: dict[str, Any] = {}
    try:
        body(found, is_ready, may_begin)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    with os.fdopen(says, "w") as out:
        json.dump(found, out)


def _wait(is_ready: int, may_begin: int) -> None:
    os.write(is_ready, b"r")
    os.read(may_begin, 1)


def _put(
    job: dict[str, Any], keys: dict[bytes, int], found: dict[str, Any], is_ready: int, go: int
) -> None:
    pages = {key: memoryview(bytes_of(key, size)) for key, size in keys.items()}
    try:
        store = open_store(job)
    except KVViewError as error:  # a store that is alone, and says so
        found["refused"] = str(error)
        return
    _wait(is_ready, go)
    found["stored"] = []
    chosen = [*keys]
    jobs = [chosen[at : at + _KEYS_OF_A_JOB] for at in range(0, len(chosen), _KEYS_OF_A_JOB)]
    for number, part in enumerate(jobs):
        store.put(number, part, [pages[key] for key in part])
    if not store.drain(_SECONDS_OF_A_JOB):
        raise TimeoutError("a job does not end")
    for number, flags in store.poll():
        stored = [key for key, flag in zip(jobs[number], flags, strict=True) if flag]
        found["stored"] += [key.hex() for key in stored]
    store.close()


def _look(
    job: dict[str, Any], keys: dict[str, int], found: dict[str, Any], is_ready: int, go: int
) -> None:
    store = open_store(job)
    _wait(is_ready, go)
    found |= {"missing": [], "wrong": []}
    chosen = {bytes.fromhex(key): size for key, size in keys.items()}
    for key, page, flag in loaded_pages(store, chosen) if chosen else ():
        if not flag:
            found["missing"].append(key.hex())
        elif page != bytes_of(key, len(page)):
            found["wrong"].append(key.hex())
    store.close()


if __name__ == "__main__":
    json.dump(run(json.loads(sys.argv[1])), sys.stdout)
