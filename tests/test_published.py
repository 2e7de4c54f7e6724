"""Figures that others printed, within the tolerance of their print; and traps, which must not be our answer.

``data/published_core.json`` has the figures with source and convention, ``data/user_cases_core.json`` what people asked
and were answered wrongly elsewhere, ``data/document_models.json`` the documents' own models. Shapes that a source gives
only by a model's name are typed here from its public config.
"""

import json
import re
from pathlib import Path

import pytest
import sympy

from tfcost import analyze, closed_form

DATA = Path(__file__).parent / "data"
PUBLISHED = {row["id"]: row for row in json.loads((DATA / "published_core.json").read_text(encoding="utf-8"))}
CASES = {
    case["id"]: case
    for case in json.loads((DATA / "user_cases_core.json").read_text(encoding="utf-8"))["cases"]
}  # fmt: skip
DOCUMENT = {
    model["id"]: model
    for model in json.loads((DATA / "document_models.json").read_text(encoding="utf-8"))["models"]
}  # fmt: skip
GiB, GB, MiB = 2**30, 10**9, 2**20


# --- Published figures ----------------------------------------------------------------------------------------------


def shape(inputs, **changes):
    """A row's inputs as keywords."""
    names = {"layers": "layers", "hidden": "hidden", "heads": "heads", "head_dim": "head_dim", "ffn": "ffn_hidden",
             "vocab": "vocab", "seq": "seq_len", "batch": "batch"}  # fmt: skip
    return {names[key]: value for key, value in inputs.items() if key in names} | changes


def learned(inputs):
    """A GPT-2 block with a table of positions: Megatron's and GPT-3's tables."""
    positions = inputs.get("max_pos") or inputs["seq"]
    return analyze(**shape(inputs, positions="learned", max_positions=positions, batch=1)).totals["parameters"]


def untied_without_positions(inputs):
    return analyze(**shape(inputs, positions="rotary", tied=False, batch=1)).totals["parameters"]


def bert(inputs, **changes):
    """A config of BERT's shape."""
    return {
        "model_type": "bert", "architectures": ["BertForPreTraining"], "hidden_size": inputs["hidden"],
        "num_hidden_layers": inputs["layers"], "num_attention_heads": inputs["heads"],
        "intermediate_size": 4 * inputs["hidden"], "vocab_size": inputs["vocab"],
        "max_position_embeddings": inputs["max_pos"], "type_vocab_size": 2,
    } | changes  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """Writes a config and gives the report's totals."""

    def totals(keys, **options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(keys))
        return analyze(path, **options).totals

    return totals


def agrees(row, value) -> bool:
    """Within the row's tolerance, which is that of its print."""
    allowed = row["rel_tol"] * abs(row["value"])
    if row["abs_tol"] is not None:
        allowed = allowed if allowed > row["abs_tol"] else row["abs_tol"]
    return abs(value - row["value"]) <= allowed


@pytest.mark.parametrize("name", [
    "params/megatron2021-7.5B", "params/megatron2021-39.1B", "params/megatron2021-76.1B", "params/megatron2021-1008.0B",
    "params/megatron2019-4.2B", "params/megatron2019-8.3B", "params/gpt3-2.7B",
])  # fmt: skip
def test_parameters_of_gpt_like_models(name):
    row = PUBLISHED[name]
    assert agrees(row, learned(row["inputs"]))


@pytest.mark.parametrize("name", ["params/megatron2021-7.5B", "params/megatron2021-1008.0B"])
def test_narayanans_equation_two_is_exact(name):
    """P = 12 l h² (1 + 13/12h + (V + s)/12lh); it leaves out the final norm, as the document's model does."""
    i = PUBLISHED[name]["inputs"]
    layers, width = i["layers"], i["hidden"]
    assert learned(i) == 12 * layers * width**2 + 13 * layers * width + (i["vocab"] + i["seq"]) * width


@pytest.mark.parametrize("name", [
    "params/megatron-h100-7.1B", "params/megatron-h100-314B", "params/megatron-h100-462B",
])  # fmt: skip
def test_parameters_with_an_untied_head(name):
    row = PUBLISHED[name]
    assert agrees(row, untied_without_positions(row["inputs"]))
    tied = analyze(**shape(row["inputs"], positions="rotary", batch=1)).totals["parameters"]
    assert untied_without_positions(row["inputs"]) - tied == row["inputs"]["vocab"] * row["inputs"]["hidden"]


