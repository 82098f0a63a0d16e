"""The ways in which a connector is run: by model, by workers, and under ``MultiConnector``."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvview import CacheGeometry
from kvview.targets import has_store, is_engine_connector, name_target
from kvview.testing.placeholders import in_folder, in_size
from kvview_vllm.inference.models import TOKEN_BYTES
from kvview_vllm.inference.server import BLOCK_SIZE
from kvview_vllm.inference.traffic import REJECTED_DRAFTS, STEPS_AHEAD
from kvview_vllm.releases.compat.versions import vllm
from kvview_vllm.releases.cpu.worker_caches import overridden
from kvview_vllm.simulation.raw.stand_ins import copies_on_cuda
from kvview_vllm.simulation.raw.transfer_config import classes_of, split_options
from kvview_vllm.simulation.scheduler import cpu_scheduler

HOST_BLOCKS = 56
"""Blocks for a connector with the option ``cpu_blocks``, too few for all KV."""
_BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
_HOST_BLOCKS_ABOVE_A_STORE = 8  # most pages must go to the store, and come from there

_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@dataclass(frozen=True)
class Arrangement:
    """One way of running a connector.

    Args:
        name: Name for people.
        kind: Kind of the model.
        is_multi: Whether two instances of the connector run under ``MultiConnector``.
        more: Further arguments of ``vllm.LLM``.
        is_v2: Whether Model Runner V2 runs; otherwise V1.
    """

    name: str
    kind: str
    is_multi: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    is_v2: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is the plain arrangement of its model, for which a control run exists."""
        return not (self.is_multi or self.more or self.is_v2)

    @property
    def is_ahead(self) -> bool:
        """Whether steps must be launched before the output of the previous step is processed."""
        return bool(self.more.get("async_scheduling"))

    @property
    def proof(self) -> tuple[str, str] | None:
        """Return the event that must occur in a run, and the message if it does not occur."""
        if self.is_ahead:
            return STEPS_AHEAD, "vLLM launched no step before the output of the last one"
        if "speculative_config" in self.more:
            return REJECTED_DRAFTS, "vLLM rejected no draft token"
        return None


ARRANGEMENTS = (
    Arrangement("one group", "llama"),
    Arrangement("sliding windows", "gemma"),
    Arrangement("two under MultiConnector", "llama", is_multi=True),
    Arrangement(
        "tensor parallel 2",
        "llama",
        more={"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
    ),
    Arrangement("a step ahead", "llama", more={"async_scheduling": True}),
    Arrangement("speculative decoding", "llama", more={"speculative_config": _NGRAM}),
    Arrangement("one group on model runner V2", "llama", is_v2=True),
    Arrangement("sliding windows on model runner V2", "gemma", is_v2=True),
)


class Configured:
    """A connector with its options, for each arrangement.

    Args:
        connector_class: A kvview connector, or a ``KVConnectorBase_V1``.
        options: Options of the connector, as for the simulation.

    Raises:
        ConfigError: The options are refused.
    """

    def __init__(self, connector_class: type, options: Mapping[str, Any]) -> None:
        self.is_own = not is_engine_connector(connector_class)
        if self.is_own:
            self._config = self._of_kvview(connector_class, options)
            self.vllm_class: type = importlib.import_module("kvview_vllm.connector").KVViewConnector
        else:
            sized = in_size(split_options(options), HOST_BLOCKS, _BLOCK_BYTES)
            self._config = {"kv_role": "kv_both", **sized}
            self._config["kv_connector"] = connector_class.__name__
            self._config["kv_connector_module_path"] = connector_class.__module__
            self.vllm_class = connector_class
        self.classes = classes_of(self.vllm_class, self._config)
        own = [kind for kind in self.classes if kind.__name__ != "MultiConnector"]
        self.resets = all("reset_cache" in overridden(kind) for kind in own)

    def config(self, arrangement: Arrangement, folder: Path) -> tuple[dict[str, Any], type]:
        """Return the ``kv_transfer_config``, and the class that it names.

        Args:
            arrangement: The arrangement.
            folder: Folder for the connector's files, which replaces ``{tmp}`` in its options.
        """
        config: dict[str, Any] = copy.deepcopy(self._config)
        if not arrangement.is_multi:
            return in_folder(config, str(folder)), self.vllm_class
        children = [in_folder(config, str(folder / name)) for name in ("first", "second")]
        multi = vllm("distributed.kv_transfer.kv_connector.v1.multi_connector").MultiConnector
        return cpu_scheduler.multi_config(*children), multi

    def why_not(self, arrangement: Arrangement) -> str:
        """Return the reason to exclude an arrangement for this connector; empty to run it."""
        if arrangement.is_multi and self.vllm_class.__name__ == "MultiConnector":
            return "it is a MultiConnector"
        if "tensor_parallel_size" in arrangement.more and copies_on_cuda(self.classes):
            return "the stand-ins for CUDA work in one process"
        return ""

    def more(self, arrangement: Arrangement) -> dict[str, Any]:
        """Return the further arguments of ``vllm.LLM``."""
        more = dict(arrangement.more)
        if self.is_own and arrangement.is_ahead:
            more["scheduler_cls"] = "kvview_vllm.scheduler.AsyncViewScheduler"
        return more

    def _of_kvview(self, connector_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
        from kvview.testing.connector.run.configure import configure
        from kvview.testing.connector.scenario.scenario import Scenario

        number = _HOST_BLOCKS_ABOVE_A_STORE if has_store(connector_class) else HOST_BLOCKS
        scenario = Scenario(CacheGeometry.single(BLOCK_SIZE), 18, (), cpu_blocks=number)
        sized = in_size(options, number, _BLOCK_BYTES)
        taken = pickle.loads(configure(connector_class, scenario, sized)).options
        config = cpu_scheduler.connector_config(name_target(connector_class), **taken)
        config["kv_load_failure_policy"] = "recompute"
        # Because the check looks for faults.
        config["kv_connector_extra_config"]["contain_faults"] = False
        return config
