"""``kvview new``: a complete connector, its test, and a CI job, which pass unchanged.

1. The connector is a renamed copy of an example: ``host_memory.py`` by default, ``host_cache.py``
   with ``--hooks``, or ``raw_host_cache.py`` with ``--raw``. The package contains all three
   examples.
2. No file is overwritten. If one of the files exists, even as a dangling link, no file is written.
3. The name of a module that can be imported is refused, because FILE would hide that module.
4. ``--for`` writes only the test and the CI job, for a connector of vLLM that exists.
"""

from __future__ import annotations

import keyword
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import click

from kvview.cli.echo import echo
from kvview.errors import ConfigError
from kvview.urls import REVISION, requirement
from kvview.version import installed_commit

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_EXAMPLES = (_TEMPLATES, _TEMPLATES.parents[2] / "examples")  # in a wheel, and in a checkout


@dataclass(frozen=True)
class _Kind:
    """The differences between the kinds of connectors."""

    template: str
    class_prefix: str  # NAME of the class NAMEConnector in the template
    arguments: str  # arguments of the check in the test
    package: str  # the package that the CI job installs before kvview
    index: str  # arguments of pip for the package
    needs: str  # note on the packages that the commands need
    commands: tuple[str, ...]
    taken: tuple[str, ...]  # values of NAME that the template's imports use


_TORCH = (
    "torch",
    " --index-url https://download.pytorch.org/whl/cpu",
    "torch comes with kvview[reference], pytest with kvview[testing]",
)
# A small GPU cache, because a large one keeps every block that is used again.
_REPLAY = "kvview replay --connector {target} --gpu-blocks 500 "
_STORE = _Kind(
    "host_memory",
    "HostMemory",
    'options={"store_blocks": "{blocks}"}',
    *_TORCH,
    (
        _REPLAY + "--option store_blocks=5000",
        "kvview check {target} --option store_blocks={{blocks}}",
    ),
    ("Store",),
)
_HOOKS = _Kind(
    "host_cache",
    "HostCache",
    'options={"cpu_blocks": "{blocks}"}',
    *_TORCH,
    (_REPLAY + "--option cpu_blocks=5000", "kvview check {target}"),
    ("Scheduler", "Worker"),
)
_RAW = _Kind(
    "raw_host_cache",
    "HostCache",
    'engine="vllm", options={"host_blocks": 64}',
    "vllm",
    "",
    "in the environment of vLLM; pytest comes with kvview[testing]",
    ("kvview check {target} --engine vllm --option host_blocks={{blocks}}",),
    (),
)
_TARGET = re.compile(r"(?P<module>(?!\S*\.py:)[A-Za-z_]\w*(?:\.\w+)*):(?P<name>[A-Za-z_]\w*)")
_IN_CI = {"kvview replay": " --requests 200", "kvview check": " --json kvview.json"}


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--name", metavar="NAME", help="Prefix of the class names.  [default: from FILE]")
@click.option(
    "--hooks",
    is_flag=True,
    help="Write a connector that overrides the hooks, instead of a StoreConnector.",
)
@click.option(
    "--raw",
    is_flag=True,
    help="Write a connector for vLLM's own interface, which does not import kvview.",
)
@click.option(
    "--for",
    "existing",
    metavar="TARGET",
    help="Write only a test (FILE) and a CI job, for a connector of vLLM, package.module:Class. "
    "Run the command in the root of the repository.",
)
def new(file: Path, name: str | None, hooks: bool, raw: bool, existing: str | None) -> None:
    """Write a complete connector to FILE, its test, and a CI job.

    The connector keeps blocks in host memory. The default is a StoreConnector; --hooks and --raw
    select other kinds. The connector passes "kvview check" and pytest unchanged, and runs in
    "kvview replay" unless --raw is given.
    """
    if hooks and raw:
        raise ConfigError("--hooks and --raw select different kinds of connector; drop one of them")
    stem = file.stem
    if file.suffix != ".py" or not stem.isidentifier() or keyword.iskeyword(stem):
        raise ConfigError(
            f"{file}: the file name is not a valid name for a Python module; try my_connector.py"
        )
    for module in (stem, f"test_{stem}"):
        if _is_module(module, file.parent):
            raise ConfigError(
                f"{file}: {module} is the name of another module, which the file would hide from "
                f"programs in the same folder; try my_{stem}.py"
            )
    if existing is not None:
        if hooks or raw or name is not None:
            raise ConfigError("--for writes no connector; drop --hooks, --raw and --name")
        _write_for(existing, file)
        return
    name = re.sub("Connector$", "", _in_capitals(stem) if name is None else name)
    kind = _RAW if raw else _HOOKS if hooks else _STORE
    if not name.isidentifier() or name in kind.taken:
        raise ConfigError(
            f"--name {name!r}: the text cannot be a part of a class name; try --name Mine"
        )
    test = file.with_name(f"test_{file.name}")
    workflow = file.parent / ".github" / "workflows" / f"kvview-{stem}.yml"
    texts = {
        file: _connector(kind, name, stem),
        test: _test(stem, f"{name}Connector", test, kind.arguments),
        workflow: _workflow(kind, f"{file.name}:{name}Connector", test.name),
    }
    _write_all(texts)
    echo(f"{file}, {test.name} and {workflow.relative_to(file.parent)} are written.")
    echo(f"Run these commands next ({kind.needs}):")
    for command in kind.commands:
        echo(f"  {command.format(target=f'{file}:{name}Connector')}")
    echo(f"  python -m pytest {test}")


