"""A plugin of pytest: imports a wrong module in place of a module of kvview.

``WRONG_MODULE`` is the name of the module, the file and the names of its class: the right name,
then the wrong one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType

from hypothesis import Phase, settings
from typing_extensions import override

MODULE, FILE, RIGHT, WRONG = os.environ["WRONG_MODULE"].split()


class Loader(SourceFileLoader):
    """Gives the wrong class the name of the right one."""

    @override
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        setattr(module, RIGHT, getattr(module, WRONG))


class Finder(MetaPathFinder):
    """Finds the wrong module."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODULE:
            return None
        return spec_from_file_location(fullname, FILE, loader=Loader(fullname, FILE))


sys.meta_path.insert(0, Finder())
# The first failure is enough, so it is not shrunk, and more examples cost nothing if they fail.
settings.register_profile(
    "first failure", phases=[Phase.generate], max_examples=2000, derandomize=True, database=None
)
settings.load_profile("first failure")
