"""Writes ``docs/commands.md`` and a JSON Schema for every report, from the commands.

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

from docs.parts import ROOT, with_parts, write
from kvview.cli.commands import SUMMARIES, cli
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import JSONOption
from kvview.targets import load_target

PAGE = ROOT / "docs/commands.md"
WIDTH = 80

_INPUTS = {"incident": "kvview_vllm.recorder.incident:IncidentModel"}
_FIELD = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def leaves(group: click.Group = cli, path: str = "kvview") -> Iterator[tuple[str, click.Command]]:
    """Yield every command of kvview with its command line, those of groups included."""
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
    """Return the help of a command, without the exit codes."""
    context = click.Context(
        command,
        info_name=path,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    return re.split(r"\n\n *Exit codes:", command.get_help(context))[0]


def targets() -> dict[str, str]:
    """Return the target of each report and of each input file, by the name of its schema."""
    options = [option for _, command in leaves() for option in command.params]
    return _INPUTS | {
        name: target
        for option in options
        if isinstance(option, JSONOption)
        for name, target in option.schemas.items()
    }


def schema(target: str) -> dict[str, Any]:
    """Make the JSON Schema of a dataclass or a pydantic model."""
    found = TypeAdapter(load_target(target)).json_schema(mode="serialization")
    for kind in (found, *found.get("$defs", {}).values()):
        _describe(kind)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _describe(kind: dict[str, Any]) -> None:
    """Turn the arguments in a docstring into descriptions of the fields."""
    if "properties" not in kind:
        return
    kind["additionalProperties"] = False
    text, _, fields = kind.get("description", "").partition("\n\nArgs:\n")
    for name, text_of_field in _FIELD.findall(fields):
        kind["properties"][name]["description"] = " ".join(text_of_field.split())
    if text:
        kind["description"] = text


def files() -> dict[Path, str]:
    """Make the text of each file."""
    texts = {
        ROOT / f"docs/{name}.schema.json": json.dumps(schema(target), indent=2) + "\n"
        for name, target in targets().items()
    }
    codes = ["| code | meaning |", "|---|---|"]
    codes += [f"| {code:d} | {code.meaning} |" for code in ExitCode]
    parts = []
    for path, command in leaves():
        parts.append(f"## {path}\n\n```text\n{help_of(path, command)}\n```\n")
        for option in command.params:
            if isinstance(option, JSONOption):
                links = [f"[`{name}`]({name}.schema.json)" for name in option.schemas]
                parts.append(f"JSON: {', '.join(links)}.\n")
    return {PAGE: with_parts(PAGE, codes="\n".join(codes), commands="\n".join(parts)), **texts}


if __name__ == "__main__":
    sys.exit(write(files()))
