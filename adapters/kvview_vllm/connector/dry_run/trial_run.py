"""A trial run, in which the installed vLLM serves four requests with ``KVViewConnector``.

A real ``Scheduler`` with its own pool and two KV-cache groups makes the calls of the scheduler's
side, and the classes through which vLLM's model runners call a connector make the calls of the
worker's side. The requests are loaded, preempted, aborted and computed in several steps; then the
caches are reset. :mod:`.trial_half` checks the calls.

1. A vLLM whose calls differ is refused when a connector is bound, and by ``kvview doctor``.
2. The trial run leaves no trace: no device, process, thread, file, event or log line. The root of
   vLLM's block hashes and the connector of this process are restored.
3. If vLLM cannot serve these requests even without a connector, vLLM is not refused, because a
   server may configure the scheduler in another way. The adapter then runs untried, with a
   warning. A vLLM in which an object of the trial run cannot be made is refused.

Source: the order of calls in vllm/v1/core/sched/scheduler.py,
vllm/v1/worker/kv_connector_model_runner_mixin.py and vllm/v1/worker/gpu/kv_connector.py, 0.11.0 to
0.33.0.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from kvview import KVViewError, UnsupportedEngineError
from kvview.errors import one_line
from kvview_vllm.connector.dry_run.trial_half import (
    LENGTHS,
    NUM_BLOCKS,
    PROMPTS,
    SALT,
    TRIAL_TARGET,
    TrialScheduler,
    TrialWorker,
)
from kvview_vllm.releases import (
    ConnectorSeam,
    engine_version,
    expect,
    installed,
    reading,
    refusal,
)
from kvview_vllm.releases.build.samples import (
    BLOCK_SIZE,
    LAYERS,
    make_kv_cache_config,
    make_model_output,
    make_request,
    make_scheduler,
    own_hash_root,
)
from kvview_vllm.releases.compat.calls import handle_preemptions
from kvview_vllm.releases.compat.versions import vllm

_SEAM = ConnectorSeam.seam
_MOST_STEPS = 12

_logger = logging.getLogger(__name__)


@cache
def try_connector(kind: type) -> str:
    """Serve the requests once per process.

    Args:
        kind: ``KVViewConnector``.

    Returns:
        Reason why the trial run was impossible; empty after a trial run.

    Raises:
        UnsupportedEngineError: A call differs from the calls of the tested releases.
    """
    try:
        with reading(_SEAM, "a trial run"), _alone():
            _Trial(kind).run()
    except KVViewError as error:
        if error.__cause__ is not None and (problem := _problem_without_connector()):
            _logger.warning(
                "kvview: vLLM %s serves no request in a trial run, even without a connector "
                "(%s), so KVViewConnector is used untried",
                *(engine_version(), problem),
            )
            return problem
        if isinstance(error, UnsupportedEngineError):
            raise
        raise refusal(
            _SEAM, one_line(error), "the same calls as in every tested release"
        ) from error
    return ""


def _problem_without_connector() -> str:
    try:
        with _alone():
            _Trial(None).run()
    except KVViewError:
        raise
    except Exception as error:
        return one_line(error)
    return ""


@contextmanager
def _alone() -> Iterator[None]:
    """Keep a trial run from writing to the server's log and from changing its state."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    state = vllm("distributed.kv_transfer.kv_transfer_state")
    connector = state._KV_CONNECTOR_AGENT
    try:
        with own_hash_root():
            yield
    finally:
        state._KV_CONNECTOR_AGENT = connector
        logging.disable(before)


