"""Compares the kit with real inference, by wrong connectors, and writes the tables of the docs.

    python -m tests.vllm.agreement [--select NAME ...] [--page docs/trust.md]

Each connector of ``late.txt`` and ``field.txt`` in ``tests/mutants/connector`` serves the traffic
of ``kvview check --inference`` in the CPU build of vLLM. Its responses, and after each step the
bytes of all cached blocks, are compared with those of an engine without a connector. Then the kit
checks the connector (200 seeds of ``kvview check``). The exit code is 1 if a right connector is not
clean, or if a connector is wrong in vLLM and green in the kit.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from docs.parts import with_parts
from kvview.targets import load_connector
from kvview.testing.connector import check_connector
from kvview_vllm.inference.arrangements import Arrangement, Configured
from kvview_vllm.inference.engines import run_engines
from kvview_vllm.inference.models import make_model
from kvview_vllm.inference.serve import ServeJob
from kvview_vllm.inference.server import prepare, require_vllm
from kvview_vllm.inference.traffic import Served
from tests.mutants.connector import BASES, load_variants
from tests.mutants.edits import Variant
from tests.vllm.kv_bytes import WRONG_BLOCKS, serve_and_compare

SEEDS = 200
TRAFFIC = range(2)  # seeds of the traffic in vLLM, up to the first that shows the mistake
SILENCE_S = 120.0
OFFLOAD = "kvview_reference.store_connector:StoreConnector"
KIND = "gemma"
"""A model of two groups."""
ARRANGEMENTS = {
    "": Arrangement("two groups", KIND),
    "processes": Arrangement("processes", KIND, more={"distributed_executor_backend": "mp"}),
    "async": Arrangement("a step ahead", KIND, more={"async_scheduling": True}),
}
"""By the note ``needs``, the way in which vLLM must run to show a mistake."""
RIGHT_RESPONSES = "right responses"
PART = """\
{num_found} of {num_wrong} wrong connectors are red in the check: {num_shown_found} of the
{num_shown} that show their mistake in vLLM {version}, and {num_others_found} of the {num_others}
that do not. Of the {num_shown}, {num_in_answers} show wrong or lost answers, and {num_in_bytes}
show only wrong bytes in cached blocks, which were compared after each step. {num_right} right
connectors, as a control, give right answers and bytes.

| connector | answers in vLLM, and wrong blocks | in the check |
|---|---|---|
{shown}

Real inference does not show these mistakes in {traffic} seeds, for the reason in the table:

