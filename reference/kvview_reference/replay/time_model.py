"""The durations in a replay with recorded arrival times."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from kvview.errors import ConfigError


@dataclass(frozen=True)
class TimeModel:
    """Durations of steps and transfers; the defaults are about right for an 8B model on an A100.

    1. Prompts are computed at a fixed rate, in the order of arrival, at most ``step_tokens`` tokens
       in one step. Tokens that were hit are not computed.
    2. Each running request generates a token every ``decode_step_s``. The computation of prompts
       and the generation of tokens do not slow each other down.
    3. Each direction of the host link moves one job at a time. A block has ``token_bytes`` for each
       of its tokens, which several KV-cache groups share evenly. The blocks of a hybrid model have
       ``group_bytes``.
    4. Requests start, and ends of transfers are reported, only between two steps.

    Args:
        prefill_tokens_per_s: Prompt tokens computed per second.
        decode_step_s: Seconds per generated token.
        load_gb_per_s: Bandwidth from the host to the GPU, in 10**9 bytes per second.
        store_gb_per_s: Bandwidth from the GPU to the host, in 10**9 bytes per second.
        token_bytes: KV bytes of one token in all attention layers, summed over all ranks.
        step_tokens: Maximum number of prompt tokens in one step.
        max_running: Maximum number of requests that are computed at once.
        speed: Seconds of the trace in one simulated second.
        group_bytes: Bytes of a block of each KV-cache group, summed over all ranks; None shares
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
