"""SGLang's file backend returns damaged pages, and pages of another dtype (SGLang 0.5.23).

This script needs no GPU, no model and no kvview. ``python sglang_file_backend.py`` stores a page of
ones, changes the file of the page or opens the folder with another setting, and prints the result
of ``get``. Expected: the page of ones in the first line, and nothing or an error in all other
lines.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

RANKS = {"tp_rank": 0, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
FLAGS = dict.fromkeys(("is_mla_model", "enable_storage_metrics", "is_page_first_layout"), False)


def backend(folder: str, **differences: Any) -> Any:
    """Open the folder; the configuration has no dtype and no revision of the weights."""
    settings = RANKS | FLAGS | {"tp_size": 1, "model_name": "org/model"} | differences
    return HiCacheFile(HiCacheStorageConfig(**settings), folder)


def flip(page: bytes) -> bytes:
    """Return the page with one flipped bit."""
    return bytes([page[0] ^ 2]) + page[1:]


cases: dict[str, tuple[Callable[[bytes], bytes], dict[str, Any], torch.dtype]] = {
    "the same page": (bytes, {}, torch.bfloat16),
    "a flipped bit": (flip, {}, torch.bfloat16),
    "a page that is cut": (lambda page: page[:-1], {}, torch.bfloat16),
    "a page with more bytes": (lambda page: b"\0" + page, {}, torch.bfloat16),
    "another model": (bytes, {"model_name": "org/other"}, torch.bfloat16),
    "another rank": (bytes, {"tp_rank": 1, "tp_size": 2}, torch.bfloat16),
    "another dtype": (bytes, {}, torch.float16),
}
for name, (change, differences, dtype) in cases.items():
    with tempfile.TemporaryDirectory() as folder:
        backend(folder).set("key", torch.ones(64, dtype=torch.bfloat16))
        for file in Path(folder).glob("*.bin"):
            file.write_bytes(change(file.read_bytes()))
        page = torch.zeros(64, dtype=dtype)
        try:
            found = backend(folder, **differences).get("key", page)
        except OSError as error:
            found = error
        is_page = isinstance(found, torch.Tensor)
        print(f"{name}: {f'a page that starts with {page[0]}' if is_page else found!r}")
