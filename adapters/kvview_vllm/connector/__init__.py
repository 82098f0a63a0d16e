"""``KVViewConnector``: runs an engine-neutral kvview connector inside vLLM."""

from kvview_vllm.connector.connector import KVViewConnector as KVViewConnector
