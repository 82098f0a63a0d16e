"""The fields of a ``config.json`` that determine a KV cache, by model type.

Each row is a ``model_type``. A type without a row is read as :data:`PLAIN`: every layer
attends, within ``sliding_window`` tokens if that is set. Any other field of its file that may
change a KV cache (:data:`CUES`) is refused, because its meaning is unknown.

Source: the configuration classes of transformers 5.19 (defaults of fields that a file may lack);
the models of vLLM 0.32.0, whose specifications ``tests/replay/model_specs.json`` pins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvview_reference.sizing.layer_rules import (
    Rule,
    every,
    flagged,
    lettered,
    listed,
    numbered,
    period,
    starting_at,
)


@dataclass(frozen=True)
class State:
    """The state of a layer, and the fields with its sizes.

    Args:
        kind: The shapes: Mamba 1, Mamba 2, gated delta net, or a short convolution alone.
        sizes: Field of each size of the shapes.
        dtype: Field with the type of the recurrent part; without it the model's type.
    """

    kind: Literal["mamba1", "mamba2", "delta_net", "convolution"]
    sizes: Mapping[str, str]
    dtype: str | None = None


@dataclass(frozen=True)
class Facts:
    """The meaning of the fields of one model type.

    Args:
        rules: Ways to list the kinds of the layers; the first whose field is set decides.
        defaults: Values of fields that a file may lack.
        state: State of the layers that have one.
        is_latent: Whether attention is multi-head latent attention.
        head_size: Field with the elements of a head; without it, hidden size over heads.
        global_fields: Fields of full attention that replace those of sliding windows.
        extra_window: Tokens that the model's window has beyond its field.
        ignored: Fields that match :data:`CUES` but do not change the cache.
    """

    rules: tuple[Rule, ...] = (listed(), every())
    defaults: Mapping[str, Any] = field(default_factory=dict)
    state: State | None = None
    is_latent: bool = False
    head_size: str = "head_dim"
    global_fields: Mapping[str, str] = field(default_factory=dict)
    extra_window: int = 0
    ignored: tuple[str, ...] = ()


CUES = re.compile(
    r"sliding|window|swa|chunk|mamba|ssm|state_size|conv|recurrent|lru|rwkv|layer_type|layers_block"
    r"|block_type|block_configs|pattern|attn_layer|attention_layer|attn_type|attention_type|hybrid"
    r"|full_att|linear_(key|value|num|attn|conv|head)|no_rope_layer|global_(head|num)|num_global"
    r"|kv_lora|v_head_dim|kv_shared|shared_kv|kv_heads|head_kv|kv_channels|query_groups|multi_query"
    r"|heads_per_layer|attention_groups|attn_config|new_decoder|index_(topk|head|n_heads)|compress"
    r"|cross_att|is_encoder_decoder|bidirectional"
)
"""Names of fields that may change what a KV cache stores."""

HARMLESS = re.compile(
    r"^_|^mtp_|_dtype$|_bias$|_norm$|_norms$|layernorms$|_act$|_init$|_kernels$|multipliers?$"
    r"|mamba_chunk_size|chunk_size_feed_forward"
)
"""Names among them that never do: types, biases, norms, initial values, kernels, private names."""

PLAIN = Facts(rules=(listed(), every("window")))

_LATENT = Facts(is_latent=True, ignored=("v_head_dim",))
_QWEN = Facts(
    rules=(listed(), starting_at("max_window_layers", "window", "full")),
    defaults={"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28},
)
_EVERY_FOURTH_FULL = (listed(), period("full_attention_interval", "full", "state"))
_DELTA_NET = Facts(
    rules=_EVERY_FOURTH_FULL,
    defaults={"full_attention_interval": 4, "head_dim": 256}
    | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32},
    state=State(
        "delta_net",
        {
            "kernel": "linear_conv_kernel_dim",
            "key_heads": "linear_num_key_heads",
            "value_heads": "linear_num_value_heads",
            "key_size": "linear_key_head_dim",
            "value_size": "linear_value_head_dim",
        },
        dtype="mamba_ssm_dtype",
    ),
)
_MAMBA_2 = {
    "kernel": "mamba_d_conv",
    "groups": "mamba_n_groups",
    "heads": "mamba_n_heads",
    "size": "mamba_d_head",
    "states": "mamba_d_state",
}
_GEMMA = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
_PATTERN = (listed(), period("sliding_window_pattern", "full", "window"))

FACTS: Mapping[str, Facts] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), _QWEN),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"), _DELTA_NET
    ),
    "mistral": Facts(rules=PLAIN.rules, defaults={"sliding_window": 4096}),
    "ministral": Facts(rules=PLAIN.rules, defaults={"sliding_window": 4096}),
    "gemma2": Facts(
        rules=_PATTERN,
        defaults={**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 2},
    ),
    "gemma3_text": Facts(
        rules=_PATTERN,
        defaults={**_GEMMA, "sliding_window": 4096, "sliding_window_pattern": 6},
    ),
    "gemma3n_text": Facts(
        rules=_PATTERN,
        defaults={
            "head_dim": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 35,
            "sliding_window": 512,
            "sliding_window_pattern": 5,
            "num_kv_shared_layers": 15,
        },
        ignored=("activation_sparsity_pattern",),
    ),
    "gemma4_text": Facts(
        rules=_PATTERN,
        defaults={"sliding_window": 512, "sliding_window_pattern": 6, "head_dim": 256},
        global_fields={
            "head_dim": "global_head_dim",
            "num_key_value_heads": "num_global_key_value_heads",
        },
    ),
    "gpt_oss": Facts(
        rules=_PATTERN,
        defaults={"sliding_window": 128, "head_dim": 64, "sliding_window_pattern": 2},
    ),
    "cohere2": Facts(
        rules=_PATTERN,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
        extra_window=1,
    ),
    "olmo3": Facts(rules=_PATTERN, defaults={"sliding_window": 4096, "sliding_window_pattern": 4}),
    "llama4_text": Facts(
        rules=(
            listed(),
            flagged("no_rope_layers", "chunked", "full"),
            period("no_rope_layer_interval", "full", "chunked"),
        ),
        defaults={"attention_chunk_size": 8192, "no_rope_layer_interval": 4, "head_dim": 128},
    ),
    "exaone4": Facts(rules=(listed(),), ignored=("sliding_window_pattern",)),
    "smollm3": Facts(rules=PLAIN.rules, ignored=("no_rope_layers", "no_rope_layer_interval")),
    "minimax_m2": Facts(rules=(flagged("attn_type_list", "full", "state"), every())),
    "jamba": Facts(
        rules=(period("attn_layer_period", "full", "state", offset="attn_layer_offset"),),
        defaults={"attn_layer_period": 8, "attn_layer_offset": 4, "num_key_value_heads": 8}
        | {"mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 2},
        state=State(
            "mamba1",
            {"kernel": "mamba_d_conv", "states": "mamba_d_state", "expand": "mamba_expand"},
        ),
        ignored=("mamba_dt_rank",),
    ),
    "falcon_h1": Facts(
        rules=(every("full and state"),),
        state=State("mamba2", {**_MAMBA_2, "inner": "mamba_d_ssm"}),
        ignored=("mamba_expand", "mamba_use_mlp", "mamba_norm_before_gate", "attn_layer_indices"),
    ),
    "nemotron_h": Facts(
        rules=(lettered("hybrid_override_pattern"), listed("layers_block_type"), listed()),
        defaults={"mamba_ssm_cache_dtype": "float32", "head_dim": 128, "num_key_value_heads": 8}
        | {"ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64}
        | {"n_groups": 8, "conv_kernel": 4},
        state=State(
            "mamba2",
            {
                "kernel": "conv_kernel",
                "groups": "n_groups",
                "heads": "mamba_num_heads",
                "size": "mamba_head_dim",
                "states": "ssm_state_size",
            },
            dtype="mamba_ssm_cache_dtype",
        ),
        ignored=("chunk_size",),
    ),
    "granitemoehybrid": Facts(
        rules=(listed(), listed("layers_block_type")),
        defaults={"mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2},
        state=State("mamba2", {**_MAMBA_2, "expand": "mamba_expand"}),
    ),
    "zamba2": Facts(
        rules=(listed("layers_block_type"),),
        defaults={"mamba_ngroups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_state": 64},
        state=State(
            "mamba2",
            {
                "kernel": "mamba_d_conv",
                "groups": "mamba_ngroups",
                "heads": "n_mamba_heads",
                "states": "mamba_d_state",
                "expand": "mamba_expand",
            },
        ),
        head_size="attention_head_dim",
        ignored=(
            *("mamba_headdim", "hybrid_layer_ids", "kv_channels", "num_query_groups"),
            *("chunk_size", "state_size"),
        ),
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"),
        Facts(
            rules=(listed(), numbered("full_attn_idxs", "full", "state")),
            state=State("convolution", {"kernel": "conv_L_cache", "inner": "conv_dim"}),
            ignored=("conv_dim_out",),
        ),
    ),
}
