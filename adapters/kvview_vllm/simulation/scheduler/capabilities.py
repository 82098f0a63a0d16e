"""The parts of a simulation that the installed release of vLLM supports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvview import CacheGroup, ChunkedLocalAttention, SlidingWindow
from kvview_vllm.releases import engine_version, installed
from kvview_vllm.releases.compat.calls import (
    active_connector_class,
    gpus_use_runner_v2,
    has_sleep_hooks,
    takes_batch,
)
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.simulation.scheduler.cpu_scheduler import MAX_TOKENS

if TYPE_CHECKING:
    from kvview.testing.connector.scenario.scenario import Scenario


def engine_name() -> str:
    """Return the release and the model runners that the simulation uses, the default first."""
    names = ["V2", "V1"] if default_runner() == "V2" else ["V1", "V2"]
    runners = " and ".join(names if has_two_runners() else ["V1"])
    return f"vllm {engine_version()}, model runner {runners}"


def default_runner() -> str:
    """Return the model runner that the release uses on a GPU."""
    return "V2" if has_two_runners() and gpus_use_runner_v2() else "V1"


def has_two_runners() -> bool:
    """Whether the release has Model Runner V2 in addition to V1 (0.15.0)."""
    return active_connector_class() is not None


def runs_v2(scenario: Scenario) -> bool:
    """Whether a scenario runs in Model Runner V2."""
    return has_two_runners() and gpus_use_runner_v2() is not scenario.other_runner


def saves_after_drafts(scenario: Scenario) -> bool:
    """Whether a step is saved after its draft model has run (V1: 0.18.0, V2: 0.33.0)."""
    if runs_v2(scenario):
        return hasattr(active_connector_class(), "finalize_step")
    mixin = vllm("v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
    return hasattr(mixin, "finalize_kv_connector")


def refuses_several_groups() -> bool:
    """Whether this release only supports one KV-cache group with a connector (0.11.0)."""
    return not installed().connector.several_groups


def can_load_between_steps() -> bool:
    """Whether a request waits for its loads between steps, and not within a step (LOAD-1)."""
    return installed().connector.worker_metadata


def most_steps_in_flight() -> int:
    """Return the most steps in flight that a scheduler handles correctly: 2, or 3 from 0.27.0 on.

    Older releases may resume a preempted request while two of its outputs are in flight, so that
    the request receives a token twice, even without a connector.
    """
    return 3 if installed().connector.stale_outputs else 2


def can_fail_loads(num_groups: int = 1) -> bool:
    """Whether a worker of this release can report failed loads (0.11.1; several groups: 0.30.0)."""
    release = installed().connector
    return release.failed_blocks if num_groups == 1 else release.failed_requests


def can_load_after_hits(num_groups: int) -> bool:
    """Whether a request may load blocks after its GPU hit (with several groups: 0.24.0)."""
    release = installed().connector
    return num_groups == 1 or release.hits_come_first or not release.null_window_blocks


def fewest_tokens_per_step(groups: Sequence[CacheGroup]) -> int:
    """Return the smallest token budget with which all blocks are counted before allocation.

    0.20.0 and 0.20.1 count the blocks of a window or a chunk up to a cap that grows with the
    budget. No request exceeds the cap if a step may compute the longest request.
    """
    has_cap = any(isinstance(group, SlidingWindow | ChunkedLocalAttention) for group in groups)
    return MAX_TOKENS if has_cap and installed().connector.uncounted_window_blocks else 1


def can_block_itself() -> bool:
    """Whether waiting requests may hold loaded blocks that the first request needs (to 0.22)."""
    return not installed().connector.reserved_blocks


def can_reset_connectors() -> bool:
    """Whether a reset of the prefix cache reaches the connector (0.13.0)."""
    return installed().connector.connector_reset


def can_sleep() -> bool:
    """Whether a sleeping engine notifies its connector (0.33.0)."""
    return has_sleep_hooks()


def loads_take_the_batch() -> bool:
    """Whether Model Runner V2 passes the step's batch to ``start_load_kv`` (0.32.0)."""
    return has_two_runners() and takes_batch()
