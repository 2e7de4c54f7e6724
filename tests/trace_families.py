"""A small ``config.json`` of every family that ``tfcost trace`` is held to: real structure, sizes that run anywhere.

Odd sizes on purpose (no width equals a length or a batch), more than two layers where layers alternate, grouped heads
where the family has them.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

GPT = {"vocab_size": 97, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 112,
}
LLAMA = {**COMMON, "num_key_value_heads": 2, "max_position_embeddings": 64}
BERT = {**COMMON, "max_position_embeddings": 64, "type_vocab_size": 2}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**COMMON, "image_size": 32, "patch_size": 8, "num_channels": 3}
MLA = {
    **LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip

FAMILIES: dict[str, Config] = {
    "gpt2": {**GPT, "architectures": ["GPT2LMHeadModel"]},
    "gpt_neo": {
        "vocab_size": 97, "hidden_size": 48, "num_layers": 4, "num_heads": 4, "intermediate_size": 112,
        "max_position_embeddings": 64, "window_size": 16, "attention_types": [[["global", "local"], 2]],
        "architectures": ["GPTNeoForCausalLM"],
    },
    "gptj": {**GPT, "rotary_dim": 8, "architectures": ["GPTJForCausalLM"]},
    "gpt_neox": {**COMMON, "max_position_embeddings": 64, "architectures": ["GPTNeoXForCausalLM"]},
    "gpt_bigcode": {**GPT, "architectures": ["GPTBigCodeForCausalLM"]},
    "bloom": {"vocab_size": 97, "hidden_size": 48, "n_layer": 3, "n_head": 4, "architectures": ["BloomForCausalLM"]},
    "opt": {
        "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 112,
        "word_embed_proj_dim": 48, "max_position_embeddings": 64, "architectures": ["OPTForCausalLM"],
    },
    "falcon": {
        "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "multi_query": True,
        "architectures": ["FalconForCausalLM"],
    },
    "mpt": {
        "vocab_size": 97, "d_model": 48, "n_layers": 3, "n_heads": 4, "max_seq_len": 64,
        "architectures": ["MptForCausalLM"],
    },
    "llama": {**LLAMA, "architectures": ["LlamaForCausalLM"]},
    "mistral": {**LLAMA, "head_dim": 12, "sliding_window": 16, "architectures": ["MistralForCausalLM"]},
    "mixtral": {
        **LLAMA, "head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None,
        "architectures": ["MixtralForCausalLM"],
    },
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**LLAMA, "head_dim": 16, "architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {
        **LLAMA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "architectures": ["Qwen3MoeForCausalLM"],
    },
    "gemma": {**LLAMA, "head_dim": 16, "architectures": ["GemmaForCausalLM"]},
    "gemma2": {
        **LLAMA, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 16, "architectures": ["Gemma2ForCausalLM"],
    },
    "gemma3_text": {
        **LLAMA, "head_dim": 16, "num_hidden_layers": 7, "sliding_window": 16, "architectures": ["Gemma3ForCausalLM"],
    },
    "phi": {**LLAMA, "architectures": ["PhiForCausalLM"]},
    "phi3": {**LLAMA, **IDS, "architectures": ["Phi3ForCausalLM"]},
    "deepseek_v2": {**MLA, "topk_method": "greedy", "architectures": ["DeepseekV2ForCausalLM"]},
    "deepseek_v3": {**MLA, "architectures": ["DeepseekV3ForCausalLM"]},
    "bert": {**BERT, "architectures": ["BertModel"]},
    "roberta": {**BERT, "max_position_embeddings": 66, "architectures": ["RobertaModel"]},
    "distilbert": {
        "vocab_size": 97, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 112, "max_position_embeddings": 64,
        "architectures": ["DistilBertModel"],
    },
    "electra": {**BERT, "embedding_size": 24, "architectures": ["ElectraModel"]},
    "albert": {**BERT, "embedding_size": 24, "architectures": ["AlbertModel"]},
    "mobilebert": {
        **BERT, "embedding_size": 24, "intra_bottleneck_size": 32, "true_hidden_size": 32,
        "num_feedforward_networks": 2, "architectures": ["MobileBertModel"],
    },
    "t5": {
        "vocab_size": 97, "d_model": 48, "d_kv": 12, "d_ff": 112, "num_layers": 3, "num_heads": 4,
        "architectures": ["T5ForConditionalGeneration"],
    },
    "bart": {
        "vocab_size": 97, "d_model": 48, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 112, "decoder_ffn_dim": 80, "max_position_embeddings": 64,
        "architectures": ["BartModel"],
    },
    "vit": {**IMAGE, "architectures": ["ViTForImageClassification"]},
    "swin": {
        "image_size": 32, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "architectures": ["SwinForImageClassification"],
    },
    "dinov2": {**IMAGE, "mlp_ratio": 2, "architectures": ["Dinov2Model"]},
    "clip": {
        "projection_dim": 40, "text_config": {**COMMON, **IDS, "max_position_embeddings": 64}, "vision_config": IMAGE,
        "architectures": ["CLIPModel"],
    },
    "whisper": {
        "vocab_size": 97, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 112, "decoder_ffn_dim": 112, "num_mel_bins": 16,
        "max_source_positions": 20, "max_target_positions": 64, **IDS, "decoder_start_token_id": 1,
        "architectures": ["WhisperForConditionalGeneration"],
    },
}  # fmt: skip

KIN: dict[str, Config] = {
    "qwen2_moe": {
        **LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2,
    },
    "gpt_oss": {
        **LLAMA, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "starcoder2": {**LLAMA, "sliding_window": 16},
    "granitemoe": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "dbrx": {
        "vocab_size": 97, "d_model": 48, "n_heads": 4, "n_layers": 3, "max_seq_len": 64,
        # Without clip_qkv the class cannot run (transformers 5.24).
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "xlm-roberta": FAMILIES["roberta"], "camembert": FAMILIES["roberta"],
    "mt5": {**FAMILIES["t5"], "feed_forward_proj": "gated-gelu"}, "mbart": FAMILIES["bart"],
    "deit": FAMILIES["vit"], "dinov2_with_registers": FAMILIES["dinov2"],
    "clip_text_model": {**COMMON, **IDS, "max_position_embeddings": 64, "projection_dim": 40},
    "clip_vision_model": {**IMAGE, "projection_dim": 40},
}  # fmt: skip
"""Further model types, whose programs the graph is held to (:mod:`test_against`)."""

FAMILIES = {name: {**config, "model_type": name} for name, config in FAMILIES.items()}
KIN = {name: {**config, "model_type": name, "architectures": None} for name, config in KIN.items()}

EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""Families whose class runs experts in a loop, or as grouped products."""

NO_FUSED = ("gpt_neo", "bloom", "mpt", "gptj")
"""Families whose class has no fused attention (transformers 5.24)."""
