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
            from kvview_vllm.simulation.scheduler.cpu_scheduler import prepare

            prepare()  # before the imports that need a platform
            return [*super().collect()]


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    made: pytest.Module = NeedsVLLM.from_parent(parent, path=module_path)
    return made


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "newest: runs on the newest tested release alone")
    config.addinivalue_line("markers", "ends: runs on the oldest and the newest tested minor alone")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose result does not depend on the release, except on some releases."""
    from kvview_vllm.releases.compat.versions import LATEST_OF_MINORS, NEWEST_TESTED, engine_version

    release = engine_version().partition("+")[0]
    for name, releases in (
        ("newest", (NEWEST_TESTED,)),
        ("ends", (LATEST_OF_MINORS[0], NEWEST_TESTED)),
    ):
        if item.get_closest_marker(name) and release not in releases:
            pytest.skip(f"runs on {' and '.join(releases)} alone")


@pytest.fixture(scope="session")
def engines() -> Any:
    """vLLM's scheduler as ``kvview check --engine vllm`` drives it."""
    from kvview_vllm.simulation import VLLMEngines

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return VLLMEngines()
