"""The reference Transformer: equal to PyTorch's own modules, right where the documents err, exact in what it keeps."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tfcost.errors import InputError, TfcostError
from tfcost.validate.masks import additive_mask, causal_mask, length_mask, merge_masks, padding_mask, visible_mask
from tfcost.validate.positions import LearnedPositions, RotaryPositions, SinusoidalPositions, sinusoidal_table
from tfcost.validate.reference import (
    Decoder,
    DecoderLayer,
    Dropout,
    Encoder,
    EncoderLayer,
    FeedForward,
    MultiHeadAttention,
    Softmax,
    Transformer,
    attention_maps,
)
from tfcost.validate.weights import copy_torch_weights

pytestmark = [
    pytest.mark.torch,
    # PyTorch's own encoder says on construction that its nested-tensor path does not apply.
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

B, N, S, D, H, FF = 3, 6, 5, 16, 4, 24
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 round-off on values of order one


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def randomise(module: nn.Module) -> nn.Module:
    """Random values in every parameter, so that biases and norms take part in the comparison."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4 + (parameter.dim() == 1) * 0.5)
    return module


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Every parameter's gradient, compared by copying the gradients over as if they were weights."""
    gradients, expected = copy.deepcopy(theirs), copy.deepcopy(ours)
    for parameter, source in zip(gradients.parameters(), theirs.parameters(), strict=True):
        assert source.grad is not None
        parameter.data = source.grad
    copy_torch_weights(expected, gradients)
    for (name, parameter), wanted in zip(ours.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.data, **EXACT, msg=lambda m, name=name: f"{name}: {m}")


def assert_parity(ours, theirs, inputs: list[Tensor], our_masks: dict, their_masks: dict) -> None:
    """Outputs and all gradients of the two modules are equal to float64 round-off."""
    mine = [x.clone().requires_grad_() for x in inputs]
    yours = [x.clone().requires_grad_() for x in inputs]
    out, expected = ours(*mine, **our_masks), theirs(*yours, **their_masks)
    torch.testing.assert_close(out, expected, **EXACT)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(mine, yours, strict=True):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)
    assert_same_gradients(ours, theirs)


def padding(lengths: list[int], size: int) -> Tensor:
    return length_mask(torch.tensor(lengths), size)


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def masks(queries: int, keys: int) -> dict[str, dict]:
    """Every kind of mask: name -> arguments (mask, key_padding_mask) in nn.Transformer's sense."""
    boolean = torch.rand(queries, keys) < 0.4
    boolean[:, 0] = False  # PyTorch's own modules give NaN where a row is hidden altogether
    per_head = torch.rand(B * H, queries, keys) < 0.4
    per_head[:, :, 0] = False
    hidden = padding([keys, keys - 2, keys - 1], keys)
    return {
        "none": {},
        "boolean": {"mask": boolean},
        "additive": {"mask": floats(queries, keys)},
        "additive-inf": {"mask": additive_mask(boolean, torch.float64)},
        "per-head": {"mask": per_head},
        "per-head-additive": {"mask": floats(B * H, queries, keys)},
        "padding": {"key_padding_mask": hidden},
        "padding-additive": {"key_padding_mask": floats(B, keys)},
        "both": {"mask": boolean, "key_padding_mask": hidden},
        "both-additive": {"mask": floats(queries, keys), "key_padding_mask": additive_mask(hidden, torch.float64)},
    }


KINDS = list(masks(2, 3))
VARIANTS = list(itertools.product([True, False], ["relu", "gelu"], [True, False], ["eager", "sdpa"]))


@pytest.mark.parametrize(("pre_norm", "activation", "batch_first", "attention"), VARIANTS)
def test_encoder_layer_equals_pytorch(pre_norm, activation, batch_first, attention):
    theirs = randomise(
        nn.TransformerEncoderLayer(
            D, H, FF, 0.0, activation, batch_first=batch_first, norm_first=pre_norm, dtype=torch.float64
        )
    )
    ours = EncoderLayer(
        D, H, FF, activation=activation, pre_norm=pre_norm, batch_first=batch_first, attention=attention
    ).double()
    copy_torch_weights(ours, theirs)
    x = floats(B, N, D) if batch_first else floats(N, B, D)
    for masks_of in masks(N, N).values():
        ours.zero_grad()
        theirs.zero_grad()
        renamed = {{"mask": "src_mask", "key_padding_mask": "src_key_padding_mask"}[k]: v for k, v in masks_of.items()}
        assert_parity(ours, theirs, [x], masks_of, renamed)
    ours.zero_grad()
    theirs.zero_grad()
    causal = {"src_mask": causal_mask(N), "is_causal": True}
    assert_parity(ours, theirs, [x], {"is_causal": True}, causal)


@pytest.mark.parametrize(("pre_norm", "activation", "batch_first", "attention"), VARIANTS)
def test_decoder_layer_equals_pytorch(pre_norm, activation, batch_first, attention):
    theirs = randomise(
        nn.TransformerDecoderLayer(
            D, H, FF, 0.0, activation, batch_first=batch_first, norm_first=pre_norm, dtype=torch.float64
        )
    )
    ours = DecoderLayer(
        D, H, FF, activation=activation, pre_norm=pre_norm, batch_first=batch_first, attention=attention
    ).double()
    copy_torch_weights(ours, theirs)
    x, memory = (floats(B, n, D) if batch_first else floats(n, B, D) for n in (N, S))
    own, cross = masks(N, N), masks(N, S)
    for kind in KINDS:
        ours.zero_grad()
        theirs.zero_grad()
        mine = own[kind] | {f"memory_{k}": v for k, v in cross[kind].items()}
        yours = {f"tgt_{k}": v for k, v in own[kind].items()} | {f"memory_{k}": v for k, v in cross[kind].items()}
        assert_parity(ours, theirs, [x, memory], mine, yours)


