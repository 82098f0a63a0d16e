"""Adds a release of vLLM: fetches it, compares it with the newest tested one, and records it.

    python tests/vllm/add_release.py 0.34.0 [--dry-run] [--no-matrix] [--seams view ...]

It prints the differences, writes the release into ``RELEASES`` (``releases/compat/versions.py``),
makes ``docs/support-matrix.md`` again, and runs the matrix on the release.
With the name of the newest release it compares and tests that one again. Rows for
``releases/compat/shapes.txt`` and ``releases/compat/differences.toml``, and other calls for
``releases/compat/calls.py``, are left to a person, because a row states that the adapter was
checked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from matrix import IMPORT_PATHS, ROOT  # type: ignore[import-not-found]

from kvview_vllm.releases.compat.versions import RELEASES, number
from kvview_vllm.releases.sources import SourcesError, sources

HERE = Path(__file__).parent
VERSIONS = ROOT / "adapters/kvview_vllm/releases/compat/versions.py"
MAKE_PAGE = ROOT / "docs/make_support_matrix.py"

Found = dict[str, dict[str, Any]]
"""A release: the shapes of the table, the members of its classes, the flags of the seams."""


def inspect(release: str) -> Found:
    """Read a release, in a process of its own.

    Raises:
        SourcesError: There is no such release, or it cannot be imported.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [sources(release), *IMPORT_PATHS, HERE])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "KVVIEW_ALLOW_UNTESTED_VLLM": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", "import add_release as a; a.print_found()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SourcesError(f"vllm {release} cannot be read: {done.stderr.strip()[-2000:]}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def print_found() -> None:
    """Print the vLLM that can be imported here, as JSON."""
    from kvview_vllm.doctor import diagnose
    from kvview_vllm.releases.compat.calls import complete_torch
    from kvview_vllm.releases.compat.shapes import SHAPES, members_of, owner_of, shape_of

    complete_torch()
    shapes: dict[str, Any] = {}
    members: dict[str, Any] = {}
    for row in (row for rows in SHAPES.values() for row in rows):
        owner = owner_of(row.owner)
        shapes[f"{row.owner} {row.name}"] = shape_of(owner, row.name)
        if isinstance(owner, type):
            members[row.owner] = members_of(owner)
    found = diagnose()
    seams = {seam.seam: seam.fits or seam.detail for seam in found.seams}
    result: Found = {"shapes": shapes, "members": members, "flags": dict(found.capabilities)}
    print(json.dumps(result | {"seams": seams}))


def differences(old: Found, new: Found) -> list[str]:
    """Return the differences, one line each; members that the adapter reads come first."""
    lines = []
    for kind in ("shapes", "flags"):
        for name, value in new[kind].items():
            if old[kind].get(name) != value:
                lines.append(f"{kind}: {name}: {old[kind].get(name)} -> {value}")
    for owner, names in new["members"].items():
        before = old["members"].get(owner, {})
        lines += [f"new: {owner} {n} {shape}" for n, shape in names.items() if n not in before]
        lines += [f"gone: {owner} {name}" for name in before if name not in names]
    return lines


def write_release(release: str) -> None:
    """Add the release to the list of the tested ones."""
    newest = f'"{RELEASES[-1]}"'
    text = VERSIONS.read_text()
    for end in (f"{newest}),\n)", f"{newest},\n)"):
        text = text.replace(end, f'{end[:-1]}    "{release}",\n)')
    VERSIONS.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Add a release of vLLM.")
    parser.add_argument("release", help="such as 0.34.0")
    parser.add_argument("--dry-run", action="store_true", help="print differences, write nothing")
    given = parser.parse_args()
    release, newest = given.release, RELEASES[-1]
    if (found := number(release)) is None:
        parser.error(f"{release} is not the name of a release, such as 0.34.0")
    if not given.dry_run and found < (number(newest) or found):
        parser.error(f"{release} is older than {newest}, the newest tested release")
    is_known = release in RELEASES
    if is_known:
        newest = RELEASES[max(0, RELEASES.index(release) - 1)]
    try:
        old, new = inspect(newest), inspect(release)
    except SourcesError as error:
        parser.error(str(error))
    lines = differences(old, new)
    print(f"{release} compared with {newest}: {len(lines)} differences that concern the adapter")
    for line in lines:
        print(f"  {line}")
    for seam, fits in new["seams"].items():
        print(f"{seam}: {'fits' if fits is True else fits}")
    if given.dry_run:
        return 0
    if not is_known:
        write_release(release)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, IMPORT_PATHS))}
    subprocess.run([sys.executable, str(MAKE_PAGE)], env=environment, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
