"""Writes the golden corpus of KV events: the bytes that each release encodes, and their meaning.

    python tests/vllm/make_event_corpus.py FOLDER [RELEASE ...]

writes ``FOLDER/RELEASE.jsonl``: for each case its name, its meaning, and the bytes in base64. Each
release runs in a process of its own, on the sources of ``tests/vllm/sources.py``.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

_TIME = 1_700_000_000.25
_STORED: dict[str, Any] = {
    "block_hashes": [2**64 - 1, 1],
    "parent_block_hash": 15760518052499183552,
    "token_ids": [*range(151640, 151672)],
    "block_size": 16,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
_LATE = {
    "locality": "LOCAL",
    "ownership": "file-tier",
    "session_id": "session-1",
    "lookahead_token_ids": [[5, 6], [7]],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "stored": ("BlockStored", _STORED),
    "stored first of a prompt": ("BlockStored", _STORED | {"parent_block_hash": None}),
    "stored under a hash of all bytes": (
        "BlockStored",
        _STORED
        | {"block_hashes": [bytes(range(32)), b"\xff" * 32], "parent_block_hash": b"p" * 32},
    ),
    "stored for an adapter": (
        "BlockStored",
        _STORED | {"lora_id": 3, "lora_name": "adapter", "extra_keys": [("adapter",)] * 2},
    ),
    "stored with an image and a salt": (
        "BlockStored",
        _STORED | {"extra_keys": [("image-1", 4), None, ("salt",), (b"embedding",)]},
    ),
    "stored in a window": (
        "BlockStored",
        _STORED
        | {
            "group_idx": 1,
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": 1024,
        },
    ),
    "stored in no medium": ("BlockStored", _STORED | {"medium": None}),
    "offloaded, the place alone": (
        "BlockStored",
        {
            "block_hashes": [7],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": 0,
            "medium": "CPU",
            "group_idx": 0,
        },
    ),
    "stored, all that can be said": (
        "BlockStored",
        _STORED | {"kv_cache_spec_sliding_window": 64} | _LATE,
    ),
    "removed": ("BlockRemoved", {"block_hashes": [2**64 - 1], "medium": "GPU", "group_idx": 0}),
    "removed from a tier": (
        "BlockRemoved",
        {"block_hashes": [b"h" * 32], "medium": "CPU", "group_idx": 1} | _LATE,
    ),
    "removed from no medium": ("BlockRemoved", {"block_hashes": [], "medium": None}),
    "cleared": ("AllBlocksCleared", {}),
}


def rows() -> Iterator[dict[str, Any]]:
    """Yield the corpus of the installed release: ``case``, ``meaning``, ``payload``.

    Raises:
        ValueError: An event has a field that no case sets.
    """
    import msgspec

    kv_events: Any = import_module("vllm.distributed.kv_events")
    pack = msgspec.msgpack.Encoder().encode
    known = {name for _, values in CASES.values() for name in values}
    made = []
    for case, (tag, values) in CASES.items():
        kind = getattr(kv_events, tag)
        if new := set(kind.__struct_fields__) - known:
            raise ValueError(f"{tag} has fields that no case sets: {', '.join(sorted(new))}")
        fields = {name: values.get(name) for name in kind.__struct_fields__}
        made.append((case, kind(**fields), {"type": tag, **fields}))
    batches: list[tuple[str, list[Any], list[Any], int | None]]
    batches = [(case, [event], [meaning], 0) for case, event, meaning in made]
    events, meanings = [event for _, event, _ in made], [meaning for _, _, meaning in made]
    batches.append(("all in one batch", events, meanings, 7))
    batches.append(("a rank that is not said", events[:1], meanings[:1], None))
    batches.append(("an empty batch", [], [], 0))
    for case, events, meanings, rank in batches:
        batch = kv_events.KVEventBatch(ts=_TIME, events=events, data_parallel_rank=rank)
        meaning = {"ts": _TIME, "rank": rank, "events": meanings}
        yield {"case": case, "meaning": meaning, "payload": pack(batch)}


def _plain(value: object) -> object:
    return {"bytes": value.hex()} if isinstance(value, bytes) else str(value)


def _write_one(path: Path) -> None:
    with path.open("w") as file:
        for row in rows():
            payload = base64.b64encode(row["payload"]).decode()
            file.write(json.dumps(row | {"payload": payload}, default=_plain) + "\n")


def main() -> None:
    """Write the corpus of each release."""
    from tests.vllm.sources import RELEASES, sources

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("releases", nargs="*", default=[*RELEASES])
    options = parser.parse_args()
    if options.releases == ["installed"]:
        _write_one(options.folder)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    for release in options.releases:
        path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(sources(release))])
        file = options.folder / f"{release}.jsonl"
        subprocess.run(
            [sys.executable, __file__, str(file), "installed"],
            env=os.environ | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
            check=True,
        )
        print(file, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
