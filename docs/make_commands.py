"""Writes ``docs/commands.md`` and a JSON Schema for every report, from the commands themselves.

python docs/make_commands.py           # write them
python docs/make_commands.py --check   # exit 1 when one is not up to date
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import TypeAdapter

from kvview.cli.commands import SUMMARIES, cli
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption
from kvview.targets import load_target

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/commands.md"
WIDTH = 80

_FIELD = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_HEAD = """\
# The commands

<!-- Written by docs/make_commands.py from the commands; edit those and run it again. -->

`kvview COMMAND`, or `python -m kvview COMMAND` where the script is not on the path. What every
command has:

- `--help`, 80 columns wide.
- `--quiet`, `-q`: nothing is printed but errors, and what an option sends to `-`, standard output.
- `--verbose`, `-v`: the versions that run are named on standard error, and an error brings its
  traceback. Both may stand before the command too: `kvview --quiet check ...`.
- An error is one line on standard error that begins with `kvview: `, and an exit code:

| code | meaning |
|---|---|
{codes}

A command that writes JSON (`--json FILE`, `-` for standard output) has a schema below. Each report
has a `schema_version`, which grows when a field goes or means something else; new fields may come
without. The file is written where the command ends with 0, 1, 3, 4 or 130, and has come that far.

The shell completes commands and options after
`eval "$(kvview completion bash)"`; `zsh` and `fish` can do it too (`kvview completion --help`).
"""


def leaves(group: click.Group = cli, path: str = "kvview") -> Iterator[tuple[str, click.Command]]:
    """Every command of kvview's own, below groups too, by what is typed for it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or (group is cli and name not in SUMMARIES):
            continue
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def help_of(path: str, command: click.Command) -> str:
    """What ``--help`` prints, but for the exit codes."""
    context = click.Context(
        command,
        info_name=path,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    return re.split(r"\n\n *Exit codes:", command.get_help(context))[0]


def targets() -> dict[str, str]:
    """What a report is made of, by the name of its schema."""
    options = [option for _, command in leaves() for option in command.params]
    return {
        name: target
        for option in options
        if isinstance(option, JSONOption)
        for name, target in option.schemas.items()
    }


def schema(target: str) -> dict[str, Any]:
    """The JSON Schema of a dataclass or a pydantic model."""
    found = TypeAdapter(load_target(target)).json_schema(mode="serialization")
    for kind in (found, *found.get("$defs", {}).values()):
        _describe(kind)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _describe(kind: dict[str, Any]) -> None:
    """Docstrings of dataclasses become descriptions of their fields."""
    if "properties" not in kind:
        return
    kind["additionalProperties"] = False
    text, _, fields = kind.get("description", "").partition("\n\nArgs:\n")
    for name, what in _FIELD.findall(fields):
        kind["properties"][name]["description"] = " ".join(what.split())
    if text:
        kind["description"] = text


def files() -> dict[Path, str]:
    """What should stand where."""
    texts = {
        ROOT / f"docs/{name}.schema.json": json.dumps(schema(target), indent=2) + "\n"
        for name, target in targets().items()
    }
    codes = "\n".join(f"| {code:d} | {code.meaning} |" for code in ExitCode)
    parts = [_HEAD.format(codes=codes)]
    for path, command in leaves():
        parts.append(f"## {path}\n\n```text\n{help_of(path, command)}\n```\n")
        for option in command.params:
            if isinstance(option, JSONOption):
                links = [f"[`{name}`]({name}.schema.json)" for name in option.schemas]
                parts.append(f"JSON: {', '.join(links)}.\n")
    return {PAGE: "\n".join(parts), **texts}


def main() -> None:
    """Write them, or check that they are up to date."""
    stale = [
        path
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(files()[path], encoding="utf-8")
    sys.exit(1 if stale and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
