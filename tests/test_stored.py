"""What is stored per weight, held against the tensors that optimizers and quantisers really make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tfcost  # noqa: E402
from tfcost.graph import Graph  # noqa: E402
from tfcost.policy import MIN_8BIT, PAGED_FROM, QUANTIZED, RECIPES, TABLE_8BIT  # noqa: E402
from tfcost.stored import eight_bit, quantized  # noqa: E402

DATA = Path(__file__).parent / "data"
LIBRARY = json.loads((DATA / "bitsandbytes.json").read_text(encoding="utf-8"))["rows"]

# Untied and tied, with and without biases, odd sizes, grouped heads, a table of relative positions, stacked experts.
LLAMA = {"hidden_size": 30, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 5,
         "num_key_value_heads": 1, "head_dim": 6, "vocab_size": 71, "tie_word_embeddings": False}  # fmt: skip
CONFIGS = {
    "llama": LLAMA,
    "qwen2": LLAMA | {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 53, "n_positions": 19},
    "bert": {"hidden_size": 28, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 33,
             "vocab_size": 41, "max_position_embeddings": 17},
    "t5": {"d_model": 16, "d_kv": 5, "num_heads": 3, "d_ff": 21, "num_layers": 2, "vocab_size": 31},
    "mixtral": LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2},
}  # fmt: skip
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertModel",
           "t5": "T5ForConditionalGeneration", "mixtral": "MixtralForCausalLM"}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with the config.json of each."""
    made = {}
    for name, config in CONFIGS.items():
        made[name] = tmp_path_factory.mktemp(name)
        text = json.dumps({"model_type": name, "architectures": [CLASSES[name]], **config})
        (made[name] / "config.json").write_text(text)
    return made


def module_of(name, dtype):
    """The transformers class, in some dtype, with a gradient for each parameter."""
    kind = getattr(transformers, CLASSES[name])
    torch.manual_seed(0)
    with torch.device("cpu"):
        module = kind(kind.config_class(**CONFIGS[name])).to(dtype)
    apart(module)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    return module


def apart(module):
    """Gate and up projections of transformers' experts as two weights, as they are two products."""
    for each in list(module.modules()):
        fused = each._parameters.pop("gate_up_proj", None)
        if fused is not None:
            for name, part in zip(("gate", "up"), fused.detach().chunk(2, dim=1), strict=True):
                each.register_parameter(name, torch.nn.Parameter(part.clone()))


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, arXiv:2302.06675, program 1: the sign of one interpolation, and another as momentum."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                update = (first * momentum + (1 - first) * parameter.grad).sign()
                parameter.sub_(group["lr"] * update)
                momentum.mul_(second).add_(parameter.grad, alpha=1 - second)


def states_of(*optimizers):
    """Bytes of every state tensor after a step; the step counters, which no element has, are left out."""
    for optimizer in optimizers:
        optimizer.step()
    tensors = [t for each in optimizers for state in each.state.values() for t in state.values()]
    return sum(t.nbytes for t in tensors if torch.is_tensor(t) and t.dim())


def muon(parameters, matrices):
    """torch.optim.Muon on the layers' matrices (stacked experts one by one), AdamW on all else."""
    inside = {id(p) for p in matrices}
    apart = []
    for each in matrices:
        for part in each.detach().unbind() if each.dim() == 3 else [each]:
            part = torch.nn.Parameter(part.detach().clone())
            part.grad = torch.ones_like(part)
            apart.append(part)
    return torch.optim.Muon(apart, lr=1e-3), torch.optim.AdamW([p for p in parameters if id(p) not in inside])


