"""What takes how long in a replay that plays time as it was."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvview.errors import ConfigError


@dataclass(frozen=True)
class TimeModel:
    """What takes how long; the defaults are about an 8B model on an A100.

    1. Prompts are computed at a rate, first come first served, at most ``step_tokens`` in
       one step. What was hit is not computed.
    2. Each running request generates a token every ``decode_step_s``. Neither slows the other.
    3. Each direction of the host link moves one job after the other. A block has
       ``token_bytes`` for each of its tokens, which several KV-cache groups share evenly;
       or, of a hybrid model, ``group_bytes``.
    4. A request starts, and a transfer is heard of, between two steps.

    Args:
        prefill_tokens_per_s: Prompt tokens a second.
        decode_step_s: Seconds.
        load_gb_per_s: From the host to the GPU, 10**9 bytes a second.
        store_gb_per_s: From the GPU to the host.
        token_bytes: Of one token's KV, all ranks together; in all layers of attention.
        step_tokens: Prompt tokens of one step.
        max_running: Requests computed at once.
        speed: Seconds of the trace in one simulated second.
        group_bytes: Of a block of each KV-cache group, all ranks together; None shares
            ``token_bytes`` evenly.
    """

    prefill_tokens_per_s: float = 10_000.0
    decode_step_s: float = 0.02
    load_gb_per_s: float = 20.0
    store_gb_per_s: float = 20.0
    token_bytes: int = 131_072
    step_tokens: int = 8_192
    max_running: int = 256
    speed: float = 1.0
    group_bytes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "group_bytes" and not 0 < value < float("inf"):
                raise ConfigError(f"{field.name} must be above 0, got {value}")
