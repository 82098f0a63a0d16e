"""Targets: one module a file, the same name in every process, one clear line for what is none."""

from __future__ import annotations

import logging
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


def python(code: str, *args: object, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, cwd=cwd, capture_output=True, timeout=60, check=False)


# --- one module a file ---


def test_a_file_is_one_module_however_often_and_however_it_is_named(
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


def test_two_files_with_one_stem_are_two_modules(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name / "mine.py") for name in "ab")
    first, second = (load_target(f"{path}:MyPlan") for path in (one, two))
    assert first is not second
    assert pickle.loads(pickle.dumps(first())) == first()
    assert type(pickle.loads(pickle.dumps(second()))) is second


def test_a_class_in_a_class_and_names_that_are_no_identifiers(tmp_path: Path) -> None:
    path = write(tmp_path / "a b" / "my-own.connector.py")
    inner = load_connector(f"{path}:Mine.Inner")
    assert inner.__qualname__ == "Mine.Inner"
    assert pickle.loads(pickle.dumps(inner)) is inner
    assert target_of(inner) == f"{path}:Mine.Inner"
    assert load_connector(target_of(inner) or "") is inner
    assert target_of(dict) is target_of(3) is None


def test_a_pickle_goes_to_another_process_that_loaded_the_target(tmp_path: Path) -> None:
    write(tmp_path / "a" / "mine.py")
    load = "import pickle, sys; from kvview.targets import load_target\n"
    dump = "sys.stdout.buffer.write(pickle.dumps(load_target(sys.argv[1])()))"
    sent = python(load + dump, "mine.py:make_plan", cwd=tmp_path / "a")
    assert sent.returncode == 0, sent.stderr
    (tmp_path / "plan").write_bytes(sent.stdout)
    take = "kind = load_target(sys.argv[1]); plan = pickle.load(open('plan', 'rb'))\n"
    take += "assert type(plan) is kind and plan.drop == ('k',), plan"
    # Another spelling, another working directory, another process.
    taken = python(load + take, "./a/mine.py:MyPlan", cwd=tmp_path)
    assert taken.returncode == 0, taken.stderr


def test_a_relative_path_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        write(tmp_path / name / "only.py")
    (tmp_path / "c").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    first = load_connector("only.py:Mine")
    monkeypatch.chdir(tmp_path / "c")
    assert load_connector("only.py:Mine") is first  # as it was loaded before
    with pytest.raises(ConfigError, match=f"there is no file 'other.py' in {tmp_path / 'c'}"):
        load_connector("other.py:Mine")
    monkeypatch.chdir(tmp_path / "b")
    assert load_connector("only.py:Mine") is not first
    assert first.__module__ in sys.modules


def test_an_edited_file_is_not_loaded_again_and_this_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "mine.py")
    first = load_connector(f"{path}:Mine")
    with caplog.at_level(logging.WARNING):
        assert load_connector(f"{path}:Mine") is first
        assert not caplog.records
        path.write_text(SOURCE + "# edited\n")
        assert load_connector(f"{path}:Mine") is first
        assert "continues with the loaded version" in caplog.text
        path.unlink()
        assert load_connector(f"{path}:Mine") is first


def test_a_file_that_failed_is_tried_again(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.py", "1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_connector(f"{path}:Mine")
    path.write_text(SOURCE)
    os.utime(path, (0, 0))  # not the time that its bytecode may be cached for
    assert load_connector(f"{path}:Mine").__name__ == "Mine"


def test_threads_that_load_at_once_get_one_module(tmp_path: Path) -> None:
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


# --- what is no target ---


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import sys; sys.exit(7)", "bad.py:1: SystemExit: 7"),
        ("\nraise RuntimeError('one\\ntwo')", "bad.py:2: RuntimeError: one two"),
        ("def f(:", "SyntaxError"),
        ("import no_such_thing", "No module named 'no_such_thing'"),
        ("class E(Exception):\n def __str__(self): 1 / 0\nraise E", "text raises ZeroDivision"),
        (
            "import kvview\nclass Mine(kvview.SchedulerConnector):\n  def match_prefx(self): ...",
            "bad.py:2: ConnectorDefinitionError: CONN-9: line 3: Mine.match_prefx is never called",
        ),
    ],
)
def test_a_file_that_does_not_import_is_one_line(tmp_path: Path, source: str, told: str) -> None:
    path = write(tmp_path / "bad.py", source)
    with pytest.raises(ConfigError) as raised:
        load_connector(f"{path}:Mine")
    text = str(raised.value)
    assert told in text
    assert f"target '{path}:Mine' does not import: " in text
    assert "\n" not in text


def test_a_file_named_as_a_module_is_pointed_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine_here.py", "import kvview\nclass Mine(kvview.Connector): ...")
    with pytest.raises(ConfigError, match=r"\. Did you mean the file mine_here\.py:Mine\?$"):
        load_connector("mine_here:Mine")
    with pytest.raises(ConfigError, match=r"No module named 'mine_there'$"):
        load_connector("mine_there:Mine")


def test_ctrl_c_at_import_passes(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.py", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_connector(f"{path}:Mine")


NOT_ONE = """
import abc, kvview

class Good(kvview.Connector):
    pass

class NeedsMore(kvview.Connector):
    def __init__(self, config, pool):
        pass

class TakesNone(kvview.Connector):
    def __init__(self):
        pass

class Abstract(kvview.Connector, abc.ABC):
    @abc.abstractmethod
    def _tier(self): ...

class Half(kvview.SchedulerConnector):
    pass

made = Good(None)
number = 3

def function(config): ...
"""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NeedsMore", "NeedsMore must be built from one argument, the ConnectorConfig: it takes"),
        ("TakesNone", "must be built from one argument"),
        ("Abstract", "is abstract: it lacks _tier"),
        ("Half", "one half of a connector: name the class that builds both"),
        ("made", "an object of Good: name the class"),
        ("number", "a int, not a subclass of Connector"),
        ("function", "a function, not a subclass of Connector"),
        ("kvview", "a module, not"),
        ("Nothing", "has no 'Nothing'; it has: Good, NeedsMore"),
        ("Good.Inner", "has no 'Good.Inner'"),
        ("kvview.Connector", "is the base class, which does nothing"),
        ("", "expected 'path/to/file.py:Name'"),
    ],
)
def test_what_is_no_connector_is_one_clear_line(tmp_path: Path, name: str, told: str) -> None:
    path = write(tmp_path / "none.py", NOT_ONE)
    with pytest.raises(ConfigError) as raised:
        load_connector(f"{path}:{name}")
    assert told in str(raised.value)
    assert str(raised.value).startswith("target ")
    assert "\n" not in str(raised.value)
