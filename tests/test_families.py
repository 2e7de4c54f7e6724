"""Whole models of random structure against two independent counts.

:func:`walk` runs a textbook Transformer as loops over sequences, layers, heads, tokens and coordinates and counts each
multiplication; :func:`expected_parameters` and :func:`expected_bytes` are typed by hand, tensor by tensor, from the
papers' descriptions. The symbolic forms of the document's models stand below them.
"""

from types import SimpleNamespace

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from strategies import LAW, QUICK, THOROUGH, Case, cases

from tfcost import analyze
from tfcost.config import complete
from tfcost.errors import GraphError
from tfcost.families import build
from tfcost.symbols import closed_form

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def resolved(case: Case) -> SimpleNamespace:
    """The case's letters, each left-out one worked out here as the flags' table in the README says."""
    left_out = {
        "pooler": False, "head_transform": False, "next_sentence": 0, "classes": 0, "parallel": False,
        "parallel_norms": 1, "parallel_dropout": 0.0, "sandwich_norm": False, "ffn_count": 1, "vocab": None,
        "src_vocab": None, "cross_attention": False, "window": None, "local_layers": None, "layer_sets": None,
        "embedding_size": None, "embedding_context": 1, "src_len": None, "layers": None, "classifier_tokens": "all",
        "classifier_dense": "", "classifier_dropout": 0.0, "classifier_input_dropout": False, "classifier_bias": True,
    }  # fmt: skip
    m = SimpleNamespace(**{**left_out, **case.fields, **case.run})
    m.kv = case.fields.get("kv_heads", m.heads)
    m.width = case.fields["head_dim"] if "head_dim" in case.fields else quotient(m.hidden, m.heads)
    m.inner = case.fields.get("ffn_hidden", 4 * m.hidden)
    m.encoders = case.fields.get("encoder_layers", m.layers) if "encoder" in m.arch else 0
    m.decoders = case.fields.get("decoder_layers", m.layers) if "decoder" in m.arch else 0
    m.reads = m.arch == "encoder-decoder" or m.cross_attention
    m.attention_dropout = m.dropout if m.attention_dropout is None else m.attention_dropout
    m.logits = m.head and m.vocab is not None
    m.size = ITEMSIZE[m.dtype]
    m.projected = m.embedding_size is not None and m.embedding_size != m.hidden
    m.table = m.embedding_size if m.projected else m.hidden  # width of the token table
    m.rows = m.table if m.projected and m.embedding_projection == "after" else m.hidden  # of positions, types, norm
    m.back = m.projected and m.output_projection
    m.classifier_width = m.table if m.back and not m.pooler else m.hidden
    if m.vocab is None:
        # The input is the hidden vectors themselves: no tables, and nothing that is done to embeddings.
        m.type_vocab, m.embedding_norm, m.embedding_dropout = 0, False, 0.0
        m.positions = None if m.positions == "learned" else m.positions
    return m


def classified(m):
    """Tokens of each sequence that a classifier reads."""
    return 1 if m.pooler or m.classifier_tokens == "first" else m.seq_len


def quotient(a, b):
    whole, rest = divmod(a, b)
    assert rest == 0
    return whole


def stacks(m):
    """(layers, tokens, tokens of the memory that each layer reads or None), in the order in which they run."""
    if m.arch == "encoder":
        return [(m.encoders, m.seq_len, None)]
    decoder = (m.decoders, m.seq_len, m.src_len if m.reads else None)
    return [decoder] if m.arch == "decoder" else [(m.encoders, m.src_len, None), decoder]


def windows(m, layers):
    """The window of each layer, or None. Only a flash kernel makes use of it."""
    local = 0 if m.window is None else layers if m.local_layers is None else m.local_layers
    return [m.window if index < local and m.attention == "flash" else None for index in range(layers)]


# --- Multiplications, one by one ------------------------------------------------------------------------------------


