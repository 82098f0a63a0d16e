"""Drifts that change no shape that the adapter reads: names and types stay, meanings do not."""

# The texts of vLLM are found as they stand, however long.
# ruff: noqa: E501

from __future__ import annotations

from drift_edits import (  # type: ignore[import-not-found]
    BLOCKS,
    DRIFTS,
    OFFLOAD,
    OUTPUT,
    SCHEDULER,
    UTILS,
    drift,
    rename,
    swap,
)

_BEFORE = set(DRIFTS)
_PACK = 'return BlockHashWithGroupId(block_hash + group_id.to_bytes(4, "big", signed=False))'
_HASH_OF = "return BlockHash(key[:-4])"
_GROUP_OF = 'return int.from_bytes(key[-4:], "big", signed=False)'

# --- keys ---

drift(
    "block hashes are ints",
    "0.11: block hashes from objects to bytes",
    swap(
        UTILS,
        _PACK,
        'return BlockHashWithGroupId(block_hash.to_bytes(32, "big") + group_id.to_bytes(4, "big"))',
        _HASH_OF,
        'return BlockHash(int.from_bytes(key[:-4], "big"))',
        "    return BlockHash(\n        hash_function((parent_block_hash, curr_block_token_ids_tuple, extra_keys))\n    )",
        "    return BlockHash(\n        int.from_bytes(hash_function((parent_block_hash, curr_block_token_ids_tuple, extra_keys)), 'big')\n    )",
        'return int.from_bytes(hash_bytes, byteorder="big") & ((1 << 64) - 1)',
        "return hash_bytes & ((1 << 64) - 1)",
    ),
    swap(
        OFFLOAD,
        "return OffloadKey(block_hash +",
        'return OffloadKey(block_hash.to_bytes(32, "big") +',
        "    return key[:-4]\n",
        '    return int.from_bytes(key[:-4], "big")\n',
    ),
)
drift(
    "group ids of keys have two bytes",
    "0.11: keys from tuples to bytes",
    swap(
        UTILS,
        *(_PACK, _PACK.replace("4,", "2,")),
        *(_HASH_OF, _HASH_OF.replace("4", "2")),
        *(_GROUP_OF, _GROUP_OF.replace("4", "2")),
    ),
)
drift(
    "group ids of keys are little-endian",
    "0.11: keys from tuples to bytes",
    swap(
        UTILS, _PACK, _PACK.replace("big", "little"), _GROUP_OF, _GROUP_OF.replace("big", "little")
    ),
)
drift(
    "group ids of keys come first",
    "0.11: keys from tuples to bytes",
    swap(
        UTILS,
        _PACK,
        'return BlockHashWithGroupId(group_id.to_bytes(4, "big") + block_hash)',
        *(_HASH_OF, _HASH_OF.replace("[:-4]", "[4:]")),
        *(_GROUP_OF, _GROUP_OF.replace("[-4:]", "[:4]")),
    ),
)

drift(
    "group ids of offloaded keys are little-endian",
    "0.20: keys from hashes to bytes with a group",
    swap(
        OFFLOAD,
        *('group_idx.to_bytes(4, "big"', 'group_idx.to_bytes(4, "little"'),
        *('from_bytes(key[-4:], "big"', 'from_bytes(key[-4:], "little"'),
    ),
)

# --- steps ---

drift(
    "new_block_ids are whole tables",
    "0.9: resumed requests have whole tables there",
    swap(
        SCHEDULER,
        "                req_to_new_blocks[req_id].get_block_ids(allow_none=True)\n            )\n            num_computed",
        "                self.kv_cache_manager.get_block_ids(req_id)\n            )\n            num_computed",
    ),
)
drift(
    "num_computed_tokens count the step",
    "0.11: num_computed_tokens is advanced before the output is taken in",
    swap(
        SCHEDULER,
        "            num_computed_tokens.append(req.num_computed_tokens)\n",
        "            num_computed_tokens.append(req.num_computed_tokens + num_scheduled_tokens[req_id])\n",
    ),
)
drift(
    "the groups of a table are reversed",
    "0.9: a tuple of lists, one a group",
    swap(
        BLOCKS,
        "return tuple([blk.block_id for blk in group] for group in groups)",
        "return tuple([blk.block_id for blk in group] for group in reversed(groups))",
    ),
)
drift(
    "preempted requests are named a step later",
    "0.12 names them in the step",
    swap(
        OUTPUT,
        "    preempted_req_ids: set[str] | None = None\n",
        "    preempted_req_ids: set[str] | None = None\n\n"
        "    def __post_init__(self) -> None:\n"
        "        last, SchedulerOutput.last_preempted = getattr(SchedulerOutput, 'last_preempted', None), self.preempted_req_ids\n"
        "        self.preempted_req_ids = last\n",
    ),
)

# --- matches, loads and ends ---

_ASKED = "                                request, block_aligned_local\n"
drift(
    "a match starts inside a block",
    "0.33: hits that end inside a block (prefix_match_unit)",
    swap(
        SCHEDULER, _ASKED, _ASKED.replace("block_aligned_local", "max(0, block_aligned_local - 1)")
    ),
)
drift(
    "a match is counted in blocks",
    "0.26: blocks_per_chunk for sizes in tokens",
    swap(
        SCHEDULER,
        _ASKED,
        _ASKED.replace("block_aligned_local", "block_aligned_local // self.block_size"),
    ),
)
drift(
    "a request is freed before the finish hook",
    "0.24: frees are deferred, 0.25: tables are trimmed at the end",
    swap(
        SCHEDULER,
        "        partial_tail_delay = False\n        if finished_partial_tails:",
        "        self.kv_cache_manager.free(request)\n        partial_tail_delay = False\n        if finished_partial_tails:",
    ),
)

FACTS = [name for name in DRIFTS if name not in _BEFORE]

# --- what only a simulated server reads: the adapter works, `kvview check` refuses in one line ---

drift(
    "Scheduler.failed_recving_kv_req_ids renamed",
    "0.22: waiting requests in several queues",
    rename("failed_recving_kv_req_ids", "unloaded_req_ids"),
)
drift(
    "Scheduler requires an argument more",
    "0.11.1: block_size, 0.20: hash_block_size",
    swap(
        SCHEDULER,
        "        block_size: int,\n        hash_block_size: int | None = None,\n",
        "        block_size: int,\n        num_ranks: int,\n        hash_block_size: int | None = None,\n",
    ),
    harness={'"log_stats": True,': '"log_stats": True, "num_ranks": 1,'},
)

ONLY_SIMULATED = [name for name in DRIFTS if name not in {*_BEFORE, *FACTS}]
