"""Wrong connectors whose mistake shows with their options, over stores and with ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvview.testing.connector import check_connector
from tests.mutants.connector import load_with_options
from tests.mutants.edits import Variant

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SEEDS = 30


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    server = [sys.executable, str(ROOT / "examples" / "page_server.py"), str(number)]
    process = subprocess.Popen(server)
    yield number
    process.kill()
    process.wait()


def params() -> Iterator[object]:
    for variant in load_with_options():
        missed = variant.notes.get("missed")
        marks = [pytest.mark.xfail(reason=missed, strict=True)] if missed else []
        yield pytest.param(variant, marks=marks, id=variant.name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of theirs
@pytest.mark.parametrize("variant", list(params()))
def test_a_wrong_connector_is_not_green(variant: Variant, port: int) -> None:
    texts = [text.partition("=") for text in variant.notes["options"].split()]
    options = {name: port if value == "{port}" else value for name, _, value in texts}
    report = check_connector(variant.load(), seeds=SEEDS, options=options, max_shrink_runs=0)
    assert report.failures or report.gaps