@pytest.mark.parametrize(("pre_norm", "activation", "batch_first", "attention"), VARIANTS)
def test_whole_model_equals_pytorch(pre_norm, activation, batch_first, attention):
    theirs = randomise(
        nn.Transformer(
            D, H, 2, 3, FF, 0.0, activation, batch_first=batch_first, norm_first=pre_norm, dtype=torch.float64
        )
    )
    # nn.Transformer has a final norm on both stacks whatever the norm order, and is not causal by itself.
    ours = Transformer(
        arch="encoder-decoder",
        hidden=D,
        heads=H,
        ffn_hidden=FF,
        encoder_layers=2,
        decoder_layers=3,
        activation=activation,
        pre_norm=pre_norm,
        final_norm=True,
        causal=False,
        batch_first=batch_first,
        attention=attention,
        dtype=torch.float64,
    )
    copy_torch_weights(ours, theirs)
    inputs = [floats(B, n, D) if batch_first else floats(n, B, D) for n in (S, N)]
    source, target, cross = masks(S, S), masks(N, N), masks(N, S)
    for kind in ("none", "both", "both-additive", "per-head"):
        ours.zero_grad()
        theirs.zero_grad()
        given = {f"{side}_{k}": v for side, m in (("src", source), ("tgt", target)) for k, v in m[kind].items()}
        given |= {f"memory_{k}": v for k, v in cross[kind].items()}
        assert_parity(ours, theirs, inputs, given, given)


def test_padding_of_the_source_is_padding_of_the_memory():
    model = Transformer(arch="encoder-decoder", hidden=D, heads=H, layers=1).double()
    x, y, hidden = floats(B, S, D), floats(B, N, D), padding([5, 3, 4], S)
    both = model(x, y, src_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    torch.testing.assert_close(model(x, y, src_key_padding_mask=hidden), both)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_equals_pytorch_with_weights(batch_first, bias):
    theirs = randomise(nn.MultiheadAttention(D, H, bias=bias, batch_first=batch_first, dtype=torch.float64))
    ours = MultiHeadAttention(D, H, bias=bias, batch_first=batch_first, dtype=torch.float64)
    copy_torch_weights(ours, theirs)
    q, k, v = (floats(B, n, D) if batch_first else floats(n, B, D) for n in (N, S, S))
    for chosen in masks(N, S).values():
        yours = {"attn_mask" if name == "mask" else name: m for name, m in chosen.items()}
        expected, expected_weights = theirs(q, k, v, **yours, average_attn_weights=False)
        out, weights = ours(q, k, v, **chosen, need_weights=True)
        torch.testing.assert_close(out, expected, **EXACT)
        torch.testing.assert_close(weights, expected_weights, **EXACT)
        torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
        assert ours(q, k, v, **chosen)[1] is None


OPTIONS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "one-kv-head": {"kv_heads": 1},
    "wide-heads": {"head_dim": 7},
    "rotary": {"positions": "rotary"},
    "glu": {"ffn": "glu", "activation": "silu"},
    "rmsnorm": {"norm": "rmsnorm"},
    "no-bias": {"bias": False},
}


@pytest.mark.parametrize("arch", ["encoder", "decoder", "encoder-decoder"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_eager_equals_sdpa(arch, options):
    eager = randomise(Transformer(arch=arch, hidden=D, heads=H, layers=2, **options, dtype=torch.float64))
    fused = Transformer(arch=arch, hidden=D, heads=H, layers=2, **options, attention="sdpa", dtype=torch.float64)
    fused.load_state_dict(eager.state_dict())
    inputs = [floats(B, S, D)] + ([floats(B, N, D)] if arch == "encoder-decoder" else [])
    cases = [{}, {"src_mask": torch.rand(S, S) < 0.5}, {"src_key_padding_mask": padding([5, 0, 2], S)}]
    for chosen in cases:  # rows that are hidden altogether too: both make them zero
        gradients = []
        for model in (eager, fused):
            x = [t.clone().requires_grad_() for t in inputs]
            model(*x, **chosen).square().sum().backward()
            gradients.append([t.grad for t in x])
        torch.testing.assert_close(eager(*inputs, **chosen), fused(*inputs, **chosen), **EXACT)
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_grouped_heads_are_repeated_heads():
    grouped = randomise(MultiHeadAttention(D, 4, kv_heads=2, dtype=torch.float64))
    full = MultiHeadAttention(D, 4, dtype=torch.float64)
    with torch.no_grad():
        for name in ("query", "output"):
            full.get_submodule(name).load_state_dict(grouped.get_submodule(name).state_dict())
        for name in ("key", "value"):
            for part in ("weight", "bias"):
                small = getattr(grouped.get_submodule(name), part)
                heads = small.view(2, D // 4, *small.shape[1:]).repeat_interleave(2, dim=0)
                getattr(full.get_submodule(name), part).copy_(heads.flatten(0, 1))
    x = floats(B, N, D)
    torch.testing.assert_close(grouped(x)[0], full(x)[0], **EXACT)


# Who sees what, by disturbing what must not be seen.


def disturb(x: Tensor, hidden: Tensor) -> Tensor:
    """``x`` with other values where ``hidden`` ([b, N], or [N] for all sequences).

    The features are reversed as well as scaled: what is only shifted or scaled is the same after a LayerNorm.
    """
    return torch.where(hidden.expand(x.shape[:2])[..., None], 3 * x.flip(-1) + 1, x)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"positions": "rotary"}, {"pre_norm": False}, {"kv_heads": 1}])
