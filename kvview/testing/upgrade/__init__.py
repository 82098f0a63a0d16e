"""One connector in many releases of an engine, a process each: ``kvview check --vllm``.

An engine brings its releases (:class:`Releases`); nothing of it is imported here. Each is
checked by ``kvview check`` itself, in a process whose imports find that release first.

1. A release is green when its process ended with 0, its report is clean, and the report
   says that the runs were in that very release.
2. What could not be had, imported or exercised is said of its release, and is not green.
3. Ctrl-C ends the processes in order: what they have found by then is told.
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