@pytest.mark.parametrize("name", [
    "params/megatron2019-bert-336M", "params/megatron2019-bert-1.3B", "params/deepspeed-profiler-bert-large-nvidia",
])  # fmt: skip
def test_parameters_of_berts(name, config):
    row = PUBLISHED[name]
    assert agrees(row, config(bert(row["inputs"]))["parameters"])


def test_parameters_of_bert_base_with_its_heads(config):
    row = PUBLISHED["params_readme/bert-base"]
    inputs = {"hidden": 768, "layers": 12, "heads": 12, "vocab": 30522, "max_pos": 512}
    assert agrees(row, config(bert(inputs))["parameters"])


def test_parameters_of_gpipes_transformer():
    """The vocabulary is inferred from the table: 64k rows of 2,048."""
    row = PUBLISHED["params/gpipe-transformer-3"]
    i = row["inputs"]
    parameters = analyze(layers=i["layers"], hidden=i["hidden"], heads=16, ffn_hidden=i["ffn"], vocab=64_000).totals
    assert agrees(row, parameters["parameters"])


def chinchilla_parameters(inputs):
    """Ours, and what Transformer-XL's relative positions add: d² + 2d per layer."""
    own = analyze(**shape(inputs, seq_len=1)).totals["parameters"]
    return own + inputs["layers"] * (inputs["hidden"] ** 2 + 2 * inputs["hidden"])


@pytest.mark.parametrize("name", [
    "params/chinchilla-A9-74M", "params/chinchilla-A9-306M", "params/chinchilla-A9-1018M",
    "params/chinchilla-A9-16183M",
])  # fmt: skip
def test_parameters_of_chinchillas_table(name):
    row = PUBLISHED[name]
    assert agrees(row, chinchilla_parameters(row["inputs"]))


def test_parameters_of_llama_3_2_3b():
    row = PUBLISHED["params_readme/llama-3.2-3b"]
    form = {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "head_dim": 128, "ffn_hidden": 8192,
            "vocab": 128_256, "ffn": "glu", "norm": "rmsnorm", "final_norm": True, "bias": False, "tied": True,
            "positions": "rotary"}  # fmt: skip
    assert agrees(row, analyze(**form).totals["parameters"])


@pytest.mark.parametrize("name", ["weights_memory/bert-base-cased-fp32", "weights_memory/bert-base-cased-fp16"])
def test_bytes_of_weights(name, config):
    """BertModel with the cased vocabulary of 28,996; the page prints MB and means MiB."""
    row = PUBLISHED[name]
    inputs = {"hidden": 768, "layers": 12, "heads": 12, "vocab": 28_996, "max_pos": 512}
    totals = config(bert(inputs, architectures=["BertModel"]), dtype=row["inputs"]["dtype"])
    assert totals["parameters"] == row["inputs"]["params"]
    assert agrees(row, totals["weight_bytes"] / MiB)


@pytest.mark.parametrize(("name", "path"), [
    ("flops_fwd/nanogpt-gpt2-1024-attention_reduce", "layer/attention/weighted_sum"),
    ("flops_fwd/nanogpt-gpt2-1024-attention_proj", "layer/attention/output"),
    ("flops_fwd/nanogpt-gpt2-1024-mlp_ffw2", "layer/mlp/down"),
    ("flops_fwd/nanogpt-gpt2-1024-dense(lm_head)", "head"),
])  # fmt: skip
def test_flops_of_gpt2s_ops(name, path):
    row = PUBLISHED[name]
    rows = {each["path"]: each for each in analyze("gpt2", seq_len=1024, command="flops", by="op").rows}
    assert rows[path]["flops_each"] == row["value"]


def test_flops_of_gpt2s_block():
    row = PUBLISHED["flops_fwd/nanogpt-gpt2-1024-block"]
    rows = {each["path"]: each for each in analyze("gpt2", seq_len=1024, command="flops", by="layer").rows}
    assert rows["layer/0"]["flops"] == row["value"]


@pytest.mark.parametrize(("name", "layers", "hidden", "heads"), [
    ("macs_fwd/calflops-pythia-1.4b-nohead", 24, 2048, 16), ("macs_fwd/calflops-pythia-12b-nohead", 36, 5120, 40),
    ("macs_fwd/calflops-bert-base-128", 12, 768, 12),
])  # fmt: skip
def test_macs_without_a_head(name, layers, hidden, heads):
    row = PUBLISHED[name]
    totals = analyze(layers=layers, hidden=hidden, heads=heads, batch=1, seq_len=row["inputs"]["seq"]).totals
    assert agrees(row, totals["forward_macs"])


