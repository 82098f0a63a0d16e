"""Tiny models with random weights, whose tokens depend on every block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 512
FIRST_TOKEN = 4
"""The first token without a special meaning."""

KINDS = ("llama", "gemma")
"""Kinds of models: one group of full attention, or sliding windows and full attention."""

_LAYERS_OF_GROUP, _KV_HEADS, _HEAD_DIM = 2, 2, 32
TOKEN_BYTES = _LAYERS_OF_GROUP * 2 * _KV_HEADS * _HEAD_DIM * 4
"""Bytes of the keys and values of one token in one group, in float32."""


def make_model(kind: str, folder: Path) -> Path:
    """Write a tiny random model and its word-level tokenizer.

    Args:
        kind: One of :data:`KINDS`.
        folder: Folder of the model.
    """
    import torch
    import transformers
    from tokenizers import (
        Tokenizer,
        models,
        pre_tokenizers,
    )

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 2048,
    }
    if kind == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=_LAYERS_OF_GROUP, torch_dtype="float32", **sizes
        )
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.Gemma3TextConfig(
            num_hidden_layers=2 * _LAYERS_OF_GROUP,
            sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * _LAYERS_OF_GROUP,
            query_pre_attn_scalar=_HEAD_DIM,
            tie_word_embeddings=False,
            **sizes,
        )
        model = transformers.Gemma3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # far enough from zero that attention decides the tokens
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    words = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t3"
    ).save_pretrained(folder)
    return folder
