"""The model runners of vLLM, V1 and V2: their calls to a connector's worker side, and its report.

vLLM's own classes make all calls in a step: ``KVConnectorModelRunnerMixin`` those of V1, and
``ActiveKVConnector`` those of V2. Only the forward pass is simulated.

Source: vllm/v1/worker/kv_connector_model_runner_mixin.py, 0.11.0 to 0.33.0;
vllm/v1/worker/gpu/kv_connector.py and gpu/model_runner.py, 0.15.0 to 0.33.0; vllm/v1/outputs.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from kvview_vllm.releases import installed
from kvview_vllm.releases.compat.calls import (
    active_connector_class,
    call_known,
    handle_preemptions,
    known_arguments,
    make_known,
)
from kvview_vllm.releases.compat.versions import vllm

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def chosen(*, is_v2: bool) -> Iterator[None]:
    """Let the parts of vLLM that are made in the context choose this model runner, as on a GPU.

    On a CPU they would choose V1. For V2, a scheduler sends a resumed request like a new one.
    """
    # Only this variable is restored, because a connector may set others when it is built.
    before = os.environ.get(_RUNNER)
    os.environ[_RUNNER] = str(int(is_v2))
    try:
        yield
    finally:
        del os.environ[_RUNNER]
        if before is not None:
            os.environ[_RUNNER] = before


class ModelRunner(Protocol):
    """The calls of a model runner to one worker's side."""

    def forward(self, output: Any, attention: Any = None) -> AbstractContextManager[bool]:
        """Make the calls around a forward pass, which runs in the block.

        Args:
            output: The scheduler's ``SchedulerOutput``.
            attention: Metadata of the attention, by layer.

        Returns:
            A context, whose value is whether the layers of the model call their hooks.
        """

    def end_step(self, output: Any, draft: Callable[[], None] = lambda: None) -> Any:
        """Make the calls after a forward pass; returns the ``KVConnectorOutput``.

        Args:
            output: The scheduler's ``SchedulerOutput``.
            draft: Runs the draft model, before the connector must have saved the step.
        """

    def no_forward(self, output: Any) -> Any:
        """Make the calls of a step without tokens; returns the ``KVConnectorOutput``."""


class RunnerV1:
    """Model Runner V1.

    Args:
        vllm_config: The worker's ``VllmConfig``.
        worker: The worker's side, with its KV caches.
    """

    def __init__(self, vllm_config: Any, worker: Any) -> None:
        self._config = vllm_config
        self._worker = worker
        self._context = vllm("forward_context").set_forward_context
        mixin = vllm("v1.worker.kv_connector_model_runner_mixin")
        self._mixin = mixin.KVConnectorModelRunnerMixin
        self._has_drafts = vllm_config.speculative_config is not None
        self._transfers: Any = None

    @contextmanager
    def forward(self, output: Any, attention: Any = None) -> Iterator[bool]:
        """Make the calls around a forward pass, also those after its end."""
        handle_preemptions(self._worker, output, output.kv_connector_metadata)
        num_tokens = output.total_num_scheduled_tokens
        calls = self._mixin.maybe_get_kv_connector_output
        # 0.18.0, and 0.17.0
        deferred = {"defer_finalize": self._has_drafts, "clear_metadata": not self._has_drafts}
        with (
            active(self._worker),
            self._context(attention, self._config, num_tokens=num_tokens),
            calls(output, **known_arguments(calls, deferred)) as self._transfers,
        ):
            yield True

    def end_step(self, output: Any, draft: Callable[[], None] = lambda: None) -> Any:
        """Run the draft model, finalize the step, and return its report."""
        with active(self._worker):
            draft()
            if self._has_drafts:
                call_known(self._mixin, "finalize_kv_connector")
                call_known(self._mixin, "clear_kv_connector_metadata")
        return self._transfers

    def no_forward(self, output: Any) -> Any:
        """Make the calls of a step without tokens."""
        handle_preemptions(self._worker, output, output.kv_connector_metadata)
        with active(self._worker):
            step = self._mixin.kv_connector_no_forward(output, self._config)
        return step.kv_connector_output


