"""Write ``docs/results.md`` from ``results/*.json``, and those files from ``results/field.toml``.

python docs/make_results.py                     # write the page
python docs/make_results.py --run [NAME ...]    # first run the commands whose file is missing

A result file is that of ``--report-json``. A command runs in the environment of this script, so
vLLM must be importable. The name of a file is RELEASE-ROW-COMMAND.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from docs.parts import ROOT, with_parts, write

PAGE = ROOT / "docs/results.md"
RESULTS = ROOT / "results"
SECONDS = 600
SEEDS = 12
_CLASSES = {
    "connector": "life of requests",
    "tier": "life of pages",
    "keys": "keys",
    "layouts": "layouts",
}
_LONGEST = 260  # characters of evidence


@dataclass(frozen=True)
class Row:
    """An implementation with one configuration.

    Args:
        name: In the page.
        target: Of the commands.
        options: Of the commands, as ``KEY=VALUE``.
        check_options: Of ``kvview check`` if they differ.
        engine: Of ``kvview check``; empty for a tier store, which needs none.
        only: Limits ``kvview partition`` to keys or layouts; empty for both.
        setup: Lines for a shell that start a server, for example.
        environment: Variables that configure the implementation.
        commands: The commands that apply; none if another check is the right one.
        reason: The reason if no command has run.
        upstream: For each red class, a thread or a report, in Markdown.
    """

    name: str
    target: str
    options: Sequence[str] = ()
    check_options: Sequence[str] | None = None
    engine: str = "vllm"
    only: str = ""
    setup: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[str] = ("partition", "check")
    reason: str = "not run yet"
    upstream: Mapping[str, str] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """Its part of the name of a file."""
        return re.sub(r"\W+", "-", self.name).lower()

    def files(self) -> list[tuple[str, dict[str, Any]]]:
        """The result files, each with its release."""
        paths = sorted(RESULTS.glob(f"*-{self.slug}-*.json"))
        names = {f"{self.slug}-{command}.json" for command in ("partition", "check")}
        return [
            (path.name.partition("-")[0], json.loads(path.read_text(encoding="utf-8")))
            for path in paths
            if path.name.partition("-")[2] in names
        ]


def rows() -> list[Row]:
    """Return the rows of ``results/field.toml``."""
    text = (RESULTS / "field.toml").read_text(encoding="utf-8")
    return [Row(**row) for row in tomllib.loads(text)["row"]]


def has_run(file: Mapping[str, Any]) -> bool:
    """Whether a result file has a verdict."""
    return any(profile["verdict"] != "could not run" for profile in file["profiles"])


def run(row: Row, release: str) -> None:
    """Run the commands of a row that have no result file, up to the first that cannot run."""
    for command in row.commands:
        if any(each.startswith(release) and not has_run(file) for each, file in row.files()):
            return
        path = RESULTS / f"{release}-{row.slug}-{command}.json"
        if path.exists():
            continue
        options, arguments = row.options, [f"--report-json={path}"]
        if command == "partition" and row.only:
            arguments.append(f"--only={row.only}")
        if command == "check" and row.engine:
            options = row.check_options or options
            arguments += [f"--engine={row.engine}", f"--seeds={SEEDS}"]
        line = [row.target, *(f"--option={option}" for option in options), *arguments]
        print(f"{release} {row.name}: {command}", flush=True)
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "kvview", "--quiet", command, *line],
                cwd=ROOT,
                env=os.environ | dict(row.environment),
                timeout=SECONDS,
                check=False,
            )


@dataclass(frozen=True)
class Verdicts:
    """All results of one row in one release."""

    row: Row
    release: str
    files: Sequence[dict[str, Any]]

    def profiles(self) -> Iterator[dict[str, Any]]:
        """The profiles of all files."""
        for each in self.files:
            yield from each["profiles"]

    def cell(self, name: str) -> str:
        """The verdict on a class."""
        for profile in self.profiles():
            if profile["name"] == name:
                return _cell(profile)
        return ""

    @property
    def replaced(self) -> str:
        """The replaced parts."""
        return "; ".join(sorted({part for each in self.files for part in each["replaced"]}))

    @property
    def has_run(self) -> bool:
        """Whether a class has a verdict."""
        return any(map(has_run, self.files))


def _cell(profile: Mapping[str, Any]) -> str:
    verdict, counts = profile["verdict"], profile["counts"]
    if verdict == "could not run":
        return "–"
    total = sum(counts.values()) - counts.get("skipped", 0)
    if verdict == "green":
        return f"green ({total})"
    bad = sum(counts.get(name, 0) for name in ("wrong", "shared wrongly", "failed"))
    unchecked = counts.get("not checked", 0)
    return f"**red** ({bad} of {total})" if verdict == "red" else f"not checked ({unchecked})"


def verdicts() -> list[Verdicts]:
    """Return all rows with results, by release."""
    found = []
    for row in rows():
        files = row.files()
        if not files:
            found.append(Verdicts(row, "", []))
        for release in dict.fromkeys(release for release, _ in files):
            found.append(Verdicts(row, release, [f for name, f in files if name == release]))
    return found


def page() -> str:
    """Return the text of ``docs/results.md``."""
    found = verdicts()
    lines = ["## Verdicts", ""]
    heads = ["implementation", "vLLM", *_CLASSES.values(), "replaced"]
    lines += [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for each in found:
        if each.has_run:
            cells = [each.cell(name) for name in _CLASSES]
            lines.append(f"| {' | '.join([each.row.name, each.release, *cells, each.replaced])} |")
    lines += ["", "## Findings", ""]
    for each in found:
        for profile in each.profiles():
            if profile["verdict"] in ("red", "not checked"):
                lines += _findings(each, profile)
    lines += ["", "## Connectors that could not run", "", "| implementation | vLLM | error |"]
    lines += ["|---|---|---|"]
    for each in found:
        if not each.has_run:
            errors = [finding["evidence"] for p in each.profiles() for finding in p["findings"]]
            error = _short(errors[0]) if errors else each.row.reason
            lines.append(f"| {each.row.name} | {each.release} | {error} |")
    commands_of_all = []
    for each in (each for each in found if each.files):
        commands = [*each.row.setup, *(line for file in each.files for line in file["reproduce"])]
        commands_of_all += ["", f"{each.row.name}, vLLM {each.release}:", "", "```sh"]
        commands_of_all += [*dict.fromkeys(commands), "```"]
    return with_parts(PAGE, verdicts="\n".join(lines), commands="\n".join(commands_of_all))


def _findings(each: Verdicts, profile: Mapping[str, Any]) -> Iterator[str]:
    name = profile["name"]
    link = each.row.upstream.get(name, "")
    title = f"{each.row.name}, vLLM {each.release}, {_CLASSES[name]}"
    yield f"**{title}**: {profile['verdict']}.{' ' + link if link else ''}"
    yield ""
    subjects: dict[tuple[str, str], list[str]] = {}
    for finding in profile["findings"]:
        if finding["outcome"] in ("failed", "wrong", "shared wrongly", "not checked"):
            key = (finding["outcome"], _short(finding["evidence"]))
            subjects.setdefault(key, []).append(finding["subject"])
    for (outcome, evidence), (first, *others) in subjects.items():
        more = f" and {len(others)} more" if others else ""
        yield f"- {outcome}: {first}{more}{': ' + evidence if evidence else ''}"
    yield ""


def _short(text: str) -> str:
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return re.sub(r"([|*_{])", r"\\\1", text).replace("<", "&lt;")


def main() -> None:
    """Run commands if they are asked for, and write the page."""
    parser = argparse.ArgumentParser(description="Write docs/results.md from result files.")
    parser.add_argument("--run", nargs="*", metavar="NAME", help="Rows to run; all without a name.")
    arguments = parser.parse_args()
    if arguments.run is not None:
        from kvview_vllm.releases import engine_version

        for row in rows():
            if not arguments.run or row.name in arguments.run:
                run(row, engine_version())
    write({PAGE: page()})


if __name__ == "__main__":
    main()
