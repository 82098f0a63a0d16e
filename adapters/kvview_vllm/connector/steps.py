"""A step of vLLM's scheduler in the contract's terms, built at its first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from kvview import RequestContent, RequestInfo, RequestStep, StepInfo


def request_info(
    request: Any, content: RequestContent, num_computed_tokens: int = 0
) -> RequestInfo:
    """Make the info of a vLLM ``Request`` for a connector, with vLLM's live list of hashes."""
    return RequestInfo(
        request.request_id, request.num_tokens, request.block_hashes, num_computed_tokens, content
    )


class LazySteps(Sequence[RequestStep]):
    """The requests of a step, built at the first access, because few connectors read them.

    Args:
        build: Makes the requests from the output, at the first access.
        output: vLLM's ``SchedulerOutput``.
    """

    __slots__ = ("_build", "_built", "_output")

    def __init__(self, build: Callable[[Any], list[RequestStep]], output: Any) -> None:
        self._build = build
        self._output = output
        self._built: list[RequestStep] | None = None

    @property
    def is_built(self) -> bool:
        """Whether the requests were read."""
        return self._built is not None

    @overload
    def __getitem__(self, index: int) -> RequestStep: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestStep]: ...
    def __getitem__(self, index: int | slice) -> RequestStep | Sequence[RequestStep]:
        return self._steps()[index]

    def __len__(self) -> int:
        return len(self._steps())

    def __iter__(self) -> Iterator[RequestStep]:
        return iter(self._steps())

    def _steps(self) -> list[RequestStep]:
        if self._built is None:
            self._built = self._build(self._output)
        return self._built


@dataclass(frozen=True, slots=True)
class LazyStep(StepInfo):
    """A step whose requests are built at their first use: all, or only those that fill a block.

    Args:
        some: Result of :meth:`~kvview.StepInfo.filling`; None for all requests.
    """

    some: LazySteps | None = None

    def filling(self) -> Sequence[RequestStep]:
        """The requests with a block that becomes full."""
        return self.scheduled if self.some is None else self.some
