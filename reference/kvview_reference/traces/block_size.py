"""The number of tokens of a block, from the rows of a trace that does not state it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvview.errors import ConfigError

_POWERS = [1 << power for power in range(21)]


def fits(num_tokens: int, num_ids: int, block_size: int) -> bool:
    """Whether a prompt has one id per full block, and at most one for its partial last block."""
    return num_tokens // block_size <= num_ids <= -(-num_tokens // block_size)


def find_block_size(lengths: Iterable[tuple[int, int]], default: int) -> int:
    """Find the block size that the rows fit.

    The published size of the format is preferred, and then powers of two, which engines use. If a
    few rows fit no size that most rows fit, these rows are malformed.

    Args:
        lengths: Prompt tokens and number of ids of each row.
        default: Block size of the published traces of the format.

    Raises:
        ConfigError: No size, or more than one, fits the rows.
    """
    counts = Counter(lengths)

    def num_fitting(size: int) -> int:
        return sum(count for (tokens, ids), count in counts.items() if fits(tokens, ids, size))

    sizes: list[int] = [default, *_POWERS]
    by_size = {size: num_fitting(size) for size in sizes}
    fitting = [size for size, number in by_size.items() if number == counts.total()]
    if default in fitting or len(fitting) == 1:
        return fitting[0]
    low = max((tokens // (ids + 1) + 1 for tokens, ids in counts), default=1)
    limits = [-(-tokens // (ids - 1)) - 1 for tokens, ids in counts if ids > 1]
    high = min(limits, default=None)
    if low == high:
        return low
    is_common = 2 * by_size[default] >= counts.total()
    if fitting or (high is not None and low < high and not is_common):
        end = "more" if high is None else f"{high:,}"
        raise ConfigError(f"the rows fit blocks of {low:,} to {end} tokens; pass --block-size")
    best = max(by_size, key=by_size.__getitem__)  # the default, if no other size fits more rows
    if is_common or 2 * by_size[best] > counts.total():
        return best
    raise ConfigError(
        "no block size fits the prompt lengths and numbers of hash_ids of most rows; pass "
        "--block-size to name the rows that do not fit it"
    )