@pytest.mark.parametrize("name", ["flops_fwd/calflops-bert-base-128", "flops_fwd/mobilebert-paper-bert-base"])
def test_flops_of_bert_base(name):
    row = PUBLISHED[name]
    assert agrees(row, analyze("bert-base", seq_len=128).totals["forward_flops"])


LLAMA_405B = {
    "layers": 126, "hidden": 16384, "heads": 128, "kv_heads": 8, "ffn_hidden": 53248, "vocab": 128_256, "ffn": "glu",
    "norm": "rmsnorm", "final_norm": True, "bias": False, "tied": False, "positions": "rotary", "dropout": 0.0,
}  # fmt: skip


def test_train_flops_per_token_of_a_large_llama():
    """Half of the square, as the table's other rows have it; the full one is 2% above and outside of the tolerance."""
    row = PUBLISHED["flops_train_token/llama-3.1-405b"]
    half = analyze(**LLAMA_405B, seq_len=row["inputs"]["seq"], convention="causal").totals
    assert agrees(row, half["train_flops_per_token"])
    assert not agrees(row, analyze(**LLAMA_405B, seq_len=row["inputs"]["seq"]).totals["train_flops_per_token"])


def test_train_flops_of_a_whole_run():
    row = PUBLISHED["train_flops/llama-3.1-405b"]
    totals = analyze(**LLAMA_405B, seq_len=8192, convention="6p-all").totals
    assert totals["parameters"] == 405_853_388_800
    assert agrees(row, totals["train_flops_per_token"] * row["inputs"]["tokens"])


@pytest.mark.parametrize(("name", "layers", "hidden", "heads"), [
    ("train_flops/gpt3-D1-GPT-3-Small", 12, 768, 12), ("train_flops/gpt3-D1-GPT-3-Large", 24, 1536, 16),
    ("train_flops/gpt3-D1-GPT-3-2.7B", 32, 2560, 32), ("train_flops/gpt3-D1-GPT-3-6.7B", 32, 4096, 32),
])  # fmt: skip
def test_gpt3s_table_of_compute(name, layers, hidden, heads):
    """Brown et al. 2020, table D.1: 6 P per token, embeddings in, attention out."""
    row = PUBLISHED[name]
    form = {"layers": layers, "hidden": hidden, "heads": heads, "vocab": 50_257, "positions": "learned",
            "max_positions": 2048}  # fmt: skip
    totals = analyze(**form, convention="gpt3-d1").totals
    assert agrees(row, totals["train_flops_per_token"] * row["inputs"]["tokens"])


@pytest.mark.parametrize("name", [
    "flops_ratio/chinchilla-A4-305M", "flops_ratio/chinchilla-A4-552M", "flops_ratio/chinchilla-A4-1.6B",
])  # fmt: skip
def test_chinchillas_ratio_needs_its_own_convention(name):
    """Table A4 comes out without embedding and logits only; appendix F as its text reads is well above it."""
    row = PUBLISHED[name]
    form = shape(row["inputs"])
    six_p = 6 * chinchilla_parameters(row["inputs"]) * row["inputs"]["seq"]
    assert agrees(row, analyze(**form, convention="chinchilla-a4").totals["train_flops"] / six_p)
    assert not agrees(row, analyze(**form, convention="chinchilla").totals["train_flops"] / six_p)


def test_a_longer_context_costs_by_the_square():
    """Liu et al. 2023: (6d + s₂) / (6d + s₁) per token, from 24bsd² + 4bs²d."""
    row = PUBLISHED["flops_ratio/ringattention-175b-4k-to-10M"]
    i = row["inputs"]
    form = {"layers": 96, "hidden": i["hidden"], "heads": 96}
    short, long = (analyze(**form, seq_len=i[key]).totals["flops_per_token"] for key in ("s1", "s2"))
    assert agrees(row, long / short)


def test_selective_recomputation_as_printed():
    """One more forward of the attention core, of one forward pass: (s/6h) / (1 + s/6h)."""
    row = PUBLISHED["flops_overhead/korthikanti-mtnlg-selective"]
    i = row["inputs"]
    totals = analyze(layers=i["layers"], hidden=i["hidden"], heads=128, seq_len=i["seq"]).totals
    assert agrees(row, 100 * totals["attention_flops"] / totals["forward_flops"])


