"""Small programs of every kind through ``tfcost.trace``, each against a concrete run or an account by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import sympy  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from trace_oracle import measure  # noqa: E402

import tfcost  # noqa: E402
from tfcost.errors import InputError  # noqa: E402
from tfcost.notation import symbol  # noqa: E402
from tfcost.tracing.modules import from_factory  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

B, N = symbol("b"), symbol("N")
TOKENS = {0: {0: "b", 1: "N"}}


class Program(nn.Module):
    """A forward pass over named modules."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.flatten(0, 1).T @ grad.flatten(0, 1)


def grouped_heads(p: Any, x: Tensor) -> Tensor:
    q, kv = p.q(x).unflatten(-1, (8, 8)).transpose(1, 2), p.kv(x).unflatten(-1, (2, 8)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)


def steps(p: Any, x: Tensor) -> Tensor:
    h = x[:, 0]
    for i in range(x.shape[1]):
        h = torch.tanh(p.l(h) + x[:, i])
    return h


def checkpointed(p: Any, x: Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(p.l, x, use_reentrant=False)


def x() -> Tensor:
    return torch.randn(3, 7, 16, requires_grad=True)


def linear(out: int = 16) -> nn.Module:
    return nn.Linear(16, out)


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "gru": (lambda: Program(lambda p, x: p.r(x)[0], r=nn.GRU(16, 24, 2, batch_first=True)), x, TOKENS),
    "rnn": (lambda: Program(lambda p, x: p.r(x)[0], r=nn.RNN(16, 24, batch_first=True)), x, TOKENS),
    "lstm with a projection": (
        lambda: Program(lambda p, x: p.r(x)[0], r=nn.LSTM(16, 24, batch_first=True, proj_size=8)), x, TOKENS,
    ),
    "gru cell": (lambda: nn.GRUCell(16, 24), lambda: torch.randn(3, 16), {0: {0: "b"}}),
    "grouped heads": (lambda: Program(grouped_heads, q=linear(64), kv=linear()), x, TOKENS),
    "own function": (lambda: Program(lambda p, x: OwnProduct.apply(x, p.l.weight.T), l=linear(8)), x, TOKENS),
    "checkpoint": (lambda: Program(checkpointed, l=nn.Sequential(linear(), nn.GELU(), linear())), x, TOKENS),
    "branch": (lambda: Program(lambda p, x: p.l(x) if x.shape[1] > 4 else x, l=linear()), x, TOKENS),
    "in place": (lambda: Program(lambda p, x: p.l(x).relu_().add_(1).mul_(2), l=linear()), x, TOKENS),
    "loop over tokens": (lambda: Program(steps, l=linear()), x, TOKENS),
    "order by size": (
        lambda: Program(lambda p, x: torch.linalg.multi_dot([x[0], p.l.weight, p.l.weight]), l=linear()), x, TOKENS,
    ),
    "interpolation": (
        lambda: Program(lambda p, x: p.c(F.interpolate(x, scale_factor=2, mode="bilinear")), c=nn.Conv2d(4, 8, 1)),
        lambda: torch.randn(3, 4, 8, 8, requires_grad=True), {0: {0: "b"}},
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),
        lambda: torch.randn(3, 16, 6, 7, requires_grad=True), {0: {0: "b"}},
    ),
    "bag of embeddings": (
        lambda: Program(lambda p, x: p.l(p.e(x)), e=nn.EmbeddingBag(50, 16), l=linear(4)),
        lambda: torch.zeros(3, 7, dtype=torch.long), TOKENS,
    ),
    "attention with its own bias": (
        lambda: Program(
            lambda p, x: p.a(x, x, x)[0], a=nn.MultiheadAttention(16, 4, 0.1, add_bias_kv=True, batch_first=True)
        ), x, TOKENS,
    ),
}  # fmt: skip


def check(report: Any, found: Any) -> None:
    """A report holds nothing that has no price, and the figures of a concrete run."""
    assert report.extra["unpriced"] == []
    assert report.totals["forward_flops"] == found.forward
    assert report.totals["backward_flops"] == found.backward
    assert report.totals["activation_bytes"] == found.kept


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_equals_its_concrete_run(name: str) -> None:
    make, example, dynamic = PROGRAMS[name]
    module, inputs = make(), (example(),)
    report = tfcost.trace(module, inputs, dynamic=dynamic, semantics="cpu", attention="flash")
    found = measure(module, inputs)
    check(report, found)


