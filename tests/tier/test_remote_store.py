"""The kit on the store of examples/remote_store.py, and on a wrong one, with a page server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import page_server, remote_store
from kvview.testing import run_checks
from tests.mutants.edits import Base, Variant, read_variants

pytest.importorskip("xxhash")

FOLDER = Path(__file__).parent
RIGHT = Base("RemoteStore", (Path(remote_store.__file__),))
WRONG = read_variants(FOLDER / "wrong_remote.txt", RIGHT)


@pytest.fixture
def port() -> Iterator[int]:
    code = """
import asyncio
from examples.page_server import serve

async def main():
    server = await serve(0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
    root = Path(page_server.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()


def test_the_right_store_is_green(port: int) -> None:
    store = Variant(RIGHT, "", "", "the right one").load()
    report = run_checks(store, options={"port": port}, seeds=5, steps=20)
    assert report.is_clean, report.summary()


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.name for wrong in WRONG])
def test_a_wrong_store_is_red(wrong: Variant, port: int) -> None:
    report = run_checks(wrong.load(), options={"port": port}, select=[wrong.notes["check"]])
    assert wrong.law in {failure.check.law for failure in report.failures}, report.summary()
