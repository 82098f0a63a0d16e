"""What differs between vLLM releases, probed once: nothing outside decides by a release.

``python tests/vllm/add_release.py <it>`` adds a release: it says what differs, writes it
into the list of those that are tested, and runs the matrix. Three places are left:

1. Where a member has another shape: a row in :mod:`.shapes`.
2. Where the adapter does something else: a field of its seam in :mod:`.release`.
3. Where it is called differently: :mod:`.calls`.
"""

from kvview_vllm.releases.probes import (
    Release,
    check_scheduler,
    installed,
    probe_connector,
    probe_offloading,
    probe_pool,
    require_class,
)
from kvview_vllm.releases.release import (
    BindingSeam,
    ConnectorSeam,
    Difference,
    GeometrySeam,
    OffloadingSeam,
    PoolSeam,
    differences,
)
from kvview_vllm.releases.shapes import expect, reading, require_concrete
from kvview_vllm.releases.versions import (
    NEWEST_TESTED,
    OLDEST_TESTED,
    TESTED,
    VLLMNotInstalledError,
    engine_version,
    is_newer,
    is_tested,
    refusal,
)

__all__ = [
    "NEWEST_TESTED",
    "OLDEST_TESTED",
    "TESTED",
    "BindingSeam",
    "ConnectorSeam",
    "Difference",
    "GeometrySeam",
    "OffloadingSeam",
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
    "probe_connector",
    "probe_offloading",
    "probe_pool",
    "reading",
    "refusal",
    "require_class",
    "require_concrete",
]