class RunnerV2:
    """Model Runner V2, which also registers the KV caches.

    1. A step of decodes runs as one CUDA graph, outside of a forward context and without the hooks
       of layers, unless the connector requires piecewise graphs.
    2. With draft tokens the step is finalized after its report, because a draft model runs between
       both.

    Args:
        vllm_config: The worker's ``VllmConfig``.
        worker: The worker's side.
        caches: The KV caches by layer.
    """

    def __init__(self, vllm_config: Any, worker: Any, caches: Mapping[str, torch.Tensor]) -> None:
        self._config = vllm_config
        self._worker = worker
        self._context = vllm("forward_context").set_forward_context
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._has_graphs = not call_known(worker, "requires_piecewise_for_cudagraph", options)
        self._has_drafts = vllm_config.speculative_config is not None
        with active(worker):
            self._calls = active_connector_class()(vllm_config, caches)
            self._calls.set_disabled(True)  # for the runs that capture graphs
            self._calls.pre_forward(None)
            self._calls.set_disabled(False)
        call_known(self._calls, "reset_capture_state")  # 0.30.0

    @contextmanager
    def forward(self, output: Any, attention: Any = None) -> Iterator[bool]:
        """Make the calls before a forward pass, and the call at its end."""
        num_tokens = output.total_num_scheduled_tokens
        with active(self._worker):
            if self._has_graphs and num_tokens == len(output.num_scheduled_tokens):
                self._before_forward(output, attn_metadata=attention)
                yield False
            else:
                with self._context(attention, self._config, num_tokens=num_tokens):
                    self._before_forward(output)
                    yield True
            call_known(self._calls, "finish_forward")  # 0.30.0

    def _before_forward(self, output: Any, **more: Any) -> None:
        names = list(output.num_scheduled_tokens)
        batch = SimpleNamespace(
            idx_mapping=torch.arange(len(names)),
            req_ids=names,
            num_tokens=output.total_num_scheduled_tokens,
        )
        before = self._calls.pre_forward
        before(output, **known_arguments(before, {"input_batch": batch, **more}))

    def end_step(self, output: Any, draft: Callable[[], None] = lambda: None) -> Any:
        """Make the report of the step, run the draft model, and finalize the step."""
        after = self._calls.post_forward
        with active(self._worker):
            transfers = make_known(
                after,
                finished_req_ids=output.finished_req_ids,
                scheduler_output=output,  # up to 0.18
                defer_finalize=self._has_drafts,  # 0.33.0
            )
            draft()
            if self._has_drafts:
                call_known(self._calls, "finalize_step")
        return transfers

    def no_forward(self, output: Any) -> Any:
        """Make the calls of a step without tokens."""
        with active(self._worker):
            return self._calls.no_forward(output).kv_connector_output


@contextmanager
def active(worker: Any) -> Iterator[None]:
    """Make a worker's side the connector of this process, as in a worker."""
    state = vllm("distributed.kv_transfer.kv_transfer_state")
    before, state._KV_CONNECTOR_AGENT = state._KV_CONNECTOR_AGENT, worker
    try:
        yield
    finally:
        state._KV_CONNECTOR_AGENT = before


def invalid_blocks(transfers: Any) -> Collection[int]:
    """Return the blocks that a worker's report lists as not loaded; empty without a report."""
    if transfers is None or not installed().connector.failed_blocks:
        return ()
    blocks: Collection[int] = transfers.invalid_block_ids or ()
    return blocks


def failed_requests(transfers: Any) -> Collection[str]:
    """Return the requests that a worker's report lists as not loaded; empty without a report."""
    if transfers is None or not installed().connector.failed_requests:
        return ()
    requests: Collection[str] = transfers.failed_recving or ()
    return requests


def computed_before(output: Any) -> dict[str, int]:
    """Return, for each scheduled request, the number of tokens whose KV exists before the step."""
    cached = output.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts


def make_aggregator(scheduler: Any, num_ranks: int) -> Any:
    """Make vLLM's own aggregator, which merges the outputs of all ranks.

    Args:
        scheduler: vLLM's scheduler; its connector states how many ranks report a transfer.
        num_ranks: Number of ranks, all of which report a transfer by default.
    """
    number = num_ranks
    if scheduler.connector is not None:
        number = scheduler.connector.get_finished_count() or num_ranks
    return vllm("distributed.kv_transfer.kv_connector.utils").KVOutputAggregator(number)