def test_a_batch_of_bags_is_written_without_floors() -> None:
    make, example, dynamic = PROGRAMS["bag of embeddings"]
    assert tfcost.trace(make(), (example(),), dynamic=dynamic).formulas["forward_flops"].expr == 128 * B


def test_a_program_whose_order_depends_on_sizes_says_so() -> None:
    make, example, dynamic = PROGRAMS["order by size"]
    report = tfcost.trace(make(), (example(),), dynamic=dynamic)
    assert "the figures are of a run there" in " ".join(report.extra["notes"])


def test_what_values_choose_has_a_letter_and_a_stated_assumption() -> None:
    module = Program(lambda p, x: p.l(x[x[:, :, 0] > 0]), l=linear())
    report = tfcost.trace(module, (x(),), dynamic=TOKENS)
    assert report.formulas["forward_flops"].expr == 2 * 16 * 16 * symbol("u_1")
    assert report.totals["forward_flops"] == 2 * 16 * 16 * 3 * 7
    assert "u_1 is how many elements aten.index chooses in the module" in " ".join(report.extra["notes"])


def test_the_value_of_a_tensor_cannot_be_followed() -> None:
    module = Program(lambda p, x: p.l(x) if x.sum().item() > 0 else x, l=linear())
    with pytest.raises(InputError, match="the value of a tensor decides something"):
        tfcost.trace(module, (x(),), dynamic=TOKENS)


@dataclass
class Pair:
    first: Tensor
    second: Tensor


@pytest.mark.parametrize("wrap", [lambda y: Pair(y, y.sum()), lambda y: {"a": [y]}, lambda y: (None, y)])
def test_outputs_of_any_form(wrap: Callable[[Tensor], Any]) -> None:
    report = tfcost.trace(Program(lambda p, x: wrap(p.l(x)), l=linear()), (x(),), dynamic=TOKENS)
    assert report.totals["backward_flops"] == 2 * report.totals["forward_flops"] == 2 * 2 * 21 * 16 * 16


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda p, x: torch.cdist(x, p.l.weight.expand(3, 16, 16)), "aten._cdist_forward"),
        (lambda p, x: x @ torch.linalg.inv(p.l.weight), "aten.linalg_inv_ex"),
        (lambda p, x: F.bilinear(x, x, torch.ones(2, 16, 16) * p.l.weight), "aten._trilinear"),
    ],
)
def test_an_op_without_a_price_is_named(run: Callable[..., Any], op: str) -> None:
    report = tfcost.trace(Program(run, l=linear()), (x(),), dynamic={0: {1: "N"}})
    assert report.totals["incomplete"]
    assert op in [each["op"] for each in report.extra["unpriced"]]


def test_ops_without_a_price_are_counted_in_loops() -> None:
    def run(p: Any, x: Tensor) -> Tensor:
        return sum(p.l(x[:, i] @ torch.linalg.inv(p.l.weight)) for i in range(x.shape[1]))

    report = tfcost.trace(Program(run, l=linear()), (x(),), dynamic=TOKENS)
    assert {"op": "aten.linalg_inv_ex", "count": 7} in report.extra["unpriced"]


def test_a_callable_that_fails_is_one_line() -> None:
    def make() -> Any:
        raise ValueError("no such\nthing")

    with pytest.raises(InputError, match=r"^make fails: ValueError: no such thing$"):
        from_factory("make", make)


def test_guards_are_shown() -> None:
    report = tfcost.trace(
        Program(lambda p, x: p.l(x) if x.shape[1] % 2 else p.l(p.l(x)), l=linear()), (x(),), dynamic=TOKENS
    )
    assert report.extra["valid"] != []
    assert sympy.expand(report.formulas["forward_flops"].expr - 512 * B * N) == 0


