"""A reset of vLLM's tiering announces pages that it has just dropped (vLLM 0.33.0).

``TieringOffloadingManager.reset_cache`` waits for promotions, which append events, and then drops
all pages of host memory, but not the events. So the next ``take_events`` announces pages that are
gone, and announces them again when they are stored later.

The script ``python tiering_events_of_a_reset.py`` needs no GPU, no model and no kvview. Expected:
no event after the reset, and one when the page is stored.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

KEY = make_offload_key(b"a" * 32, 0)

pages = np.zeros((4, 64), np.uint8).data
region: Any = SimpleNamespace(create_kv_memoryview=lambda: pages)
host = CPUPrimaryTierOffloadingManager(4, region, enable_events=True)
spec: Any = SimpleNamespace()
tier = ExampleSecondaryTierManager(spec, pages, "example")
tier.chunks[KEY] = True  # an earlier request has stored the page
manager = TieringOffloadingManager(host, [tier])


def events() -> str:
    found = [*manager.take_events()]
    return ", ".join("removed" if each.removed else "stored" for each in found) or "none"


request = ReqContext("request")
manager.on_new_request(request)
print(f"lookup: {manager.lookup(KEY, request).name}")
manager.on_schedule_end(ScheduleEndContext(["request"], []))  # starts the promotion
print(f"events before the reset: {events()}")
manager.reset_cache()
print(f"lookup after the reset: {manager.lookup(KEY, request).name}")
print(f"events after the reset: {events()}")
manager.prepare_store([KEY], request)
manager.complete_store([KEY], request)
print(f"events of the next store: {events()}")
