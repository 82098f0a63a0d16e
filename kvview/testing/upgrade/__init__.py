"""One connector in many releases of an engine, a process each: ``kvview check --vllm``.

An engine provides its releases (:class:`Releases`) and is never imported here. ``kvview check``
itself checks each release, in a process whose imports find that release first.

1. A release is green if its process ended with 0, its report is clean, and the report names
   that release for the runs.
2. A release that could not be downloaded, imported or exercised is reported and not green.
3. Ctrl-C ends the processes in order, and their findings so far are reported.
"""

from kvview.testing.upgrade.engine_releases import Change, Releases, load_releases
from kvview.testing.upgrade.runs import ReleaseResult, UpgradeReport, Verdict, check_releases

__all__ = [
    "Change",
    "ReleaseResult",
    "Releases",
    "UpgradeReport",
    "Verdict",
    "check_releases",
    "load_releases",
]
