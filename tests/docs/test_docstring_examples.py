"""The examples in the docstrings of the contract run, and each protocol and each hook has one.

An example may use the names of its module, of ``kvview``, ``kvview.handoff`` and ``kvview.tier``,
and the prepared names ``pool``, ``view``, ``geometry``, ``keys``, ``request``, ``new_request``,
``ctx``, ``config``, ``manager``, ``stream``, ``kv_caches``, ``worker``, ``job``, ``store``,
``page_file``, ``me``, ``handoff``, ``network``, ``wire`` and ``other_wire``
(:func:`prepared_names`).
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import ismodule
from pathlib import Path
from typing import Any

import pytest
import torch

import kvview
from kvview import handoff, tier
from kvview.connector.hooks import Hooked, hooks_of
from kvview.testing import GatedComputeStream
from kvview.testing.handoff.network import Network
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.pool import BlockPool
from kvview_reference.tier import FileStore
from kvview_reference.transfer import CPUGPUTransferWorker

_ABOVE = ("testing", "cli", "__main__")
MODULES = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(kvview.__path__, "kvview.")
    if module.name.split(".")[1] not in _ABOVE
]
EXAMPLES = {
    found.name: found
    for module in MODULES
    for found in doctest.DocTestFinder().find(module)
    if found.examples
}
CLASSES = [
    value
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__
]
PROTOCOLS = [
    cls for cls in CLASSES if getattr(cls, "_is_protocol", False) and cls.__name__[0] != "_"
]
HOOKS = {hook for cls in CLASSES if Hooked in cls.__bases__ for hook in hooks_of(cls).values()}


@contextmanager
def prepared_names(folder: Path) -> Iterator[dict[str, Any]]:
    """Make new objects for one docstring."""
    hashes = [kvview.BlockHash(b"hash %d" % block) for block in range(3)]
    keys = [kvview.make_offload_key(block_hash, 0) for block_hash in hashes]
    pool = BlockPool(9)  # with the null block
    blocks = pool.allocate_blocks(3)
    pool.cache_blocks(blocks, hashes, block_size=16)
    pool.free_blocks(blocks[::-1])  # the end of the prefix is evicted first
    view = kvview.GuardedView(pool.view("example"), pin_budget=0.45)  # 4 blocks
    geometry = kvview.CacheGeometry.single(block_size=16)
    stream = GatedComputeStream()
    stream.hold()  # the kernels still run
    cache = kvview.CanonicalKVCacheTensor(torch.zeros((9, 4), dtype=torch.int8), 4)
    refs = [[kvview.CanonicalKVCacheRef(0, 4)]]
    worker = CPUGPUTransferWorker(kvview.CanonicalKVCaches([cache], refs), num_cpu_blocks=4)
    gpu, host = kvview.GPULoadStoreSpec([3], [1], [2]), kvview.CPULoadStoreSpec([0])
    store = FileStore(tier.Namespace("model", "v1"), root=str(folder), max_bytes=320)
    store.put(0, keys[:1], [memoryview(b"page")])
    store.drain(10.0)
    store.poll()
    network = Network(0, 1)
    me = handoff.Peer("P", "life 1", "tcp://p:1")
    offer = handoff.Handoff(me.engine_id, me.life, me.address, 0, 48, hashes[2].hex(), "layout")
    yield {
        **{name: value for package in (kvview, handoff, tier) for name, value in _public(package)},
        "pool": pool,
        "view": view,
        "geometry": geometry,
        "keys": keys,
        "request": kvview.RequestInfo("r1", 50, hashes, num_computed_tokens=49),
        "new_request": kvview.RequestInfo("r1", 50, hashes, num_computed_tokens=16),
        "ctx": kvview.ReqContext("r1"),
        "config": kvview.ConnectorConfig(geometry, {"cpu_blocks": 100}),
        "manager": CPUOffloadingManager(num_blocks=4, enable_events=True),
        "stream": stream,
        "kv_caches": kvview.CanonicalKVCaches([cache], refs, stream),
        "worker": worker,
        "job": kvview.TransferJob(7, gpu, host),
        "store": store,
        "page_file": next(folder.glob("*/*/*")),
        "me": me,
        "handoff": offer,
        "network": network,
        "wire": network.connect("tcp://p:1"),
        "other_wire": network.connect("tcp://c:1"),
    }
    store.close()
    worker.shutdown()
    view.close()


def _public(package: Any) -> list[tuple[str, Any]]:
    names = {name for name in vars(package) if not name.startswith("_")}
    return [(name, vars(package)[name]) for name in names if not ismodule(vars(package)[name])]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_its_lines(name: str, tmp_path: Path) -> None:
    printed: list[str] = []
    with prepared_names(tmp_path) as names:
        EXAMPLES[name].globs.update(names)
        result = doctest.DocTestRunner().run(EXAMPLES[name], out=printed.append)
    assert not result.failed, "".join(printed)


def test_each_protocol_and_each_hook_has_an_example() -> None:
    subjects: list[Any] = [*PROTOCOLS, *HOOKS]
    names = {f"{subject.__module__}.{subject.__qualname__}" for subject in subjects}
    with_an_example = {*EXAMPLES, *(name.rpartition(".")[0] for name in EXAMPLES)}
    assert names <= with_an_example, names - with_an_example