class Counter:
    """Runs matrix products as loops and counts; ``attention`` apart."""

    def __init__(self):
        self.macs = 0
        self.attention = 0

    def dot(self, length):
        """One output element."""
        for _ in range(length):
            self.macs += 1

    def project(self, tokens, width, outputs):
        """Each token's vector to ``outputs`` coordinates."""
        for _ in range(tokens):
            for _ in range(outputs):
                self.dot(width)

    def attend(self, m, tokens, memory, window=None):
        """Multi-head attention of ``tokens`` queries to ``memory`` keys (a window: to as many), head by head."""
        self.project(tokens, m.hidden, m.heads * m.width)
        for _ in range(m.kv):
            self.project(memory, m.hidden, m.width)  # keys
            self.project(memory, m.hidden, m.width)  # values
        before = self.macs
        visited = memory if window is None or window > memory else window
        for _ in range(m.heads):
            for _ in range(tokens):
                for _ in range(visited):
                    self.dot(m.width)  # one score
                for _ in range(m.width):
                    self.dot(visited)  # one coordinate of the weighted sum
        self.attention += self.macs - before
        self.project(tokens, m.heads * m.width, m.hidden)

    def feed(self, m, tokens):
        """The feed-forward part: in, (gate,) out; several one after another."""
        for _ in range(m.ffn_count):
            for _ in range(2 if m.ffn == "glu" else 1):
                self.project(tokens, m.hidden, m.inner)
            self.project(tokens, m.inner, m.hidden)


def walk(m):
    count = Counter()
    for _ in range(m.batch):
        for layers, tokens, memory in stacks(m):
            if m.projected:
                count.project(tokens, m.embedding_context * m.embedding_size, m.hidden)
            for window in windows(m, layers):
                count.attend(m, tokens, tokens, window)
                if memory is not None:
                    count.attend(m, tokens, memory)
                count.feed(m, tokens)
        if m.back:
            count.project(m.seq_len, m.hidden, m.table)
        if m.pooler:
            count.project(1, m.hidden, m.hidden)
        if m.next_sentence:
            count.project(1, m.hidden, m.next_sentence)
        if m.classes:
            if m.classifier_dense:
                count.project(classified(m), m.classifier_width, m.classifier_width)
            count.project(classified(m), m.classifier_width, m.classes)
        if m.logits:
            if m.head_transform:
                count.project(m.seq_len, m.hidden, m.table)
            count.project(m.seq_len, m.table, m.vocab)
    return count


@THOROUGH
@given(cases())
def test_macs_are_the_multiplications_of_a_textbook_model(case):
    m, counted = resolved(case), walk(resolved(case))
    totals = case.totals()
    assert totals["forward_macs"] == counted.macs
    assert totals["forward_flops"] == 2 * counted.macs
    assert totals["attention_flops"] == 2 * counted.attention
    frozen = 0
    if m.arch == "decoder" and m.reads:
        # The encoder is another model's: its output gets no gradient, so K and V have one product in backward, not two.
        frozen = m.batch * m.decoders * m.src_len * m.hidden * 2 * m.kv * m.width
    assert totals["backward_flops"] == 2 * (2 * counted.macs - frozen)


@THOROUGH
@given(cases())
def test_a_causal_half_is_half_of_the_self_attention_of_decoders(case):
    m = resolved(case)
    hidden = 0  # FLOPs that the mask saves: 2 per product, QKᵀ and PV
    if m.arch != "encoder":
        for window in windows(m, m.decoders):
            width = m.seq_len if window is None or window > m.seq_len else window
            visited, half_flops = m.seq_len * width, width * (2 * m.seq_len - width)  # N w - w²/2 products at 2 FLOPs
            hidden += 2 * m.batch * m.heads * m.width * (2 * visited - half_flops)
    totals = case.totals()
    assert totals["forward_flops_causal"] == totals["forward_flops"] - hidden


# --- Parameters -----------------------------------------------------------------------------------------------------


def norm_parameters(m, width=None):
    return (m.hidden if width is None else width) * (2 if m.norm == "layernorm" and m.bias else 1)


def attention_parameters(m):
    q, kv = m.heads * m.width, m.kv * m.width
    own = m.hidden * q + 2 * m.hidden * kv + q * m.hidden + (q + 2 * kv + m.hidden if m.bias else 0)
    return own + {"": 0, "rmsnorm": 2 * m.width, "layernorm": 4 * m.width}[m.qk_norm]


def mlp_parameters(m):
    ins = 2 if m.ffn == "glu" else 1
    return (ins + 1) * m.hidden * m.inner + (ins * m.inner + m.hidden if m.bias else 0)


def layer_parameters(m, reads):
    """Attention, feed-forwards, cross-attention, and a norm for each (two with the sandwich's)."""
    branches = 1 + m.ffn_count + reads
    norms = m.parallel_norms if m.parallel else branches * (2 if m.sandwich_norm else 1)
    return (1 + reads) * attention_parameters(m) + m.ffn_count * mlp_parameters(m) + norms * norm_parameters(m)


