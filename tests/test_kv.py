"""The KV cache against the tensors that transformers' classes really cache."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tfcost.fit import kv_report  # noqa: E402
from tfcost.models import load  # noqa: E402

GROUPED = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 12, "vocab_size": 61}  # fmt: skip
LATENT = {"hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 61, "q_lora_rank": 16, "kv_lora_rank": 10,
          "qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 7, "n_routed_experts": 4, "n_group": 1,
          "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 53, "n_positions": 64}),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 8}),
    "gemma2": ("Gemma2ForCausalLM", GROUPED | {"sliding_window": 8}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "t5": ("T5ForConditionalGeneration",
           {"d_model": 16, "d_kv": 5, "num_heads": 3, "d_ff": 21, "num_layers": 2, "vocab_size": 61}),
}  # fmt: skip
WINDOWED = {"mistral": 4, "gemma2": 2}
"""Layers with a window of 8."""


def cached(cache):
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    layers = [layer for part in parts if part is not None for layer in part.layers] or cache.layers
    return sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))


@pytest.mark.parametrize("tokens", [5, 20])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_class_caches(tmp_path, name, tokens):
    """Grouped heads with a width of their own, windows, latent vectors, and an encoder's keys and values."""
    kind, config = MODELS[name]
    kind = getattr(transformers, kind)
    torch.manual_seed(0)
    module = kind(kind.config_class(**config)).to(torch.bfloat16).eval()
    ids = torch.randint(5, 50, (3, tokens))
    inputs = {"input_ids": ids}
    if name == "t5":
        inputs = {"input_ids": torch.randint(5, 50, (3, 9)), "decoder_input_ids": ids}
    with torch.no_grad():
        made = cached(module(**inputs, use_cache=True).past_key_values)
    text = json.dumps({"model_type": name, "architectures": [kind.__name__], **config})
    (tmp_path / "config.json").write_text(text)
    report = kv_report(load(tmp_path), seq_len=tokens, batch=3, **({"src_len": 9} if name == "t5" else {}))
    ours = report.totals["kv_cache_bytes"]
    if tokens > 8 and name in WINDOWED:
        # Between two tokens the class keeps w - 1: the next one is the window's w-th while it attends.
        ours -= 3 * WINDOWED[name] * 2 * 2 * 12 * 2
    assert ours == made


def test_latent_attention_both_ways(tmp_path):
    """Compressed, (d_c + d_r) elements of a layer and token; expanded, h (d_nope + d_r + d_v)."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **LATENT})
    )
    totals = kv_report(load(tmp_path), seq_len=7, batch=2).totals
    assert totals["kv_cache_bytes"] == 2 * 7 * 3 * 2 * (10 + 6)
    assert totals["kv_cache_bytes_expanded"] == 2 * 7 * 3 * 2 * 4 * (8 + 6 + 7)


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 1), ("int8", 1)])
def test_a_cache_of_other_elements(dtype, itemsize):
    totals = kv_report(load("llama-3-8b"), seq_len=100, kv_dtype=dtype).totals
    assert totals["kv_cache_bytes"] == 100 * 32 * 2 * 8 * 128 * itemsize
