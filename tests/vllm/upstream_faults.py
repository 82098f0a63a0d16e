"""Plants changes of behaviour into copies of vLLM, and reports those that the upstream job misses.

    python tests/vllm/upstream_faults.py [NAME ...]

Each is an edit of the newest release's sources (``upstream_faults.toml``) that changes no
signature. ``examples/upstream/test_kv_connectors.py`` runs on the edited copy. A change is missed
if the job stays green, or does not get as far as the tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from drift_edits import Sources, read_drifts  # type: ignore[import-not-found]
from drifts import NEWEST, write_tree  # type: ignore[import-not-found]

from kvview_vllm.releases.sources import sources

_ROOT = Path(__file__).parents[2]
_JOB = _ROOT / "examples" / "upstream" / "test_kv_connectors.py"


def run_in(folder: Path) -> tuple[bool, str]:
    """Return whether the job is red there, and the test that failed."""
    paths = [str(_ROOT), str(_ROOT / "reference"), str(_ROOT / "adapters"), str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", str(_JOB)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    failed = re.search(r"^FAILED \S+::(.+?)( - |$)", done.stdout, re.MULTILINE)
    last = (done.stdout + done.stderr).strip().splitlines()[-1]
    return failed is not None, failed[1] if failed else last


def main() -> int:
    files = Sources(sources(NEWEST))
    faults = read_drifts("upstream_faults.toml")
    names = [n for n in faults if not sys.argv[1:] or any(part in n for part in sys.argv[1:])]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="kvview-upstream-") as scratch:
        for number, name in enumerate(names):
            folder = Path(scratch, str(number))
            write_tree(files.folder, folder, faults[name].apply(files))
            is_seen, test = run_in(folder)
            missed += not is_seen
            print(f"{'seen' if is_seen else 'MISSED':7} {name}: {test}", flush=True)
    print(f"{len(names) - missed} of {len(names)} changes seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
