"""``kvview check --vllm`` on the sources of this release."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm.version as vllm

from kvview.testing.upgrade import Verdict, check_releases, load_releases
from kvview_vllm.comparison import surfaces

HERE = Path(vllm.__file__).parents[1]
EXAMPLE = f"{Path(__file__).parents[2]}/examples/host_cache.py:HostCacheConnector"
RAW = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"


# It starts a process that imports vLLM again; the matrix proves each release.
@pytest.mark.ends
def test_a_connector_is_checked_on_this_release() -> None:
    releases = load_releases("vllm")
    (release,) = releases.resolve([vllm.__version__.partition("+")[0]])
    (result,) = check_releases(EXAMPLE, "vllm", releases, [release], ["--seeds=2"])
    # Two seeds need not exercise everything.
    assert result.verdict in (Verdict.GREEN, Verdict.NOT_CHECKED), result.reason
    assert result.report is not None
    assert result.report["runs"]["engine"].split()[1].partition("+")[0] == release
    assert result.report["runs"]["num_seeds"] == 2


def test_every_watched_class_has_its_members() -> None:
    missing = {name for name in surfaces.WATCHED if not surfaces.members(HERE, name)}
    # Added in 0.11.1; their members are those of their base classes.
    assert missing <= {"SupportsHMA", "KVConnectorMetadata"}
    assert {"get_num_new_matched_tokens", "build_connector_meta"} <= {
        name for name, member in surfaces.members(HERE, surfaces.BASE).items() if member.is_abstract
    }


def test_a_release_has_no_changes_compared_with_itself() -> None:
    assert load_releases("vllm").changes(RAW, HERE, HERE) == []
