"""vLLM's releases for ``kvview check --vllm``: their sources and their changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvview_vllm.releases.sources import resolve_all, sources

if TYPE_CHECKING:
    from kvview.testing.upgrade import Change, Releases


class VLLMReleases:
    """The releases on the package index, by their Python sources."""

    def resolve(self, names: Sequence[str]) -> list[str]:
        """The releases that names stand for: "0.33", "0.33.0", "all"."""
        return resolve_all(names)

    def fetch(self, release: str, on_progress: Callable[[str], None]) -> Path:
        """The folder of its sources, fetched the first time."""
        return sources(release, on_progress)

    def environment(self) -> Mapping[str, str]:
        """Settings for no network, and no log of features that a CPU lacks."""
        return {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

    def changes(self, target: str, old: Path, new: Path) -> list[Change]:
        """The changes to the parts that a connector's source uses."""
        from kvview_vllm.comparison.changes import changes

        return changes(target, old, new)


if TYPE_CHECKING:
    _: type[Releases] = VLLMReleases
