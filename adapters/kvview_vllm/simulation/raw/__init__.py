"""Any ``KVConnectorBase_V1``, as it is, under the seeded simulation.

    report = check_connector(MyV1Connector, engines=VLLMEngines(), options={...})

The real scheduler of the installed vLLM, both roles of the connector, tensors of the real
shapes, and the same scenarios, shrinking, scripts and report as for kvview connectors. What a
run is judged by: every byte that a request reads, an end for every request, every block given
back, the pool's counts and links, and that nothing raises.

Source: :mod:`kvview_vllm.simulation.raw.harness`.
"""

from kvview_vllm.simulation.raw.run import RawRun, judge

__all__ = ["RawRun", "judge"]