def expected_parameters(m):
    """Embeddings, head and the rest."""
    embedding = head = rest = 0
    d = m.hidden
    if m.vocab is not None:
        embedding += m.vocab * m.table
        if m.src_vocab is not None:
            embedding += m.src_vocab * m.table
    for layers, _, memory in stacks(m):
        sets = layers if m.layer_sets is None else m.layer_sets
        rest += sets * layer_parameters(m, memory is not None)
        rest += m.final_norm * norm_parameters(m) + m.embedding_norm * norm_parameters(m, m.rows)
        embedding += m.type_vocab * m.rows
        if m.positions == "learned":
            embedding += m.max_positions * m.rows
        if m.positions == "relative":
            embedding += 32 * m.heads
        if m.projected:
            rest += m.embedding_context * m.table * d + (d if m.embedding_projection_bias else 0)
    if m.back:
        rest += d * m.table + (m.table if m.embedding_projection_bias else 0)
    if m.pooler:
        rest += d * d + d
    if m.next_sentence:
        rest += m.next_sentence * d + m.next_sentence
    if m.classes:
        width = m.classifier_width
        rest += width * width + width if m.classifier_dense else 0
        head += m.classes * width + (m.classes if m.classifier_bias else 0)
    if m.logits:
        if m.head_transform:
            rest += d * m.table + m.table + 2 * m.table
        head += (0 if m.tied else m.vocab * m.table) + (m.vocab if m.head_bias else 0)
    return embedding, head, rest


@THOROUGH
@given(cases())
def test_parameters_by_hand(case):
    embedding, head, rest = expected_parameters(resolved(case))
    totals = case.totals()
    assert totals["embedding_parameters"] == embedding
    assert totals["head_parameters"] == head
    assert totals["non_embedding_parameters"] == rest
    assert (
        totals["parameters"]
        == totals["trainable_parameters"]
        == totals["active_parameters"]
        == sum((embedding, head, rest))
    )


@QUICK
@given(cases())
def test_tables_that_are_only_looked_up_by_hand(case):
    """A tied head multiplies by the token table, so that one stays in; positions, types and biases are looked up."""
    m = resolved(case)
    _, head, rest = expected_parameters(m)
    multiplied = m.vocab * m.table if m.logits and m.tied else 0
    assert case.totals()["active_non_input_embedding_parameters"] == multiplied + head + rest


# --- Bytes kept for backward ----------------------------------------------------------------------------------------


def attention_bytes(m, n, keys):
    """Without its input: Q, K, V, what the kernel keeps, the heads' output, the mask of the residual dropout."""
    e, square = m.size, m.batch * m.heads * n * keys
    q, k = m.batch * n * m.heads * m.width, m.batch * keys * m.kv * m.width
    kept = e * (q + 2 * k)
    if m.qk_norm:
        kept += e * (q + k)  # the norms' inputs
    kept += e * q  # the heads' output
    if m.attention == "flash":
        kept += 4 * m.batch * m.heads * n
    else:
        kept += e * square
        if m.attention_dropout:
            kept += square + e * square
        if m.attention_softcap:
            kept += e * square  # tanh's input
    return kept + (m.batch * n * m.hidden if m.dropout else 0)


def mlp_bytes(m, n, last):
    """Without its input: what enters the activation, (the other factor,) what enters the last product, masks."""
    e, inner = m.size, m.batch * n * m.inner
    kept = e * inner
    if m.ffn == "glu":
        kept += 2 * e * inner  # activation's output and the other factor
    kept += e * inner  # the last product's operand
    if m.ffn_dropout:
        kept += inner
    return kept + (m.batch * n * m.hidden if m.dropout and last else 0)


def layer_bytes(m, n, memory):
    """Each branch has an input and a norm that keeps its own; the sandwich's norm keeps what the branch returned."""
    e, vector = m.size, m.batch * n * m.hidden
    kept = attention_bytes(m, n, n) + sum(mlp_bytes(m, n, index == m.ffn_count) for index in range(1, m.ffn_count + 1))
    if m.parallel:
        # The norms' common input, and an output for each norm; one mask for the sum of the branches.
        return kept + e * vector * (1 + m.parallel_norms) + (vector if m.parallel_dropout else 0)
    branches = 1 + m.ffn_count + (memory is not None)
    kept += e * vector * branches * (3 if m.sandwich_norm else 2)
    return kept if memory is None else kept + attention_bytes(m, n, memory)


