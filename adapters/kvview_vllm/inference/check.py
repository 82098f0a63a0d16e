"""The comparison of the tokens with and without a connector."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvview import ConfigError
from kvview.targets import name_target
from kvview.testing.connector.exercised.coverage import (
    failed_by_themselves,
    is_headline,
    notes_on,
)
from kvview.testing.connector.result import ConnectorFailure
from kvview.testing.results.law_broken import Gap
from kvview.testing.supervision import watchdog
from kvview.testing.token_runs import TokenRuns
from kvview_vllm.inference.arrangements import ARRANGEMENTS, Arrangement, Configured
from kvview_vllm.inference.engines import run_engines
from kvview_vllm.inference.models import make_model
from kvview_vllm.inference.runner_v2 import why_no_runner_v2
from kvview_vllm.inference.serve import ServeJob, serve
from kvview_vllm.inference.server import prepare, require_vllm
from kvview_vllm.inference.traffic import Served

_WEIGHTS = "weights "
_FEWEST_SILENT_SECONDS = 240.0
_WAITS = 5  # multiple of a hook's time limit for which an engine may be silent


@dataclass(frozen=True)
class _Broken:
    """A failure in one arrangement."""

    arrangement: str
    law: str
    message: str
    seeds: tuple[int, ...]


def check_tokens(
    connector_class: type,
    *,
    seeds: int,
    first_seed: int = 0,
    options: Mapping[str, Any] | None = None,
    hook_seconds: float = watchdog.HOOK_SECONDS,
    on_progress: Callable[[str], None] = lambda text: None,
    arrangements: Sequence[Arrangement] = ARRANGEMENTS,
) -> TokenRuns:
    """Serve traffic with a connector and without it, and compare the tokens.

    1. Every arrangement serves the same traffic, and each engine runs in a separate process.
    2. Before a difference is attributed to the connector, the arrangement is run again with the
       connector's loads off, and without the connector.
    3. After Ctrl-C the results so far are returned.

    Args:
        connector_class: A kvview connector, or a ``KVConnectorBase_V1``.
        seeds: Number of seeds of the traffic.
        first_seed: The first seed.
        options: Options of the connector.
        hook_seconds: CPU seconds that one call of a method may take.
        on_progress: Called with the progress.
        arrangements: The arrangements, including the plain one of each model.

    Raises:
        ConfigError: No vLLM that can run is installed, or the connector refuses the options.
    """
    prepare()
    version = require_vllm()
    start = time.perf_counter()
    is_interrupted = False
    with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
        check = _Check(
            connector_class,
            dict(options or {}),
            tuple(range(first_seed, first_seed + seeds)),
            arrangements,
            hook_seconds,
            on_progress,
            Path(folder),
        )
        try:
            check.run()
        except KeyboardInterrupt:
            is_interrupted = True
    return TokenRuns(
        f"vllm {version}, model runner {check.runners} (inference)",
        first_seed,
        seeds,
        check.failures(),
        time.perf_counter() - start,
        dict(check.coverage),
        is_interrupted,
        notes=[*check.notes()],
        gaps=check.gaps,
    )


@dataclass(eq=False)
class _Check:
    """Runs the engines of one check, and compares their results."""

    connector_class: type
    options: dict[str, Any]
    seeds: tuple[int, ...]
    arrangements: Sequence[Arrangement]
    hook_seconds: float
    on_progress: Callable[[str], None]
    folder: Path
    coverage: Counter[str] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._configured = Configured(self.connector_class, self.options)
        self._plains = [each for each in self.arrangements if each.is_plain]
        self._truth: dict[str, Served] = {}
        self._broken: list[_Broken] = []
        self._models: dict[str, Path] = {}
        self._first_error = ""
        has_v2 = any(each.is_v2 for each in self.arrangements)
        self._why_no_v2 = why_no_runner_v2() if has_v2 else ""
        self.runners = "V1 and V2" if has_v2 and not self._why_no_v2 else "V1"

    def run(self) -> None:
        """Run all engines."""
        kinds = [plain.kind for plain in self._plains]
        self._models = {kind: make_model(kind, self.folder / kind) for kind in kinds}
        self._run_without_connector()
        if self._broken:
            return
        if self._why_no_v2:
            self._leave_out(f"not run: model runner V2: {self._why_no_v2}")
        arrangements = [each for each in self.arrangements if self._is_possible(each)]
        jobs = [self._job(arrangement) for arrangement in arrangements]
        jobs += [self._job(plain, "corrupted") for plain in self._plains]
        results = self._run(jobs)
        if not any(served.is_up for served in results):  # wrong options, or another engine's
            name, message = self.connector_class.__name__, results[0].message
            raise ConfigError(f"{name} cannot start in this vLLM: {message}")
        names = [plain.name for plain in self._plains]
        controls = dict(zip(names, results[len(arrangements) :], strict=True))
        for arrangement, served in zip(arrangements, results, strict=False):
            self._judge(arrangement, served, controls.get(arrangement.name))
        self._add_gaps()

    def _run_without_connector(self) -> None:
        """Serve the traffic without the connector, whose tokens are the truth."""
        bare = self._run([self._job(plain, is_bare=True) for plain in self._plains])
        for plain, served in zip(self._plains, bare, strict=True):
            self._truth[plain.kind] = served
            if served.law:
                message = f"without a connector: {served.message}"
                self._broken.append(_Broken(plain.name, "ENGINE", message, self.seeds))

    def _is_possible(self, arrangement: Arrangement) -> bool:
        """Whether the connector can run in an arrangement; record the reason if not."""
        if arrangement.is_v2 and self._why_no_v2:
            return False
        why = self._configured.why_not(arrangement)
        if why:
            self._leave_out(f"{arrangement.name}: {why}")
        return not why

    def _judge(self, arrangement: Arrangement, served: Served, control: Served | None) -> None:
        """Record the failure or the coverage of an arrangement."""
        if served.is_refused:
            self._leave_out(f"{arrangement.name}: {served.message}")
            return
        self._first_error = self._first_error or served.first_error
        broken = self._broken_in(arrangement, served)
        if broken is not None and all(broken.law != other.law for other in self._broken):
            broken = self._with_controls(broken, arrangement)
        if broken is not None:
            self._broken.append(broken)
            self.coverage.update(served.coverage)
            self.coverage["loads"] += _num_loads(served)
        elif not served.law:
            self._count(arrangement, served, control)

    def failures(self) -> list[ConnectorFailure]:
        """Return one failure per law and seed, which names all arrangements with this failure."""
        found = []
        for law in dict.fromkeys(broken.law for broken in self._broken):
            alike = [broken for broken in self._broken if broken.law == law]
            message = f"{alike[0].arrangement}: {alike[0].message}"
            if others := [broken.arrangement for broken in alike[1:]]:
                message += f". In {', '.join(others)} too"
            if all(self._is_v2(broken) for broken in alike):
                message += ". On model runner V1 the same traffic is right"
            for seed in sorted({seed for broken in alike for seed in broken.seeds}):
                script = self._script(seed, message)
                found.append(ConnectorFailure(seed, law, message, script, filed_under=law))
        return found

    def notes(self) -> Iterator[str]:
        """Yield the replaced parts, and the failed jobs that are not in the verdict."""
        yield from notes_on(self.coverage)
        for failed in failed_by_themselves(self.coverage, self._first_error):
            if self._broken or not is_headline(failed, self.coverage):
                yield failed.what

    def _is_v2(self, broken: _Broken) -> bool:
        return any(each.is_v2 and each.name == broken.arrangement for each in self.arrangements)

    def _leave_out(self, *parts: str) -> None:
        self.coverage |= Counter({f"left out: {part}": 1 for part in parts})

    # --- one engine ---

    def _job(
        self, arrangement: Arrangement, control: str = "", *, is_bare: bool = False
    ) -> ServeJob:
        kind, configured = arrangement.kind, self._configured
        truth = self._truth.get(kind)
        job = ServeJob(
            f"{arrangement.name}, without the connector" if is_bare else arrangement.name,
            kind,
            self._models[kind],
            self.seeds,
            is_own=configured.is_own,
            resets=configured.resets,
            truth=None if truth is None else truth.answers,
            control=control,
            more=dict(arrangement.more) if is_bare else configured.more(arrangement),
            is_v2=arrangement.is_v2,
            hook_seconds=self.hook_seconds,
        )
        if is_bare:
            return job
        own = Path(tempfile.mkdtemp(dir=self.folder))  # an engine must not find another's files
        config, connector_class = configured.config(arrangement, own)
        return replace(
            job, config=config, connector_class=connector_class, classes=configured.classes
        )

    def _run(self, jobs: list[ServeJob]) -> list[Served]:
        silence = max(_FEWEST_SILENT_SECONDS, _WAITS * self.hook_seconds)
        return run_engines(jobs, serve, silence, self.on_progress)

    # --- the results ---

    def _broken_in(self, arrangement: Arrangement, served: Served) -> _Broken | None:
        truth = self._truth[arrangement.kind].answers
        wrong = [name for name in served.answers if served.answers[name] != truth.get(name)]
        name = arrangement.name
        if wrong:
            first = wrong[0]
            got, expected = served.answers[first], truth[first]
            pairs = enumerate(zip(got, expected, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
            is_stale = all(_WEIGHTS in one for one in wrong)
            when = "after other weights and a reset, " if is_stale else ""
            message = (
                f"{when}{len(wrong)} of {len(served.answers)} answers have other tokens than "
                f"without the connector; the first is {first!r}, from its token {at} on: "
                f"{got[at : at + 3]}, expected {expected[at : at + 3]}"
            )
            if served.law:
                message += f"; then {served.law}: {served.message}"
            seeds = tuple(sorted({int(one.partition(":")[0]) for one in wrong}))
            return _Broken(name, "CONN-11" if is_stale else "XFER-1", message, seeds)
        if served.law:
            return _Broken(name, served.law, served.message, self.seeds)
        if served.lost:
            lost = f"{len(served.lost)} requests ended without an answer, {served.lost[0]!r} first"
            return _Broken(name, "CONN-3", lost, self.seeds)
        return None

    def _with_controls(self, broken: _Broken, arrangement: Arrangement) -> _Broken | None:
        """Add the results of control runs to a failure; None if vLLM itself cannot run."""
        jobs = [self._job(arrangement, "loads off")]
        if arrangement.more or arrangement.is_v2:
            jobs.append(self._job(arrangement, is_bare=True))
        off, *bare = self._run(jobs)
        if bare and bare[0].law:
            why = f"{arrangement.name}: vLLM cannot run it here: {bare[0].message}"
            self._leave_out(why)
            return None
        if bare and (same := self._broken_in(arrangement, bare[0])):
            message = f"without the connector too: {same.message}"
            return replace(broken, law="ENGINE", message=message)
        still = self._broken_in(arrangement, off)
        control = "with its loads off as well"
        if still is not None:
            control = f"with its loads off: {still.law}"
        message = f"{broken.message}. Without the connector the run is green, {control}"
        return replace(broken, message=message)

    def _count(self, arrangement: Arrangement, served: Served, control: Served | None) -> None:
        coverage, name = served.coverage, arrangement.name
        if arrangement.proof is not None and not coverage[arrangement.proof[0]]:
            event, why = arrangement.proof
            self.gaps.append(Gap(f"{event} in {name}", f"{why} in {name}: it is not counted"))
            return
        loads = _num_loads(served)
        self.coverage.update(coverage)
        # A loaded block was stored before.
        self.coverage.update({"loads": loads, "stores": loads, f"loads in {name}": loads})
        self.coverage[f"answers compared in {name}"] += len(served.answers)
        self._leave_out(*served.left_out)
        if not self._configured.is_own:
            self._leave_out("reused request ids: vLLM makes its own")
        if not self._configured.resets:
            self._leave_out("other weights: reset_cache is not implemented")
        if control is None or not loads:
            return
        truth = self._truth[arrangement.kind].answers
        changed = sum(control.answers[one] != truth.get(one) for one in control.answers)
        self.coverage[f"answers that an injected fault changed in {name}"] = changed
        if not changed:
            why = f"a fault injected into its loads changed no token in {name}: nothing is proven"
            self.gaps.append(Gap(f"control in {name}", why))

    def _add_gaps(self) -> None:
        failed = failed_by_themselves(self.coverage, self._first_error)
        self.gaps[:0] = [one for one in failed if is_headline(one, self.coverage)]
        names = [arrangement.name for arrangement in self.arrangements]
        compared = [name for name in names if self.coverage[f"answers compared in {name}"]]
        if compared and not self.coverage["loads"]:
            if not self.coverage["hits"]:
                self.gaps.append(Gap("hits", "the connector never promised any token"))
            self.gaps.append(Gap("loads", "nothing was ever loaded"))
            return
        self.gaps += [
            Gap(f"loads in {name}", f"nothing was ever loaded in {name}")
            for name in compared
            if not self.coverage[f"loads in {name}"]
        ]

    def _script(self, seed: int, message: str) -> str:
        target = name_target(self.connector_class)
        return (
            f"# seed {seed}: {message}\n"
            "from kvview.testing import load_target, run_checks\n\n"
            f"report = run_checks(load_target({target!r}), inference=True, seed={seed}, seeds=1,\n"
            f"    options={self.options!r})\n"
            "assert report.is_clean, report.summary()"
        )


def _num_loads(served: Served) -> int:
    return served.coverage["loads between steps"] + served.coverage["loads within a step"]
