"""vLLM's own managers behind the adapter, compared with the model of the kit.

The model is the reference manager's as well, so both managers agree in everything that the
contract defines. vLLM's ARC differs from the published one and is played without its order.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from dataclasses import replace
from typing import Any

import pytest

from kvview.testing import PROFILES, Capability, ManagerPlayer
from kvview.testing.search import search

PROFILE = replace(PROFILES["ci"], num_examples=150, seed=1000)


@pytest.fixture(scope="module")
def tiers() -> Any:
    """The harnesses of the installed release's managers."""
    pytest.importorskip("vllm.version", reason="needs a vLLM release", exc_type=ImportError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("kvview_vllm.simulation.scheduler").prepare()
        return importlib.import_module("tests.vllm.offloading_tiers")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_vllm_managers_agree_with_the_model(tiers: Any, policy: str) -> None:
    class Tier(tiers.Tier):  # type: ignore[misc]
        @property
        def capabilities(self) -> frozenset[Capability]:
            return super().capabilities - {Capability.ARC}  # type: ignore[no-any-return]

    Tier.policy = policy
    result = search(ManagerPlayer, Tier, PROFILE)
    release = tuple(map(int, importlib.metadata.version("vllm").split(".")[:2]))
    refuses_what_fits = policy == "arc" and release < (0, 30)  # vLLM PR #55461
    failures = [str(failure) for failure in result.failures.values()]
    assert result.failures.keys() == ({"OFF-3"} if refuses_what_fits else set()), failures
    assert result.compared["OFF-5"] > 1000, "stores that evict"


def test_vllm_arc_is_not_the_published_one(tiers: Any) -> None:
    assert "OFF-11" in search(ManagerPlayer, tiers.ARCTier, PROFILE).failures