def expected_bytes(m):
    """(layers with embeddings and final norms, head and loss)."""
    e, d = m.size, m.hidden
    layers = 0
    for depth, n, memory in stacks(m):
        vector = m.batch * n * d
        layers += depth * layer_bytes(m, n, memory)
        layers += e * m.batch * n * m.rows if m.embedding_norm else 0
        layers += m.batch * n * m.rows if m.embedding_dropout else 0
        layers += e * m.batch * n * m.embedding_context * m.table if m.projected else 0
        layers += e * vector if m.final_norm else 0
        layers += vector if m.final_dropout else 0
        layers += e * m.batch * memory * d if memory is not None else 0  # once for all layers
    vector = m.batch * m.seq_len * d
    layers += e * vector if m.back else 0
    head, reads = classifier_bytes(m) if m.classes else (0, None)
    if m.pooler:
        head += 2 * e * m.batch * d  # the token, and the activation's input
        head += e * m.batch * d if m.next_sentence or reads == "pooled" else 0
    head += e * m.batch * m.seq_len * (m.table if m.back else d) if m.logits or reads == "last" else 0
    if m.logits:
        head += 3 * e * m.batch * m.seq_len * m.table if m.head_transform else 0
        head += (e + 4) * m.batch * m.seq_len * m.vocab
        head += e * m.batch * m.seq_len * m.vocab if m.logit_softcap else 0
    return layers, head


def classifier_bytes(m):
    """What it keeps of its own, and which tensor from before it, if it reads one without dropout in between."""
    elements = m.batch * classified(m) * m.classifier_width
    dropped = elements + m.size * elements  # the mask, and what the next product reads instead
    reads = "pooled" if m.pooler else "first" if m.classifier_tokens == "first" else "last"
    kept = 0
    if m.classifier_dense:
        if m.classifier_input_dropout and m.classifier_dropout:
            kept, reads = kept + dropped, None
        kept += m.size * elements  # the activation's input
        kept += dropped if m.classifier_dropout else m.size * elements
    elif m.classifier_dropout:
        kept, reads = kept + dropped, None
    if reads == "first":
        kept += m.size * elements
    return kept, reads


@THOROUGH
@given(cases())
def test_bytes_kept_by_hand(case):
    layers, head = expected_bytes(resolved(case))
    totals = case.totals()
    assert totals["activation_bytes"] == layers
    assert totals["logits_bytes"] == head
    assert totals["weight_bytes"] == ITEMSIZE[case.run["dtype"]] * totals["parameters"]
    stored = totals["weight_bytes"] + totals["optimizer_bytes"] + totals["master_weight_bytes"]
    assert totals["end_of_forward_bytes"] == layers + head + stored


# --- The document's models, symbolically ----------------------------------------------------------------------------

b, N, T, S, d, h, V, V_src, layer_count = sympy.symbols("b N T S d h V V_src l", positive=True, integer=True)
l_enc, l_dec, N_max, h_kv = sympy.symbols("l_enc l_dec N_max h_kv", positive=True, integer=True)


def equal(found, expected):
    return sympy.expand(found - expected) == 0


@pytest.mark.parametrize("arch", ["decoder", "encoder"])
@pytest.mark.parametrize(("quantity", "expected"), [
    ("forward_flops", layer_count * (24 * b * N * d**2 + 4 * b * N**2 * d) + 2 * b * N * d * V),
    ("backward_flops", 2 * (layer_count * (24 * b * N * d**2 + 4 * b * N**2 * d) + 2 * b * N * d * V)),
    ("train_flops", 3 * (layer_count * (24 * b * N * d**2 + 4 * b * N**2 * d) + 2 * b * N * d * V)),
    ("forward_macs", layer_count * (12 * b * N * d**2 + 2 * b * N**2 * d) + b * N * d * V),
    ("attention_flops", layer_count * 4 * b * N**2 * d),
    ("parameters", layer_count * (12 * d**2 + 13 * d) + V * d),
    ("embedding_parameters", V * d),
    ("non_embedding_parameters", layer_count * (12 * d**2 + 13 * d)),
    ("activation_bytes", layer_count * (34 * b * N * d + 5 * b * N**2 * h)),
    ("activation_bytes_per_layer", 34 * b * N * d + 5 * b * N**2 * h),
    ("logits_bytes", 2 * b * N * d + 2 * b * N * V + 4 * b * N * V),
    ("weight_bytes", 2 * (layer_count * (12 * d**2 + 13 * d) + V * d)),
    ("flops_per_token", layer_count * (24 * d**2 + 4 * N * d) + 2 * d * V),
])  # fmt: skip
def test_the_documents_model(arch, quantity, expected):
    assert equal(closed_form(None, quantity, arch=arch), expected)