def test_decoder_never_sees_the_future(attention, options):
    model = Transformer(hidden=D, heads=H, layers=3, attention=attention, **options, dtype=torch.float64)
    x = floats(B, N, D).requires_grad_()
    out = model(x)
    for t in range(N):
        later = torch.arange(N) > t
        disturbed = model(disturb(x, later))
        assert torch.equal(disturbed[:, : t + 1], out[:, : t + 1])
        assert t == N - 1 or not torch.allclose(disturbed[:, -1], out[:, -1])
        (gradient,) = torch.autograd.grad(out[:, t, 0].sum(), x, retain_graph=True)
        assert not gradient[:, later].any()
        assert gradient[:, t].any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_encoder_sees_everything_but_padding(attention):
    model = Transformer(arch="encoder", hidden=D, heads=H, layers=2, attention=attention, dtype=torch.float64)
    x, hidden = floats(B, N, D), padding([6, 2, 4], N)
    assert not torch.allclose(model(disturb(x, torch.arange(N) == N - 1))[:, 0], model(x)[:, 0])
    out = model(x, src_key_padding_mask=hidden)
    assert torch.equal(model(disturb(x, hidden), src_key_padding_mask=hidden)[~hidden], out[~hidden])
    for i, length in enumerate([6, 2, 4]):  # and padding changes nothing at all
        torch.testing.assert_close(out[i, :length], model(x[i : i + 1, :length])[0], **EXACT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_encoder_decoder_sees_neither_future_nor_padding(attention):
    model = Transformer(arch="encoder-decoder", hidden=D, heads=H, layers=2, attention=attention, dtype=torch.float64)
    x, y = floats(B, S, D), floats(B, N, D)
    source, target = padding([5, 2, 3], S), padding([6, 4, 1], N)
    given = {"src_key_padding_mask": source, "tgt_key_padding_mask": target}
    out = model(x, y, **given)
    again = model(disturb(x, source), disturb(y, target), **given)
    assert torch.equal(again[~target], out[~target])
    later = torch.arange(N) > 2
    assert torch.equal(model(x, disturb(y, later), **given)[:, :3], out[:, :3])
    assert not torch.allclose(model(disturb(x, torch.arange(S) == 0), y, **given), out)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_cross_attention_sees_what_the_memory_mask_leaves(attention):
    layer = DecoderLayer(D, H, attention=attention, dtype=torch.float64)
    y, memory = floats(B, N, D), floats(B, S, D)
    mask = torch.zeros(N, S, dtype=torch.bool)
    mask[2, 1:] = True  # target 2 sees source 0 only
    out = layer(y, memory, memory_mask=mask)
    disturbed = layer(y, disturb(memory, torch.arange(S) > 0), memory_mask=mask)
    assert torch.equal(disturbed[:, 2], out[:, 2])
    assert not torch.isclose(disturbed, out).all(-1)[:, [0, 1, 3, 4, 5]].any()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["boolean", "-inf", "-1e9", "padding"])
def test_row_that_sees_nothing_stays_finite(attention, dtype, kind):
    module = MultiHeadAttention(D, H, attention=attention, dtype=dtype)
    nn.init.normal_(module.output.bias)
    x = torch.randn(B, N, D, dtype=dtype, requires_grad=True)
    if kind == "padding":
        given = {"key_padding_mask": padding([0, 3, N], N)}
        hidden = torch.tensor([True, False, False])[:, None].expand(B, N)
    else:
        mask = torch.zeros(N, N, dtype=torch.bool)
        mask[1] = True
        value = {"boolean": None, "-inf": -math.inf, "-1e9": -1e9}[kind]
        given = {"mask": mask if value is None else torch.zeros(N, N).masked_fill(mask, value)}
        hidden = (torch.arange(N) == 1).expand(B, N)
    out, _ = module(x, **given)
    assert out.isfinite().all()
    if kind != "-1e9" or dtype is torch.float16:  # a finite mask is a number: only in fp16 is -1e9 -inf
        assert torch.equal(out[hidden], module.output.bias.expand_as(out[hidden]))
    out.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


# Masks: shapes and senses.


def test_mask_builders():
    inf = math.inf
    expected = torch.tensor([[0, -inf, -inf, -inf], [0, 0, -inf, -inf], [0, 0, 0, -inf], [0, 0, 0, 0]])
    assert torch.equal(additive_mask(causal_mask(4)), expected)
    assert torch.equal(additive_mask(causal_mask(4)), nn.Transformer.generate_square_subsequent_mask(4))
    assert causal_mask(2, 4).tolist() == [[False, False, False, True], [False] * 4]
    assert padding_mask(torch.tensor([[5, 0, 0], [1, 2, 3]]), 0).tolist() == [[False, True, True], [False] * 3]
    assert padding([3, 1], 3).tolist() == [[False] * 3, [False, True, True]]
    assert merge_masks(None, None, batch=1, heads=1, queries=2, keys=2, dtype=torch.float32) is None


def test_mask_senses():
    q, k, v = (floats(B, H, n, 4) for n in (N, S, S))
    hidden = torch.rand(N, S) < 0.5
    hidden[:, 0] = False
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=visible_mask(hidden))
    scores = q @ k.mT / math.sqrt(4) + additive_mask(hidden, torch.float64)
    torch.testing.assert_close(Softmax()(scores) @ v, theirs)
    # The documents' product with a 0/1 mask leaves weight on hidden keys.
    wrong = Softmax()(q @ k.mT / 2 * visible_mask(hidden))
    assert (wrong[..., hidden] > 0).all()


# Positions.


