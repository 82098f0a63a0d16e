"""``kvview check --vllm`` on the sources of this release."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm.version as vllm

from kvview_vllm.releases.sources import VLLMReleases
from kvview_vllm.releases.upgrade import Verdict, check_releases

EXAMPLE = f"{Path(__file__).parents[2]}/examples/host_cache.py:HostCacheConnector"


# It starts a process that imports vLLM again; the matrix proves each release.
@pytest.mark.ends
def test_a_connector_is_checked_on_this_release() -> None:
    releases = VLLMReleases()
    (release,) = releases.resolve([vllm.__version__.partition("+")[0]])
    (result,) = check_releases(EXAMPLE, "vllm", releases, [release], ["--seeds=2"]).results
    # Two seeds need not exercise everything.
    assert result.verdict in (Verdict.GREEN, Verdict.NOT_CHECKED), result.reason
    assert result.report is not None
    assert result.report["runs"]["engine"].split()[1].strip(",").partition("+")[0] == release
    assert result.report["runs"]["num_seeds"] == 2
