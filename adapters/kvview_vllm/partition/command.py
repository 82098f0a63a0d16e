"""``kvview partition``."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from rich.table import Column, Table
from rich.text import Text

from kvview import ConfigError
from kvview.cli.console import Console, progress
from kvview.cli.exit_codes import ExitCode
from kvview.cli.output import naming, target_options
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
@RESULT_OPTION
def partition(
    target: str,
    options: tuple[str, ...],
    transfer_config: str | None,
    only: str | None,
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
    from kvview_vllm.simulation.scheduler import capabilities, cpu_scheduler

    given = read_options(options)
    if transfer_config is not None:
        given |= read_options([f"kv_transfer_config={transfer_config}"])
    console = Console(markup=True)
    names = ["keys", "layouts"] if only is None else [only]
    with (
        naming(target),
        or_could_not_run(result_file, target, *names),
        progress(f"checking {target}") as on_progress,
    ):
        found = load_target(target)
        cpu_scheduler.prepare()
        engine = f"vllm {engine_version()}, model runner {capabilities.default_runner()}"
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
    rows = [ResultFinding(cell.pair.name, str(cell.outcome), cell.detail) for cell in cells]
    by_class = {"keys": rows[: len(keys)], "layouts": rows[len(keys) :]}
    replaced = sorted({part for cell in cells for part in cell.replaced})
    code = _print_verdict(console, f"{target} on {engine}", rows, by_class)
    for part in replaced:
        console.print(Text(f"not checked, because this check replaces it: {part}", style="yellow"))
    profiles = [_profile(name, by_class[name]) for name in names]
    write_result(result_file, target, profiles, versions_of(found), replaced, engine)
    sys.exit(code)


def _print_verdict(
    console: Console,
    subject: str,
    rows: Sequence[ResultFinding],
    by_class: Mapping[str, Sequence[ResultFinding]],
) -> ExitCode:
    """Print the tables, and return the exit code."""
    styles = Counter(_STYLES.get(row.outcome) for row in rows)
    num_wrong, num_unchecked = styles["red"], styles[_UNCHECKED]
    if all(row.outcome == "refused" for row in rows):
        num_unchecked = len(rows)
    title = f"{subject}: {num_wrong} wrong, {num_unchecked} not checked"
    if by_class["keys"]:
        console.print(_table_of_keys(by_class["keys"], title))
    if by_class["layouts"]:
        console.print(_table_of_layouts(by_class["layouts"], title))
        for text in _details(by_class["layouts"]):
            console.print(text)
    if num_wrong:
        return ExitCode.WRONG
    return ExitCode.NOT_CHECKED if num_unchecked else ExitCode.CLEAN


def _profile(name: str, rows: Sequence[ResultFinding]) -> Profile:
    """Make the verdict on the target, for a result file."""
    colours: dict[str, Colour] = {
        "not shared": "",
        "refused": "",
        "shared by vLLM": "",
        "not checked": "not checked",
    }
    if all(row.outcome == "refused" for row in rows):
        first = ResultFinding(rows[0].subject, "could not run", rows[0].evidence)
        return Profile(name, "could not run", {"refused": len(rows)}, [first])
    colours |= dict.fromkeys((name for name in _STYLES if _STYLES[name] == "red"), "red")
    return make_profile(name, colours, rows)


def _table_of_keys(rows: Sequence[ResultFinding], title: str) -> Table:
    table = Table(
        Column("two requests with", overflow="fold"),
        "KV is",
        Column("evidence", overflow="fold"),
        title=title,
    )
    for row in rows:
        outcome = Text(row.outcome, _STYLES.get(row.outcome, ""))
        table.add_row(row.subject, outcome, Text(row.evidence))
    return table


def _table_of_layouts(rows: Sequence[ResultFinding], title: str) -> Table:
    outcomes: dict[str, dict[str, str]] = {}
    for row in rows:
        kind, _, layout = row.subject.rpartition(", ")
        outcomes.setdefault(kind, {})[layout] = row.outcome
    layouts = list(dict.fromkeys(layout for row in outcomes.values() for layout in row))
    table = Table(Column("KV of", overflow="fold"), *layouts, title=title)
    for kind, by_layout in outcomes.items():
        cells = [by_layout.get(layout, "-") for layout in layouts]
        table.add_row(kind, *(Text(cell, _STYLES.get(cell, "")) for cell in cells))
    return table


def _details(rows: Sequence[ResultFinding]) -> Iterator[Text]:
    """Yield each reason, with the first row that has this reason."""
    details = dict.fromkeys(row.evidence for row in rows if row.evidence)
    for detail in details:
        places = [row.subject for row in rows if row.evidence == detail]
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
