"""A connector shares KV exactly between requests with the same KV; each confusion is detected."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("vllm.v1.core.block_pool", reason="needs a vLLM release")

from docs import make_results
from kvview_vllm.connector import KVViewConnector
from kvview_vllm.partition.command import partition
from kvview_vllm.partition.matrix import PairOutcome, check_partition
from kvview_vllm.partition.pairs import all_pairs
from kvview_vllm.releases import engine_version, installed
from kvview_vllm.releases.versions import RELEASES, vllm
from kvview_vllm.simulation import scheduler as cpu_scheduler
from tests.vllm.partition_connectors import SETTINGS

cpu_scheduler.prepare()

KEYED = f"{Path(__file__).parent / 'partition_connectors.py'}:KeyedConnector"
CONFUSIONS = {
    "a token of the first block": "tokens",
    "a LoRA adapter or none": "lora",
    "two LoRA adapters": "lora",
    "a LoRA name with other weights": "path",
    "a cache salt or none": "salt",
    "two cache salts": "salt",
    "two multimodal items": "item",
    "two prompt embeddings": "embeds",
    "another model": "{model}",
    "another revision of the weights": "{revision}",
    "another dtype": "{dtype}",
    "a quantised cache": "{cache_dtype}",
    "another block size": "{block_size}",
    "another tensor-parallel size": "{ranks}",
    "another tensor-parallel rank": "{rank}",
    "another pipeline-parallel size": "{ranks}",
    "another memory layout": "{layout}",
}
BY_NAME = {pair.name: pair for pair in all_pairs()}
CONTROLS = [BY_NAME["the same request"], BY_NAME["a restart"]]

needs_tags = pytest.mark.skipif(
    not installed().offloading.metadata_events, reason="hashes have tags since vLLM 0.33"
)


def outcomes(ignored: str, *names: str) -> dict[str, PairOutcome]:
    engine = SETTINGS.replace(ignored, "") if ignored.startswith("{") else SETTINGS
    options = {
        "connector": KEYED,
        "contain_faults": False,
        "options": {"name": "{tmp}", "engine": engine, "ignores": ignored},
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


def test_every_pair_with_other_kv_has_a_confusion() -> None:
    assert {pair.name for pair in all_pairs() if not pair.num_same_tokens} == set(CONFUSIONS)


def test_the_results_have_a_row_for_each_connector_and_each_tier_of_the_newest_release() -> None:
    if engine_version() != RELEASES[-1]:
        pytest.skip("docs/results.md is about the newest release")
    connectors = vllm("distributed.kv_transfer.kv_connector.factory").KVConnectorFactory._registry
    tiers = vllm("v1.kv_offload.tiering.factory").SecondaryTierFactory._registry
    rows = [row.name for row in make_results.rows()]
    expected = [*(connectors.keys() - {"KVViewConnector"}), *(f"tier {name}" for name in tiers)]
    assert [each for each in expected if not any(row.startswith(each) for row in rows)] == []


def test_a_store_below_vllms_host_tier_is_checked_too() -> None:
    if not installed().offloading.request_hooks:
        pytest.skip("vLLM has a tiering manager since 0.22")
    store = Path(__file__).parents[2] / "examples" / "folder_store.py"
    target = [f"{store}:FolderStore", "--option", "root={tmp}"]
    run = CliRunner().invoke(partition, [*target, "--only", "keys"])
    assert run.exit_code == 0, run.output
    assert "a restart" in run.output
