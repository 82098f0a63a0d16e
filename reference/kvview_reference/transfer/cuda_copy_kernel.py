"""A kernel that copies many small pages between GPU memory and pinned host memory.

The copy engines need about a microsecond for each page, so a kernel that reads and writes host
memory directly is faster for small pages. While the kernel runs, it occupies a few multiprocessors.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

Ids = npt.NDArray[np.int64]

WORD_BYTES = 8
_WORDS_AT_ONCE = 1024
_PROGRAMS = 128  # enough for the bandwidth of the bus, at most one for each multiprocessor


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _copy_each(listed, count, AT_ONCE: tl.constexpr, STRIDE: tl.constexpr):  # type: ignore
    for page in range(tl.program_id(0), count, STRIDE):
        to = tl.load(listed + page).to(tl.pointer_type(tl.int64))
        origin = tl.load(listed + count + page).to(tl.pointer_type(tl.int64))
        end = tl.load(listed + 2 * count + page)
        for first in range(0, end, AT_ONCE):
            word = first + tl.arange(0, AT_ONCE)
            tl.store(to + word, tl.load(origin + word, mask=word < end), mask=word < end)


def copy_small_pages(stream: torch.cuda.Stream, dst: Ids, src: Ids, sizes: Ids) -> object:
    """Queue copies on a stream; addresses and sizes are multiples of 8 bytes.

    Args:
        stream: The stream.
        dst: Addresses, int64.
        src: Addresses, int64.
        sizes: In bytes, int64.

    Returns:
        Memory that the kernel reads; the caller must keep it until the kernel has run.
    """
    listed = torch.from_numpy(np.stack([dst, src, sizes // WORD_BYTES])).pin_memory()
    with torch.cuda.stream(stream):
        _copy_each[(_PROGRAMS,)](listed, len(sizes), AT_ONCE=_WORDS_AT_ONCE, STRIDE=_PROGRAMS)
    return listed
