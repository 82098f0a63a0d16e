"""Every test of this folder runs on the vLLM release that can be imported, or is skipped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest


class NeedsVLLM(pytest.Module):
    """A test file that is skipped without vLLM, and imported without the warnings of vLLM."""

    def collect(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip(  # a submodule, because this folder is named vllm too
                "vllm.version",
                reason="needs vLLM's Python sources: tests/vllm/sources.py",
                exc_type=ImportError,
            )
            from kvview_vllm.simulation.scheduler import prepare

            prepare()  # before any test file imports what needs a platform
            return [*super().collect()]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    made: pytest.Module = NeedsVLLM.from_parent(parent, path=module_path)
    return made


@pytest.fixture(scope="session")
def engines() -> Any:
    """vLLM's scheduler as ``kvview check --engine vllm`` drives it."""
    from kvview_vllm.simulation import VLLMEngines

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VLLMEngines()
