"""The speed of the store of files, and of the guard in front of it.

    python benchmarks/tier.py cost
    python benchmarks/tier.py compare

``cost``: microseconds a chunk on the caller's thread, and GB/s of one job, guarded and not, in
turns. ``compare``: the same load through vLLM's own fs tier and LMCache's fs adapter, if they are
installed, without a guard as in their engines. vLLM reads past the page cache if it can, so it is
as fast as the disk; TMPDIR=/dev/shm compares the programs alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvview import KVViewError
from kvview.targets import load_target
from kvview.testing.tier.faulty_store import FaultyStore
from kvview.testing.tier.model import bytes_of
from kvview.tier import GuardedTier, Namespace, TierStore
from kvview_reference.tier import FileStore

HERE = Namespace("benchmark", weights="1")


def cost(rounds: int = 15) -> dict[str, Any]:
    """Measure the caller's thread per chunk, and a load of 64 pages of 1 MiB in one job."""
    keys = [bytes([number]) * 36 for number in range(64)]
    page = bytes_of(b"page", 1 << 20)
    pages = [memoryview(bytearray(page)) for _ in keys]
    back = [memoryview(bytearray(len(page))) for _ in keys]
    found: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as root:
        made: dict[str, TierStore] = {
            "no checksum": FileStore(HERE, root=f"{root}/1", checksum="none"),
            "store's": FileStore(HERE, root=f"{root}/2"),
            "guard's": _guarded(f"{root}/3", "none", "xxh3"),
            "both": _guarded(f"{root}/4", "xxh3", "xxh3"),
        }
        empty = GuardedTier(FaultyStore(), HERE)
        for store in made.values():
            store.put(1, keys, pages)
            store.drain(60.0)
            store.poll()
        small = [memoryview(bytearray(4096)) for _ in keys]
        for _ in range(rounds):
            for name, store in made.items():
                began = time.perf_counter()
                store.get(2, keys, back)
                store.drain(60.0)
                assert all(store.poll()[0][1])
                found[f"load, {name}: GB/s"].append(
                    len(keys) * len(page) / (time.perf_counter() - began) / 1e9
                )
            for what in ("put", "get"):
                began = time.thread_time()
                getattr(empty, what)(3, keys, small)
                took = time.thread_time() - began
                empty.drain(10.0)
                began = time.thread_time()
                empty.poll()
                took += time.thread_time() - began
                found[f"guard, {what} and poll: us a chunk"].append(took / len(keys) * 1e6)
            began = time.thread_time()
            for key in keys:
                empty.lookup((key,))
            took = time.thread_time() - began
            found["guard, lookup: us a chunk"].append(took / len(keys) * 1e6)
        for store in (*made.values(), empty):
            store.close()
    return {name: round(statistics.median(values), 2) for name, values in found.items()}


def compare(rounds: int = 15) -> dict[str, Any]:
    """Load one job of 64 pages of 1 MiB at a time, and eight jobs of 8, in turns.

    Reports GB/s of wall time, CPU seconds of all threads for a GB, and the median ratio of the
    rounds, so that other load on the machine affects all sides.
    """
    keys = [bytes([number]) * 32 for number in range(64)]
    pages = [memoryview(bytes_of(b"page", (1 << 20) - 8)) for _ in keys]
    back = [memoryview(bytearray(len(page))) for page in pages]
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    cpu: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as root:
        made: dict[str, TierStore] = {
            "kvview, guarded": _guarded(f"{root}/1", "none", "xxh3"),
            "kvview, zero copy": GuardedTier(
                FileStore(HERE, root=f"{root}/4"), HERE, checksum="none", zero_copy=True
            ),
        }
        for name, target, options in (
            ("vLLM fs", "kvview_vllm.secondary_tiers:SecondaryTierStore",
             {"type": "fs", "root_dir": f"{root}/2"}),
            ("LMCache fs", "kvview_lmcache.l2_adapter_store:L2AdapterStore",
             {"adapter": "fs", "base_path": f"{root}/3"}),
        ):  # fmt: skip
            try:
                made[name] = load_target(target)(HERE, **options)
            except KVViewError as error:
                print(f"skipped: {name}: {error}")
        for store in made.values():
            store.put(1, keys, pages)
            store.drain(120.0)
            assert all(store.poll()[0][1])
        loads: dict[str, Callable[[int], None]] = {
            name: partial(_vllm_load if name == "vLLM fs" else _load, store, keys, back)
            for name, store in made.items()
        }
        for number in range(rounds + 1):  # the first one warms up
            for jobs in (1, 8):
                for name, load in loads.items():
                    wall, spent = time.perf_counter(), time.process_time()
                    load(jobs)
                    if number:
                        seconds[name, jobs].append(time.perf_counter() - wall)
                        cpu[name, jobs].append(time.process_time() - spent)
        assert back == pages
        for store in made.values():
            store.close()
    found: dict[str, Any] = {}
    num_bytes = sum(map(len, pages)) / 1e9
    for (name, jobs), times in seconds.items():
        needed = cpu[name, jobs]
        text = f"{num_bytes / statistics.median(times):.2f} GB/s, "
        text += f"{statistics.median(needed) / num_bytes:.3f} CPU s a GB"
        for ours in () if name.startswith("kvview") else ("guarded", "zero copy"):
            faster = _middle_ratio(times, seconds[f"kvview, {ours}", jobs])
            dearer = _middle_ratio(cpu[f"kvview, {ours}", jobs], needed)
            text += f"; {ours} has {faster} of its speed for {dearer} of its CPU"
        found[f"{name}, {jobs} in flight"] = text
    return found


def _middle_ratio(ones: Sequence[float], others: Sequence[float]) -> str:
    return f"{statistics.median(a / b for a, b in zip(ones, others, strict=True)):.2f}"


def _load(store: TierStore, keys: list[bytes], pages: list[memoryview], jobs: int) -> None:
    for job in range(jobs):
        store.get(job, keys[job::jobs], pages[job::jobs])
    store.drain(120.0)
    reports = store.poll()
    assert len(reports) == jobs
    assert all(all(flags) for _, flags in reports)


def _vllm_load(store: Any, keys: list[bytes], pages: list[memoryview], jobs: int) -> None:
    """Load through vLLM's tier alone, into rows of its own memory."""
    made = store._tier(-(-(len(pages[0]) + 8) // 4096) * 4096)
    from kvview_vllm.releases.tiers import make_tier_job
    from kvview_vllm.secondary_tiers import _key

    rows = made.free[: len(keys)]
    for job in range(jobs):
        names = [_key(key) for key in keys[job::jobs]]
        made.tier.submit_load(make_tier_job(1_000_000 + job, names, rows[job::jobs], True))
    made.tier.drain_jobs()
    assert all(result.success for result in made.tier.get_finished_jobs())


def _guarded(root: str, of_store: str, of_guard: str) -> GuardedTier:
    return GuardedTier(FileStore(HERE, root=root, checksum=of_store), HERE, checksum=of_guard)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["cost", "compare"])
    found = cost() if parser.parse_args().what == "cost" else compare()
    for name, value in found.items():
        print(f"{name:40} {value}")


if __name__ == "__main__":
    main()