def test_the_documents_decoder_with_half_its_square():
    full = layer_count * (24 * b * N * d**2 + 4 * b * N**2 * d) + 2 * b * N * d * V
    half = layer_count * (24 * b * N * d**2 + 2 * b * N**2 * d) + 2 * b * N * d * V
    assert equal(closed_form(None, "forward_flops", causal="half"), half)
    assert equal(closed_form(None, "forward_flops_causal"), half)
    assert equal(closed_form(None, "forward_flops_causal", arch="encoder"), full)
    assert equal(closed_form(None, "train_flops", causal="half"), 3 * half)


@pytest.mark.parametrize(("fields", "expected"), [
    ({"attention": "flash"}, 34 * b * N * d + 4 * b * N * h),
    ({"dropout": 0.0}, 32 * b * N * d + 2 * b * N**2 * h),
    ({"dropout": 0.0, "attention": "flash"}, 32 * b * N * d + 4 * b * N * h),
    ({"ffn_dropout": 0.1}, 38 * b * N * d + 5 * b * N**2 * h),
    ({"pre_norm": False}, 34 * b * N * d + 5 * b * N**2 * h),
    ({"activation": "relu"}, 34 * b * N * d + 5 * b * N**2 * h),
    ({"dtype": "fp32"}, 66 * b * N * d + 9 * b * N**2 * h),
    ({"dtype": "fp8"}, 18 * b * N * d + 3 * b * N**2 * h),
])  # fmt: skip
def test_bytes_of_all_layers(fields, expected):
    assert equal(closed_form(None, "activation_bytes", **fields), layer_count * expected)
    assert equal(closed_form(None, "activation_bytes_per_layer", **fields), expected)


@pytest.mark.parametrize(("fields", "expected"), [
    # Two LayerNorms keep a mean and a 1/deviation per token: in fp32 on a GPU, in bf16 on a CPU.
    ({}, 34 * b * N * d + 5 * b * N**2 * h + 16 * b * N),
    ({"semantics": "cpu"}, 34 * b * N * d + 5 * b * N**2 * h + 8 * b * N),
    # ReLU keeps its output, which the next product keeps anyway.
    ({"activation": "relu"}, 26 * b * N * d + 5 * b * N**2 * h + 16 * b * N),
    ({"activation": "relu", "dropout": 0.0}, 24 * b * N * d + 2 * b * N**2 * h + 16 * b * N),
    ({"dropout": 0.0}, 32 * b * N * d + 2 * b * N**2 * h + 16 * b * N),
    # The inner dropout adds its mask.
    ({"ffn_dropout": 0.1}, 38 * b * N * d + 5 * b * N**2 * h + 16 * b * N),
    # nn.RMSNorm keeps 2bNd + 4bN on a GPU, 8bNd + 4bN on a CPU; there are two.
    ({"norm": "rmsnorm"}, 30 * b * N * d + 5 * b * N**2 * h + 2 * (2 * b * N * d + 4 * b * N)),
    ({"norm": "rmsnorm", "semantics": "cpu"}, 30 * b * N * d + 5 * b * N**2 * h + 2 * (8 * b * N * d + 4 * b * N)),
    # Unfused scaled-dot-product attention works on fp32 copies of Q, K and V, the last two repeated to all heads; a
    # CPU's dropout keeps its mask as numbers.
    ({"attention": "math"}, 40 * b * N * d + 9 * b * N**2 * h + 16 * b * N),
    ({"attention": "math", "kv_heads": h_kv}, 40 * b * N * d + 9 * b * N**2 * h + 16 * b * N),
    ({"attention": "math", "semantics": "cpu"}, 40 * b * N * d + 12 * b * N**2 * h + 8 * b * N),
    # A GPU's flash kernel keeps 24 bytes of random state.
    ({"attention": "flash"}, 34 * b * N * d + 4 * b * N * h + 16 * b * N + 24),
])  # fmt: skip
def test_bytes_of_a_layer_as_our_own_module_keeps_them(fields, expected):
    """The design's figures for ``--implementation reference``; test_reference and test_counters measure them."""
    assert equal(closed_form(None, "activation_bytes_per_layer", implementation="reference", **fields), expected)


