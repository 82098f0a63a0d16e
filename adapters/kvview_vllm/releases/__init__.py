"""What differs between vLLM releases, probed once: nothing outside decides by a release.

A new release is added in three places:

1. ``NEWEST_TESTED`` in :mod:`.versions`, and the release itself in ``RELEASES`` of
   ``tests/vllm/sources.py``.
2. Where it differs: a field of its seam in :mod:`.release`, or a known shape in
   :mod:`.probes`.
3. Where it is called differently: :mod:`.calls`.

``python tests/vllm/matrix.py --releases <it>`` then says what is left, and
``python tests/vllm/matrix.py --all --markdown docs/support-matrix.md`` writes the page.
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
