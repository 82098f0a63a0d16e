"""``kvview partition``."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click
from rich.table import Column, Table
from rich.text import Text

from kvview import ConfigError
from kvview.cli.console import Console, progress
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import json_option, naming, target_options, write_json
from kvview.options import read_options
from kvview.targets import is_connector, is_engine_connector, load_target
from kvview.tier.store import is_tier_store

_STYLES = {
    "shared wrongly": "red",
    "failed": "red",
    "shared by vLLM": "yellow",
    "refused": "yellow",
    "not checked": "yellow",
}


@dataclass(frozen=True)
class PartitionRow:
    """One pair of requests in the report.

    Args:
        pair: The property in which the two requests differ.
        outcome: shared, separated, not shared, shared wrongly, shared by vLLM, refused,
            failed or not checked.
        detail: The evidence or the reason; may be empty.
    """

    pair: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class PartitionReport:
    """The partition matrix of one connector.

    Args:
        target: The connector or store.
        engine: The vLLM release whose scheduler and hashes were used.
        rows: One for each pair.
        replaced: Parts of the connector that the check replaced, because they need CUDA.
        schema_version: Version of the JSON; grows when a field is removed or changes its meaning.
    """

    target: str
    engine: str
    rows: list[PartitionRow]
    replaced: list[str]
    schema_version: Literal[1] = 1


@click.command()
@click.argument("target")
@target_options(
    "Option of the connector or store, as JSON or text; '{tmp}' is a new folder for each "
    "pair, '{revision}' the revision of the weights. Repeatable."
)
@click.option(
    "--kv-transfer-config",
    "transfer_config",
    metavar="JSON",
    help="Configuration of a vLLM connector in the form that vllm serve accepts.",
)
@json_option({"partition": "kvview_vllm.partition.command:PartitionReport"})
def partition(
    target: str, options: tuple[str, ...], transfer_config: str | None, json_file: str | None
) -> None:
    """Check that requests share KV only if the model computes the same KV for them.

    TARGET is a kvview connector, any KVConnectorBase_V1 of vLLM, or a class of tier
    stores. The real scheduler of the installed vLLM stores the KV of one request,
    and then serves a request that differs in one property: tokens, LoRA adapter,
    cache salt, multimodal item, prompt embedding, model, weights, dtype, block
    size, hash function, or parallel ranks.
    """
    from kvview_vllm.releases import engine_version
    from kvview_vllm.simulation import scheduler as cpu_scheduler

    given = read_options(options)
    if transfer_config is not None:
        given |= read_options([f"kv_transfer_config={transfer_config}"])
    console = Console(stderr=json_file == "-", markup=True)
    with naming(target), progress(f"checking {target}") as on_progress:
        found = load_target(target)
        cpu_scheduler.prepare()
        release = f"vllm {engine_version()}"
        from kvview_vllm.partition.matrix import PairOutcome, check_partition
        from kvview_vllm.partition.pairs import all_pairs

        cells = []
        connector = _connector(target, found, given)
        for cell in check_partition(*connector, all_pairs()):
            cells.append(cell)
            on_progress(cell.pair.name)
    rows = [PartitionRow(cell.pair.name, str(cell.outcome), cell.detail) for cell in cells]
    wrong = sum(cell.is_wrong for cell in cells)
    unchecked = sum(cell.outcome is PairOutcome.NOT_CHECKED for cell in cells)
    table = Table(
        Column("two requests with", overflow="fold"),
        "KV is",
        Column("evidence", overflow="fold"),
        title=f"{target} on {release}: {wrong} wrong, {unchecked} not checked",
    )
    for row in rows:
        table.add_row(row.pair, Text(row.outcome, _STYLES.get(row.outcome, "")), Text(row.detail))
    console.print(table)
    replaced = sorted({part for cell in cells for part in cell.replaced})
    for part in replaced:
        console.print(Text(f"replaced, so not checked: {part}", style="yellow"))
    write_json(json_file, asdict(PartitionReport(target, release, rows, replaced)))
    code = ExitCode.NOT_CHECKED if unchecked else ExitCode.CLEAN
    sys.exit(ExitCode.WRONG if wrong else code)


def _connector(target: str, found: object, options: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """The vLLM connector that runs a target, and its options."""
    if is_engine_connector(found):
        return found, options  # type: ignore[return-value]
    if is_connector(found):
        kind = importlib.import_module("kvview_vllm.connector").KVViewConnector
        return kind, {"connector": target, "options": options, "contain_faults": False}
    if is_tier_store(found):
        v1 = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector"
        weights = options.pop("weights", "{revision}")
        tier = {"type": "kvview", "weights": weights, "store": target, "options": options}
        return importlib.import_module(v1).OffloadingConnector, {
            "spec_name": "KVViewTieringSpec",
            "spec_module_path": "kvview_vllm.tier",
            "cpu_bytes_to_use": 2_000_000,
            "secondary_tiers": [tier],
        }
    raise ConfigError(f"{target} is not a connector or a class of tier stores")
