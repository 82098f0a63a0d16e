"""A recorder of the last hooks of any ``KVConnectorBase_V1``, and the replay of its incidents.

    recorder = Recorder(limit_bytes=8 << 20, folder="/var/log/kv")
    recorder.note("get_num_new_matched_tokens", (request, 0), {}, (128, True))
    recorder.write("digest differs", {"law": "XFER-1"})

``kvview check my.py:MyConnector --engine vllm --from incident.json`` plays an incident.
"""

from kvview_vllm.recorder.ring import Recorder

__all__ = ["Recorder"]