@pytest.mark.parametrize("how", ["module", "callable"])
def test_a_type_is_given_or_the_modules_own(how: str) -> None:
    def make() -> Any:
        return nn.Sequential(linear(), nn.GELU(), linear()), (x(),), TOKENS

    def traced(dtype: str | None) -> Any:
        if how == "module":
            module, inputs, dynamic = make()
            report = tfcost.trace(module, inputs, dynamic=dynamic, dtype=dtype)
            assert {p.dtype for p in module.parameters()} == {torch.float32}
            return report
        from tfcost.tracing.report import report_of
        from tfcost.tracing.trace import Settings
        from tfcost.tracing.trace import traced as run

        source = from_factory("make", make, dtype)
        return report_of(run(source, Settings(dtype=source.dtype)))

    own, half = traced(None), traced("bf16")
    assert (own.assumptions["dtype"], half.assumptions["dtype"]) == ("fp32", "bf16")
    assert own.totals["weight_bytes"] == 2 * half.totals["weight_bytes"] == 4 * 2 * (16 * 16 + 16)
    assert own.totals["activation_bytes"] == 2 * half.totals["activation_bytes"] == 4 * 3 * 21 * 16


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        (5, "dynamic must be"),
        ({0: ["b"]}, "dynamic must be"),
        ({0: {5: "b"}}, "has 3 axes, and no axis 5"),
        ({"y": {0: "b"}}, "the inputs are 0"),
        ({0: {0: "b", 1: "b"}}, "b is 3 in one input and 7"),
    ],
)
def test_wrong_axes_are_one_line(dynamic: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        tfcost.trace(linear(), (x(),), dynamic=dynamic)


def test_no_size_is_zero() -> None:
    with pytest.raises(InputError, match="sizes are at least 1"):
        tfcost.trace(linear(), (torch.randn(0, 16),), dynamic={0: {0: "b"}})


def test_a_failing_module_names_shapes_by_letters_and_logs_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"1 \(Linear\) on \[b, N, 15\] fails: RuntimeError"):
        tfcost.trace(nn.Sequential(nn.Identity(), linear()), (torch.randn(3, 7, 15),), dynamic=TOKENS)
    assert capfd.readouterr() == ("", "")


class Masked(nn.Module):
    """nn.Transformer with a mask of each kind that its callers make."""

    def __init__(self, batch_first: bool, norm_first: bool, mask: str) -> None:
        super().__init__()
        self.model = nn.Transformer(32, 4, 2, 2, 48, batch_first=batch_first, norm_first=norm_first)
        self.batch, self.mask = 0 if batch_first else 1, mask

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        masks: dict[str, Any] = {}
        length = target.shape[1 - self.batch]
        if self.mask == "bool":
            masks["tgt_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
        elif self.mask == "causal":
            masks["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(length)
        elif self.mask == "padding":
            shape = source.shape[self.batch], source.shape[1 - self.batch]
            masks["src_key_padding_mask"] = torch.zeros(shape, dtype=torch.bool)
        return self.model(source, target, **masks)


@pytest.mark.parametrize("mask", ["none", "bool", "causal", "padding"])
@pytest.mark.parametrize(("batch_first", "norm_first"), [(True, True), (True, False), (False, True), (False, False)])
def test_every_path_of_torchs_transformer(batch_first: bool, norm_first: bool, mask: str) -> None:
    module = Masked(batch_first, norm_first, mask)
    shapes = [(3, length, 32) if batch_first else (length, 3, 32) for length in (11, 13)]
    inputs = tuple(torch.randn(shape, requires_grad=True) for shape in shapes)
    axes = [{0: "b", 1: letter} if batch_first else {0: letter, 1: "b"} for letter in ("S", "T")]
    dynamic = dict(enumerate(axes))
    report = tfcost.trace(module, inputs, dynamic=dynamic, semantics="cpu", attention="flash")
    found = measure(module, inputs)
    check(report, found)
    if mask in ("bool", "causal"):
        assert "square mask" in " ".join(report.extra["notes"])
    # In eval PyTorch's counter misses the fast path; what is multiplied is the same.
    evaluated = tfcost.trace(module, inputs, dynamic=dynamic, semantics="cpu", attention="flash", train=False)
    assert evaluated.totals["forward_flops"] == found.forward
    assert not evaluated.totals["incomplete"]


class Wide(nn.Module):
    """Fused attention of one kind of head."""

    def forward(self, query: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)


@pytest.mark.parametrize(("width", "kernel"), [(256, "flash"), (264, "efficient")])
def test_a_head_wider_than_flash_takes_has_the_memory_efficient_kernel(width: int, kernel: str) -> None:
    """PyTorch's flash kernel takes heads of up to 256 (sdp_utils.cpp)."""
    query = torch.randn(2, 3, 32, width, dtype=torch.bfloat16, requires_grad=True)
    report = tfcost.trace(Wide(), (query,), dynamic={0: {0: "b", 2: "N"}}, attention="flash", by="op", semantics="cuda")
    assert {f"_scaled_dot_product_{kernel}_attention"} == {
        row["path"].split(" ")[0] for row in report.rows if row["flops"]
    }
