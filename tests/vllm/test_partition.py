"""A connector shares KV exactly between requests with the same KV; each confusion is detected."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("vllm.v1.core.block_pool", reason="needs a vLLM release")

from docs import make_results
from kvview.testing.supervision import watchdog
from kvview_vllm.connector import KVViewConnector
from kvview_vllm.partition.command import partition
from kvview_vllm.partition.matrix import PairOutcome, check_partition
from kvview_vllm.partition.pairs import PROMPT, all_pairs
from kvview_vllm.releases import engine_version
from kvview_vllm.releases.compat.tiers import has_tiers
from kvview_vllm.releases.compat.versions import RELEASES, is_between, vllm
from kvview_vllm.simulation.scheduler import cpu_scheduler
from tests.cases import read_cases
from tests.vllm.partition_connectors import SETTINGS
from tests.vllm.raw_connectors import HostConnector, ReadsItsRanks

cpu_scheduler.prepare()

V1 = "distributed.kv_transfer.kv_connector.v1"
KEYED = f"{Path(__file__).parent / 'partition_connectors.py'}:KeyedConnector"
CASES = read_cases(Path(__file__).with_name("pairs.txt"))
CONFUSIONS = {pair: part for kind, pair, part in CASES if kind == "confusions"}
SEPARATIONS = {pair: part for kind, pair, part in CASES if kind != "confusions"}
BY_NAME = {pair.name: pair for pair in all_pairs()}
CONTROLS = [BY_NAME["the same request"], BY_NAME["a restart"]]
# Before other tests register theirs.
CONNECTORS = {*vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory._registry}

needs_tags = pytest.mark.skipif(
    not is_between(engine_version(), "0.33.0", None), reason="hashes have tags since vLLM 0.33"
)


def outcomes(ignored: str, *names: str, added: str = "") -> dict[str, PairOutcome]:
    engine = SETTINGS.replace(ignored, "") if ignored.startswith("{") else SETTINGS
    if added.startswith("{"):
        engine += added
    options = {
        "connector": KEYED,
        "contain_faults": False,
        "options": {"name": "{tmp}", "engine": engine, "ignores": ignored, "adds": added},
    }
    pairs = [*CONTROLS, *(BY_NAME[name] for name in names)]
    cells = check_partition(KVViewConnector, options, pairs)
    return {cell.pair.name: cell.outcome for cell in cells}


@needs_tags
def test_a_right_connector_separates_every_pair_and_shares_the_rest() -> None:
    found = outcomes("", *(name for name in BY_NAME if "hash" not in name))
    for name, outcome in found.items():
        is_same = BY_NAME[name].num_same_tokens > 0
        assert outcome is (PairOutcome.SHARED if is_same else PairOutcome.SEPARATED), name


@needs_tags
@pytest.mark.parametrize(("name", "ignored"), CONFUSIONS.items())
def test_each_confusion_is_detected(name: str, ignored: str) -> None:
    assert outcomes(ignored, name)[name] is PairOutcome.SHARED_WRONGLY


@needs_tags
@pytest.mark.parametrize(("name", "added"), [*SEPARATIONS.items(), ("a restart", "salt")])
def test_each_needless_separation_is_detected(name: str, added: str) -> None:
    assert outcomes("", name, added=added)[name] is PairOutcome.NOT_SHARED


def test_every_pair_has_a_confusion_or_a_separation() -> None:
    are_equal = {pair.name: pair.num_same_tokens == len(PROMPT) for pair in all_pairs()}
    assert {name for name in are_equal if are_equal[name]} == set(SEPARATIONS)
    assert {name for name in are_equal if not are_equal[name]} == set(CONFUSIONS)


def test_caches_model_and_process_groups_are_those_of_one_rank() -> None:
    pairs = [pair for pair in all_pairs() if "parallel" in pair.name]
    cells = list(check_partition(ReadsItsRanks, {}, pairs))
    assert len(cells) == 3
    assert [cell.detail for cell in cells if cell.is_wrong] == []


class TakesOneSize(HostConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.block_size != 16:
            raise ValueError(f"blocks of {self.block_size} tokens are not supported")


def test_a_second_engine_that_is_refused_is_no_failure() -> None:
    (cell,) = check_partition(TakesOneSize, {}, [BY_NAME["another block size"]])
    assert (cell.outcome, cell.detail) == (
        PairOutcome.REFUSED,
        "blocks of 32 tokens are not supported",
    )


class Waits(HostConnector):
    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> Any:
        Event().wait()


def test_the_check_ends_although_a_method_never_returns() -> None:
    pairs = [pair for pair in all_pairs() if pair.second_engine is None][:4]
    with watchdog.limit(0.2):
        cells = list(check_partition(Waits, {}, pairs))
    assert [cell.outcome for cell in cells] == [
        *[PairOutcome.FAILED] * watchdog.MAX_TIMEOUTS,
        *[PairOutcome.NOT_CHECKED] * 2,
    ]
    assert "get_num_new_matched_tokens did not return" in cells[0].detail


def test_a_method_may_wait_for_the_other_ranks() -> None:
    with watchdog.limit(0.2):
        (cell,) = check_partition(Waits, {}, [BY_NAME["another tensor-parallel rank"]])
    assert cell.outcome is PairOutcome.NOT_CHECKED
    assert cell.detail.endswith("it may wait for the ranks that do not run here")


def test_a_copy_of_the_offloading_connector_in_another_package_runs(tmp_path: Path) -> None:
    own = "vllm.v1.simple_kv_offload"
    try:
        package = vllm("v1.simple_kv_offload.worker").__file__
    except ImportError:
        pytest.skip("vLLM has SimpleCPUOffloadConnector since 0.19")
    files = [*Path(package).parent.glob("*.py")]
    files.append(Path(vllm(f"{V1}.simple_cpu_offload_connector").__file__))
    for file in files:
        text = file.read_text().replace(own, f"{tmp_path.name}")
        (tmp_path / file.name).write_text(text)
    (tmp_path / "__init__.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path.parent)
        module = import_module(f"{tmp_path.name}.simple_cpu_offload_connector")
        options = {"cpu_bytes_to_use": 2_000_000}
        (cell,) = check_partition(module.SimpleCPUOffloadConnector, options, CONTROLS[:1])
    assert cell.outcome is PairOutcome.SHARED, cell.detail


def test_the_results_have_a_row_for_each_connector_and_each_tier_of_the_newest_release() -> None:
    if engine_version() != RELEASES[-1]:
        pytest.skip("docs/results.md is about the newest release")
    tiers = vllm("v1.kv_offload.tiering.factory").SecondaryTierFactory._registry
    rows = [row.submission.name for row in make_results.rows()]
    expected = [
        *(CONNECTORS - {"KVViewConnector"}),
        *(f"tier {name}" for name in tiers if name != "kvview"),
    ]
    assert [each for each in expected if not any(row.startswith(each) for row in rows)] == []


def test_a_store_below_vllms_host_tier_is_checked_too() -> None:
    if not has_tiers():
        pytest.skip("vLLM has a tiering manager since 0.22")
    store = Path(__file__).parents[2] / "examples" / "folder_store.py"
    target = [f"{store}:FolderStore", "--option", "root={tmp}"]
    run = CliRunner().invoke(partition, [*target, "--only", "keys"])
    assert run.exit_code == 0, run.output
    assert "a restart" in run.output
