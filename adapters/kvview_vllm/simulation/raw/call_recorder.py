"""A recorder that records exceptions, promises, touches and frees of a raw connector's methods.

vLLM builds a subclass of the connector's class, so bases, class methods and overrides stay the
same.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from inspect import isfunction
from typing import Any

from kvview.testing.connector.half.hook_calls import hook
from kvview.testing.connector.judge.invariants import InvariantBroken
from kvview_vllm.canary.call_laws import CallLaws
from kvview_vllm.releases.cpu.worker_caches import is_hook, overridden
from kvview_vllm.simulation.raw.reported_events import ReportedEvents

REFUSAL = re.compile(r"raised (?:ValueError|NotImplementedError) (.*?)(?: at \S+:\d+:|$)")
"""The message of an exception with which a constructor refuses settings, as vLLM's own do."""


def refused_settings(message: str) -> str | None:
    """Return the reason with which a constructor refuses its settings; None for other messages."""
    found = REFUSAL.search(message) if message.startswith("__init__ raised") else None
    return found[1] if found else None


_LAW_OF_METHOD = {
    "__init__": "CONN-1",
    "bind_gpu_block_pool": "CONN-1",
    "bind_kv_cache_manager": "CONN-1",
    "register_kv_caches": "XFER-1",
    "get_num_new_matched_tokens": "CONN-2",
    "update_state_after_alloc": "CONN-2",
    "on_new_request": "CONN-4",
    "request_finished": "CONN-4",
    "request_finished_all_groups": "CONN-4",
    "reset_cache": "CONN-11",
    "shutdown": "CONN-4",
    "take_events": "EVENT-2",
}  # the others: CONN-3


class CallRecorder:
    """Observations of a connector during one run.

    Args:
        loads: Whether vLLM receives the connector's promises; otherwise vLLM receives 0 for each
            promise.
    """

    def __init__(self, *, loads: bool = True) -> None:
        self.coverage: Counter[str] = Counter()
        self.events: ReportedEvents | None = None  # of the scheduler's side, which is built later
        self.to_load: dict[str, tuple[int, int]] = {}  # first and last token, since the last step
        self.left_out: set[str] = set()
        self.seen: set[str] = set()  # coverage entries of the worker
        self.laws = CallLaws(_raise)
        self._loads = loads
        self._inside: list[str] = []

    # --- methods ---

    def call(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a method of the connector."""
        self._inside.append(name)
        try:
            with hook(name, _LAW_OF_METHOD.get(name, "CONN-3")):
                try:
                    answer = method(*args, **kwargs)
                except NotImplementedError:
                    if name != "reset_cache":
                        raise
                    self.left_out.add("resets of the connector: reset_cache is not implemented")
                    return False
                if name == "take_events":
                    answer = list(answer)
        finally:
            self._inside.pop()
        if name == "get_num_new_matched_tokens":
            return self._promise(args[0], args[1], answer)
        if name == "take_events" and self.events is not None:
            self.events.check(answer)
            self.coverage["events"] += len(answer)
        if name == "reset_cache" and self.events is not None:
            self.events.note_reset()
        if name == "update_state_after_alloc":
            num_tokens = args[2] if len(args) > 2 else kwargs["num_external_tokens"]
            self._note_load(args[0], num_tokens)
        return answer

    def _promise(self, request: Any, num_computed: int, answer: Any) -> Any:
        num_tokens = self.laws.on_promise(request, num_computed, answer, is_used=self._loads)
        if not self._loads and num_tokens is not None:
            return 0, False
        self.coverage["tokens asked about"] += request.num_tokens
        self.coverage["tokens hit on the GPU"] += num_computed
        if num_tokens:
            self.coverage["hits"] += 1
            self.coverage["tokens promised"] += num_tokens
        return answer

    def _note_load(self, request: Any, num_tokens: int) -> None:
        if not num_tokens:
            return
        start, is_async = self.laws.on_allocated(request, None, num_tokens)
        self.to_load[request.request_id] = start, start + num_tokens
        self.coverage["tokens to load"] += num_tokens
        self.coverage["loads between steps" if is_async else "loads within a step"] += 1
        self.coverage["loads next to a GPU hit"] += start > 0

    # --- the pool ---

    def record_pool(self, pool: Any) -> None:
        """Record the calls that the connector's methods make on the pool itself."""
        touch, free, take = pool.touch, pool.free_blocks, pool.get_new_blocks

        def recorded_touch(blocks: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = list(blocks)
            answer = touch(blocks, *args, **kwargs)
            self._hold(_flat(blocks))
            return answer

        def recorded_take(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            self._hold(blocks)
            return blocks

        def recorded_free(blocks: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            blocks = list(blocks)
            self._release(blocks)
            return free(blocks, *args, **kwargs)

        pool.touch, pool.get_new_blocks = recorded_touch, recorded_take
        pool.free_blocks = recorded_free

    def _hold(self, blocks: Iterable[Any]) -> None:
        if not self._inside:
            return
        block_ids = [block.block_id for block in blocks]
        self.laws.hold(block_ids, f"{self._inside[-1]}{_line()}")
        self.coverage["blocks held"] += len(block_ids)

    def _release(self, blocks: Iterable[Any]) -> None:
        if self._inside:
            block_ids = (block.block_id for block in blocks)
            self.laws.release(block_ids, self._inside[-1], _line())


def _raise(law: str, message: str) -> None:
    raise InvariantBroken(law, message)


def make_recorded(connector_class: type, recorder: CallRecorder) -> type:
    """Make a subclass for vLLM to build, which calls the connector's methods through a recorder."""
    own = overridden(connector_class)

    def recorded(name: str) -> Callable[..., Any]:
        inner = getattr(connector_class, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder.call(name, inner.__get__(self), args, kwargs)

        call.__name__ = name
        call.__doc__ = inner.__doc__
        call.__wrapped__ = inner  # type: ignore[attr-defined] # vLLM reads its signature
        return call

    members: dict[str, Any] = {
        name: recorded(name)
        for name in own
        if isfunction(getattr(connector_class, name)) and (is_hook(name) or name in _LAW_OF_METHOD)
    }
    members["__module__"] = connector_class.__module__
    members["__qualname__"] = connector_class.__qualname__
    return type(connector_class.__name__, (connector_class,), members)


def free_queue(pool: Any) -> list[int]:
    """Return the free queue by its links, next victim first; a connector may have broken them."""
    queue = pool.free_block_queue
    tail = queue.fake_free_list_tail
    block = queue.fake_free_list_head
    free: list[int] = []
    while block.next_free_block is not tail:
        before, block = block, block.next_free_block
        if block is None or block.prev_free_block is not before or len(free) > len(pool.blocks):
            raise InvariantBroken(
                "POOL-2",
                f"the free queue of the raw pool is broken behind {free[-3:]}, because its links "
                f"do not match. Code that changes blocks directly breaks links; "
                f"view.touch_blocks(ids) and view.free_blocks(ids) keep them intact",
            )
        free.append(block.block_id)
    if queue.num_free_blocks != len(free):
        raise InvariantBroken(
            "POOL-2",
            f"the free queue of the raw pool has {len(free)} blocks, but its counter is "
            f"{queue.num_free_blocks}",
        )
    return free


def _flat(blocks: Iterable[Any]) -> Iterable[Any]:
    for block in blocks:  # up to 0.13 a list for each group
        if isinstance(block, list | tuple):
            yield from block
        else:
            yield block


def _line() -> str:
    """Return the line of the connector's code that calls the pool."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return f", at {frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
