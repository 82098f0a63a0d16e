"""The report of a wrong connector leads to the faulty line."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest

from kvview import CacheGeometry, OffloadingEvent, RequestInfo, StepPlan, make_offload_key
from kvview.errors import line_of
from kvview.testing.connector import Abort, Add, Fate, Scenario, check_connector
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview.testing.connector.judge.tier_model import TierKeys
from kvview.testing.connector.run.long_runs import check_conserved
from kvview.testing.connector.scenario.scenario import to_script
from kvview_reference.engine.request import chain_hashes
from kvview_reference.simulation import ReferenceEngines
from kvview_reference.store_connector import StoreConnector
from tests.mutants.connector import load_wrong

WRONG = {variant.what: variant for variant in load_wrong()}

CASES = {  # the mistake: the seed, a part of the message, and a part of the remedy
    "a reset keeps the keys": (2, "was planned before the last reset", "reset_cache"),
    "Finds a block as soon as its store is planned, and runs loads before stores": (
        1,
        "store job 0 of this key failed",
        "on_transfers_finished",
    ),
    "Looks a block up by the hash at its start, not at its end": (
        2,
        "no job of this run stored this key",
        "block_key",
    ),
    "Reports a failed copy as a success": (8, "which store job 1 wrote", "worker half"),
    "Does not load the last block that it promised": (
        8,
        "no load job names block",
        "on_blocks_allocated",
    ),
    "Reuses a host page while a load reads it, and runs stores before loads": (
        29,
        "wrote before the load had ended",
        "Do not reuse a page",
    ),
    "frees the table of a preempted request": (
        10,
        ", called at line ",
        "",
    ),
    "a preempted request's holds are given back at once": (
        9,
        "self.view.free_blocks(blocks); hold the blocks",
        "",
    ),
    "copies group 0 only": (7, "is written in tensors [", ""),
    "all ranks but the first skip a copy that the first made": (3, " on rank ", ""),
    "Loads the blocks before a window too, where the table has none": (
        8,
        "block 0",
        "Skip block 0",
    ),
    "Forgets its holds at shutdown": (7, "view.touch_blocks(gpu_blocks), called at line ", ""),
}


@pytest.mark.parametrize("mistake", CASES)
def test_a_report_names_the_cause_and_the_hook(mistake: str) -> None:
    seed, message, hint = CASES[mistake]
    connector = WRONG[mistake].load()
    report = check_connector(connector, seeds=1, first_seed=seed, max_shrink_runs=0)
    (failure,) = report.failures
    assert message in failure.message
    assert hint in (failure.hint or "")


def test_a_script_writes_a_row_of_default_fates_as_one_item() -> None:
    fates = (*[Fate()] * 11, Fate(outcome="half"))
    run = Scenario(CacheGeometry.single(4), num_gpu_blocks=8, events=(), fates=fates)
    script = to_script(StoreConnector, run, {}, "a comment", ReferenceEngines())
    assert "        *[Fate()] * 11,\n        Fate(outcome='half'),\n" in script
    exec(script)


def test_lost_pages_name_only_the_events_of_the_run() -> None:
    run = Scenario(CacheGeometry.single(4), num_gpu_blocks=8, events=(Add("a", 1, 5), Abort("a")))
    with pytest.raises(InvariantBroken, match="pages after an abort, a second store of a key"):
        check_conserved(run, [200] * 4 + [0] * 4, [200] * 4)
    failing = replace(run, events=run.events[:1], fates=(Fate(outcome="half"),))
    with pytest.raises(InvariantBroken, match="after a failed store or load, a second store"):
        check_conserved(failing, [200] * 4 + [0] * 4, [200] * 4)


def test_a_key_that_is_advertised_too_early_was_never_stored() -> None:
    keys = TierKeys(CacheGeometry.single(4))
    request = RequestInfo("a", 9, chain_hashes(range(2)))
    key = make_offload_key(request.block_hashes[0], 0)
    keys.on_events([OffloadingEvent((key,), "CPU", removed=False)])
    with pytest.raises(
        InvariantBroken, match=r"EVENT-2: .* but no job of this run stored this key"
    ):
        keys.check_advertised()


def test_an_assignment_to_a_plan_names_replace() -> None:
    with pytest.raises(FrozenInstanceError) as caught:
        StepPlan().loads = []  # type: ignore[misc]
    expected = "cannot assign to field 'loads'; the object is frozen, so make another one with "
    assert line_of(caught.value) == f"{expected}dataclasses.replace"
