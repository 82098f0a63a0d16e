"""Injected faults of modules that have tests of their own instead of checks of the kit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .edits import ROOT, Base, Variant, read_variants


@dataclass(frozen=True)
class FaultOfTests:
    """A wrong module, which tests must detect.

    Args:
        variant: The wrong text.
        module: The module that has the text.
        tests: The folder or file of the tests.
    """

    variant: Variant
    module: str
    tests: str

    def first_failure(self) -> str | None:
        """Run the tests until one fails; returns the message of the failure."""
        file, _, wrong = self.variant.write().rpartition(":")
        names = f"{self.module} {file} {self.variant.kind} {wrong}"
        run = [*(sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.wrong_module")]
        done = subprocess.run(
            [*run, "-p", "no:cacheprovider", "--tb=short", self.tests],
            cwd=ROOT,
            env={**os.environ, "WRONG_MODULE": names},
            capture_output=True,
            text=True,
        )
        if done.returncode not in (0, 1):
            raise ValueError(f"{self.variant.name}: the tests cannot run: {done.stdout[-2000:]}")
        found = re.search(r"^(?:E|  \| ) +(.+)", done.stdout, re.M)
        return None if done.returncode == 0 else found[1] if found else done.stdout[-500:]


def read_faults(file: str, base: Base, module: str, tests: str) -> Sequence[FaultOfTests]:
    """Return the faults of the text file next to a module."""
    variants = read_variants(Path(file).with_suffix(".txt"), base)
    return [FaultOfTests(variant, module, tests) for variant in variants]
