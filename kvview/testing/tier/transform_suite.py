"""The suite of a transform: pages that are encoded, kept, and decoded in any order.

A transform is part of the path to a store, so its pages satisfy laws of the tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize
from typing_extensions import override

import kvview.testing.tier.suite  # noqa: F401 - so that its checks have the short names
from kvview.testing.suites.capability import Contract
from kvview.testing.suites.conformance import (
    Conformance,
    ContractMachine,
    Label,
    import_lines,
    of_state,
    operation,
)
from kvview.testing.tier.model import bytes_of

_METHODS = ("max_bytes", "encode", "decode")
_SIZES = (1, 64, 511, 4096, 9001, 65_536)


class TransformMachine(ContractMachine):
    """Encodes pages, and later decodes them."""

    labels: ClassVar[Mapping[str, Label]] = {
        "TIER-1": Label("A decoded page has exactly the bytes that were encoded."),
        "TIER-3": Label("encode changes no page, and decode does not change the encoded bytes."),
        "TIER-8": Label("encode returns at most the number of bytes that max_bytes returns."),
    }
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

    def make(self) -> Any:
        """Make a transform."""
        return self.transform()

    @override
    @contextmanager
    def parts(self) -> Iterator[Mapping[str, object]]:
        yield {"suite": self, "transform": self.make()}

    @classmethod
    @override
    def source(cls) -> str:
        name = cls.transform.__qualname__
        made = f"from {__name__} import suite_of_transform"
        return (
            f"{import_lines(cls.transform)}\n{made}\n\n{cls.__name__} = suite_of_transform({name})"
        )


def is_transform(target: object) -> bool:
    """Return whether a target is a class of transforms."""
    has_methods = (callable(getattr(target, name, None)) for name in _METHODS)
    return isinstance(target, type) and all(has_methods)


def suite_of_transform(found: Any) -> type[TransformConformance]:
    """Make the suite of a class of transforms."""
    members = {"transform": found, "__module__": found.__module__}
    return type(f"Test{found.__name__}", (TransformConformance,), members)