@pytest.mark.parametrize("name", ["act_memory_layer/korthikanti-175B-none-notp",
                                  "act_memory_layer/korthikanti-530B-none-notp"])  # fmt: skip
def test_bytes_of_a_layer(name):
    """sbh(34 + 5as/h), Korthikanti et al. 2022, table 2."""
    row = PUBLISHED[name]
    i = row["inputs"]
    assert i["ffn"] == 4 * i["hidden"]
    totals = analyze(layers=1, hidden=i["hidden"], heads=i["heads"], batch=i["micro_batch"], seq_len=i["seq"]).totals
    assert totals["activation_bytes_per_layer"] == row["value"]


@pytest.mark.parametrize("name", ["act_saving/korthikanti-gpt3-selective", "act_saving/korthikanti-mtnlg-selective"])
def test_the_share_of_the_square(name):
    """(5as/h) / (34 + 5as/h): softmax, its mask and the dropped-out weights."""
    row = PUBLISHED[name]
    i = row["inputs"]
    report = analyze(layers=1, hidden=i["hidden"], heads=i["heads"], seq_len=i["seq"], command="memory", by="op")
    square = sum(each["bytes"] for each in report.rows if each.get("shape", [])[-2:] == [i["seq"], i["seq"]])
    assert agrees(row, 100 * square / report.totals["activation_bytes"])


@pytest.mark.parametrize("name", ["act_memory_layer/torch-megatron_layer_s128_b2_h256_a4",
                                  "act_memory_layer/torch-megatron_layer_s64_b4_h256_a8"])  # fmt: skip
def test_bytes_of_a_layer_as_pytorch_measured_them(name):
    """The document's accounting, and the statistics that it leaves out: mean and rstd of two norms in bf16, 8sb."""
    row = PUBLISHED[name]
    i = row["inputs"]
    totals = analyze(layers=1, hidden=i["hidden"], heads=i["heads"], batch=i["batch"], seq_len=i["seq"]).totals
    assert totals["activation_bytes"] + 8 * i["seq"] * i["batch"] == row["value"]


@pytest.mark.parametrize("name", ["throughput/bloom-log-gbs2048", "throughput/bloom-log-gbs16"])
def test_blooms_log_is_equation_three(name):
    row = PUBLISHED[name]
    i = row["inputs"]
    form = {"layers": i["layers"], "hidden": i["hidden"], "heads": i["heads"], "vocab": i["vocab"], "seq_len": i["seq"]}
    per_sequence = analyze(**form, convention="megatron-recompute").totals["hardware_flops"]
    rate = i.get("samples_per_s") or i["global_batch"] / i["iter_time_s"]
    assert agrees(row, per_sequence * rate / i["gpus"] / 10**12)


@pytest.mark.parametrize("name", [
    "throughput/bloom-prequel-200B-160gpu-fp16", "throughput/bloom-prequel-20B-8gpu-bf16",
    "throughput/bloom-prequel-200B-80gpu-bf16",
])  # fmt: skip
def test_blooms_earlier_log_is_eight_p_without_embeddings(name):
    row = PUBLISHED[name]
    i = row["inputs"]
    form = {"layers": i["layers"], "hidden": i["hidden"], "heads": i["heads"], "vocab": 250_880, "seq_len": i["seq"],
            "batch": i["global_batch"]}  # fmt: skip
    step = analyze(**form, convention="bigscience-8p").totals["hardware_flops"]
    assert agrees(row, step / i["iter_time_s"] / i["gpus"] / 10**12)


