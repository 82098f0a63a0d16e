"""The negative control: a subclass of a connector that corrupts the last block of each load.

If this fault does not change the tokens, equal tokens prove nothing about a connector.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.simulation.raw.call_recorder import CallRecorder


def make_corrupting(
    connector_class: type, recorder: CallRecorder, scheduler: Callable[[], Any]
) -> type:
    """Make a subclass whose loads leave a wrong last block.

    Args:
        connector_class: The recorded class that vLLM is to build.
        recorder: The recorder of this class, which records the loads.
        scheduler: Returns the engine's scheduler; the worker runs in the same process.
    """
    corrupted: dict[str, set[str]] = {}  # layers, by request
    inner: Callable[..., None] = connector_class.wait_for_layer_load  # type: ignore[attr-defined]

    def wait_for_layer_load(self: Any, layer_name: str) -> None:
        inner(self, layer_name)
        for name, (_, end) in recorder.to_load.items():
            request = scheduler().requests.get(name)
            done = corrupted.setdefault(name, set())
            if request is not None and request.status.name == "RUNNING" and layer_name not in done:
                done.add(layer_name)
                _corrupt(scheduler(), name, end - 1, layer_name)

    members = {"wait_for_layer_load": wait_for_layer_load, "__module__": connector_class.__module__}
    return type(connector_class.__name__, (connector_class,), members)


def _corrupt(scheduler: Any, name: str, position: int, layer_name: str) -> None:
    groups = scheduler.kv_cache_config.kv_cache_groups
    index, group = next((i, g) for i, g in enumerate(groups) if layer_name in g.layer_names)
    table = scheduler.kv_cache_manager.get_block_ids(name)[index]
    number = position // group.kv_cache_spec.block_size
    if number >= len(table):
        return
    context = vllm("forward_context").get_forward_context()
    cache = context.no_compile_layers[layer_name].kv_cache
    cache = cache[0] if isinstance(cache, list | tuple) else cache
    num_blocks = scheduler.kv_cache_config.num_blocks
    cache.select(list(cache.shape).index(num_blocks), table[number]).fill_(1.0)
