"""Profiles: the length and the randomness of searches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from kvview.errors import ConfigError


@dataclass(frozen=True)
class Profile:
    """The effort of a run.

    Args:
        name: Its name.
        num_examples: Sequences that a stateful check tries.
        num_steps: Longest sequence, in calls.
        seed: Of everything random; None makes Hypothesis derive it from the check. Of a
            connector, the first of its seeds.
        num_seeds: Simulated runs of a connector.
        run_steps: Fewest scheduler steps of each run; None for those of its scenario.
        engine: Engine of a connector; None for the reference engine.
        options: Of a connector.
        hook_seconds: CPU seconds that one call of a connector's hook may take; None for
            the default.
        inference: Whether a connector serves a model, in place of simulated runs.
        keep_going: Whether all its seeds are played, whatever fails.
        token_seeds: Seeds of the requests that it serves then.
        is_brief: Whether a search ends at its first failure, which is not shrunk.
        shared: Results that the checks of one run share.
    """

    name: str
    num_examples: int
    num_steps: int
    seed: int | None = None
    num_seeds: int = 200
    run_steps: int | None = None
    engine: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    hook_seconds: float | None = None
    inference: bool = False
    keep_going: bool = False
    token_seeds: int = 1
    is_brief: bool = False
    shared: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)


PROFILES = {
    "ci": Profile("ci", num_examples=100, num_steps=40),
    "soak": Profile(
        "soak", num_examples=1000, num_steps=100, num_seeds=2000, run_steps=1000, token_seeds=10
    ),
}

_current: ContextVar[Profile] = ContextVar("kvview_profile", default=PROFILES["ci"])


@dataclass(frozen=True)
class Effort:
    """The settings of a run by its user; None leaves a setting to the profile.

    Args:
        profile: ``ci`` (the same every time) or ``soak`` (random, much longer).
        seed: Of everything random; of a connector, the first of its seeds.
        steps: Longest sequence of calls that a stateful check tries; of a connector, the
            fewest scheduler steps of a run.
        seeds: Simulated runs. This and what follows is for connectors alone.
        engine: Engine that runs them: ``"reference"`` or ``"vllm"``.
        options: Of the connector.
        hook_seconds: CPU seconds that one call of a hook may take.
        inference: Whether they serve a model, in place of simulated runs.
        keep_going: Whether all seeds are played, whatever fails.
    """

    profile: str = "ci"
    seed: int | None = None
    steps: int | None = None
    seeds: int | None = None
    engine: str | None = None
    options: Mapping[str, Any] | None = None
    hook_seconds: float | None = None
    inference: bool = False
    keep_going: bool = False

    def for_connectors(self) -> list[str]:
        """Return the names of the given settings that only a connector has."""
        names = ("seeds", "engine", "options", "hook_seconds", "inference", "keep_going")
        return [name for name in names if getattr(self, name) not in (None, {}, False)]


def make_profile(effort: Effort) -> Profile:
    """Return the requested profile; ``soak`` without a seed draws one.

    Raises:
        ConfigError: The name is not known, or a number is too small.
    """
    name, seed = effort.profile, effort.seed
    if name not in PROFILES:
        raise ConfigError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}")
    for what in ("steps", "seeds", "hook_seconds"):
        value = getattr(effort, what)
        if value is not None and not value > 0:
            raise ConfigError(f"{what} must be more than 0, got {value}")
    if seed is None and name == "soak":
        seed = random.SystemRandom().randrange(2**32)
    if effort.inference and effort.steps is not None:
        raise ConfigError("steps applies to simulated runs only; with inference, drop it")
    base = PROFILES[name]
    return replace(
        base,
        seed=seed,
        num_steps=effort.steps or base.num_steps,
        run_steps=effort.steps or base.run_steps,
        num_seeds=effort.seeds or (base.token_seeds if effort.inference else base.num_seeds),
        engine=effort.engine,
        options=dict(effort.options or {}),
        hook_seconds=effort.hook_seconds,
        inference=effort.inference,
        keep_going=effort.keep_going,
        shared={},
    )


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
