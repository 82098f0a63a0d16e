"""A vLLM that cannot be imported with the installed torch is refused in one line, everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# A module of vLLM's reads a name that torch does not have.
_SCRIPT = """
import contextlib, importlib, io, json, sys
from importlib.machinery import ModuleSpec

class Broken:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == broken else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile("import torch\\ntorch._C.no_such_name", "broken.py", "exec"), vars(module))

sys.meta_path.insert(0, Broken())
_, broken, target = sys.argv
from kvview.cli import main

def command(*arguments):
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            sys.argv = ["kvview", *arguments]
            main()
        except SystemExit as end:
            return [end.code, output.getvalue()]

def imported(name):
    try:
        importlib.import_module(name)
    except Exception as error:
        return [type(error).__name__, str(error)]

ways = {name: imported(name) for name in ("kvview_vllm.connector", "kvview_vllm.scheduler")}
ways["doctor"] = command("doctor")
ways["check"] = command("check", target, "--engine", "vllm", "--seeds", "1")
print(json.dumps(ways))
"""


pytestmark = pytest.mark.ends


@pytest.fixture(scope="module")
def ways() -> dict[str, Any]:
    example = "examples/host_cache.py:HostCacheConnector"
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, "vllm.v1.core.sched.scheduler", example],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


LINE = "is installed and cannot be imported with torch "


@pytest.mark.parametrize("way", ["kvview_vllm.connector", "kvview_vllm.scheduler"])
def test_an_import_is_refused(ways: dict[str, Any], way: str) -> None:
    if ways[way] is None:
        pytest.skip("it does not import the scheduler on this release")
    kind, text = ways[way]
    assert kind == "VLLMNotImportableError"
    assert LINE in text
    assert "\n" not in text
    assert "no_such_name" in text


def test_doctor_reports_it_once(ways: dict[str, Any]) -> None:
    code, text = ways["doctor"]
    assert code == 1
    assert "Traceback" not in text
    assert " ".join(text.split()).count("no_such_name") == 1


def test_a_check_cannot_run(ways: dict[str, Any]) -> None:
    code, text = ways["check"]
    assert code == 2
    assert "Traceback" not in text
    assert text.startswith("kvview: vLLM ")
    assert LINE in text
