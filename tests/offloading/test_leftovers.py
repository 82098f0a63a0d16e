from __future__ import annotations

import pytest

from kvview import OffloadKey, make_offload_key
from kvview_reference.offloading import CPUOffloadingManager
from kvview_reference.offloading.leftovers import Leftovers


def test_dicts_are_let_go_in_pieces() -> None:
    leftovers = Leftovers()
    dicts = [dict.fromkeys(range(5)), {}, dict.fromkeys(range(3))]
    leftovers.add(dicts)
    leftovers.drop(4)
    assert list(map(len, dicts)) == [4, 0, 0]
    leftovers.drop(9)
    assert not any(dicts)
    leftovers.drop(1)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_off_8_what_a_reset_leaves_is_gone_when_as_many_keys_have_come(policy: str) -> None:
    manager = CPUOffloadingManager(300, policy)
    keys = [make_offload_key(number.to_bytes(4, "big"), 0) for number in range(900)]

    def store(batch: list[OffloadKey]) -> None:
        output = manager.prepare_store(batch)
        assert output is not None
        manager.complete_store(output.keys_to_store)

    for at in range(0, 600, 30):
        store(keys[at : at + 30])
    manager.reset()
    left = manager._leftovers._dicts
    assert sum(map(len, left)) >= 600
    for at in range(600, 900, 30):
        store(keys[at : at + 30])
    assert not left
    manager.shutdown()
    assert manager.num_free_blocks() == 300
