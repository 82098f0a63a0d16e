"""A recorder of the last calls of any ``KVConnectorBase_V1``, and the replay of its incidents.

The canary records the calls of the scheduler's side, and writes them to a file at an incident.
``kvview check my.py:MyConnector --engine vllm --from recorded-scheduler-4711-1.json`` plays a file.
"""

from kvview_vllm.recorder.ring import Recorder as Recorder, on_signal as on_signal
