"""The part of vLLM's front end that the metrics of a connector pass through."""

from __future__ import annotations

import importlib
from typing import Any

from kvview_vllm.metrics.connector_metrics import COUNTERS, PREFIX
from tests.vllm.server import Server

METRICS: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.metrics")
PROM = getattr(METRICS, "KVConnectorProm", None) or getattr(METRICS, "KVConnectorPrometheus", None)


class FrontEnd:
    """Passes the stats of each step to vLLM's log and Prometheus registry, over its wire format.

    Args:
        server: The server.
        connector: Label of the series that ``value`` returns.
    """

    def __init__(self, server: Server, connector: str) -> None:
        self.connector = connector
        config = server.configs.vllm
        self.log = METRICS.KVConnectorLogging(config.kv_transfer_config)
        self.prom = PROM and PROM(config, ["model_name", "engine"], {0: ["m", "0"]})
        serial: Any = importlib.import_module("vllm.v1.serial_utils")
        outputs: Any = importlib.import_module("vllm.v1.engine").EngineCoreOutputs
        encoder, decoder = serial.MsgpackEncoder(), serial.MsgpackDecoder(outputs)
        scheduler = server.scheduler.real
        update = scheduler.update_from_output

        def take_in(*args: Any) -> Any:
            outputs_by_client = update(*args)
            for output in outputs_by_client.values():
                sent = decoder.decode(encoder.encode(output))
                stats = sent.scheduler_stats and sent.scheduler_stats.kv_connector_stats
                if stats is not None:
                    self.log.observe(stats)
                    if self.prom is not None:
                        self.prom.observe(stats, 0)
            return outputs_by_client

        scheduler.update_from_output = take_in

    def value(self, name: str, connector: str = "") -> float | None:
        """Return the sample of a series, or None."""
        registry = importlib.import_module("prometheus_client").REGISTRY
        suffix = "_total" if name in COUNTERS else ""
        labels = {"model_name": "m", "engine": "0", "connector": connector or self.connector}
        value: float | None = registry.get_sample_value(PREFIX + name + suffix, labels)
        return value

    def logged(self) -> str:
        """Return the line of the stats log."""
        lines: list[str] = []
        self.log.log(log_fn=lambda text, *args: lines.append(text % args))
        return "".join(lines)
