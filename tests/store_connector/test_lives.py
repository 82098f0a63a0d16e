"""Lives of engines that leave nothing for later ones: killed, shut down, reset, and in pairs."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from examples.two_levels import TwoLevelConnector
from kvview import CacheGeometry, ConnectorConfig
from kvview.keys import BlockHash
from kvview_reference.engine import Engine
from kvview_reference.engine.request import Request

PAGE_BYTES = 4096
STORE_BLOCKS = 40
LIVES = 100
FILES_OF_A_STORE = 5


def live(root: Path, weights: str, number: int, is_reset: bool, is_killed: bool) -> None:
    """Run requests that fill the store about once, and end."""
    given = {"root": str(root), "cpu_blocks": 4, "store_blocks": STORE_BLOCKS, "mode": "finish"}
    connector = TwoLevelConnector(
        ConnectorConfig(CacheGeometry.single(4), given | ({"weights": weights} if weights else {}))
    )
    engine = Engine(connector.config.geometry, connector, num_gpu_blocks=24, page_bytes=PAGE_BYTES)
    source = random.Random(number)

    def run(name: str) -> None:
        for request in range(16):
            hashes = [BlockHash(source.randbytes(32)) for _ in range(8)]
            engine.add_request(Request(f"{name}{request}", 33, 2, 4, hashes))
            while engine.has_work():
                engine.step()

    run("a")
    if is_reset:
        assert engine.reset_cache()
        run("b")
    assert engine.stats.offloaded_blocks > STORE_BLOCKS
    assert not engine.stats.failed_transfers
    if is_killed:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.shutdown()


def files(root: Path) -> int:
    return sum(path.is_file() for path in root.rglob("*"))


@pytest.mark.slow
def test_a_folder_stays_flat_over_a_hundred_lives(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    source = random.Random(0)
    running: list[tuple[ForkProcess, int]] = []
    counts: list[int] = []
    for number in range(LIVES):
        is_reset, is_killed, is_with_next = (source.random() < share for share in (0.3, 0.7, 0.2))
        given = (tmp_path, source.choice(("", "a")), number, is_reset, is_killed)
        running.append((context.Process(target=live, args=given), -is_killed * signal.SIGKILL))
        running[-1][0].start()
        if is_with_next and len(running) < 2:
            continue
        for process, end in running:
            process.join(60)
            assert process.exitcode == end, number
        running.clear()
        counts.append(files(tmp_path))
    # The pages under the weights, and those of two killed lives, which the next life removes.
    assert max(counts) <= 3 * (STORE_BLOCKS + FILES_OF_A_STORE), counts
