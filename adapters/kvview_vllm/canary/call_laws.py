"""The laws of a connector's calls that a scheduler can check while it serves.

The canary checks them in a server, and :mod:`kvview_vllm.simulation.raw` in the simulation. This
module does not import vLLM.

1. A promise (``get_num_new_matched_tokens``) is a number of tokens that the request still needs
   (CONN-2).
2. Each load between steps is reported once, and each request that keeps its blocks is released
   once, and neither takes forever (CONN-3, CONN-4).
3. A connector frees a block of the pool as often as it touched it (POOL-4), and holds no block
   forever (CONN-4).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

LATE_SECONDS = 60.0
"""Age at which a load, a kept request, a query or a hold is late."""

_STEPS_BEFORE_LATE = 500
"""Steps that must also have passed, because an idle server makes no progress."""

_Starts = dict[Any, tuple[float, int]]  # seconds and step


def stuck_loads(requests: Collection[str]) -> tuple[str, str]:
    """Return law and message for loads that are never reported."""
    return "CONN-3", (
        f"requests {list(requests)} wait forever for their loads: get_num_new_matched_tokens "
        f"promised them, and get_finished of the worker never names the requests"
    )


def stuck_ends(requests: Collection[str]) -> tuple[str, str]:
    """Return law and message for ended requests whose blocks are never freed."""
    return "CONN-4", (
        f"requests {list(requests)} have ended and keep their blocks: request_finished returned "
        f"that they are freed later, and get_finished of the worker never names them"
    )


def stuck_aborts(requests: Collection[str]) -> tuple[str, str]:
    """Return law and message for aborted requests whose loads are never reported."""
    return "CONN-4", (
        f"requests {list(requests)} were aborted while loading and keep their blocks: get_finished "
        f"of the worker must still name them when their loads have ended"
    )


def stuck_queries(requests: Collection[str]) -> tuple[str, str]:
    """Return law and message for requests that are never answered."""
    return "CONN-2", (
        f"requests {list(requests)} wait forever: get_num_new_matched_tokens always returns None"
    )


class CallLaws:
    """Checks the calls of the scheduler half of one connector.

    Args:
        on_broken: Called with the law and a message; it may raise an exception.
        aborts_wait: Whether the blocks of an aborted request wait for its load.
        has_siblings: Whether a ``MultiConnector`` also passes the reports of other connectors.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        on_broken: Callable[[str, str], None],
        aborts_wait: bool = True,
        has_siblings: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # First token, number of tokens, whether between steps.
        self.promised: dict[str, tuple[int, int, bool]] = {}
        self.held: Counter[int] = Counter()
        """References that the connector's methods took."""
        self.places: dict[int, str] = {}
        """Place in the code of the last touch of each block."""
        self._broken = on_broken
        self._aborts_wait = aborts_wait
        self._has_siblings = has_siblings
        self._clock = clock
        self._step = 0
        self._unanswered: _Starts = {}
        self._loading: _Starts = {}
        self._kept: _Starts = {}
        self._holding: _Starts = {}

    @property
    def unanswered(self) -> Collection[str]:
        """Requests whose last result was None."""
        return self._unanswered.keys()

    @property
    def loading(self) -> Collection[str]:
        """Requests whose load between steps was not reported."""
        return self._loading.keys()

    def _start(self) -> tuple[float, int]:
        return self._clock(), self._step

    # --- requests ---

    def on_promise(
        self, request: Any, num_computed: int, answer: Any, *, is_used: bool = True
    ) -> int | None:
        """Check a result of ``get_num_new_matched_tokens``, and return its number of tokens.

        Args:
            request: vLLM's ``Request``.
            num_computed: Tokens that are computed.
            answer: The result.
            is_used: Whether vLLM receives the promise.
        """
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        if not is_pair or not (answer[0] is None or isinstance(answer[0], int)):
            self._broken(
                "CONN-2",
                f"get_num_new_matched_tokens returned {answer!r}; expected a number of tokens or "
                f"None, and whether they are loaded between steps",
            )
            return None
        request_id = request.request_id
        num_tokens: int | None = answer[0]
        if num_tokens is None:
            self._unanswered.setdefault(request_id, self._start())
            return None
        self._unanswered.pop(request_id, None)
        if not is_used:
            return num_tokens
        is_async = bool(answer[1])
        most = request.num_tokens - num_computed - (not is_async)
        if not 0 <= num_tokens <= most:
            why = "" if is_async else ": within a step one token must be left to compute"
            self._broken(
                "CONN-2",
                f"get_num_new_matched_tokens returned {num_tokens} tokens for {request_id!r}, "
                f"which has {request.num_tokens} tokens, {num_computed} of them computed; "
                f"expected 0 to {most}{why}",
            )
        if num_tokens:
            self.promised[request_id] = num_computed, num_tokens, is_async
        return num_tokens

    def on_allocated(self, request: Any, blocks: Any, num_tokens: int) -> tuple[int, bool]:
        """Note the start of a load; returns its first token, and whether it is between steps."""
        start, _, is_async = self.promised.get(request.request_id, (0, 0, False))
        if num_tokens and is_async:
            self._loading[request.request_id] = self._start()
        return start, is_async

    def on_output(self, output: Any) -> None:
        """Check the requests that workers report."""
        wrong = "received, which has no load in flight; expected one report for each load"
        self._check(self._loading, output.finished_recving, "CONN-3", wrong)
        wrong = "sent, which does not keep its blocks; expected one report after its end"
        self._check(self._kept, output.finished_sending, "CONN-4", wrong)

    def _check(self, starts: _Starts, names: Iterable[str] | None, law: str, wrong: str) -> None:
        for name in names or ():
            if starts.pop(name, None) is None and not self._has_siblings:
                self._broken(law, f"get_finished named request {name!r} as {wrong}")

    def on_finished(self, request: Any, answer: Any) -> None:
        """Note the end of a request, and whether the connector frees its blocks later."""
        request_id = request.request_id
        self._unanswered.pop(request_id, None)
        self.promised.pop(request_id, None)
        if answer[0]:
            self._kept[request_id] = self._start()
        if not self._aborts_wait:
            self._loading.pop(request_id, None)

    # --- the pool ---

    def hold(self, block_ids: Iterable[int], place: str) -> None:
        """Note touched blocks."""
        for block_id in block_ids:
            self.held[block_id] += 1
            self.places[block_id] = place
            self._holding.setdefault(block_id, self._start())

    def release(self, block_ids: Iterable[int], method: str, line: str = "") -> None:
        """Check freed blocks."""
        for block_id in block_ids:
            if self.held[block_id] <= 0:
                self._broken(
                    "POOL-4",
                    f"{method} frees block {block_id} of the raw pool{line}, but the connector no "
                    f"longer holds the block, because it has freed the block as often as it "
                    f"touched the block; call view.free_blocks(ids), which refuses such a call",
                )
                continue
            self.held[block_id] -= 1
            if not self.held[block_id]:
                self._holding.pop(block_id, None)

    # --- time ---

    def on_step(self, output: Any) -> None:
        """Count a step, and report once each load, end, query and hold that is late."""
        self._step += 1
        if self._step % _STEPS_BEFORE_LATE:
            return
        for starts, describe in (
            (self._loading, stuck_loads),
            (self._kept, stuck_ends),
            (self._unanswered, stuck_queries),
        ):
            if names := list(self._late(starts)):
                self._broken(*describe(names[:10]))
        if blocks := sorted(self._late(self._holding)):
            places = sorted({self.places[block] for block in blocks})
            self._broken(
                "CONN-4",
                f"{len(blocks)} blocks of the pool are held for more than {LATE_SECONDS:g} s, such "
                f"as {blocks[:5]}; touched by {', '.join(places[:3])}",
            )

    def _late(self, starts: _Starts) -> Iterator[Any]:
        now = self._clock()
        for key, (seconds, step) in [*starts.items()]:
            if now - seconds > LATE_SECONDS and self._step - step > _STEPS_BEFORE_LATE:
                starts[key] = math.inf, step  # reported once
                yield key
