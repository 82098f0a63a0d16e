"""Targets: one module per file, the same name in every process, one line for each error."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvview import ConfigError
from kvview.targets import load_connector, load_target, target_of
from tests.cases import read_cases

SOURCE = """
import dataclasses, kvview

@dataclasses.dataclass(frozen=True)
class MyPlan(kvview.StepPlan):
    drop: tuple = ()

class Mine(kvview.Connector):
    class Inner(kvview.Connector):
        pass

def make_plan():
    return MyPlan(drop=("k",))
"""


def write(path: Path, source: str = SOURCE) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    return path


def test_a_file_is_one_module_under_every_spelling_of_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a" / "mine.py")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    first = load_connector(f"{path}:Mine")
    plan = load_target(f"{path}:make_plan")()
    for other in ("a/mine.py", "./a/../a/mine.py", "b/mine.py", f"{tmp_path}//a/mine.py"):
        assert load_connector(f"{other}:Mine") is first
        assert isinstance(plan, load_target(f"{other}:MyPlan"))
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    first, second = (load_target(f"{write(tmp_path / name / 'mine.py')}:MyPlan") for name in "ab")
    assert first is not second
    assert pickle.loads(pickle.dumps(first())) == first()
    assert type(pickle.loads(pickle.dumps(second()))) is second


def test_a_nested_class_and_a_path_that_is_not_an_identifier(tmp_path: Path) -> None:
    path = write(tmp_path / "a b" / "my-own.connector.py")
    inner = load_connector(f"{path}:Mine.Inner")
    assert inner.__qualname__ == "Mine.Inner"
    assert pickle.loads(pickle.dumps(inner)) is inner
    assert target_of(inner) == f"{path}:Mine.Inner"
    assert load_connector(target_of(inner) or "") is inner
    assert target_of(dict) is target_of(3) is None


def test_another_process_that_loaded_the_target_unpickles_its_objects(tmp_path: Path) -> None:
    def python(code: str, target: str, folder: Path) -> bytes:
        code = f"import pickle, sys; from kvview.targets import load_target\n{code}"
        command = [sys.executable, "-c", code, target]
        return subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout

    write(tmp_path / "a" / "mine.py")
    dump = "sys.stdout.buffer.write(pickle.dumps(load_target(sys.argv[1])()))"
    (tmp_path / "plan").write_bytes(python(dump, "mine.py:make_plan", tmp_path / "a"))
    load = "kind = load_target(sys.argv[1]); plan = pickle.load(open('plan', 'rb'))\n"
    load += "assert type(plan) is kind and plan.drop == ('k',), plan"
    python(load, "./a/mine.py:MyPlan", tmp_path)  # another spelling, another working directory


def test_a_relative_path_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        write(tmp_path / name / "only.py")
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    first = load_connector("only.py:Mine")
    monkeypatch.chdir(tmp_path / "c")
    assert load_connector("only.py:Mine") is first
    with pytest.raises(ConfigError, match=f"no file 'other.py' in {tmp_path / 'c'}"):
        load_connector("other.py:Mine")
    monkeypatch.chdir(tmp_path / "b")
    assert load_connector("only.py:Mine") is not first
    assert first.__module__ in sys.modules


def test_a_file_that_failed_is_loaded_again(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_connector(f"{path}:Mine")
    path.write_text(SOURCE)
    os.utime(path, (0, 0))  # not the time that its bytecode may be cached for
    assert load_connector(f"{path}:Mine").__name__ == "Mine"


def test_concurrent_threads_load_one_module(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "import time; time.sleep(0.2)\n" + SOURCE)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append(load_connector(f"{path}:Mine")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert len(set(found)) == 1


# --- errors ---


def error_of(target: str) -> str:
    with pytest.raises(ConfigError) as raised:
        load_connector(target)
    assert str(raised.value).startswith("target ")
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("import sys; sys.exit(7)", "bad.py:1: SystemExit: 7"),
        ("\nraise RuntimeError('one\\ntwo')", "bad.py:2: RuntimeError: one two"),
        ("def f(:", "SyntaxError"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("class E(Exception):\n def __str__(self): 1 / 0\nraise E", "text raises ZeroDivision"),
        (
            "import kvview\nclass Mine(kvview.SchedulerConnector):\n  def match_prefx(self): ...",
            "bad.py:2: ConnectorDefinitionError: CONN-9: line 3: Mine.match_prefx",
        ),
    ],
)
def test_a_file_that_does_not_import(tmp_path: Path, source: str, shown: str) -> None:
    target = f"{write(tmp_path / 'bad.py', source)}:Mine"
    text = error_of(target)
    assert shown in text
    assert f"target '{target}' cannot be imported: " in text


def test_a_file_given_as_a_module_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine_here.py", "import kvview\nclass Mine(kvview.Connector): ...")
    assert error_of("mine_here:Mine").endswith("mine_here.py:Mine?")
    assert error_of("mine_there:Mine").endswith("No module named 'mine_there'")


def test_ctrl_c_at_import_passes(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_connector(f"{path}:Mine")


WRONG = """
import abc, kvview

class Good(kvview.Connector): ...

class NeedsMore(kvview.Connector):
    def __init__(self, config, pool): ...

class TakesNone(kvview.Connector):
    def __init__(self): ...

class Abstract(kvview.Connector, abc.ABC):
    @abc.abstractmethod
    def _tier(self): ...

class Half(kvview.SchedulerConnector): ...

made = Good(None)
number = 3

def function(config): ...
"""


@pytest.mark.parametrize(
    ("_", "name", "shown"), read_cases(Path(__file__).with_name("targets.txt"))
)
def test_a_target_that_is_not_a_connector(tmp_path: Path, _: str, name: str, shown: str) -> None:
    assert shown in error_of(f"{write(tmp_path / 'wrong.py', WRONG)}:{name}")
