"""The differences between vLLM releases, which are probed once and decided only in this package.

``python tests/vllm/add_release.py RELEASE`` adds a release: it lists the differences, writes
the release into the list of tested ones, and runs the matrix. Three places must be edited by hand:

1. For a member with another shape, a row in ``compat/shapes.txt``.
2. For another behaviour of the adapter, a row in ``compat/differences.toml``, and a field of its
   seam in :mod:`.compat.seams`.
3. For another way to call a member, a function in :mod:`.compat.calls`.
"""

from kvview_vllm.releases.compat.probes import (
    Release as Release,
    check_scheduler as check_scheduler,
    installed as installed,
    probe_pool as probe_pool,
)
from kvview_vllm.releases.compat.seams import (
    ConnectorSeam as ConnectorSeam,
    Difference as Difference,
    GeometrySeam as GeometrySeam,
    PoolSeam as PoolSeam,
    differences as differences,
)
from kvview_vllm.releases.compat.shapes import (
    expect as expect,
    reading as reading,
    require_concrete as require_concrete,
)
from kvview_vllm.releases.compat.versions import (
    NEWEST_TESTED as NEWEST_TESTED,
    TESTED as TESTED,
    VLLMNotInstalledError as VLLMNotInstalledError,
    engine_version as engine_version,
    is_newer as is_newer,
    is_tested as is_tested,
    refusal as refusal,
)