# How a recipe is run: the dtype of the model, whether an fp32 copy is stepped, an fp32 buffer that gradients are added
# to (and whether it is the only gradient), and the optimizer.
RUN = {
    "fp32-adam": (torch.float32, False, "", torch.optim.AdamW),
    "bf16-adam": (torch.bfloat16, False, "", torch.optim.Adam),
    "zero-16": (torch.bfloat16, True, "", torch.optim.AdamW),
    "megatron-18": (torch.bfloat16, True, "only", torch.optim.AdamW),
    "grad-accum-20": (torch.bfloat16, True, "too", torch.optim.AdamW),
    "sgd": (torch.bfloat16, False, "", torch.optim.SGD),
    "sgd-momentum": (torch.bfloat16, False, "", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "rmsprop": (torch.bfloat16, False, "", torch.optim.RMSprop),
    "lion": (torch.bfloat16, True, "", Lion),
}


@pytest.mark.parametrize("recipe", RUN)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_step_really_stores(folders, name, recipe):
    dtype, master, buffer, optimizer = RUN[recipe]
    module = module_of(name, dtype)
    parameters = list(module.parameters())
    weights = sum(p.nbytes for p in parameters)
    stepped, copies, gradients = parameters, 0, sum(p.grad.nbytes for p in parameters)
    if master:
        stepped = [torch.nn.Parameter(p.detach().float()) for p in parameters]
        copies = sum(p.nbytes for p in stepped)
        for each, low in zip(stepped, parameters, strict=True):
            each.grad = low.grad.float()
    if buffer:
        gradients = sum(p.grad.nbytes for p in stepped) + (gradients if buffer == "too" else 0)
    states = states_of(optimizer(stepped))
    words = "fp32" if dtype == torch.float32 else "bf16"
    totals = tfcost.analyze(folders[name], command="memory", recipe=recipe, dtype=words, seq_len=8).totals
    assert totals["weight_bytes"] == weights
    assert totals["master_weight_bytes"] == copies
    assert totals["gradient_bytes"] == gradients
    assert totals["optimizer_bytes"] == states


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral", "t5", "bert"])
def test_adafactors_means(folders, name):
    """transformers' Adafactor on bf16 weights, and torch's on fp32 ones: fp32 rows and columns."""
    ours = {
        dtype: tfcost.analyze(folders[name], command="memory", recipe="adafactor", dtype=dtype, seq_len=8)
        for dtype in ("bf16", "fp32")
    }
    module = module_of(name, torch.bfloat16)
    theirs = states_of(transformers.optimization.Adafactor(module.parameters()))
    assert ours["bf16"].totals["optimizer_bytes"] == theirs
    module = module_of(name, torch.float32)
    assert ours["fp32"].totals["optimizer_bytes"] == states_of(torch.optim.Adafactor(module.parameters()))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mixtral"])
def test_muon_has_momentum_for_matrices_and_adam_for_the_rest(folders, name):
    module = module_of(name, torch.float32)
    tables = {id(each.weight) for each in module.modules() if isinstance(each, torch.nn.Embedding)}
    head = module.get_output_embeddings().weight
    matrices = [p for p in module.parameters() if p.dim() > 1 and id(p) not in tables and p is not head]
    theirs = states_of(*muon(list(module.parameters()), matrices))
    totals = tfcost.analyze(folders[name], command="memory", recipe="muon", seq_len=8).totals
    assert totals["optimizer_bytes"] == theirs
    assert totals["master_weight_bytes"] == sum(p.nbytes for p in module.parameters())


def test_fp8_lm_by_its_tensors(folders):
    """fp8 weights and gradients, an fp16 master copy, and Adam's moments in fp8 and fp16."""
    kinds = {"weight_bytes": (torch.float8_e4m3fn,), "gradient_bytes": (torch.float8_e4m3fn,),
             "master_weight_bytes": (torch.float16,),
             "optimizer_bytes": (torch.float8_e4m3fn, torch.float16)}  # fmt: skip
    module = module_of("llama", torch.float32)
    totals = tfcost.analyze(folders["llama"], command="memory", dtype="fp8", seq_len=8).totals
    for key, dtypes in kinds.items():
        assert totals[key] == sum(p.to(dtype).nbytes for p in module.parameters() for dtype in dtypes)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_in_backward_one_gradient_is_there_at_a_time(folders, name):
    """Each weight is stepped and its gradient dropped by a hook; the most bytes of gradients at a hook. (GPT-2's class
    holds Q, K and V in one weight, Mixtral's gate and up: of these models all are apart.)"""
    module = module_of(name, torch.bfloat16)
    parameters = list(module.parameters())
    most = 0

    def step(parameter):
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in parameters if p.grad is not None))
        torch.optim.SGD([parameter], lr=0.1).step()
        parameter.grad = None

    for parameter in parameters:
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(step)
    ids = torch.randint(30, (2, 8))
    torch.autograd.backward(module(input_ids=ids, labels=ids).loss)
    assert all(p.grad is None for p in parameters)
    for recipe in ("sgd-in-backward", "bf16-adam-in-backward", "adam8bit-in-backward"):
        totals = tfcost.analyze(folders[name], command="memory", recipe=recipe, seq_len=8).totals
        assert totals["gradient_bytes"] == most


