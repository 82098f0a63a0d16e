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

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_STEPS_BEFORE_LATE = 500
"""Steps that must also have passed, because an idle server makes no progress."""


@dataclass
class _Start:
    seconds: float
    step: int
    is_reported: bool = False


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


def stuck_queries(requests: Collection[str]) -> tuple[str, str]:
    """Return law and message for requests that are never answered."""
    return "CONN-2", (
        f"requests {list(requests)} wait forever: get_num_new_matched_tokens always returns None"
    )


class CallLaws:
    """Checks the calls of the scheduler half of one connector.

    Args:
        on_broken: Called with the law and a message; it may raise an exception.
        clock: Clock in seconds.
    """

    def __init__(
        self,
        on_broken: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # First token, number of tokens, whether between steps.
        self.promised: dict[str, tuple[int, int, bool]] = {}
        self.held: Counter[int] = Counter()
        """References that the connector's methods took."""
        self.places: dict[int, str] = {}
        """SampledBlock of the last touch of each block."""
        self._broken = on_broken
        self._clock = clock
        self._step = 0
        self._unanswered: dict[str, _Start] = {}
        self._loading: dict[str, _Start] = {}
        self._kept: dict[str, _Start] = {}
        self._holding: dict[int, _Start] = {}

    @property
    def unanswered(self) -> Collection[str]:
        """Requests whose last result was None."""
        return self._unanswered.keys()

    def _start(self) -> _Start:
        return _Start(self._clock(), self._step)

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

    def on_allocated(self, request_id: str, num_tokens: int) -> tuple[int, bool]:
        """Note the start of a load; returns its first token, and whether it is between steps."""
        start, _, is_async = self.promised.get(request_id, (0, 0, False))
        if num_tokens and is_async:
            self._loading[request_id] = self._start()
        return start, is_async

    def on_output(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """Check the requests that workers report."""
        for name in received:
            if self._loading.pop(name, None) is None:
                self._broken(
                    "CONN-3",
                    f"get_finished named request {name!r} as received, which has no load in "
                    f"flight; expected one report for each load",
                )
        for name in sent:
            if self._kept.pop(name, None) is None:
                self._broken(
                    "CONN-4",
                    f"get_finished named request {name!r} as sent, which does not keep its "
                    f"blocks; expected one report after request_finished returned True",
                )

    def on_finished(self, request_id: str, *, keeps_blocks: bool, keeps_load: bool) -> None:
        """Note the end of a request.

        Args:
            request_id: Id of the request.
            keeps_blocks: Whether the connector frees its blocks later.
            keeps_load: Whether the release waits for the load of an aborted request.
        """
        self._unanswered.pop(request_id, None)
        self.promised.pop(request_id, None)
        if keeps_blocks:
            self._kept[request_id] = self._start()
        if not keeps_load:
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

    def on_step(self, seconds: float) -> None:
        """Count a step, and report once each load, end, query and hold that is this old."""
        self._step += 1
        if self._step % _STEPS_BEFORE_LATE:
            return
        for late, describe in (
            (self._late(self._loading, seconds), stuck_loads),
            (self._late(self._kept, seconds), stuck_ends),
            (self._late(self._unanswered, seconds), stuck_queries),
        ):
            if names := list(late):
                self._broken(*describe(names[:10]))
        if blocks := sorted(self._late(self._holding, seconds)):
            places = sorted({self.places[block] for block in blocks})
            self._broken(
                "CONN-4",
                f"{len(blocks)} blocks of the pool are held for more than {seconds:g} s, such as "
                f"{blocks[:5]}; touched by {', '.join(places[:3])}",
            )

    def _late(self, starts: Mapping[Any, _Start], seconds: float) -> Iterator[Any]:
        now = self._clock()
        for key, start in starts.items():
            is_late = now - start.seconds > seconds
            if is_late and self._step - start.step > _STEPS_BEFORE_LATE and not start.is_reported:
                start.is_reported = True
                yield key
