"""The index of a store that other engines share: its lookups agree with its own stores."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.folder_store import FolderStore
from kvview import CacheGeometry
from kvview.keys import OffloadKey, make_offload_key
from kvview.tier import GuardedTier, Namespace
from kvview.tier.answers import LookupAnswers
from kvview_reference.store_connector.planning.page_index import PageIndex, TierSettings

FIRST, SECOND = (make_offload_key(bytes([number]) * 32, 0) for number in range(2))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[PageIndex]:
    """Of a store that has room for one page."""
    namespace = Namespace("m", weights="1")
    settings = TierSettings(
        mode="finish",
        prefetch=False,
        memory_blocks=0,
        memory_bytes=0,
        store_blocks=1,
        can_delete=False,
        policy="lru",
        store_threshold=1,
        max_bytes=lambda page_bytes: page_bytes,
        shared=(store := GuardedTier(FolderStore(namespace, str(tmp_path)), namespace)),
        has_names=True,
        events=False,
        admits=None,
    )
    made = PageIndex(CacheGeometry.single(4), settings, [64])
    yield made
    store.close()


def is_found(index: PageIndex, key: OffloadKey) -> bool:
    while index.look_up([key]):
        time.sleep(0.001)
    return index.num_leading_hits([key]) == 1


def store(index: PageIndex, key: OffloadKey) -> None:
    assert index.prepare_store([key]) == [key]
    index.end_store([key], (), None)
    index.take_places()


def test_a_page_is_found_once_it_is_stored_although_a_lookup_has_missed_it(
    index: PageIndex,
) -> None:
    assert not is_found(index, FIRST)
    store(index, FIRST)
    assert is_found(index, FIRST)


def test_the_result_of_a_lookup_waits_for_its_reader_and_is_then_valid_for_a_second() -> None:
    now = 0.0
    answers = LookupAnswers(lambda: now)
    assert answers.flags([FIRST]) == ([None], [FIRST])
    answers.looked_up(FIRST, True)
    now = 5.0  # a step that takes long
    assert answers.flags([FIRST]) == ([True], [])
    now = 5.9
    assert answers.flags([FIRST]) == ([True], [])
    now = 6.1
    assert answers.flags([FIRST]) == ([None], [FIRST])
