"""The suite of a transform: pages that are encoded, kept, and decoded in any order.

A transform is part of the path to a store, so its pages satisfy laws of the tier.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize
from typing_extensions import override

import kvview.testing.tier.suite  # noqa: F401 - so that its checks have the short names
from kvview.targets import load_target
from kvview.testing.suites.capability import Capability as C, Contract
from kvview.testing.suites.conformance import (
    Conformance,
    ContractMachine,
    example,
    import_lines,
    of_state,
    operation,
)
from kvview.testing.tier.model import bytes_of
from kvview.testing.tier.under_test.opened_store import importable
from kvview.testing.tier.under_test.writer import environment

_METHODS = ("max_bytes", "encode", "decode")
_SIZES = (1, 64, 511, 4096, 9001, 65_536)


class TransformMachine(ContractMachine):
    """Encodes pages, and later decodes them."""

    laws = ("TIER-1", "TIER-3", "TIER-8")
    num_calls = 20

    @initialize()
    def start(self) -> None:
        """Make a transform."""
        self.transform: Any = self.call(self.suite, "make")
        self.pages: dict[bytes, tuple[bytes, bytes]] = {}
        """Each page with its encoded bytes, by key."""

    @operation(
        "TIER-1",
        key=st.binary(min_size=1, max_size=40),
        size=st.sampled_from(_SIZES),
        num_zeros=st.sampled_from((0, 1, 2)),
    )
    def encode(self, key: bytes, size: int, num_zeros: int) -> None:
        """Encode a page of random bytes, of zeros, or of both."""
        page = bytearray(bytes_of(key, size))
        zeros = size * num_zeros // 2
        page[size - zeros :] = bytes(zeros)
        before = bytes(page)
        try:
            encoded = bytes(self.transform.encode(key, memoryview(page)))
        except Exception:  # the connector then does not keep the page
            return
        self.true(page == before, "encode changes no page", "other bytes", "the same", "TIER-3")
        most = self.call(self.transform, "max_bytes", size)
        what = f"encode returns at most max_bytes({size}) bytes"
        self.true(len(encoded) <= most, what, len(encoded), f"at most {most}", "TIER-8")
        self.pages[key] = before, encoded

    @operation(
        "TIER-1",
        when=lambda machine: machine.pages,
        key=of_state(lambda machine: st.sampled_from([*machine.pages])),
    )
    def decode(self, key: bytes) -> None:
        """Decode a page into memory that other pages have used."""
        expected, encoded = self.pages[key]
        page, data = bytearray(b"\xa5" * len(expected)), bytearray(encoded)
        self.call(self.transform, "decode", key, memoryview(data), memoryview(page))
        is_same = data == encoded
        what = "decode does not change the encoded bytes"
        self.true(is_same, what, "other bytes", "the same", "TIER-3")
        what = f"a page of {len(expected)} bytes is decoded as it was encoded"
        self.true(page == expected, what, "other bytes", "the same")


class TransformConformance(Conformance):
    """The suite of a class of transforms."""

    contract: ClassVar[Contract] = "transform"
    machine = TransformMachine
    transform: ClassVar[type]
    """The class."""
    is_shared: ClassVar[bool] = True
    """Whether other processes decode the pages."""

    def make(self) -> Any:
        """Make a transform."""
        return self.transform()

    @classmethod
    @override
    def capabilities(cls) -> list[C]:
        return [C.REOPEN] if importable(cls.transform) and cls.is_shared else []

    @example("TIER-1", C.REOPEN)
    def test_tier_1_another_process(self, machine: TransformMachine) -> None:
        """Processes: a page that is decoded in another process is exact, or decode raises."""
        machine.start()
        for number, size in enumerate(_SIZES):
            machine.encode(b"key %d" % number, size, num_zeros=number % 3)
        pages = {key.hex(): [len(page), data.hex()] for key, (page, data) in machine.pages.items()}
        process = subprocess.run(
            [sys.executable, "-c", f"from {__name__} import decode_pages; decode_pages()"],
            input=json.dumps([importable(self.transform), pages]),
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        if process.returncode:
            raise RuntimeError(f"the decoding process has failed: {process.stderr[-2000:]}")
        decoded = json.loads(process.stdout)
        for (page, _), found in zip(machine.pages.values(), decoded, strict=True):
            what = f"a page of {len(page)} bytes is decoded in another process as it was encoded"
            machine.true(found in (None, page.hex()), what, "other bytes", "the same")

    @override
    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        yield {"suite": self, "transform": self.make()}


def is_transform(target: object) -> bool:
    """Return whether a target is a class of transforms."""
    has_methods = (callable(getattr(target, name, None)) for name in _METHODS)
    return isinstance(target, type) and all(has_methods)


def decode_pages() -> None:
    """Decode the pages that another process has encoded, and write them to the output."""
    target, pages = json.loads(sys.stdin.read())
    transform: Any = load_target(target)()
    decoded: list[str | None] = []
    for key, (size, data) in pages.items():
        page = bytearray(size)
        encoded = memoryview(bytearray.fromhex(data))
        try:
            transform.decode(bytes.fromhex(key), encoded, memoryview(page))
            decoded.append(page.hex())
        except Exception:  # the connector then computes the block
            decoded.append(None)
    sys.stdout.buffer.write(json.dumps(decoded).encode())


def suite_of_transform(found: Any, is_shared: bool = True) -> type[TransformConformance]:
    """Make the suite of a class of transforms.

    Args:
        found: The class.
        is_shared: Whether other processes decode the pages.
    """
    name = f"Test{found.__name__}"
    imports = f"{import_lines(found)}\nfrom {__name__} import suite_of_transform"
    members = {"transform": found, "__module__": found.__module__, "is_shared": is_shared}
    members["made_by"] = f"{imports}\n\n{name} = suite_of_transform({found.__qualname__})"
    return type(name, (TransformConformance,), members)