def test_positions_example():
    expected = [[0, 1, 0], [0.84147, 0.5403, 0.00215], [0.9093, -0.41615, 0.00431], [0.14112, -0.98999, 0.00646]]
    torch.testing.assert_close(sinusoidal_table(4, 3), torch.tensor(expected), rtol=0, atol=5e-6)
    x = torch.zeros(1, 4, 3, requires_grad=True)
    assert torch.equal(SinusoidalPositions(3)(x)[0], sinusoidal_table(4, 3))
    assert not list(SinusoidalPositions(3).parameters())


@given(
    width=st.integers(1, 70), position=st.integers(0, 5000), offset=st.integers(-2000, 2000).filter(lambda k: k != 0)
)
@settings(max_examples=60, deadline=None)
def test_position_shift_is_a_rotation(width, position, offset):
    here, there = (
        sinusoidal_table(1, width, start=start, dtype=torch.float64)[0] for start in (position, position + offset)
    )
    pairs = width // 2
    angle = offset / 10000 ** (torch.arange(pairs, dtype=torch.float64) * 2 / width)
    sine, cosine = here[0 : 2 * pairs : 2], here[1 : 2 * pairs : 2]
    turned = torch.stack(
        [sine * angle.cos() + cosine * angle.sin(), cosine * angle.cos() - sine * angle.sin()], dim=-1
    ).flatten()
    torch.testing.assert_close(there[: 2 * pairs], turned, rtol=0, atol=1e-9)
    if width % 2:  # the sine left over has no partner
        assert there[-1] == pytest.approx(math.sin((position + offset) / 10000 ** ((width - 1) / width)), abs=1e-9)


@given(shift=st.integers(0, 50), head_dim=st.sampled_from([2, 6, 8]))
@settings(max_examples=20, deadline=None)
def test_rotary_scores_depend_on_distance_only(shift, head_dim):
    q, k = floats(1, 1, 1, head_dim), floats(1, 1, 1, head_dim)
    rows = torch.zeros(1, 60, 1, head_dim, dtype=torch.float64)
    turned_q, turned_k = RotaryPositions(head_dim)(rows + q, rows + k)
    scores = turned_q[0, :, 0] @ turned_k[0, :, 0].T
    assert scores[shift, shift + 9].item() == pytest.approx(scores[0, 9].item(), abs=1e-9)
    assert scores[0, 0].item() == pytest.approx((q * k).sum().item(), abs=1e-9)


def test_learned_positions_and_lengths():
    positions = LearnedPositions(4, 6)
    x = torch.zeros(2, 5, 4)
    assert torch.equal(positions(x)[1], positions.weight[:5])
    model = Transformer(hidden=8, heads=2, layers=1, vocab=9, positions="learned", max_positions=6)
    assert sum(p.numel() for p in model.embedding.parameters()) == 9 * 8 + 6 * 8
    with pytest.raises(InputError, match="longer than max_positions=6"):
        model(torch.zeros(1, 7, dtype=torch.long))


# Worked examples of the documents, in their right form.


def test_norm_examples():
    norm = EncoderLayer(2, 1).attention_norm
    torch.testing.assert_close(norm(torch.tensor([1.0, 5.0])), torch.tensor([-1.0, 1.0]), rtol=0, atol=1e-5)
    assert torch.tensor([1.0, 5.0]).std(correction=0) == 2
    assert torch.tensor([1.0, 2.0, 3.0, 4.0]).std(correction=0).item() == pytest.approx(1.118, abs=5e-4)
    rms = Transformer(hidden=2, heads=1, layers=1, norm="rmsnorm").layer[0].mlp_norm
    torch.testing.assert_close(rms(torch.tensor([3.0, 4.0])), torch.tensor([3.0, 4.0]) / math.sqrt(12.5))


def test_scores_are_divided_by_the_root_of_the_head_width():
    module = MultiHeadAttention(D, H, head_dim=9, bias=False, dtype=torch.float64)
    x = floats(1, N, D)
    q, k = (m(x).view(1, N, H, 9).transpose(1, 2) for m in (module.query, module.key))
    torch.testing.assert_close(module.scores(q, k), q @ k.mT / 3)


def test_initial_values():
    module = FeedForward(512, 2048)
    bound = math.sqrt(6 / (512 + 2048))
    assert bound == pytest.approx(0.04841229, abs=1e-8)
    assert bound * 0.999 < module.up.weight.abs().max().item() <= bound
    assert not module.up.bias.any()
    table = Transformer(hidden=256, heads=4, layers=1, vocab=400).embedding.token.weight
    assert table.std().item() == pytest.approx(1 / 16, rel=0.02)


