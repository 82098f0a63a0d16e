"""Runs the benchmarks, and replaces their tables in tables.md and docs/performance.md.

    python benchmarks/performance.py [--vllm-sources DIR] [NAME ...]

Each table has the date, the machine, its load and the versions of its run, and the targets that it
misses. With names, only these benchmarks run; all other tables, and those of a benchmark that
fails, are kept, like the text of the pages.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
from harness import PEER, ROOT  # type: ignore[import-not-found, unused-ignore]

TABLES = ROOT / "benchmarks" / "tables.md"
PAGE = ROOT / "docs" / "performance.md"
"""The page with the cost of a step; all other tables are in ``TABLES``."""
BENCHMARKS = {
    "offloading": True,
    "transfer": False,
    "step_cost": False,
}
"""Whether a benchmark has the option --vllm-sources."""


def machine() -> str:
    """Describe the time, the machine and the versions of a run."""
    cores = f"{os.cpu_count()} cores ({platform.machine()})"
    parts = [f"{datetime.now(UTC):%Y-%m-%d} with {cores}"]
    if hasattr(os, "getloadavg"):
        parts.append(f"a load average of {os.getloadavg()[0]:.1f} before the run")
    parts += [f"Python {platform.python_version()}", PEER]
    for package in ("numpy", "torch"):
        try:
            parts.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(parts)


def measure(name: str, sources: Path | None) -> bool:
    """Run one benchmark and replace its tables; returns False if it failed."""
    options = ["--vllm-sources", str(sources)] if sources and BENCHMARKS[name] else []
    path = [os.environ.get("PYTHONPATH", ""), *([str(sources)] if sources else [])]
    where = machine()
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    if run.returncode:
        print(f"benchmarks/{name}.py: exit code {run.returncode}", file=sys.stderr)
        return False
    section = f"`benchmarks/{name}.py` ran on {where}.\n\n{run.stdout.strip()}\n"
    written = PAGE if name == "step_cost" else TABLES
    page = written.read_text(encoding="utf-8")
    start = page.index(f"`benchmarks/{name}.py`")
    heading = re.compile(r"\n##+ ").search(page, start)
    end = heading.start() if heading else len(page)
    written.write_text(f"{page[:start]}{section}{page[end:]}", encoding="utf-8")
    return True


@click.command(help=__doc__)
@click.option("--vllm-sources", type=click.Path(path_type=Path), help="Holds vLLM's package.")
@click.argument("names", nargs=-1, type=click.Choice(list(BENCHMARKS)))
def main(vllm_sources: Path | None, names: tuple[str, ...]) -> None:
    results = [measure(name, vllm_sources) for name in names or BENCHMARKS]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
