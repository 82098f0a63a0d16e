"""How long and how randomly the checks search."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from kvview.errors import ConfigError


@dataclass(frozen=True)
class Profile:
    """The effort of a run.

    Args:
        name: What to ask for it by.
        num_examples: Sequences that a stateful check tries.
        num_steps: Longest sequence, in calls.
        seed: Of everything random; None makes Hypothesis derive it from the check.
    """

    name: str
    num_examples: int
    num_steps: int
    seed: int | None = None


PROFILES = {
    "ci": Profile("ci", num_examples=100, num_steps=40),
    "soak": Profile("soak", num_examples=1000, num_steps=100),
}

_current: ContextVar[Profile] = ContextVar("kvview_profile", default=PROFILES["ci"])


def make_profile(name: str, seed: int | None = None) -> Profile:
    """A profile by name; ``soak`` without a seed draws one.

    Raises:
        ConfigError: The name is not known.
    """
    if name not in PROFILES:
        raise ConfigError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    if seed is None and name == "soak":
        seed = random.SystemRandom().randrange(2**32)
    base = PROFILES[name]
    return Profile(name, base.num_examples, base.num_steps, seed)


def current_profile() -> Profile:
    """The profile of the run that a check is part of; ``ci`` outside any."""
    return _current.get()


@contextmanager
def use_profile(profile: Profile) -> Iterator[None]:
    """Run the checks in the block with this profile."""
    token = _current.set(profile)
    try:
        yield
    finally:
        _current.reset(token)