# Parameters and FLOPs of the documents' models (tests' own copy; checked with torch 2.13).


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def flops(module: nn.Module, *inputs: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    return counter.get_total_flops()


def on_meta(**options) -> Transformer:
    return Transformer(**options, device="meta")


BASE = {"arch": "encoder-decoder", "hidden": 512, "heads": 8, "layers": 6, "activation": "relu", "pre_norm": False}


def test_parameter_counts():
    assert parameters(on_meta(**BASE, final_norm=True)) == 44_140_544
    assert parameters(on_meta(**BASE, final_norm=True, bias=False)) == 44_056_576
    assert parameters(EncoderLayer(512, 8, device="meta")) == 3_152_384
    assert parameters(DecoderLayer(512, 8, device="meta")) == 4_204_032
    assert parameters(on_meta(**BASE, src_vocab=5, vocab=7, tied=False)) == 44_148_224
    assert parameters(on_meta(**BASE, vocab=37_000)) == 6 * (3_152_384 + 4_204_032) + 37_000 * 512
    d, layers, vocab = 24, 3, 50
    decoder = {"hidden": d, "heads": 4, "layers": layers, "vocab": vocab}
    assert parameters(on_meta(**decoder)) == layers * (12 * d * d + 13 * d) + vocab * d
    assert parameters(on_meta(**decoder, tied=False)) == layers * (12 * d * d + 13 * d) + 2 * vocab * d
    assert (
        parameters(on_meta(**decoder, head=False, final_norm=True)) == layers * (12 * d * d + 13 * d) + (vocab + 2) * d
    )


def test_flop_counts():
    hidden = {"device": "meta"}
    whole = on_meta(**BASE, final_norm=True)
    source, target = torch.empty(32, 10, 512, **hidden), torch.empty(32, 20, 512, **hidden)
    assert flops(whole, source, target) == 42_553_835_520
    assert (
        flops(on_meta(**BASE, final_norm=True, batch_first=False), source.mT.mT.transpose(0, 1), target.transpose(0, 1))
        == 42_553_835_520
    )
    assert flops(EncoderLayer(512, 8, **hidden), torch.empty(4, 10, 512, **hidden)) == 252_477_440
    toy = on_meta(**BASE, src_vocab=5, vocab=7, tied=False)
    ids = torch.zeros(1, 5, dtype=torch.long, **hidden)
    assert flops(toy, ids, ids) == 441_359_360
    b, n, d, layers, vocab = 2, 7, 24, 3, 50
    decoder = on_meta(hidden=d, heads=4, layers=layers, vocab=vocab)
    total = layers * (24 * b * n * d**2 + 4 * b * n**2 * d) + 2 * b * n * d * vocab
    assert flops(decoder, torch.zeros(b, n, dtype=torch.long, **hidden)) == total


def test_decoder_layer_flops():
    b, t, s, d = 2, 7, 5, 24
    total = 28 * b * t * d**2 + 4 * b * s * d**2 + 4 * b * t**2 * d + 4 * b * t * s * d
    assert flops(DecoderLayer(d, 4), torch.empty(b, t, d), torch.empty(b, s, d)) == total


@pytest.mark.parametrize("ffn", ["mlp", "glu"])
def test_convolution_is_the_same_feed_forward_at_equal_cost(ffn):
    linear = randomise(FeedForward(D, FF, ffn=ffn, dtype=torch.float64))
    conv = FeedForward(D, FF, ffn=ffn, conv=True, dtype=torch.float64)
    with torch.no_grad():
        for mine, theirs in zip(conv.parameters(), linear.parameters(), strict=True):
            mine.copy_(theirs.view_as(mine))
    x = floats(B, N, D)
    torch.testing.assert_close(conv(x), linear(x), **EXACT)
    assert parameters(conv) == parameters(linear)
    assert flops(conv, x) == flops(linear, x) == (4 if ffn == "mlp" else 6) * B * N * D * FF
    assert saved(conv, x.requires_grad_()) == saved(linear, x)


# Module names: the cost graph's paths.


def names(module: nn.Module) -> set[str]:
    """Module paths without layer indices, with slashes, without modules that have other modules inside."""
    return {
        "/".join(part for part in name.split(".") if not part.isdigit())
        for name, child in module.named_modules()
        if name and not list(child.children())
    }


ATTENTION = {"query", "key", "value", "scores", "softmax", "dropout", "weighted_sum", "output", "output_dropout"}
MLP = {"up", "activation", "dropout", "down", "output_dropout"}


def below(path: str, children: set[str]) -> set[str]:
    return {f"{path}/{child}" for child in children}


def test_module_names_are_the_graph_paths():
    layer = below("layer/attention", ATTENTION) | below("layer/mlp", MLP) | {"layer/attention_norm", "layer/mlp_norm"}
    ends = {"embedding/token", "embedding/position", "embedding/dropout", "final_norm", "head"}
    one = {"hidden": D, "heads": H, "layers": 2, "vocab": 9, "final_norm": True}
    assert names(Transformer(**one)) == names(Transformer(arch="encoder", **one)) == layer | ends
    cross = below("layer/cross_attention", ATTENTION) | {"layer/cross_attention_norm"}
    both = Transformer(arch="encoder-decoder", **one)
    decoder = below("decoder", layer | cross | ends - {"head"})
    assert names(both) == below("encoder", layer | ends - {"head"}) | decoder | {"head"}
    assert both.encoder.embedding.token.weight is both.decoder.embedding.token.weight is both.head.weight
    two = Transformer(arch="encoder-decoder", **one, src_vocab=5, tied=False)
    assert two.encoder.embedding.token.weight.shape == (5, D)
    assert two.head.weight is not two.decoder.embedding.token.weight
    fused = Transformer(
        hidden=D, heads=H, layers=1, attention="sdpa", positions="rotary", ffn="glu", vocab=9, head=False
    )
    attention = ATTENTION - {"scores", "softmax", "dropout", "weighted_sum"} | {"sdpa", "rotary"}
    assert names(fused) == (
        below("layer/attention", attention)
        | below("layer/mlp", MLP | {"gate", "product"})
        | {"layer/attention_norm", "layer/mlp_norm", "embedding/token", "embedding/dropout"}
    )


def test_flops_are_reported_op_by_op():
    b, n, d, h = 2, 7, 24, 4
    with FlopCounterMode(display=False) as counter:
        Transformer(hidden=d, heads=h, layers=1)(torch.zeros(b, n, d))
    counts = {name: sum(by_op.values()) for name, by_op in counter.get_flop_counts().items()}
    prefix = "Transformer.layer.0."
    for path in ("attention.query", "attention.key", "attention.value", "attention.output"):
        assert counts[prefix + path] == 2 * b * n * d**2
    assert counts[prefix + "attention.scores"] == counts[prefix + "attention.weighted_sum"] == 2 * b * n**2 * d
    assert counts[prefix + "mlp.up"] == counts[prefix + "mlp.down"] == 8 * b * n * d**2


# What is kept for the backward pass, to the byte, on a CPU.


def saved(module: nn.Module, *inputs: Tensor, **given: Tensor) -> int:
    """Bytes of unique storages kept for backward, parameters and buffers aside."""
    owned = {t.untyped_storage()._cdata for t in itertools.chain(module.parameters(), module.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (key := tensor.untyped_storage()._cdata) not in owned:
            kept.setdefault(key, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = module.train()(*inputs, **given)
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del out
    return total


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize(("b", "n", "h", "a"), [(3, 7, 4, 6), (1, 5, 2, 8), (2, 9, 1, 12)])
def test_saved_bytes_of_the_documents_layer(b, n, h, a, pre_norm):
    d = h * a
    x = torch.randn(b, n, d, dtype=torch.bfloat16, requires_grad=True)
    statistics = 8 * b * n  # mean and reciprocal deviation of two norms, bf16 on a CPU

    def of(**options):
        return saved(EncoderLayer(d, h, pre_norm=pre_norm, **options, dtype=torch.bfloat16), x) - statistics

    square = b * n * n * h
    assert of(dropout=0.1) == 34 * b * n * d + 5 * square
    assert of(dropout=0.1, activation="relu") == 26 * b * n * d + 5 * square
    assert of(activation="gelu") == 32 * b * n * d + 2 * square
    assert of(activation="relu") == 24 * b * n * d + 2 * square
    # Inner dropout: GELU's output gives way to what dropout makes of it, so only the mask is new. ReLU keeps its output
    # for its own gradient, so there both stay.
    assert of(dropout=0.1, ffn_dropout=0.1) == 38 * b * n * d + 5 * square
    assert of(dropout=0.1, ffn_dropout=0.1, activation="relu") == 38 * b * n * d + 5 * square
    assert of(dropout=0.1, attention_dropout=0.0, attention="sdpa") == 34 * b * n * d + 4 * b * n * h


def attention_bytes(b, n, m, d, h, kv, a, s, p, out_p, eager):
    """Kept by one attention without its input(s): s bytes per element, dropout p on weights and out_p on the output."""
    projected = b * n * h * a + 2 * b * m * kv * a
    total = s * b * n * h * a + (b * n * d if out_p else 0)  # merged heads, and the mask of the result
    if eager:
        return total + s * projected + b * n * m * h * (2 * s + 1 if p else s)
    if p:  # the math kernel in fp32: Q, K and V (repeated to all heads), softmax, a 4-byte mask, weights after dropout
        return total + 4 * (b * n * h * a + 2 * b * m * h * a) + 12 * b * n * m * h
    return total + s * projected + 4 * b * n * h  # a CPU's flash kernel: fp32 log-sum-exp


def mlp_bytes(b, n, d, f, s, ffn, activation, p, out_p):
    """Kept by one feed-forward, with its input."""
    wide = {"mlp": {"relu": 1, "gelu": 2, "silu": 2}, "glu": {"relu": 3, "gelu": 4, "silu": 4}}[ffn][activation]
    total = s * b * n * d + wide * s * b * n * f + (b * n * d if out_p else 0)
    if p:
        total += b * n * f + (s * b * n * f if (ffn, activation) == ("mlp", "relu") else 0)
    return total


def norm_bytes(b, n, d, s, norm):
    """Kept by one norm on a CPU, with its input: nn.RMSNorm is made of steps in fp32 there and keeps two of them."""
    return s * b * n * d + 2 * s * b * n if norm == "layernorm" else 8 * b * n * d + 4 * b * n


GRID = [
    dict(
        zip(
            (
                "kv_heads",
                "ffn",
                "activation",
                "norm",
                "pre_norm",
                "attention",
                "rotary",
                "dtype",
                "p",
                "out_p",
                "ffn_p",
            ),
            case,
            strict=True,
        )
    )
    for case in itertools.product(
        (4, 2, 1),
        ("mlp", "glu"),
        ("gelu", "relu", "silu"),
        ("layernorm", "rmsnorm"),
        (True, False),
        ("eager", "sdpa"),
        (True, False),
        (torch.bfloat16, torch.float16, torch.float32),
        (0.0, 0.2),
        (0.0, 0.2),
        (0.0, 0.2),
    )
]


def layer_case(case: dict) -> tuple[int, int]:
    b, n, d, h, a, f = 2, 7, 24, 4, 8, 20
    module = EncoderLayer(
        d,
        h,
        f,
        head_dim=a,
        attention_dropout=case["p"],
        dropout=case["out_p"],
        ffn_dropout=case["ffn_p"],
        **{k: v for k, v in case.items() if k not in ("p", "out_p", "ffn_p")},
    )
    s = case["dtype"].itemsize
    x = torch.randn(b, n, d, dtype=case["dtype"], requires_grad=True)
    expected = s * b * n * d + attention_bytes(
        b, n, n, d, h, case["kv_heads"], a, s, case["p"], case["out_p"], case["attention"] == "eager"
    )
    expected += mlp_bytes(b, n, d, f, s, case["ffn"], case["activation"], case["ffn_p"], case["out_p"])
    expected += 2 * norm_bytes(b, n, d, s, case["norm"]) + (s * n * a if case["rotary"] else 0)
    return saved(module, x), expected


@pytest.mark.parametrize("part", range(3))
def test_saved_bytes_of_a_layer(part):
    """Every 19th of 6912 layers (19 shares no factor with the grid, so each value meets each other one)."""
    for case in GRID[part * 19 :: 57]:
        got, expected = layer_case(case)
        assert got == expected, case


@pytest.mark.slow
def test_saved_bytes_of_every_layer():
    for case in GRID:
        got, expected = layer_case(case)
        assert got == expected, case


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_bytes_of_an_encoder_decoder(attention, p, pre_norm, dtype):
    b, n, m, d, h, f, vocab, s = 3, 7, 5, 24, 4, 96, 11, dtype.itemsize
    model = Transformer(
        arch="encoder-decoder",
        hidden=d,
        heads=h,
        encoder_layers=2,
        decoder_layers=3,
        vocab=vocab,
        pre_norm=pre_norm,
        final_norm=True,
        dropout=p,
        embedding_dropout=p,
        attention=attention,
        dtype=dtype,
    )

    def attend(queries, keys):
        return s * b * queries * d + attention_bytes(b, queries, keys, d, h, h, d // h, s, p, p, attention == "eager")

    def common(length, norms):
        return norms * norm_bytes(b, length, d, s, "layernorm") + mlp_bytes(b, length, d, f, s, "mlp", "gelu", 0, p)

    encoder = attend(m, m) + common(m, 2)
    decoder = attend(n, n) + attend(n, m) + common(n, 3)
    memory = s * b * m * d  # once, whatever the number of layers that read it
    ends = norm_bytes(b, m, d, s, "layernorm") + norm_bytes(b, n, d, s, "layernorm") + s * b * n * d
    ends += 8 * b * (m + n) + (b * (m + n) * d if p else 0)  # token ids (8 bytes each); masks of the embeddings
    source, target = torch.randint(vocab, (b, m)), torch.randint(vocab, (b, n))
    assert saved(model, source, target) == 2 * encoder + 3 * decoder + memory + ends


def test_masks_keep_nothing_in_eager_attention():
    x, hidden = torch.randn(B, N, D, requires_grad=True), padding([6, 2, 4], N)
    for attention, sizes in (("eager", (0, 0, 0)), ("sdpa", (4 * N * N, 4 * B * N, 4 * B * N * N))):
        model = Transformer(arch="encoder", hidden=D, heads=H, layers=2, attention=attention)
        plain = saved(model, x)
        assert saved(model, x, src_mask=causal_mask(N)) - plain == sizes[0]  # one mask for all layers
        assert saved(model, x, src_key_padding_mask=hidden) - plain == sizes[1]
        assert saved(model, x, src_mask=causal_mask(N), src_key_padding_mask=hidden) - plain == sizes[2]


# Dropout.


def test_dropout():
    x = torch.ones(200, 200, requires_grad=True)
    dropout = Dropout(0.25)
    out = dropout(x)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (out == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert saved(dropout, x) == x.numel()  # a 1-byte mask and nothing else
    assert saved(Dropout(0.0), x) == 0
    assert Dropout(0.0)(x) is x
    assert dropout.eval()(x) is x


@pytest.mark.parametrize(
    ("option", "paths"),
    [
        ("dropout", ["layer.0.attention.output_dropout", "layer.0.mlp.output_dropout", "layer.0.attention.dropout"]),
        ("attention_dropout", ["layer.0.attention.dropout"]),
        ("ffn_dropout", ["layer.0.mlp.dropout"]),
        ("embedding_dropout", ["embedding.dropout"]),
    ],
)
def test_each_dropout_has_its_place(option, paths):
    model = Transformer(hidden=D, heads=H, layers=1, vocab=9, **{option: 0.5})
    active = [name for name, module in model.named_modules() if isinstance(module, Dropout) and module.p]
    assert sorted(active) == sorted(paths)
    tokens = torch.randint(9, (B, N))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
    assert (
        Transformer(hidden=D, heads=H, layers=1, dropout=0.5, attention_dropout=0.0).layer[0].attention.dropout.p == 0
    )


# Weights on request.


def test_attention_maps():
    model = Transformer(arch="encoder-decoder", hidden=D, heads=H, layers=2, vocab=9, dropout=0.5)
    source, target = torch.randint(1, 9, (B, S)), torch.randint(1, 9, (B, N))
    hidden = padding([5, 3, 4], S)
    maps = attention_maps(model, source, target, src_key_padding_mask=hidden)
    assert set(maps) == {
        f"{side}.layer.{i}.{kind}"
        for i in range(2)
        for side, kind in (("encoder", "attention"), ("decoder", "attention"), ("decoder", "cross_attention"))
    }
    for name, weights in maps.items():
        keys = N if name.startswith("decoder") and not name.endswith("cross_attention") else S
        assert weights.shape == (B, H, S if name.startswith("encoder") else N, keys)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
        if keys == S:
            assert not weights[hidden[:, None, None, :].expand_as(weights)].any()
        else:
            assert not weights.triu(1).any()
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_embedding_is_scaled_with_sinusoidal_positions_only():
    tokens = torch.tensor([[3, 1]])
    scaled = Transformer(hidden=D, heads=H, layers=1, vocab=9).embedding
    expected = scaled.token(tokens) * math.sqrt(D) + sinusoidal_table(2, D)
    torch.testing.assert_close(scaled(tokens), expected)
    plain = Transformer(hidden=D, heads=H, layers=1, vocab=9, positions="none").embedding
    assert torch.equal(plain(tokens), plain.token(tokens))
    asked = Transformer(hidden=D, heads=H, layers=1, vocab=9, positions="none", scale_embedding=True).embedding
    assert torch.equal(asked(tokens), asked.token(tokens) * math.sqrt(D))


# Errors: one clear line each.

ONE = {"hidden": 16, "heads": 4, "layers": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**ONE, "heads": 5}, "heads=5 does not divide hidden=16; give head_dim"),
        ({**ONE, "kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({**ONE, "heads": 0}, "heads must be positive, got 0"),
        ({**ONE, "hidden": -4}, "hidden must be positive, got -4"),
        ({**ONE, "ffn_hidden": 0}, "ffn_hidden must be positive, got 0"),
        ({**ONE, "layers": 0}, "layers must be positive, got 0"),
        ({**ONE, "vocab": 0}, "vocab must be positive, got 0"),
        ({"hidden": 16, "heads": 4}, "layers is missing"),
        ({"hidden": 16, "heads": 4, "arch": "encoder-decoder", "encoder_layers": 1}, "decoder_layers is missing"),
        ({**ONE, "arch": "decoders"}, "unknown arch 'decoders'; did you mean decoder"),
        ({**ONE, "norm": "batchnorm"}, "unknown norm 'batchnorm'"),
        ({**ONE, "activation": "tanh"}, "unknown activation 'tanh'"),
        ({**ONE, "ffn": "moe"}, "unknown ffn 'moe'"),
        ({**ONE, "attention": "flash"}, "unknown attention 'flash'"),
        ({**ONE, "positions": "alibi"}, "unknown positions 'alibi'"),
        ({**ONE, "positions": "rotary", "head_dim": 3}, "rotary positions need an even head_dim, got 3"),
        ({**ONE, "positions": "learned", "vocab": 9}, "positions='learned' needs max_positions"),
        ({**ONE, "dropout": 1.5}, "a dropout probability lies between 0 and 1, got 1.5"),
        ({**ONE, "attention": "sdpa", "attention_dropout": -1}, "between 0 and 1, got -1"),
        ({**ONE, "encoder_layers": 2}, "encoder_layers is for arch='encoder-decoder', not 'decoder'"),
        ({**ONE, "arch": "encoder-decoder", "src_vocab": 9}, "src_vocab needs vocab"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(InputError) as caught:
        Transformer(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TfcostError)


def model_of(arch: str) -> Transformer:
    return Transformer(arch=arch, **ONE)


X = torch.zeros(3, 6, 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_of("decoder")(torch.zeros(3, 6, 8)), "input is 8 wide, this model's hidden width is 16"),
        (lambda: model_of("decoder")(torch.zeros(6, 16)), "input must be [b, N, d], got [6, 16]"),
        (lambda: model_of("decoder")(X, X), "a single stack has no target"),
        (lambda: model_of("encoder-decoder")(X), "an encoder-decoder needs source and target"),
        (lambda: model_of("encoder-decoder")(X, X[:2]), "batches differ: source 3, target 2"),
        (lambda: Decoder(1, 16, 4)(X, X[:2]), "batches differ: target 3, memory 2"),
        (lambda: Decoder(1, 16, 4)(X, X[..., :8]), "memory is 8 wide"),
        (lambda: DecoderLayer(16, 4)(X, X[:2]), "batches differ: query 3, key 2, value 2"),
        (lambda: MultiHeadAttention(16, 4)(X, X, X[:, :5]), "key and value lengths differ: 6 and 5"),
        (lambda: MultiHeadAttention(16, 4)(X, X[..., :4]), "key is 4 wide"),
        (lambda: MultiHeadAttention(16, 4, rotary=True)(X, X[:, :5]), "rotary positions are for self-attention"),
        (lambda: MultiHeadAttention(16, 4, attention="sdpa")(X, need_weights=True), "only with attention='eager'"),
        (lambda: FeedForward(16)(X[..., :4]), "input is 4 wide"),
        (lambda: EncoderLayer(16, 4)(X, mask=causal_mask(5)), "mask is [5, 5], expected [N, M] = [6, 6], [b*h, N, M]"),
        (lambda: EncoderLayer(16, 4)(X, mask=torch.zeros(3, 6, 6)), "mask is [3, 6, 6], expected"),
        (lambda: EncoderLayer(16, 4)(X, mask=torch.zeros(6, 6, dtype=torch.long)), "pass mask == 0"),
        (lambda: model_of("encoder")(X, src_key_padding_mask=padding([3, 3], 6)), "expected [b, M] = [3, 6]"),
        (lambda: visible_mask(torch.zeros(2, 2)), "only a boolean mask has two senses"),
        (lambda: Transformer(**ONE, vocab=5)(X), "tokens must be integers [b, N], got torch.float32 [3, 6, 16]"),
        (lambda: attention_maps(Transformer(**ONE, attention="sdpa"), X), "only with attention='eager'"),
        (lambda: copy_torch_weights(EncoderLayer(16, 4), nn.Linear(2, 2)), "cannot copy a Linear into a EncoderLayer"),
        (
            lambda: copy_torch_weights(EncoderLayer(16, 4), nn.TransformerDecoderLayer(16, 4, 64)),
            "cannot copy a decoder layer into one without cross-attention",
        ),
        (
            lambda: copy_torch_weights(DecoderLayer(16, 4), nn.TransformerEncoderLayer(16, 4, 64)),
            "cannot copy an encoder layer into one with cross-attention",
        ),
        (
            lambda: copy_torch_weights(EncoderLayer(16, 4, bias=False), nn.TransformerEncoderLayer(16, 4, 64)),
            "one has biases and the other has not",
        ),
        (
            lambda: copy_torch_weights(EncoderLayer(16, 4), nn.TransformerEncoderLayer(16, 4, 32)),
            "cannot copy a [32, 16] parameter into [64, 16]",
        ),
        (
            lambda: copy_torch_weights(
                Encoder(2, 16, 4), nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 64), 1)
            ),
            "cannot copy 1 layers into 2",
        ),
        (
            lambda: copy_torch_weights(
                Encoder(1, 16, 4, final_norm=True), nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 64), 1)
            ),
            "one has a final norm and the other has not",
        ),
    ],
)
def test_bad_inputs(call, message):
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