def test_a_profiler_that_misses_attention_is_not_our_default():
    """DeepSpeed's page prints 128.87 GMACs for a BERT-large layer; QKᵀ and PV are missing."""
    row = PUBLISHED["macs_fwd/deepspeed-profiler-bert-large-layer"]
    i = row["inputs"]
    form = {"layers": 1, "hidden": i["hidden"], "heads": i["heads"], "ffn_hidden": i["ffn"], "arch": "encoder",
            "batch": i["batch"], "seq_len": i["seq"]}  # fmt: skip
    totals = analyze(**form).totals
    assert not agrees(row, totals["forward_macs"])
    assert agrees(row, totals["forward_macs"] - totals["attention_flops"] // 2)
    assert f"{totals['forward_macs'] / 10**9:.2f}" == "131.53"


def test_a_counter_that_misses_one_product_is_not_our_default():
    """Calflops on BLOOM-1b7, without a head: 155.42 GMACs, since ``baddbmm`` (QKᵀ) has no handler."""
    row = PUBLISHED["macs_fwd/calflops-bloom-1b7-partial"]
    form = {"layers": 24, "hidden": 2048, "heads": 16, "batch": 1, "seq_len": row["inputs"]["seq"]}
    totals = analyze(**form).totals
    assert not agrees(row, totals["forward_macs"])
    assert agrees(row, totals["forward_macs"] - totals["attention_flops"] // 4)
    with_head = analyze(**form, vocab=250_880).totals["forward_macs"]
    assert not agrees(row, with_head)


# --- What people asked ----------------------------------------------------------------------------------------------


def right(case, key):
    """A case's right value: an int, or a Decimal as text."""
    value = CASES[case]["right"][key]
    return int(value.replace(",", "")) if isinstance(value, str) and re.fullmatch(r"[0-9,]+", value) else value


def shows(value, text) -> bool:
    """Whether a value printed to as many decimals as ``text`` is that text."""
    decimals = len(text.partition(".")[2])
    return f"{value:,.{decimals}f}" == text


def llama(layers, hidden, heads, kv_heads, ffn, vocab, **more):
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn_hidden": ffn, "vocab": vocab,
        "ffn": "glu", "activation": "silu", "norm": "rmsnorm", "final_norm": True, "bias": False, "tied": False,
        "positions": "rotary", "dropout": 0.0, **more,
    }  # fmt: skip


LLAMA_2_7B = llama(32, 4096, 32, 32, 11008, 32_000)
LLAMA_2_13B = llama(40, 5120, 40, 40, 13824, 32_000)
LLAMA_2_70B = llama(80, 8192, 64, 8, 28672, 32_000)
LLAMA_3_8B = llama(32, 4096, 32, 8, 14336, 128_256)
LLAMA_3_70B = llama(80, 8192, 64, 8, 28672, 128_256)


def test_f01_forward_flops_of_llama_3_8b():
    totals = analyze(**LLAMA_3_8B, batch=1, seq_len=4096).totals
    assert totals["forward_flops"] == right("F01", "total_flops")
    assert totals["attention_flops"] == right("F01", "attn_flops")
    assert totals["forward_flops"] - totals["attention_flops"] == right("F01", "linear_flops")
    assert totals["forward_macs"] == right("F01", "total_macs")
    preset = analyze("llama-3-8b", batch=1, seq_len=4096).totals
    assert preset["forward_flops"] == right("F01", "total_flops")


def attention_sublayer(**form):
    rows = {row["path"]: row for row in analyze(layers=1, command="flops", **form).rows}
    return rows["layer/attention"]


def test_f07_one_multi_head_attention():
    i = CASES["F07"]["inputs"]
    row = attention_sublayer(hidden=i["embed"], heads=i["heads"], batch=i["batch"], seq_len=i["seq"])
    assert (row["macs_each"], row["flops"]) == (right("F07", "macs"), right("F07", "flops"))


@pytest.mark.parametrize("case", ["F10", "F14"])
@pytest.mark.parametrize("kernel", ["eager", "flash"])
def test_f10_f14_scaled_dot_product_attention(case, kernel):
    i = CASES[case]["inputs"]
    form = {"hidden": i["H"] * i["D"], "heads": i["H"], "layers": 1, "batch": i["B"], "seq_len": i["S"]}
    assert analyze(**form, attention=kernel).totals["attention_flops"] == right(case, "flops")


@pytest.mark.parametrize("kv_heads", [32, 8, 1])
def test_f11_grouped_queries_leave_the_square_alone(kv_heads):
    i = CASES["F11"]["inputs"]
    form = {"hidden": i["heads"] * i["head_dim"], "heads": i["heads"], "kv_heads": kv_heads, "layers": 1}
    totals = analyze(**form, batch=i["B"], seq_len=i["S"]).totals
    assert totals["attention_flops"] == right("F11", "flops_per_layer")


def test_f13_attention_per_token_and_position():
    i = CASES["F13"]["inputs"]
    b, n, length, h, d_k = sympy.symbols("b N l h d_k", positive=True, integer=True)
    square = closed_form(None, "attention_flops", head_dim=d_k).subs({h: i["heads"], d_k: i["head_dim"]})
    assert sympy.expand(square - length * b * n**2 * right("F13", "coef_per_layer")) == 0


A100 = 312e12


@pytest.mark.parametrize(("row", "form", "seq", "key"), [
    ("L3-8B S8192", LLAMA_3_8B, 8192, "8B"), ("L2-13B S4096", LLAMA_2_13B, 4096, "13B"),
    ("L3-70B S8192", LLAMA_3_70B, 8192, "L3-70B"), ("L2-70B S4096", LLAMA_2_70B, 4096, "L2-70B"),
])  # fmt: skip
def test_t04_utilisation_with_and_without_the_embedding(row, form, seq, key):
    rate = CASES["T04"]["inputs"]["rows"][row]
    for side, convention in (("with_embedding", "palm-all"), ("without_embedding", "palm-no-input-embedding")):
        per_token = analyze(**form, seq_len=seq, convention=convention).totals["train_flops_per_token"]
        if key in CASES["T04"]["right"][side]:
            assert shows(100 * per_token * rate / A100, CASES["T04"]["right"][side][key])


def test_t05_utilisation_of_llama_405b():
    i = CASES["T05"]["inputs"]
    for key, convention in (("mfu_with_embedding", "palm-all"), ("mfu_matmul_only", "document")):
        totals = analyze(**LLAMA_405B, seq_len=i["seq"], convention=convention).totals
        assert totals["parameters"] == right("T05", "params")
        assert shows(100 * totals["train_flops_per_token"] * i["tps"] / i["peak"], CASES["T05"]["right"][key])


def test_t06_flops_per_token_of_llama_3_8b():
    totals = analyze(**LLAMA_3_8B, seq_len=8192, convention="palm-no-input-embedding").totals
    assert totals["train_flops_per_token"] == right("T06", "flops_per_token")


def test_t07_flops_per_token_of_a_small_model():
    i = CASES["T07"]["inputs"]
    form = {"layers": i["depth"], "hidden": i["h"], "heads": i["heads"], "vocab": i["vocab"], "seq_len": i["seq"]}
    per_token = analyze(**form).totals["train_flops_per_token"]
    assert per_token == right("T07", "flops_per_token")
    assert shows(100 * per_token * i["tok_per_s"] / i["gpus"] / A100, CASES["T07"]["right"]["mfu_a100"])


def test_t17_linear_and_attention_parts_of_a_long_step():
    i = CASES["T17"]["inputs"]
    seq_len = i["seq"][0]
    full = analyze(**LLAMA_2_7B, batch=i["batch"], seq_len=seq_len).totals
    half = analyze(**LLAMA_2_7B, batch=i["batch"], seq_len=seq_len, causal="half").totals
    values = CASES["T17"]["right"]
    assert shows(3 * (full["forward_flops"] - full["attention_flops"]) / 10**12, values["learnable_8k_T"])
    assert shows(3 * full["attention_flops"] / 10**12, values["attn_8k_T"])
    assert shows(3 * half["attention_flops"] / 10**12, values["attn_8k_causal_T"])


def test_t19_a_step_of_llama_2_7b():
    i = CASES["T19"]["inputs"]
    totals = analyze(**LLAMA_2_7B, batch=i["batch"], seq_len=i["seq"]).totals
    values = CASES["T19"]["right"]
    assert totals["train_flops"] == round(values["total_T"] * 10**12)
    assert 3 * totals["attention_flops"] == round(values["attn_T"] * 10**12)
    assert totals["train_flops"] - 3 * totals["attention_flops"] == round(values["weights_T"] * 10**12)


def test_t22_a_gated_layer_with_grouped_queries_is_not_24d2():
    i = CASES["T22"]["inputs"]
    form = llama(1, i["h"], i["heads"], i["kv_heads"], i["ffn"], None, final_norm=False)
    assert analyze(**form, seq_len=i["seq"]).totals["flops_per_token"] == right("T22", "fwd_flops_per_token_layer")
    plain = {"layers": 1, "hidden": i["h"], "heads": i["heads"], "seq_len": i["seq"]}
    assert analyze(**plain).totals["flops_per_token"] == right("T22", "naive_24h2")
    # Gated with d_ff = 4d: 32d² per token.
    gated = analyze(**plain, ffn="glu").totals
    assert gated["forward_flops"] - gated["attention_flops"] == 32 * i["seq"] * i["h"] ** 2


def test_p02_gpt2s_parameters_tied_and_untied():
    i = CASES["P02"]["inputs"]
    form = {"layers": i["L"], "hidden": i["h"], "heads": 12, "vocab": i["vocab"], "positions": "learned",
            "max_positions": i["ctx"], "final_norm": True}  # fmt: skip
    tied, untied = analyze(**form).totals, analyze(**form, tied=False).totals
    assert tied["parameters"] == right("P02", "params")
    assert untied["parameters"] == right("P02", "untied")
    assert untied["head_parameters"] == right("P02", "head")


def test_a02_what_flash_attention_keeps():
    """Input, Q, K, V and output of 2sbh each, and 4 bytes per query and head."""
    i = CASES["A02"]["inputs"]
    form = {"hidden": i["h"], "heads": i["heads"], "layers": 1, "dropout": 0.0, "batch": i["b"], "seq_len": i["s"]}
    rows = {row["path"]: row for row in analyze(**form, attention="flash", command="memory").rows}
    assert rows["layer/attention"]["bytes"] == right("A02", "saved_only")


def test_a04_a_bert_large_layer():
    i = CASES["A04"]["inputs"]
    form = {"hidden": i["h"], "heads": i["a"], "layers": 1, "arch": "encoder", "pre_norm": False, "batch": i["b"],
            "seq_len": i["s"], "command": "memory"}  # fmt: skip
    report = analyze(**form, by="op")
    assert report.totals["activation_bytes_per_layer"] == right("A04", "bytes_16bit")
    elements = sum(row["bytes"] for row in report.rows if row.get("itemsize") == 2)
    assert elements == 2 * right("A04", "elements")
    boundary = [row["bytes"] for row in report.rows if row.get("tensor") == "layer/input"]
    assert boundary == [right("A04", "boundary_bytes_16bit")]


def test_a10_gpt2_large_on_a_32_gb_card():
    i = CASES["A10"]["inputs"]
    values = CASES["A10"]["right"]
    report = analyze("gpt2-large", vocab=i["vocab_padded"], batch=4, seq_len=i["seq"], attention="eager",
                     command="memory", by="op")  # fmt: skip
    assert analyze("gpt2-large", vocab=i["vocab_padded"]).totals["parameters"] == right("A10", "params")
    assert shows(i["L"] * report.totals["activation_bytes_per_layer"] / GB, values["act_GB"])
    copies = [row["bytes"] for row in report.rows if row.get("itemsize") == 4]
    assert copies == [values["logit_alloc_MiB"] * MiB]


def test_a11_llama_2_7b_at_a_micro_batch_of_two():
    """Per layer 16sbh + 4sba + 8sbf."""
    i = CASES["A11"]["inputs"]
    totals = analyze("llama-2-7b", batch=i["mbs"], seq_len=i["seq"]).totals
    per_layer = i["seq"] * i["mbs"] * (16 * i["h"] + 4 * i["heads"] + 8 * i["ffn"])
    assert totals["activation_bytes_per_layer"] == per_layer
    assert shows(i["L"] * per_layer / GiB, CASES["A11"]["right"]["act_explicit_fused_norm_GiB"])
    head_input = 2 * i["mbs"] * i["seq"] * i["h"]
    assert shows((totals["logits_bytes"] - head_input) / GiB, CASES["A11"]["right"]["logits_GiB"])


def test_a13_one_key_head():
    """sbh(30 + 4/a + 5as/h): a single head's K and V are 1/a as large."""
    i = CASES["A13"]["inputs"]
    form = {"hidden": i["h"], "heads": i["heads"], "kv_heads": i["kv_heads"], "layers": i["L"], "batch": i["batch"],
            "seq_len": i["seq"], "command": "memory", "by": "op"}  # fmt: skip
    report = analyze(**form)
    values = CASES["A13"]["right"]
    assert shows(report.totals["activation_bytes"] / GiB, values["eager_GiB"])
    square = sum(row["bytes"] for row in report.rows if row.get("shape", [])[-2:] == [i["seq"], i["seq"]])
    assert shows((report.totals["activation_bytes"] - square) / GiB, values["no_quadratic_GiB"])


def fp32_logits(**form):
    """Bytes of the loss's fp32 copy."""
    rows = analyze(layers=1, command="memory", by="op", **form).rows
    (copy,) = [row["bytes"] for row in rows if row.get("tensor", "").endswith("fp32_log_probabilities")]
    return copy


def test_a15_a16_a18_one_copy_of_the_logits():
    a15 = fp32_logits(hidden=768, heads=12, vocab=50_257, batch=8, seq_len=512)
    assert shows(a15 / GiB, CASES["A15"]["right"]["one_logit_copy_GiB"])
    a16, a18 = (CASES[case]["inputs"] for case in ("A16", "A18"))
    copy = fp32_logits(hidden=8, heads=1, vocab=a16["vocab"], batch=a16["batch"], seq_len=a16["seq"])
    assert shows(copy / GiB, CASES["A16"]["right"]["GiB_32768"])
    copy = fp32_logits(hidden=8, heads=1, vocab=a18["vocab"], batch=a18["batch"], seq_len=a18["seq"])
    assert shows(copy / GiB, CASES["A18"]["right"]["one_fp32_copy_GiB"])


def square_rows(heads, seq_len, dtype):
    report = analyze(hidden=8 * heads, heads=heads, layers=1, seq_len=seq_len, dtype=dtype, command="memory", by="op")
    return {row["tensor"]: row["bytes"] for row in report.rows if row.get("shape", [])[-2:] == [seq_len, seq_len]}


def test_a19_the_score_square_of_a_long_sequence():
    """Softmax output, dropout output and a 1-byte mask, of 16 heads and 20,000 tokens in fp32."""
    heads, seq_len, _ = CASES["A19"]["inputs"]["shape"]
    rows = square_rows(heads, seq_len, "fp32")
    assert rows["layer/attention/softmax"] == rows["layer/attention/dropout"] == CASES["A19"]["right"]["GB"] * GB
    assert 4 * rows["layer/attention/dropout/mask"] == rows["layer/attention/softmax"]


def test_a20_one_head_and_one_mask():
    values = CASES["A20"]["right"]
    short, long = CASES["A20"]["inputs"]["S"]
    assert shows(square_rows(1, short, "fp32")["layer/attention/softmax"] / GiB, values["GiB_per_head"])
    assert shows(square_rows(1, long, "fp32")["layer/attention/dropout/mask"] / GiB, values["mask_bool_GiB"])


# --- The documents' models ------------------------------------------------------------------------------------------

TORCH = {"hidden": 512, "heads": 8, "ffn_hidden": 2048, "activation": "relu", "pre_norm": False, "positions": "none"}


def test_torch_nn_transformer():
    model = DOCUMENT["nn.Transformer-default"]
    form = {**TORCH, "arch": "encoder-decoder", "layers": 6, "final_norm": True}
    totals = analyze(**form, batch=model["b"], src_len=model["S"], seq_len=model["T"]).totals
    assert totals["forward_flops"] == model["forward_flops"] == 42_553_835_520
    assert totals["parameters"] == model["parameters"] == 44_140_544
    assert analyze(**form, bias=False).totals["parameters"] == model["parameters_bias_false"]


def test_one_encoder_layer():
    model = DOCUMENT["encoder-layer-512"]
    assert analyze(**TORCH, arch="encoder", layers=1).totals["parameters"] == model["parameters"]


def test_one_decoder_layer():
    form = {**TORCH, "arch": "encoder-decoder", "encoder_layers": 1}
    one, two = (analyze(**form, decoder_layers=layers).totals["parameters"] for layers in (1, 2))
    assert two - one == DOCUMENT["decoder-layer-512"]["parameters"]


def test_the_hand_written_encoder_block():
    model = DOCUMENT["encoder-block-test"]
    totals = analyze(**TORCH, arch="encoder", layers=1, batch=model["b"], seq_len=model["N"]).totals
    assert totals["parameters"] == model["parameters"]
    assert totals["forward_flops"] == model["forward_flops"]


def test_the_toy_translator():
    model = DOCUMENT["toy-translation"]
    form = {**TORCH, "positions": "sinusoidal", "arch": "encoder-decoder", "layers": 6, "src_vocab": 5, "vocab": 7,
            "tied": False}  # fmt: skip
    totals = analyze(**form, batch=model["b"], src_len=model["S"], seq_len=model["T"]).totals
    assert totals["parameters"] == model["parameters"]
    assert totals["forward_flops"] == model["forward_flops"]


def test_vaswanis_base_model_layer_by_layer():
    model = DOCUMENT["vaswani-base"]
    rows = {row["path"]: row for row in analyze("transformer-base", command="params", by="layer").rows}
    for index in range(6):
        assert rows[f"encoder/layer/{index}"]["parameters"] == model["layer_parameters_encoder"]
        assert rows[f"decoder/layer/{index}"]["parameters"] == model["layer_parameters_decoder"]


def test_every_published_row_is_used():
    """A row that no test reads proves nothing."""
    here = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{name}"' in here for name in PUBLISHED)
    assert all(f'"{case}"' in here for case in CASES)
    assert all(f'"{model}"' in here for model in DOCUMENT)
