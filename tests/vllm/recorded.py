"""A connector of vLLM whose hooks are recorded, like those of a server with the canary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import isfunction
from pathlib import Path
from typing import Any

from kvview.testing.connector import simulate
from kvview.testing.connector.scenario.scenario import Scenario
from kvview_vllm.recorder import Recorder
from kvview_vllm.releases.cpu.worker_caches import is_hook
from kvview_vllm.simulation import VLLMEngines

_MIB = 1 << 20


def with_recorders(kind: Any, recorders: Mapping[str, Recorder]) -> type:
    """Return a subclass whose sides call the recorder of their role after each hook."""

    def recorded(name: str, inner: Any) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(self, *args, **kwargs)
            recorders[self.role.name].note(name, args, kwargs, result)
            return result

        call.__name__ = name
        call.__wrapped__ = inner  # type: ignore[attr-defined] # vLLM reads its signature
        return call

    def init(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        kind.__init__(self, vllm_config, role, kv_cache_config)
        args = vllm_config, role, kv_cache_config
        recorders[role.name].note("__init__", args, {}, None)

    names = [name for name in dir(kind) if not name.startswith("_") and is_hook(name)]
    members = {
        name: recorded(name, getattr(kind, name))
        for name in names
        if isfunction(getattr(kind, name))
    }
    names_of_class = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {"__init__": init, **members, **names_of_class})


def record(
    kind: type, scenario: Scenario, folder: Path, engines: VLLMEngines, options: Mapping[str, Any]
) -> tuple[str, Path] | None:
    """Run a scenario with a recorded connector; returns the broken law and the incident."""
    recorders = {role: Recorder(_MIB, folder) for role in ("SCHEDULER", "WORKER")}
    watched = with_recorders(kind, recorders)
    failure = simulate(watched, scenario, options, engines=engines).failure
    assert not any(recorder.num_errors for recorder in recorders.values())
    if failure is None:
        return None
    path = recorders["SCHEDULER"].write(str(failure), {"law": failure.law})
    assert path is not None
    return failure.law, path