@pytest.mark.parametrize(("seq_len", "rows"), [(1, 32), (31, 32), (32, 32), (33, 64), (100, 128)])
def test_efficient_attention_pads_its_log_sum_exp(seq_len, rows):
    """In fp32 a GPU runs the memory-efficient kernel: rows in steps of 32, and 16 bytes of random state."""
    form = {"hidden": 16, "heads": 2, "layers": 3, "batch": 2, "seq_len": seq_len}
    totals = analyze(**form, implementation="reference", attention="flash", dtype="fp32").totals
    each = 66 * 2 * seq_len * 16 + 4 * 2 * rows * 2 + 16 * 2 * seq_len + 16
    assert totals["activation_bytes"] == 3 * each


def test_an_implementation_changes_neither_flops_nor_parameters():
    for quantity in ("parameters", "train_flops", "attention_flops"):
        assert closed_form(None, quantity, implementation="reference") == closed_form(None, quantity)


def test_a_final_norm_keeps_its_input_and_has_2d_parameters():
    assert equal(
        closed_form(None, "activation_bytes", final_norm=True),
        layer_count * (34 * b * N * d + 5 * b * N**2 * h) + 2 * b * N * d,
    )
    assert equal(closed_form(None, "parameters", final_norm=True), layer_count * (12 * d**2 + 13 * d) + V * d + 2 * d)


def test_flash_attentions_recomputation_is_in_no_other_total():
    """2bN²d per layer, once more QKᵀ."""
    assert equal(closed_form(None, "flash_recompute_flops", attention="flash"), layer_count * 2 * b * N**2 * d)
    for quantity in ("train_flops", "hardware_flops", "forward_flops"):
        assert equal(closed_form(None, quantity, attention="flash"), closed_form(None, quantity, attention="eager"))


def test_an_encoder_decoder():
    """Encoder layers on S tokens, decoder layers on T that read them, one table of V rows, logits of T tokens."""
    encoder = 24 * b * S * d**2 + 4 * b * S**2 * d
    decoder = 28 * b * T * d**2 + 4 * b * S * d**2 + 4 * b * T**2 * d + 4 * b * T * S * d
    form = {"arch": "encoder-decoder"}
    logits = 2 * b * T * d * V
    assert equal(closed_form(None, "forward_flops", **form), layer_count * (encoder + decoder) + logits)
    table = V * d
    assert equal(
        closed_form(None, "parameters", **form),
        layer_count * (12 * d**2 + 13 * d) + layer_count * (16 * d**2 + 19 * d) + table,
    )
    kept = 34 * b * S * d + 5 * b * S**2 * h + 43 * b * T * d + 4 * b * S * d + 5 * b * T**2 * h + 5 * b * T * S * h
    assert equal(closed_form(None, "activation_bytes", **form), layer_count * kept + 2 * b * S * d)
    deep = closed_form(None, "forward_flops", encoder_layers=l_enc, decoder_layers=l_dec, **form)
    assert equal(deep, l_enc * encoder + l_dec * decoder + logits)


def test_an_encoder_of_another_model_gets_no_gradient():
    """GPT-2 with cross-attention: of K and V on S tokens of it, backward has the weights' gradients only."""
    form = {"cross_attention": True}
    forward = layer_count * (28 * b * T * d**2 + 4 * b * S * d**2 + 4 * b * T**2 * d + 4 * b * T * S * d)
    forward += 2 * b * T * d * V
    assert equal(closed_form(None, "forward_flops", **form), forward)
    assert equal(closed_form(None, "backward_flops", **form), 2 * forward - layer_count * 4 * b * S * d**2)


def test_a_model_that_could_read_an_encoder_and_has_none_has_the_weights_all_the_same():
    form = {"hidden": 8, "heads": 2, "layers": 3, "seq_len": 5}
    plain, able = analyze(**form).totals, analyze(**form, cross_attention=True).totals
    assert able["parameters"] - plain["parameters"] == 3 * (4 * 64 + 6 * 8)
    for quantity in ("forward_flops", "train_flops", "activation_bytes"):
        assert able[quantity] == plain[quantity]