def _write_for(target: str, test: Path) -> None:
    """Write a test and a CI job for a connector that exists."""
    found = _TARGET.fullmatch(target)
    if found is None:
        raise ConfigError(
            f"--for {target!r}: the test imports the connector; expected package.module:Class"
        )
    kind = replace(_RAW, index=" -e .")
    workflow = Path(".github", "workflows", "kvview.yml")  # GitHub reads it in the root only
    _write_all(
        {
            test: _test(found["module"], found["name"], test, 'engine="vllm"'),
            workflow: _workflow(kind, target, str(test)),
        }
    )
    echo(f"{test} and {workflow} are written.")
    echo(f"Run these commands next ({kind.needs}):")
    echo(f"  {kind.commands[0].format(target=target)}")
    echo(f"  python -m pytest {test}")
    echo("If the connector needs options, add options={...} to the test, and --option to the job.")


def _is_module(name: str, folder: Path) -> bool:
    """Whether a module with this name exists outside a folder, or pytest reads such a file."""
    if name in sys.stdlib_module_names or name in ("conftest", "__init__"):
        return True
    spec = find_spec(name)
    own = {folder.resolve(), Path.cwd()}
    return bool(spec and spec.origin and Path(spec.origin).resolve().parent not in own)


def _write_all(texts: Mapping[Path, str]) -> None:
    """Write new files, but none if one of them exists.

    Raises:
        ConfigError: A file exists, or a folder cannot be made.
    """
    if there := [str(path) for path in texts if os.path.lexists(path)]:
        raise ConfigError(f"these files already exist: {', '.join(there)}; nothing was written")
    try:
        for path in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; nothing was written") from None
    for path, text in texts.items():
        with path.open("x", encoding="utf-8") as file:  # mode "x" does not follow links
            file.write(text)


def _in_capitals(stem: str) -> str:
    return "".join(part.capitalize() for part in stem.split("_"))


def _connector(kind: _Kind, name: str, stem: str) -> str:
    text = _template(f"{kind.template}.py").replace(f"examples/{kind.template}", stem)
    # The user has vLLM, with its types.
    text = text.replace(kind.template, stem).replace("  # type: ignore[misc]", "")
    return text.replace(kind.class_prefix, name)


def _test(module: str, name: str, test: Path, arguments: str) -> str:
    words = {"module": module, "name": name, "test": test.name, "arguments": arguments}
    return _template("test_connector.txt").format(**words, function=test.stem)


def _workflow(kind: _Kind, target: str, test: str) -> str:
    commands = [
        command.format(target=target) + _IN_CI[" ".join(command.split()[:2])]
        for command in kind.commands
    ]
    steps = "\n".join(f"      - run: {line}" for line in [*commands, f"python -m pytest {test}"])
    kvview = requirement("cli,reference,testing", installed_commit() or REVISION)
    install = f"pip install {_pinned(kind.package)}{kind.index}"
    words = {"install": install, "kvview": kvview, "steps": steps}
    return _template("workflow.yml").format(**words)


def _pinned(package: str) -> str:
    """Return the requirement of the installed version; of any version if none is installed."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return package
    return f"{package}=={version.partition('+')[0]}"  # each index has its own local versions


def _template(name: str) -> str:
    path = next(path for folder in _EXAMPLES if (path := folder / name).exists())
    return path.read_text(encoding="utf-8")
