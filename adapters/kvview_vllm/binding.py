"""The binding of a connector to the pool view, with the hook of the installed vLLM.

- BIND-1 To receive the view, a connector only overrides ``bind_gpu_block_pool_view``.
- BIND-2 Binding the same pool again **must** change nothing; another pool closes
  the view of the first one (POOL-10).
- BIND-3 A connector that needs the view and has no view **must** report this at its first scheduler
  step, and name the missing flag.

Source: ``vllm/distributed/kv_transfer/kv_connector/v1/base.py``, 0.19.0 (a hook
under ``hasattr``), 0.22.0 (a base method), 0.30.0 (``bind_kv_cache_manager``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, ClassVar

from kvview import GPUBlockPoolView, GuardedView, Leak, ViewNotBoundError
from kvview_vllm.guard import LeakReporter, close_view, guarded_view
from kvview_vllm.releases import engine_version, installed
from kvview_vllm.releases.compat.calls import child_connectors

_POOL_HOOK = "bind_gpu_block_pool"
_FIRST_CALLS_OF_A_STEP = ("get_num_new_matched_tokens", "build_connector_meta")


class BlockPoolViewMixin:
    """Adds the view to a subclass of ``KVConnectorBase_V1``, which lists the mixin first.

    1. ``bind_gpu_block_pool_view`` is called once for each pool, on the scheduler's
       side only, before the first request.
    2. While :attr:`needs_block_pool_view` is true, a scheduler step without a view
       raises :class:`~kvview.ViewNotBoundError` (BIND-3).
    3. The view is a :class:`~kvview.GuardedView`. Set its options before the pool is bound:
       :attr:`pin_budget` (the largest share of the pool that the connector may hold),
       :attr:`trace_holds` (whether to record the line that took each hold; slow),
       :attr:`leak_report_seconds` (the age at which a hold is logged; None for never) and
       :attr:`view_owner` (the owner in reports; by default the class).
    """

    needs_block_pool_view: bool = True
    pin_budget: float | None = None
    trace_holds: bool = False
    leak_report_seconds: float | None = 60.0
    view_owner: str = ""
    _bound_pool: ClassVar[Any] = None  # replaced on the instance once bound
    _bound_view: GuardedView | None = None
    _hold_watch: LeakReporter | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if _POOL_HOOK in vars(base))
        if not issubclass(owner, BlockPoolViewMixin):
            raise TypeError(
                f"{cls.__name__}: list BlockPoolViewMixin before {owner.__name__}, which "
                f"otherwise handles {_POOL_HOOK} itself and drops the pool"
            )
        for name in _FIRST_CALLS_OF_A_STEP:
            if name in vars(cls):
                setattr(cls, name, _on_open_view(vars(cls)[name]))

    # --- for the connector ---

    def bind_gpu_block_pool_view(self, view: GPUBlockPoolView) -> None:
        """Receive the view. Override this method.

        Args:
            view: The view, which is valid until another pool is bound or
                :meth:`close_block_pool_view` is called.
        """

    @property
    def block_pool_view(self) -> GuardedView:
        """The bound view.

        Raises:
            ViewNotBoundError: The engine never bound a pool.
        """
        if self._bound_view is None:
            raise self._not_bound()
        return self._bound_view

    def check_block_pool_view(self) -> None:
        """Raise an exception if the view is needed and was never bound (BIND-3).

        Raises:
            ViewNotBoundError: The engine never bound a pool.
        """
        if self._bound_view is None and self.needs_block_pool_view:
            raise self._not_bound()

    def _not_bound(self) -> ViewNotBoundError:
        return ViewNotBoundError(
            f"BIND-3: {self._owner()} needs the block pool, and vLLM {engine_version()} did not "
            f"bind it: add --scheduler-cls kvview_vllm.scheduler.ViewScheduler (with "
            f"--async-scheduling: kvview_vllm.scheduler.AsyncViewScheduler)"
        )

    def _owner(self) -> str:
        return self.view_owner or type(self).__name__

    def _describe_hold(self, leak: Leak) -> Leak:
        """Add facts about the engine to a leak before the leak is logged."""
        return leak

    def _late_work(self, seconds: float) -> list[str]:
        """Return log lines about other work that has taken at least this number of seconds."""
        return []

    def close_block_pool_view(self) -> None:
        """Close the view, if it exists, and log the blocks that it still holds."""
        view = self._bound_view
        if view is not None:
            vars(self).pop("_bound_pool", None)
            vars(self).pop("_bound_view", None)
            vars(self).pop("_hold_watch", None)
            close_view(view)

    # --- for the engine: whichever of these the release calls ---

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Bind the pool; called by vLLM 0.19.0 and later, and by ``ViewScheduler`` (BIND-2)."""
        if gpu_block_pool is self._bound_pool:
            return
        bound = guarded_view(
            gpu_block_pool,
            self._owner(),
            pin_budget=self.pin_budget,
            trace_holds=self.trace_holds,
        )
        self.close_block_pool_view()
        watch = LeakReporter(bound, self.leak_report_seconds, self._describe_hold, self._late_work)
        vars(self).update(_bound_pool=gpu_block_pool, _bound_view=bound, _hold_watch=watch)
        self.bind_gpu_block_pool_view(bound)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Bind the pool in 0.30.0 and later: the base method calls :meth:`bind_gpu_block_pool`."""
        if installed().binding.manager_hook:
            super().bind_kv_cache_manager(kv_cache_manager)  # type: ignore[misc]
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)


def walk_connectors(connector: Any) -> Iterator[Any]:
    """Yield a connector and, for a ``MultiConnector``, its children, parents first.

    Source: ``MultiConnector._connectors``, the same name in 0.11.0 to 0.33.0.
    """
    if connector is not None:
        yield connector
        for child in child_connectors(connector):
            yield from walk_connectors(child)


def _on_open_view(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def checked(self: BlockPoolViewMixin, *args: Any, **kwargs: Any) -> Any:
        if self._hold_watch is None:
            self.check_block_pool_view()
        else:
            self._hold_watch.step()
        return method(self, *args, **kwargs)

    return checked
