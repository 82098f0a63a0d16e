"""Add a release of vLLM: fetch it, say what differs from the newest tested one, write it down.

    python tests/vllm/add_release.py 0.34.0 [--dry-run] [--no-matrix] [--seams view ...]

It writes the release into ``RELEASES`` (``releases/versions.py``), what differs into
``docs/releases.md``, runs the matrix on it, and writes its row (and a column for each test file
that has none) into ``docs/support-matrix.md``. Named again, the newest release is looked at and
tested again. Left to a person: rows for ``releases/shapes.txt`` and ``releases/release.py``, and
other calls for ``releases/calls.py``. No such row is written by itself: it says that the adapter
was looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matrix import IMPORT_PATHS, ROOT, make_page, read_page  # type: ignore[import-not-found]

from kvview_vllm.releases.sources import SourcesError, sources
from kvview_vllm.releases.versions import RELEASES, number

HERE = Path(__file__).parent
VERSIONS = ROOT / "adapters/kvview_vllm/releases/versions.py"
PAGE = ROOT / "docs/support-matrix.md"
DIFFERENCES = ROOT / "docs/releases.md"

Found = dict[str, dict[str, Any]]
"""What one release has: shapes of the table, members of its classes, flags of the seams."""


def look(release: str) -> Found:
    """What a release has, looked at in a process of its own.

    Raises:
        SourcesError: There is no such release, or it cannot be imported.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [sources(release), *IMPORT_PATHS])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "KVVIEW_ALLOW_UNTESTED_VLLM": "1",
    }
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
        "import add_release; add_release.print_found()",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SourcesError(f"vllm {release} cannot be looked at: {done.stderr.strip()[-2000:]}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def print_found() -> None:
    """Of the vLLM that can be imported here, as JSON."""
    from kvview_vllm.doctor import diagnose
    from kvview_vllm.releases.calls import complete_torch
    from kvview_vllm.releases.shapes import SHAPES, members_of, owner_of, shape_of

    complete_torch()
    shapes: dict[str, Any] = {}
    members: dict[str, Any] = {}
    for rows in SHAPES.values():
        for row in rows:
            owner = owner_of(row.owner)
            shapes[f"{row.owner} {row.name}"] = shape_of(owner, row.name)
            if isinstance(owner, type):
                members[row.owner] = members_of(owner)
    found = diagnose()
    seams = {seam.seam: seam.fits or seam.detail for seam in found.seams}
    print(
        json.dumps(
            {"shapes": shapes, "members": members, "flags": found.capabilities, "seams": seams}
        )
    )


def differences(old: Found, new: Found) -> list[str]:
    """What differs, a line each, what is read of it first."""
    lines = []
    for kind in ("shapes", "flags"):
        for name, value in new[kind].items():
            if old[kind].get(name) != value:
                lines.append(f"{kind}: {name}: {old[kind].get(name)} -> {value}")
    for owner, names in new["members"].items():
        before = old["members"].get(owner, {})
        for name, shape in names.items():
            if name not in before:
                lines.append(f"new: {owner} {name} {shape}")
        lines += [f"gone: {owner} {name}" for name in before if name not in names]
    return lines


def write_release(release: str) -> None:
    """Put the release into the list of those that are tested."""
    newest = RELEASES[-1]
    text = VERSIONS.read_text()
    text = (
        text.replace(f'"{newest}"),\n)', f'"{newest}"),\n    "{release}",\n)')
        if (f'"{newest}"),\n)' in text)
        else text.replace(f'    "{newest}",\n)', f'    "{newest}",\n    "{release}",\n)')
    )
    VERSIONS.write_text(text)


def write_differences(page: str, release: str, newest: str, lines: Sequence[str]) -> str:
    """The page of what differs with a section for a release, in place of one that it has."""
    head, *sections = page.split("\n## ")
    others = [section for section in sections if not section.startswith(f"{release} ")]
    said = [f"- `{line}`" for line in lines] or ["Nothing that the adapter knows."]
    section = "\n".join([f"{release} beside {newest}", "", *said, ""])
    return "\n## ".join([head, section, *others])


def run_matrix(release: str, only: Sequence[str]) -> tuple[int, dict[str, dict[str, int]]]:
    """The tests on it, of all seams if none is named: the exit code, and what each seam said."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "matrix.json")
        command = [
            sys.executable,
            str(HERE / "matrix.py"),
            "--releases",
            release,
            "--json",
            str(file),
            *(["--seams", *only] if only else []),
        ]
        code = subprocess.run(command).returncode
        seams: dict[str, dict[str, int]] = (
            json.loads(file.read_text())[release] if file.exists() else {}
        )
    return code, seams


def main() -> int:
    parser = argparse.ArgumentParser(description="Add a release of vLLM.")
    parser.add_argument("release", help="such as 0.34.0")
    parser.add_argument("--dry-run", action="store_true", help="say what differs, write nothing")
    parser.add_argument("--no-matrix", action="store_true", help="run no tests, write no row")
    parser.add_argument(
        "--seams", nargs="+", default=(), metavar="SEAM", help="of the matrix; default: all"
    )
    arguments = parser.parse_args()
    release, newest = arguments.release, RELEASES[-1]
    if (found := number(release)) is None:
        parser.error(f"{release} names no release, such as 0.34.0")
    if not arguments.dry_run and found < (number(newest) or found):
        parser.error(f"{release} is older than {newest}, the newest of those that are tested")
    is_there = release in RELEASES
    if is_there:
        newest = RELEASES[max(0, RELEASES.index(release) - 1)]
    try:
        old, new = look(newest), look(release)
    except SourcesError as error:
        parser.error(str(error))
    lines = differences(old, new)
    print(f"{release} beside {newest}: {len(lines)} differences of what the adapter knows")
    for line in lines:
        print(f"  {line}")
    for seam, fits in new["seams"].items():
        print(f"{seam}: {'fits' if fits is True else fits}")
    if arguments.dry_run:
        return 0
    if not is_there:
        write_release(release)
    DIFFERENCES.write_text(write_differences(DIFFERENCES.read_text(), release, newest, lines))
    if arguments.no_matrix:
        return 0
    code, seams = run_matrix(release, arguments.seams)
    record = read_page(PAGE.read_text())
    PAGE.write_text(make_page(record | {release: record.get(release, {}) | seams}))
    return code


if __name__ == "__main__":
    sys.exit(main())
