"""Wrong connectors of handoffs: those of public incidents, and one for each law.

The list was written before the checks and the reference connector, from public threads; the first
version of this file in the history has it. Three of its 48 faults break no law in a connector of
messages:

- ``NeverRetries``: a lost request fails its load, and the prompt is computed.
- ``SecondReaderIsServed``: two consumers read at once, and each read holds the blocks, so both get
  the right KV.
- ``ConfirmsBeforePages``: the read has started when the receipt comes, and a read holds the blocks.
  If the pages are lost, the consumer is refused and computes the prompt.
"""

from __future__ import annotations

from pathlib import Path

from kvview.handoff import offers
from kvview.testing.handoff import pd_factory
from kvview_reference.handoff import pull

from .edits import Base, read_variants
from .mutant import Mutant

_BASE = Base("PullConnector", (Path(pull.__file__), Path(offers.__file__)))
_VARIANTS = read_variants(Path(__file__).with_suffix(".txt"), _BASE)
MUTANTS: list[Mutant] = [
    Mutant(pd_factory(one.load()), one.law, f"{one.what}.", one.incident) for one in _VARIANTS
]
globals().update({one.name: one.load() for one in _VARIANTS})  # kvview check names them