class _Trial:
    """The scheduler, and the worker's side of the connector.

    Args:
        kind: Class of the connector; None for no connector.
    """

    def __init__(self, kind: Any | None) -> None:
        binding, release = installed().binding, installed().connector
        scheduler: Any = vllm("v1.core.sched.scheduler").Scheduler
        if kind is not None and not binding.optional_pool_hook:
            scheduler = import_module("kvview_vllm.scheduler").ViewScheduler
        self._half: TrialScheduler | None = None
        self._runners: list[Callable[[Any], Any]] = []
        transfer_config: dict[str, Any] | None = None
        num_groups = 2 if release.several_groups else 1
        cache_config = make_kv_cache_config(NUM_BLOCKS, num_groups)
        page_bytes = cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        if kind is not None:
            self._half = TrialScheduler(num_groups)
            worker = TrialWorker(self._half.failing, page_bytes)
            transfer_config = {
                "kv_connector": kind.__name__,
                "kv_connector_module_path": kind.__module__,
                "kv_role": "kv_both",
                "engine_id": "kvview trial",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "connector": TRIAL_TARGET,
                    "options": {"scheduler": self._half, "worker": worker},
                    "contain_faults": False,
                },
            }
        self._scheduler = make_scheduler(scheduler, NUM_BLOCKS, num_groups, transfer_config)
        if kind is not None:
            role = vllm("distributed.kv_transfer.kv_connector.v1.base").KVConnectorRole.WORKER
            config = self._scheduler.vllm_config
            self._runners = _runners(kind(config, role, cache_config), config, num_groups)

    def run(self) -> None:
        """Serve the requests."""
        half = self._half
        self._add("a")
        self._step()
        self._add("b")
        self._add("c")
        self._step()
        if half is not None:
            half.expect_ended("a")
        self._step_until("c")
        aborted = vllm("v1.request").RequestStatus.FINISHED_ABORTED
        self._scheduler.finish_requests("c", aborted)
        if half is not None:
            half.expect_ended("b", "c")
            half.release_held()
        self._add("d")
        self._step_until("d")
        if half is not None:
            half.expect_ended("d")
            half.expect_all_free()
        self._reset()
        self._scheduler.shutdown()

    def _add(self, name: str) -> None:
        request = make_request(name, PROMPTS[name], LENGTHS[name], cache_salt=SALT)
        self._scheduler.add_request(request)

    def _step_until(self, name: str) -> None:
        """Step until a request has all tokens that it must have at its end."""
        for _ in range(_MOST_STEPS):
            self._step()
            if self._half is not None and self._half.is_computed(name):
                return

    def _step(self) -> None:
        """Schedule a step, run the worker's side, and process its tokens."""
        self._scheduler.has_requests()
        output = self._scheduler.schedule()
        transfers = None
        if self._runners:
            self._runners.append(self._runners.pop(0))  # takes turns
            transfers = self._runners[0](pickle.loads(pickle.dumps(output)))
        requests = self._scheduler.requests
        sampled = {
            name: [7] if requests[name].num_computed_tokens >= requests[name].num_tokens else []
            for name in output.num_scheduled_tokens
        }
        self._scheduler.update_from_output(
            output, make_model_output(output, sampled, pickle.loads(pickle.dumps(transfers)))
        )

    def _reset(self) -> None:
        """Reset the prefix cache and, if the release can, the connector."""
        can_reset = installed().connector.connector_reset
        options = {"reset_connector": self._half is not None} if can_reset else {}
        done = self._scheduler.reset_prefix_cache(**options)
        if self._half is not None:
            found = done, self._half.num_resets
            expect(_SEAM, "a reset of the caches", found, (True, int(can_reset)))


def _runners(worker: Any, config: Any, num_groups: int) -> list[Callable[[Any], Any]]:
    """Return functions that make a model runner's calls in a step, one for each kind of runner.

    Args:
        worker: The worker's side of the connector.
        config: The ``VllmConfig``.
        num_groups: KV-cache groups.
    """
    import torch

    vllm("distributed.kv_transfer.kv_transfer_state")._KV_CONNECTOR_AGENT = worker
    context = vllm("forward_context").set_forward_context
    mixin = vllm("v1.worker.kv_connector_model_runner_mixin").KVConnectorModelRunnerMixin
    caches = {name: torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 8) for name in LAYERS[:num_groups]}

    def first_runner(output: Any) -> Any:
        handle_preemptions(worker, output, output.kv_connector_metadata)
        with context(None, config), mixin.maybe_get_kv_connector_output(output) as transfers:
            pass
        return transfers

    if not installed().connector.loads_after_launch:
        worker.register_kv_caches(caches)
        return [first_runner]
    second = vllm("v1.worker.gpu.kv_connector").ActiveKVConnector(config, caches)
    return [first_runner, lambda output: second.no_forward(output).kv_connector_output]