# --- 8-bit states and quantised weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("row", LIBRARY, ids=lambda row: "x".join(map(str, row["shape"])))
def test_an_eight_bit_state_is_the_librarys(row):
    made = row["adam8bit"]
    count = torch.Size(row["shape"]).numel()
    values, scales = eight_bit(count, count < MIN_8BIT)
    assert values == made["state1"] == made["state2"]
    assert scales == made.get("absmax1", 0) == made.get("absmax2", 0)
    assert made.get("qmap1", 0) == (0 if count < MIN_8BIT else TABLE_8BIT)


@pytest.mark.parametrize("name", ["nf4", "nf4-dq", "int8"])
@pytest.mark.parametrize(
    "row", [row for row in LIBRARY if "nf4" in row], ids=lambda row: "x".join(map(str, row["shape"]))
)
def test_a_quantised_weight_is_the_librarys(row, name):
    """A torch weight has its output features first; ours has what comes in first."""
    out, come_in = row["shape"]
    weight = Graph().weight("w", ("d", "f"), (come_in, out))
    assert quantized(weight, QUANTIZED[name]) == sum(row[name].values())


def test_fp8_weights_have_a_scale_per_tensor():
    assert quantized(Graph().weight("w", ("d", "f"), (64, 256)), QUANTIZED["fp8"]) == 64 * 256 + 4


@pytest.mark.parametrize(("name", "matrix"), [
    ("nf4", lambda n, rows: -(-n // 2) + 4 * -(-n // 64) + 64),
    ("nf4-dq", lambda n, rows: -(-n // 2) + -(-n // 64) + 4 * -(-n // (64 * 256)) + 4 + 64 + 1024),
    ("int8", lambda n, rows: n + 4 * rows), ("fp8", lambda n, rows: n + 4),
])  # fmt: skip
def test_tables_norms_biases_and_head_stay_as_they_are(folders, name, matrix):
    """transformers replaces the layers' linear layers, and not the output embedding."""
    module = module_of("qwen2", torch.bfloat16)
    expected = 0
    for path, weight in module.named_parameters():
        inside = path.startswith("model.layers.") and weight.dim() == 2
        expected += matrix(weight.numel(), weight.shape[0]) if inside else weight.nbytes
    totals = tfcost.analyze(folders["qwen2"], command="memory", mode="prefill", quantize=name, seq_len=8).totals
    assert totals["weight_bytes"] == expected


def test_paged_states_are_on_the_host_and_scales_are_not():
    """Llama 2 7B: all matrices are paged, the norms' states of 4,096 elements are not."""
    matrices, norms = 6_738_415_616 - 65 * 4096, 65
    assert PAGED_FROM == 100_000
    totals = tfcost.analyze("llama-2-7b", command="memory", recipe="paged-adam8bit", seq_len=16).totals
    assert totals["paged_optimizer_bytes"] == 2 * matrices
    assert totals["optimizer_bytes"] == 2 * (4 * matrices // 256 + norms * (4096 + 4 * 16)) + 2 * TABLE_8BIT
    plain = tfcost.analyze("llama-2-7b", command="memory", recipe="adam8bit", seq_len=16).totals
    assert plain["optimizer_bytes"] == totals["optimizer_bytes"] + totals["paged_optimizer_bytes"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["gpt2", "llama-2-7b"])
def test_the_closed_form_is_the_number_whichever_side_of_a_bound_a_weight_is_on(model, recipe):
    dtype = {"fp32-adam": "fp32", "fp8": "fp8"}.get(recipe, "bf16")
    for more in ({}, {"lora_rank": 4}, {"lora_rank": 64, "quantize": "nf4-dq"} if dtype != "fp8" else {}):
        given = {"recipe": recipe, "dtype": dtype, **more}
        totals = tfcost.analyze(model, command="memory", seq_len=64, **given).totals
        config = tfcost.analyze(model, command="memory", seq_len=64).model
        letters = {"d": "hidden", "l": "decoder_layers", "V": "vocab", "N_max": "max_positions", "h": "heads",
                   "d_ff": "ffn_hidden"}  # fmt: skip
        for key in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "master_weight_bytes"):
            form = tfcost.closed_form(model, key, **given)
            assert form.subs({s: config[letters[s.name]] for s in form.free_symbols}) == totals[key]
