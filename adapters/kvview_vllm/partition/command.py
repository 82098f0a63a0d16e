"""``kvview partition``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal

import click
from rich.table import Column, Table
from rich.text import Text

from kvview import ConfigError
from kvview.cli.console import Console, progress
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import json_option, naming, target_options, write_json
from kvview.cli.result_file import (
    RESULT_OPTION,
    Colour,
    Profile,
    ResultFinding,
    make_profile,
    or_could_not_run,
    write_result,
)
from kvview.options import read_options
from kvview.targets import is_connector, is_engine_connector, load_target
from kvview.tier.store import is_tier_store
from kvview.version import versions_of

_UNCHECKED = "bold yellow"
_STYLES = {
    "shared wrongly": "red",
    "wrong": "red",
    "failed": "red",
    "shared by vLLM": "yellow",
    "refused": "yellow",
    "not checked": _UNCHECKED,
}


@dataclass(frozen=True)
class PartitionRow:
    """One pair of requests in the report.

    Args:
        pair: The property in which the two requests differ; in ``layouts``, the layers and the
            memory layout.
        outcome: shared, separated, not shared, shared wrongly, shared by vLLM, refused, failed or
            not checked; in ``layouts``: exact, wrong, refused, failed or not checked.
        detail: The evidence or the reason for the outcome, if any.
    """

    pair: str
    outcome: str
    detail: str


@dataclass(frozen=True)
class PartitionReport:
    """The two matrices of one connector.

    Args:
        target: The connector or store.
        engine: The vLLM release whose scheduler, hashes and tensors were used.
        rows: One row for each pair of requests that tests the keys.
        layouts: One row for each kind of layers and each memory layout.
        replaced: Parts of the connector that the check replaced, because they need CUDA.
        schema_version: Version of the JSON format, which grows when a field is removed or changes
            its meaning.
    """

    target: str
    engine: str
    rows: list[PartitionRow]
    layouts: list[PartitionRow]
    replaced: list[str]
    schema_version: Literal[1] = 1

    def count(self, style: str) -> int:
        """Count the rows whose outcome is printed in this style."""
        return sum(_STYLES.get(row.outcome) == style for row in (*self.rows, *self.layouts))


@click.command()
@click.argument("target")
@target_options(
    "Option of the connector or store, as JSON or text; '{tmp}' is a new folder for each "
    "row, '{revision}' the revision of the weights. Repeatable."
)
@click.option(
    "--kv-transfer-config",
    "transfer_config",
    metavar="JSON",
    help="Configuration of a vLLM connector in the form that vllm serve accepts.",
)
@click.option(
    "--only",
    type=click.Choice(["keys", "layouts"]),
    help="Check only the keys or only the memory layouts.",
)
@json_option({"partition": "kvview_vllm.partition.command:PartitionReport"})
@RESULT_OPTION
def partition(
    target: str,
    options: tuple[str, ...],
    transfer_config: str | None,
    only: str | None,
    json_file: str | None,
    result_file: str | None,
) -> None:
    """Check that requests receive exactly the KV that the model computes for them.

    TARGET is a kvview connector, any KVConnectorBase_V1 of vLLM, or a class of tier
    stores. The real scheduler of the installed vLLM stores the KV of one request, and
    then serves a second request.

    Keys: the second request differs in one property: tokens, LoRA adapter, cache
    salt, multimodal item, prompt embedding, model, weights, dtype, block size, hash
    function, or parallel ranks. Only requests with the same KV may share it.

    Layouts: the second request continues the first one, in the tensors that vLLM
    allocates for each attention backend, cache dtype, mix of layers and memory
    layout. All bytes must be loaded unchanged.
    """
    from kvview_vllm.releases import engine_version
    from kvview_vllm.simulation import scheduler as cpu_scheduler

    given = read_options(options)
    if transfer_config is not None:
        given |= read_options([f"kv_transfer_config={transfer_config}"])
    console = Console(stderr="-" in (json_file, result_file), markup=True)
    names = ["keys", "layouts"] if only is None else [only]
    with (
        naming(target),
        or_could_not_run(result_file, target, *names),
        progress(f"checking {target}") as on_progress,
    ):
        found = load_target(target)
        cpu_scheduler.prepare()
        release = f"vllm {engine_version()}"
        from kvview_vllm.partition.layouts import layout_pairs
        from kvview_vllm.partition.matrix import check_partition
        from kvview_vllm.partition.pairs import all_pairs

        cells = []
        connector = _connector(target, found, given)
        keys = [] if only == "layouts" else all_pairs()
        layouts = [] if only == "keys" else layout_pairs()
        for cell in check_partition(*connector, [*keys, *layouts]):
            cells.append(cell)
            on_progress(cell.pair.name)
    rows = [PartitionRow(cell.pair.name, str(cell.outcome), cell.detail) for cell in cells]
    replaced = sorted({part for cell in cells for part in cell.replaced})
    report = PartitionReport(target, release, rows[: len(keys)], rows[len(keys) :], replaced)
    num_wrong, num_unchecked = report.count("red"), report.count(_UNCHECKED)
    if all(row.outcome == "refused" for row in rows):
        num_unchecked = len(rows)
    title = f"{target} on {release}: {num_wrong} wrong, {num_unchecked} not checked"
    if keys:
        console.print(_table_of_keys(report, title))
    if layouts:
        console.print(_table_of_layouts(report, title))
        for text in _details(report):
            console.print(text)
    for part in replaced:
        console.print(Text(f"not checked, because this check replaces it: {part}", style="yellow"))
    write_json(json_file, asdict(report))
    profiles = [_profile("keys", report.rows)] if keys else []
    profiles += [_profile("layouts", report.layouts)] if layouts else []
    write_result(result_file, target, profiles, versions_of(found), replaced, release)
    code = ExitCode.NOT_CHECKED if num_unchecked else ExitCode.CLEAN
    sys.exit(ExitCode.WRONG if num_wrong else code)


def _profile(name: str, rows: Sequence[PartitionRow]) -> Profile:
    """Make the verdict on the target, for a result file."""
    colours: dict[str, Colour] = {
        "not shared": "",
        "refused": "",
        "shared by vLLM": "",
        "not checked": "not checked",
    }
    if all(row.outcome == "refused" for row in rows):
        first = ResultFinding(rows[0].pair, "could not run", rows[0].detail)
        return Profile(name, "could not run", {"refused": len(rows)}, [first])
    colours |= dict.fromkeys((name for name in _STYLES if _STYLES[name] == "red"), "red")
    return make_profile(name, colours, [ResultFinding(*astuple(row)) for row in rows])


def _table_of_keys(report: PartitionReport, title: str) -> Table:
    table = Table(
        Column("two requests with", overflow="fold"),
        "KV is",
        Column("evidence", overflow="fold"),
        title=title,
    )
    for row in report.rows:
        table.add_row(row.pair, Text(row.outcome, _STYLES.get(row.outcome, "")), Text(row.detail))
    return table


def _table_of_layouts(report: PartitionReport, title: str) -> Table:
    outcomes: dict[str, dict[str, str]] = {}
    for row in report.layouts:
        kind, _, layout = row.pair.rpartition(", ")
        outcomes.setdefault(kind, {})[layout] = row.outcome
    layouts = list(dict.fromkeys(layout for row in outcomes.values() for layout in row))
    table = Table(Column("KV of", overflow="fold"), *layouts, title=title)
    for kind, by_layout in outcomes.items():
        cells = [by_layout.get(layout, "-") for layout in layouts]
        table.add_row(kind, *(Text(cell, _STYLES.get(cell, "")) for cell in cells))
    return table


def _details(report: PartitionReport) -> Iterator[Text]:
    """Yield each reason in ``layouts``, with the first row that has this reason."""
    rows = [row for row in report.layouts if row.detail]
    for detail in dict.fromkeys(row.detail for row in rows):
        places = [row.pair for row in rows if row.detail == detail]
        more = f" and {len(places) - 1} more" if places[1:] else ""
        yield Text(f"{places[0]}{more}: {detail}")


def _connector(target: str, found: object, options: dict[str, Any]) -> tuple[type, dict[str, Any]]:
    """Return the vLLM connector class that runs a target, and the options of that connector."""
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
