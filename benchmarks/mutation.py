"""Draws random mutants of the product, runs the check and the tests on them, and writes a table.

    python benchmarks/mutation.py [--room pool ...] [--mutants 4] [--seed 0]
        [--page docs/trust.md]

1. universalmutator makes the mutants of a random line of a function, and one of them is drawn.
2. The mutants run in a copy of the checkout. ``mutation.toml`` lists the modules and the commands
   of each room. A command that ends otherwise than without the mutant kills the mutant.
3. The rooms take turns, and the table is written after each mutant. So a draw that is interrupted
   is a smaller draw.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import click
from universalmutator.mutator import mutants_regexp

from docs.parts import with_parts

ROOT = Path(__file__).parents[1]
PLAN: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RULES = ["universal.rules", "python.rules"]


@dataclass(frozen=True)
class Mutant:
    """A module with one wrong line."""

    room: str
    module: str
    line: int
    right: str
    wrong: str
    source: str


class _WithoutTexts(ast.NodeTransformer):
    """Removes the parts of a program that are texts for people."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args = []
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


def program(source: str) -> str | None:
    """Return a program without texts for people; None if it does not compile."""
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return None
    return ast.dump(_WithoutTexts().visit(ast.parse(source)))


def draw(room: str, seed: int) -> Iterator[Mutant]:
    """Yield mutants of a room in random order, at most one for each line."""
    found_by = {pattern: [*ROOT.glob(pattern)] for pattern in PLAN["room"][room]["modules"]}
    for pattern, found in found_by.items():
        if not found:
            raise click.ClickException(f"no module has the name {pattern} of the room {room}")
    paths = [path for found in found_by.values() for path in found]
    places = {
        (path, at)
        for path in paths
        if not any(part in path.stem for part in PLAN["never"])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for at in range(node.body[0].lineno - 1, node.end_lineno or 0)
    }
    chance = random.Random(f"{seed} {room}")
    for path, at in chance.sample(sorted(places), len(places)):
        lines = path.read_text().splitlines(keepends=True)
        with contextlib.redirect_stdout(io.StringIO()):  # the names of the rules
            found = mutants_regexp(lines[at : at + 1], RULES, ignorePatterns=[r"^\s*#"])
        for _, wrong, *_ in chance.sample(found, len(found)):
            source = "".join([*lines[:at], wrong, *lines[at + 1 :]])
            if program(source) not in (None, program("".join(lines))):
                yield Mutant(room, str(path.relative_to(ROOT)), at + 1, lines[at], wrong, source)
                break


class Copy:
    """A copy of the checkout, in which mutants run.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        without = shutil.ignore_patterns(".*", "__pycache__", "site", "dist")
        shutil.copytree(ROOT, folder, ignore=without, dirs_exist_ok=True)
        self._folder = folder
        path = [str(folder / part) for part in ("", "reference", "adapters")]
        names = os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
        # Without bytecode, because two mutants of one second would have the same time.
        self._env = os.environ | {"PYTHONPATH": names, "PYTHONDONTWRITEBYTECODE": "1"}
        self._right: dict[str, tuple[int, float]] = {}

    def killed_by(self, mutant: Mutant) -> str:
        """Return the first command that ends otherwise with a mutant; empty for a survivor."""
        commands = PLAN["room"][mutant.room]["commands"]
        for command in commands:
            if command not in self._right:
                start = time.monotonic()
                code = self._run(command, 600)
                gaps = 4 if command.startswith("kvview check") else 0  # few seeds leave gaps
                if code not in (0, gaps):
                    raise click.ClickException(f"the command fails without a mutant: {command}")
                self._right[command] = code, 30 + 10 * (time.monotonic() - start)
        path = self._folder / mutant.module
        right = path.read_text()
        path.write_text(mutant.source)
        try:
            limits = {one: self._right[one] for one in commands}
            return next((one for one, (code, s) in limits.items() if self._run(one, s) != code), "")
        finally:
            path.write_text(right)

    def _run(self, command: str, seconds: float) -> int:
        # timeout also ends the processes that a check has started.
        line = ["timeout", "-s", "KILL", str(seconds), sys.executable, "-m", *shlex.split(command)]
        quiet = subprocess.DEVNULL
        done = subprocess.run(line, cwd=self._folder, env=self._env, stdout=quiet, stderr=quiet)
        return done.returncode


def part(killed_by: Mapping[Mutant, str], seed: int, num_drawn: int) -> str:
    """Return the part of the page about a draw."""
    rooms = [*dict.fromkeys(mutant.room for mutant in killed_by)]
    rows = []
    for room in [*rooms, "all"]:
        kills = [how for one, how in killed_by.items() if room in (one.room, "all")]
        by_check = sum("kvview check" in how for how in kills)
        by_tests = sum("pytest" in how for how in kills)
        rate = f"{(by_check + by_tests) / len(kills):.0%}"
        rows.append(f"| {room} | {len(kills)} | {by_check} | {by_tests} | {rate} |")
    text: str = PLAN["page"]["text"].lstrip()
    return text.format(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        seed=seed,
        python=platform.python_version(),
        vllm=f"vLLM {import_module('vllm.version').__version__}" if "vllm" in rooms else "no vLLM",
        num_played=len(killed_by),
        num_drawn=num_drawn,
        never=", ".join(f"`{part}`" for part in PLAN["never"]),
        rows="\n".join(rows),
    )


@click.command(help=__doc__)
@click.option("--room", "rooms", type=click.Choice([*PLAN["room"]]), multiple=True)
@click.option("--mutants", "each", default=4, show_default=True, help="Of each room.")
@click.option("--seed", default=0, show_default=True)
@click.option("--page", "target", type=click.Path(path_type=Path))
def main(rooms: Sequence[str], each: int, seed: int, target: Path | None) -> None:
    """Draw the mutants and run them."""
    plans = {room: PLAN["room"][room] for room in rooms or PLAN["room"]}
    can_run = [room for room, plan in plans.items() if find_spec(plan.get("needs", "kvview"))]
    turns = zip(*(islice(draw(room, seed), each) for room in can_run), strict=True)
    drawn = [mutant for turn in turns for mutant in turn]
    killed_by: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="kvview-mutants-") as folder:
        copy = Copy(Path(folder))
        for mutant in drawn:
            killed_by[mutant] = copy.killed_by(mutant)
            click.echo(f"{mutant.module}:{mutant.line}: {killed_by[mutant] or 'alive'}")
            if not killed_by[mutant]:
                click.echo(f"-{mutant.right}+{mutant.wrong}", nl=False)
            if target is not None:
                target.write_text(with_parts(target, mutants=part(killed_by, seed, len(drawn))))


if __name__ == "__main__":
    main()
