"""The differences between vLLM releases, which are probed once and decided only in this package.

``python tests/vllm/add_release.py RELEASE`` adds a release: it lists the differences, writes
the release into the list of tested ones, and runs the matrix. Three places must be edited by hand:

1. For a member with another shape, a row in ``compat/shapes.txt``.
2. For another behaviour of the adapter, a row in ``compat/differences.toml``, and a field of its
   seam in :mod:`.compat.seams`.
3. For another way to call a member, a function in :mod:`.compat.calls`.
"""

from kvview_vllm.releases.compat.probes import (
    Release,
    check_scheduler,
    installed,
    probe_pool,
)
from kvview_vllm.releases.compat.seams import (
    ConnectorSeam,
    Difference,
    GeometrySeam,
    PoolSeam,
    differences,
)
from kvview_vllm.releases.compat.shapes import expect, reading, require_concrete
from kvview_vllm.releases.compat.versions import (
    NEWEST_TESTED,
    TESTED,
    VLLMNotInstalledError,
    engine_version,
    is_newer,
    is_tested,
    refusal,
)

__all__ = [
    "NEWEST_TESTED",
    "TESTED",
    "ConnectorSeam",
    "Difference",
    "GeometrySeam",
    "PoolSeam",
    "Release",
    "VLLMNotInstalledError",
    "check_scheduler",
    "differences",
    "engine_version",
    "expect",
    "installed",
    "is_newer",
    "is_tested",
    "probe_pool",
    "reading",
    "refusal",
    "require_concrete",
]
