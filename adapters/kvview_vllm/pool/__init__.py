"""A view of vLLM's block pool, and its walks over free blocks."""

from kvview_vllm.pool.block_pool import (
    NULL_BLOCK_ID as NULL_BLOCK_ID,
    VLLMBlockPoolView as VLLMBlockPoolView,
    view as view,
)
