"""``kvview new``: a connector to begin from, its test, and a CI job, which pass as they stand.

1. The connector is ``examples/host_cache.py``, which the package carries, under a new name.
2. Nothing is overwritten: if one of the files is there, none is written.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

import click

from kvview.errors import ConfigError
from kvview.version import __version__

_HERE = Path(__file__).resolve().parent
_TEMPLATES = (
    _HERE / "templates" / "host_cache.py",  # a wheel: pyproject.toml puts it there
    _HERE.parents[1] / "examples" / "host_cache.py",  # a checkout
)
_TEST = '''\
"""The laws that a connector keeps, in simulated runs: pytest {test}"""

from collections.abc import Callable

from kvview.testing import parametrize_with_checks

from {module} import {name}Connector


@parametrize_with_checks({name}Connector, seeds=50, options={{"cpu_blocks": 64}})
def test_{module}(check: Callable[[], None]) -> None:
    check()
'''
_WORKFLOW = """\
name: kvview
on: [push, pull_request]
jobs:
  check:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.11"
      - run: pip install torch --index-url https://download.pytorch.org/whl/cpu
      - run: pip install 'kvview[cli,reference,testing]>={version}'
      - run: kvview replay --connector {file}:{name}Connector --requests 200
      - run: kvview check {file}:{name}Connector --report kvview.html
      - run: python -m pytest {test}
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: kvview
          path: kvview.html
"""


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--name", metavar="NAME", help="Of the classes: NAMEConnector.  [default: from FILE]")
def new(file: Path, name: str | None) -> None:
    """Write a connector to begin from: FILE, its test, and a CI job beside it.

    What is written keeps finished requests in host memory, and passes "kvview
    replay", "kvview check" and pytest as it stands.
    """
    stem = file.stem
    if file.suffix != ".py" or not stem.isidentifier() or keyword.iskeyword(stem):
        raise ConfigError(f"{file}: not a Python module's name; try my_connector.py")
    name = re.sub("Connector$", "", name or _in_capitals(stem))
    if not f"{name}C".isidentifier():
        raise ConfigError(f"--name {name!r}: not the name of a class; try Mine")
    test = file.with_name(f"test_{file.name}")
    workflow = file.parent / ".github" / "workflows" / "kvview.yml"
    words = {"file": file.name, "module": stem, "name": name, "test": test.name}
    texts = {
        file: _connector(name, file.name),
        test: _TEST.format(**words),
        workflow: _WORKFLOW.format(**words, version=__version__),
    }
    if there := [str(path) for path in texts if path.exists()]:
        raise ConfigError(f"{', '.join(there)}: already there; nothing was written")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    target = f"{file}:{name}Connector"
    click.echo(f"{file}, {test.name} and {workflow.relative_to(file.parent)} are written. Next:")
    click.echo(f"  kvview replay --connector {target}")
    click.echo(f"  kvview check {target}")
    click.echo(f"  python -m pytest {test}")


def _in_capitals(stem: str) -> str:
    return "".join(part.capitalize() for part in stem.split("_"))


def _connector(name: str, file_name: str) -> str:
    path = next(path for path in _TEMPLATES if path.exists())
    text = path.read_text(encoding="utf-8").replace("examples/host_cache.py", file_name)
    return text.replace("HostCache", name)
