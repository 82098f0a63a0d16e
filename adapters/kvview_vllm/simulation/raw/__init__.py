"""Any ``KVConnectorBase_V1``, unmodified, run by the seeded simulation.

    report = check_connector(MyV1Connector, engines=VLLMEngines(), options={...})

A run has the real scheduler of the installed vLLM, both roles of the connector and tensors of the
real shapes. Scenarios, shrinking, scripts and report are the same as for kvview connectors. A run
checks every byte that a request reads, the end of every request, the release of every block, the
counts and links of the pool, and that no method raises.

Source: :mod:`kvview_vllm.simulation.raw.raw_engine`.
"""

from kvview_vllm.simulation.raw.run import RawRun as RawRun, judge as judge