def test_separate_vocabularies_have_separate_tables():
    form = {"arch": "encoder-decoder", "src_vocab": V_src}
    layers = layer_count * (28 * d**2 + 32 * d)
    assert equal(closed_form(None, "parameters", **form), layers + V * d + V_src * d)
    assert equal(closed_form(None, "parameters", tied=False, **form), layers + 2 * V * d + V_src * d)


def test_a_shared_table_serves_source_target_and_head_once():
    form = {"arch": "encoder-decoder"}
    assert equal(closed_form(None, "embedding_parameters", **form), V * d)
    assert equal(closed_form(None, "head_parameters", **form), 0)
    assert equal(closed_form(None, "head_parameters", tied=False, **form), V * d)


def test_learned_positions_are_a_table_per_stack():
    assert equal(closed_form(None, "embedding_parameters", positions="learned", max_positions=N_max), V * d + N_max * d)
    two = closed_form(None, "embedding_parameters", arch="encoder-decoder", positions="learned", max_positions=N_max)
    assert equal(two, V * d + 2 * N_max * d)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "none"])
def test_other_positions_have_no_parameters_and_keep_nothing(positions):
    assert equal(closed_form(None, "embedding_parameters", positions=positions), V * d)
    assert equal(
        closed_form(None, "activation_bytes", positions=positions), layer_count * (34 * b * N * d + 5 * b * N**2 * h)
    )


def test_relative_positions_are_a_scalar_per_bucket_and_head_once_per_stack():
    """Raffel et al. 2020: 32 buckets, one table for all layers of a stack."""
    assert equal(closed_form(None, "embedding_parameters", positions="relative"), V * d + 32 * h)
    two = closed_form(None, "embedding_parameters", positions="relative", arch="encoder-decoder")
    assert equal(two, V * d + 2 * 32 * h)


def test_without_a_vocabulary_there_is_no_embedding_and_no_head():
    totals = analyze(hidden=12, heads=3, layers=5, batch=2, seq_len=7).totals
    assert totals["embedding_parameters"] == totals["head_parameters"] == totals["logits_bytes"] == 0
    assert totals["forward_flops"] == 5 * (24 * 2 * 7 * 12**2 + 4 * 2 * 7**2 * 12)


def test_a_model_without_a_head_reads_its_table_only():
    with_head, without = (
        analyze(hidden=12, heads=3, layers=5, vocab=100, seq_len=7, head=head, tied=False).totals
        for head in (True, False)
    )
    assert with_head["forward_flops"] - without["forward_flops"] == 2 * 7 * 12 * 100
    assert with_head["parameters"] - without["parameters"] == 100 * 12
    assert without["logits_bytes"] == 0


@pytest.mark.parametrize("arch", ["decoder", "encoder", "encoder-decoder"])
def test_a_million_layers_are_built_once(arch):
    few, many = (
        build(complete({"hidden": 8, "heads": 2, "layers": layers, "arch": arch}), _run(arch)) for layers in (1, 10**6)
    )
    assert len(few.ops) == len(many.ops)


def _run(arch):
    from tfcost.blocks import Run

    return Run(1, 5, 4 if arch == "encoder-decoder" else None)


def test_an_architecture_that_no_family_builds_is_a_defect_of_ours():
    with pytest.raises(GraphError, match="mixer"):
        build(complete({"hidden": 8, "heads": 2, "layers": 1})._replace(arch="mixer"), _run("decoder"))


@LAW
@given(cases("encoder-decoder"), st.integers(1, 9))
def test_the_encoders_output_is_kept_once_however_many_layers_read_it(case, depth):
    """One more decoder layer adds exactly what a decoder layer keeps of its own; the output of the encoder stays 1."""
    base = {key: value for key, value in case.fields.items() if not key.endswith("layers")}
    kept = [
        Case(base | {"encoder_layers": 1, "decoder_layers": layers}, case.run).totals()["activation_bytes"]
        for layers in (depth, depth + 1, depth + 2)
    ]
    assert kept[2] - kept[1] == kept[1] - kept[0]
    m = resolved(Case(base | {"encoder_layers": 1, "decoder_layers": 1}, case.run))
    first = Case(base | {"encoder_layers": 1, "decoder_layers": 1}, case.run).totals()["activation_bytes"]
    assert first == expected_bytes(m)[0]