| connector | mistake | why vLLM does not show it | in the check |
|---|---|---|---|
{others}"""
_IN_SHORT = {
    "lost responses": "lost",
    "wrong responses": "wrong",
    WRONG_BLOCKS: "blocks",
}


@dataclass(frozen=True)
class Row:
    """A connector that is served and checked.

    Args:
        name: Name in the table.
        target: Target of the class.
        mistake: The mistake, or a description of a right connector.
        is_right: Whether it is a right connector, as a control.
        needs: A key of ``ARRANGEMENTS``.
        excuse: The reason why an engine may not show the mistake.
        in_vllm: Its behaviour in vLLM.
        in_the_kit: The law that the kit finds broken, and its seed; otherwise why it is not clean.
        is_red: Whether the kit finds a law broken.
    """

    name: str
    target: str
    mistake: str
    is_right: bool
    needs: str = ""
    excuse: str = ""
    in_vllm: str = ""
    in_the_kit: str = ""
    is_red: bool = False

    @property
    def is_shown(self) -> bool:
        """Whether real inference shows a mistake."""
        return self.in_vllm != RIGHT_RESPONSES

    @property
    def is_in_answers(self) -> bool:
        """Whether the responses of real inference show a mistake."""
        return "responses: " in self.in_vllm

    def __str__(self) -> str:
        """Return the row of a table."""
        if not self.is_shown:
            return f"| {self.name} | {self.mistake} | {self.excuse} | {self.in_the_kit} |"
        numbers = re.findall(r"(\w+ (?:responses|blocks)): (\d+)", self.in_vllm)
        short = ", ".join(f"{number} {_IN_SHORT[name]}" for name, number in numbers)
        return f"| {self.name} | {short} | {self.in_the_kit} |"


def connectors() -> list[Row]:
    """Return the right connectors as a control, then the wrong ones."""
    late = Variant(BASES["late"], "", "", "").write()
    flaky = Variant(BASES["late"], "", "", "", notes={"in": "Flaky"}).write()
    return [
        Row("Late", late, "The example, with late copies", True),
        Row("Flaky", flaky, "The example, with a medium that fails every third time", True),
        Row("Offload", OFFLOAD, "The default connector", True),
        *(
            Row(
                variant.name,
                variant.write(),
                variant.what,
                False,
                variant.notes.get("needs", ""),
                variant.notes.get("why an engine may not show it", ""),
            )
            for name in ("late", "field")
            for variant in load_variants(name)
        ),
    ]


def serve_with(row: Row | None, model: Path, seed: int, truth: Served | None) -> Served:
    """Serve the traffic in a process; without a connector if there is no row."""
    serve = partial(serve_and_compare, model / f"kv-{seed}.pt")
    job = ServeJob("without a connector", KIND, model, [seed], is_own=True)
    with tempfile.TemporaryDirectory() as folder:
        if row is not None:
            arrangement = ARRANGEMENTS[row.needs]
            configured = Configured(load_connector(row.target), {})
            config, connector_class = configured.config(arrangement, Path(folder))
            job = replace(
                job,
                name=row.name,
                config=config,
                connector_class=connector_class,
                classes=configured.classes,
                truth=None if truth is None else truth.answers,
                more=configured.more(arrangement),
            )
        (served,) = run_engines([job], serve, SILENCE_S, lambda text: None)
    return served


def in_vllm(row: Row, model: Path, truths: Sequence[Served]) -> str:
    """Describe the first seed of the traffic whose responses, or else blocks, show the mistake."""
    in_blocks = RIGHT_RESPONSES
    for seed, truth in zip(TRAFFIC, truths, strict=True):
        found = describe(serve_with(row, model, seed, truth), truth)
        if "responses: " in found:
            return found
        if in_blocks == RIGHT_RESPONSES:
            in_blocks = found
    return in_blocks


def describe(served: Served, truth: Served) -> str:
    """Describe the difference from an engine without a connector, in one line."""
    answers = served.answers
    wrong = [name for name in answers if answers[name] != truth.answers.get(name)]
    lost = served.lost if not served.law else truth.answers.keys() - answers.keys()
    found = [f"wrong responses: {len(wrong)}"] if wrong else []
    if served.law:
        found.append(_short(f"{served.law}: {served.message}"))
    if lost:
        found.append(f"lost responses: {len(lost)}")
    if wrong_blocks := served.coverage[WRONG_BLOCKS]:
        found.append(f"{WRONG_BLOCKS}: {wrong_blocks}")
    return "; ".join(found) or RIGHT_RESPONSES


def _short(text: str) -> str:
    """Return a text without the parts that differ between machines and runs."""
    text = re.sub(r"connector \S+: ?| at \S+\.py:.*|\S+\.py:(?=\w)|0x[0-9a-f]+", "", text)
    return text if len(text) <= 90 else f"{text[:90].rpartition(' ')[0]} ..."


def check(target: str) -> tuple[str, bool]:
    """Check a connector up to the first seed that breaks a law; return the result, and if red."""
    report = check_connector(load_connector(target), seeds=SEEDS, max_shrink_runs=0)
    for failure in report.failures:
        return f"{failure.law}, seed {failure.seed}", True
    gaps = {"code that never ran" if ".py:" in gap.name else gap.name for gap in report.gaps}
    return f"not checked: {', '.join(sorted(gaps))}" if gaps else "green", False


def part(rows: Sequence[Row], version: str) -> str:
    """Return the part of the page."""
    wrong = [row for row in rows if not row.is_right]
    shown = [row for row in wrong if row.is_shown]
    others = [row for row in wrong if not row.is_shown]
    return PART.format(
        version=version,
        traffic=len(TRAFFIC),
        num_right=len(rows) - len(wrong),
        num_wrong=len(wrong),
        num_found=sum(row.is_red for row in wrong),
        num_shown=len(shown),
        num_in_answers=sum(row.is_in_answers for row in shown),
        num_in_bytes=sum(not row.is_in_answers for row in shown),
        num_shown_found=sum(row.is_red for row in shown),
        num_others=len(others),
        num_others_found=sum(row.is_red for row in others),
        shown="\n".join(map(str, shown)),
        others="\n".join(map(str, others)),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with each connector, check each with the kit, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--select", nargs="+", metavar="NAME", help="connectors; default: all")
    parser.add_argument("--page", type=Path, metavar="FILE", help="page with the part to replace")
    arguments = parser.parse_args(argv)
    prepare()
    version = require_vllm()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(KIND, Path(folder))
        truths = [serve_with(None, model, seed, None) for seed in TRAFFIC]
        assert not any(truth.law for truth in truths)
        for row in connectors():
            if row.name in (arguments.select or [row.name]):
                seen = in_vllm(row, model, truths)
                in_the_kit, is_red = check(row.target)
                rows.append(replace(row, in_vllm=seen, in_the_kit=in_the_kit, is_red=is_red))
                print(rows[-1], flush=True)
    if arguments.page:
        arguments.page.write_text(with_parts(arguments.page, agreement=part(rows, version)))
    bad = [row.name for row in rows if row.is_right and (row.is_shown or row.is_red)]
    missed = [row.name for row in rows if row.is_shown and not row.is_red]
    print(
        f"control not clean: {bad or 'none'}; wrong in vLLM, green in the kit: {missed or 'none'}"
    )
    return 1 if bad or missed else 0


if __name__ == "__main__":
    sys.exit(main())
