"""The partition check, which finds the pairs of requests that wrongly share KV."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from unittest.mock import patch

from kvview import ConfigError
from kvview.errors import MissingLibraryError, line_of
from kvview.targets import load_target, name_target
from kvview.testing.connector.exercised.coverage import replaced_parts
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.placeholders import in_folder
from kvview.testing.supervision import watchdog
from kvview_vllm.partition.pair_engine import PartitionEngine
from kvview_vllm.partition.pairs import PROMPT, RESTART, EngineSettings, Pair
from kvview_vllm.releases.cpu.process_groups import CANNOT_COMMUNICATE, process_groups
from kvview_vllm.simulation.raw.stand_ins import StandIns
from kvview_vllm.simulation.raw.transfer_config import classes_of, split_options
from kvview_vllm.simulation.raw.worker.token_bytes import NEVER_WRITTEN
from kvview_vllm.simulation.scheduler import cpu_scheduler


class PairOutcome(StrEnum):
    """The result for one pair; for a layout it is exact, wrong, refused, failed or not checked.

    ``REFUSED``: the connector raised an error with a message before the first request of an engine.
    ``SHARED_BY_VLLM``: vLLM gives both requests the same block hashes although their KV differs,
    so its own prefix cache shares the KV too, and a connector cannot detect the difference.
    """

    SHARED = "shared"
    SEPARATED = "separated"
    SHARED_WRONGLY = "shared wrongly"
    SHARED_BY_VLLM = "shared by vLLM"
    NOT_SHARED = "not shared"
    EXACT = "exact"
    WRONG = "wrong"
    FAILED = "failed"
    REFUSED = "refused"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class Cell:
    """One row of the matrix.

    Args:
        pair: The two requests.
        outcome: The result.
        detail: The evidence or the reason, in one line; may be empty.
        replaced: Parts of the connector that a stand-in replaced, because they need CUDA.
        is_timeout: Whether a method did not return.
    """

    pair: Pair
    outcome: PairOutcome
    detail: str = ""
    replaced: frozenset[str] = frozenset()
    is_timeout: bool = False

    @property
    def is_wrong(self) -> bool:
        """Whether the connector broke the partition or another law."""
        return self.outcome in (PairOutcome.SHARED_WRONGLY, PairOutcome.WRONG, PairOutcome.FAILED)


def check_partition(
    connector_class: type, options: Mapping[str, Any], pairs: Sequence[Pair]
) -> Iterable[Cell]:
    """Check each pair with a new connector and a new folder.

    Args:
        connector_class: A ``KVConnectorBase_V1``.
        options: The ``kv_connector_extra_config`` of the connector; its key ``kv_transfer_config``
            contains the other fields of the connector's configuration. ``{tmp}`` is a new folder
            for each pair; ``{model}``, ``{revision}`` and the other settings of
            :class:`EngineSettings` are filled in for each engine.
        pairs: The pairs; each control precedes the pairs that it controls.

    Yields:
        One cell for each pair, in the order of the pairs. After two pairs with a method that does
        not return, the other pairs are not played.

    Raises:
        MissingLibraryError: The connector needs a library that is not installed.
    """
    is_shared = {False: False, True: False}  # equal requests: in one engine, after a restart
    num_timeouts = 0
    for pair in pairs:
        if num_timeouts == watchdog.MAX_TIMEOUTS:
            detail = f"not played, because methods did not return in {num_timeouts} rows"
            yield Cell(pair, PairOutcome.NOT_CHECKED, detail)
            continue
        stand_ins = StandIns(())
        cell = _Play(connector_class, options, pair, stand_ins).run()
        replaced = frozenset(replaced_parts(dict.fromkeys(stand_ins.used, 1)))
        cell = replace(cell, replaced=replaced)
        num_timeouts += cell.is_timeout
        if replaced and cell.outcome in (PairOutcome.EXACT, PairOutcome.WRONG):
            # The bytes are those of the stand-in, which is neither credited nor blamed.
            cell = replace(cell, outcome=PairOutcome.NOT_CHECKED, detail=", ".join(replaced))
        has_restart = pair.second_engine is not None
        if pair.num_same_tokens and pair.second_engine in (None, EngineSettings()):
            is_shared[has_restart] = cell.outcome is PairOutcome.SHARED
        elif cell.outcome is PairOutcome.SEPARATED and not is_shared[has_restart]:
            if has_restart:
                cell = replace(cell, detail="no KV survives a restart")
            else:
                cell = replace(
                    cell,
                    outcome=PairOutcome.NOT_CHECKED,
                    detail="equal requests do not share KV either",
                )
        yield cell


@dataclass(eq=False)
class _Play:
    """The engines of one pair, in a new folder.

    Args:
        connector_class: The connector.
        options: Its options.
        pair: The two requests.
        stand_ins: Replacements for code that needs CUDA.
    """

    connector_class: type
    options: Mapping[str, Any]
    pair: Pair
    stand_ins: StandIns
    _stack: ExitStack = field(default_factory=ExitStack)
    _engine: PartitionEngine | None = None
    _hashes: tuple[bytes, ...] = ()

    def run(self) -> Cell:
        """Serve both requests in a new folder, and return the result."""
        with tempfile.TemporaryDirectory(prefix="kvview-") as folder:
            if self.pair is not RESTART:
                return self.live(folder, is_first=True, is_second=True)
            first = _live_in_another_process(self.connector_class, self.options, folder)
            return first or self.live(folder, is_first=False, is_second=True)

    def live(self, folder: str, is_first: bool, is_second: bool) -> Cell:
        """Serve one request or both, and return the result."""
        with self._stack as stack:
            given = in_folder(split_options(self.options), folder)
            classes = classes_of(self.connector_class, given)
            stack.enter_context(self.stand_ins.installed(classes))
            stack.enter_context(watchdog.watching())
            try:
                return self._cell(self._serve(folder, given, classes, is_first, is_second))
            except InvariantBroken as broken:
                return self._cell_of(broken)
            except MissingLibraryError:  # no verdict
                raise
            except Exception as error:  # whatever the connector or vLLM raises is the result
                # vLLM or the connector does not accept the configuration of an engine.
                is_refused = self._engine is None and isinstance(error, ConfigError)
                outcome = PairOutcome.REFUSED if is_refused else PairOutcome.FAILED
                return Cell(self.pair, outcome, line_of(error))

    def _serve(
        self,
        folder: str,
        given: Mapping[str, Any],
        classes: Sequence[type],
        is_first: bool,
        is_second: bool,
    ) -> int:
        """Serve one request or both; return the number of tokens that the last one loaded."""
        pair, stack = self.pair, self._stack

        def start(settings: EngineSettings) -> PartitionEngine:
            stack.enter_context(patch.dict(os.environ, PYTHONHASHSEED=settings.hash_seed))
            stack.enter_context(process_groups(settings.ranks, settings.rank))
            # A server may outlive the row, and must not find the pages of another row.
            settings = replace(settings, model=f"{settings.model}-{os.path.basename(folder)}")
            config = settings.fill(given)
            self._engine = engine = PartitionEngine(
                self.connector_class, config, settings, self.stand_ins
            )
            stack.callback(engine.close)
            return engine

        num_loaded = 0
        if is_first:
            engine = start(pair.first_engine)
            num_loaded = engine.serve(pair.first(), kv_seed=1)
            self._hashes = engine.last_hashes
            if pair.second_engine is None:
                engine.forget_gpu()
            else:
                engine.shutdown()
                self.stand_ins.end_process(classes)
                self._engine = None
        if is_second:
            if pair.second_engine is not None:
                engine = start(pair.second_engine)
            # Other tokens have other bytes; other properties need another seed for that.
            num_loaded = engine.serve(pair.second(), kv_seed=1 if pair.num_same_tokens else 2)
            if pair.second_engine is None:
                engine.check_other_blocks()
            engine.shutdown()
        return num_loaded

    def _cell(self, num_loaded: int) -> Cell:
        """Return the result of requests that were served without an error."""
        pair = self.pair
        if pair.is_of_layouts:
            if not num_loaded:
                return Cell(pair, PairOutcome.NOT_CHECKED, "the connector loaded nothing")
            return Cell(pair, PairOutcome.EXACT)
        if pair.num_same_tokens:
            return Cell(pair, PairOutcome.SHARED if num_loaded else PairOutcome.NOT_SHARED)
        detail = "the load failed, so the tokens were computed" if num_loaded else ""
        return Cell(pair, PairOutcome.SEPARATED, detail)

    def _cell_of(self, broken: InvariantBroken) -> Cell:
        """Return the result of a broken law."""
        pair, engine, cause = self.pair, self._engine, broken.__cause__
        if engine is None and cause is not None and str(cause):
            return Cell(pair, PairOutcome.REFUSED, line_of(cause))
        if CANNOT_COMMUNICATE in broken.message:
            return Cell(pair, PairOutcome.NOT_CHECKED, line_of(broken.message))
        engines = [pair.first_engine, pair.second_engine or pair.first_engine]
        if broken.is_timeout and any(each.ranks != (1, 1) for each in engines):
            detail = f"{line_of(broken.message)}; it may wait for the ranks that do not run here"
            return Cell(pair, PairOutcome.NOT_CHECKED, detail)
        is_other_kv = broken.law == "XFER-1" and NEVER_WRITTEN not in broken.message
        if is_other_kv and cause is None and pair.num_same_tokens < len(PROMPT):
            has_equal_hashes = engine is not None and engine.last_hashes == self._hashes
            is_vllm = has_equal_hashes and pair.second_engine is None
            outcome = PairOutcome.SHARED_BY_VLLM if is_vllm else PairOutcome.SHARED_WRONGLY
            return Cell(pair, outcome, str(pair))
        is_wrong = pair.is_of_layouts and broken.law in ("XFER-1", "XFER-2")
        outcome = PairOutcome.WRONG if is_wrong else PairOutcome.FAILED
        detail = line_of(f"{broken.law}: {broken.message}")
        return Cell(pair, outcome, detail, is_timeout=broken.is_timeout)


def _live_in_another_process(
    connector_class: type, options: Mapping[str, Any], folder: str
) -> Cell | None:
    """Play the first life of a restart; returns its result if it failed.

    The process is a new interpreter, because a fork inherits the salt of ``hash`` and all values
    that modules made when they were imported.
    """
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    salt = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    arguments = (name_target(connector_class), dict(options), folder, results)
    with patch.dict(os.environ, PYTHONHASHSEED=salt):
        process = context.Process(target=_live_first, args=arguments)
        process.start()
    process.join()
    if process.exitcode:
        detail = f"the process of the first life ended with exit code {process.exitcode}"
        return Cell(RESTART, PairOutcome.FAILED, detail)
    cell = results.get()
    return cell if cell.outcome in (PairOutcome.FAILED, PairOutcome.REFUSED) else None


def _live_first(target: str, options: Mapping[str, Any], folder: str, results: Any) -> None:
    cpu_scheduler.prepare()
    play = _Play(load_target(target), options, RESTART, StandIns(()))
    results.put(play.live(folder, is_first=True, is_second=False))
