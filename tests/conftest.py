"""Settings of all tests, and a page server."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_PAGE_SERVER = """
import asyncio
from examples.page_server import serve

async def main():
    server = await serve(0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def pytest_configure() -> None:
    """Give torch one thread in each process, and let tests interrupt commands.

    xdist runs a process on each core, and threads of torch that wait for each other cost ten times
    the CPU time of the copies. A shell starts background jobs with SIGINT ignored.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """Port of the server of ``examples/page_server.py``, in another process."""
    command = [sys.executable, "-c", _PAGE_SERVER]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.kill()
