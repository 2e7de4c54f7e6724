"""Models of images and sound: against modules written by hand, a user's case, closed forms, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
from measured import agree
from torch import Tensor, nn

import tfcost
from tfcost import blocks, families, images, speech
from tfcost.blocks import Run
from tfcost.config import complete
from tfcost.errors import ConfigError, InputError
from tfcost.graph import Graph
from tfcost.hf import from_hf
from tfcost.models import Model
from tfcost.notation import symbol
from tfcost.symbols import closed_form

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch

VIT = {"image_size": 12, "patch_size": 4, "hidden": 8, "heads": 2, "layers": 1, "dropout": 0.0}


def model(**keys: Any) -> Model:
    return Model("", from_hf(keys).fields)


# --- Modules by hand ------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """A LayerNorm in one step whose backward needs its input alone: the statistics are made again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return _Again.apply(x, self.weight, self.bias)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return nn.functional.layer_norm(x, x.shape[-1:], weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            out = nn.functional.layer_norm(inputs[0], inputs[0].shape[-1:], *inputs[1:])
        return torch.autograd.grad(out, inputs, gradient)


class Patches(nn.Module):
    """Patch projection, class token, positions; registers after the positions; DINOv2's factor on each branch."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        d, self.plain = cfg.hidden, cfg.plain_tokens
        rows = cfg.patches + cfg.prefix_tokens - cfg.plain_tokens
        self.project = nn.Conv2d(3, d, cfg.patch_size, cfg.patch_size)
        self.first = nn.Parameter(torch.zeros(1, cfg.prefix_tokens - cfg.plain_tokens, d))
        self.positions = nn.Parameter(torch.zeros(1, rows, d))
        self.registers = nn.Parameter(torch.zeros(1, self.plain, d)) if self.plain else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.positions
        if self.registers is not None:
            x = torch.cat((self.registers.expand(len(x), -1, -1), x), 1)
        return x


@pytest.mark.parametrize("tokens", [{}, {"prefix_tokens": 2}, {"prefix_tokens": 3, "plain_tokens": 2}])
def test_patches_cost_no_gradient_of_the_image(tokens: dict[str, int]) -> None:
    cfg = complete({**VIT, **tokens})
    run = Run(2, cfg.patches + cfg.prefix_tokens)

    def block(g: Graph, x: Any) -> None:
        # The image of the block is its own: (b, 3, 12, 12) as 9 patches of 16 pixels.
        images.patch_tokens(g, cfg, run)

    agree(block, Patches(cfg), (2, 3, 12, 12), ("b", "c", "h", "w"), grad=False)


class Scaled(nn.Module):
    """A branch times a learned factor per coordinate."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.factor = Norm(8), nn.Linear(8, 8), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)) * self.factor


def test_a_scaled_branch_keeps_what_is_scaled() -> None:
    from tfcost import ops

    cfg = complete({**VIT, "layer_scale": True})
    agree(
        lambda g, x: blocks.residual(
            g, "branch", x, cfg, lambda y: ops.linear(g, "inner", "b n d, d c -> b n c", y, (8, 8))
        ),
        Scaled(),
        (2, 5, 8),
    )


class WindowLayer(nn.Module):
    """Swin's layer on a grid of tokens: windows of the padded grid, shifted or not, with a bias per distance."""

    def __init__(self, grid: tuple[int, int], side: int, d: int, heads: int, shift: int) -> None:
        super().__init__()
        self.grid, self.side, self.heads, self.shift = grid, side, heads, shift
        self.before, self.after = Norm(d), Norm(d)
        self.query, self.key, self.value, self.out = (nn.Linear(d, d) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.grid
        side, width = self.side, x.shape[-1]
        y = self.before(x).view(-1, rows, columns, width)
        y = nn.functional.pad(y, (0, 0, 0, -columns % side, 0, -rows % side))
        tall, wide = y.shape[1:3]
        y = y.roll((-self.shift, -self.shift), (1, 2))
        y = y.view(-1, tall // side, side, wide // side, side, width).transpose(2, 3).reshape(-1, side**2, width)
        y = self.attend(y)
        y = y.view(-1, tall // side, wide // side, side, side, width).transpose(2, 3).reshape(-1, tall, wide, width)
        y = y.roll((self.shift, self.shift), (1, 2))[:, :rows, :columns].reshape(x.shape)
        x = x + y
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))

    def attend(self, x: Tensor) -> Tensor:
        count, area, width = x.shape
        shape = (count, area, self.heads, width // self.heads)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        where = torch.zeros(area * area, dtype=torch.long)
        bias = self.bias[where].view(area, area, self.heads).permute(2, 0, 1)
        weights = (query @ key.transpose(2, 3) + bias).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(count, area, width))


@pytest.mark.parametrize(("grid", "shift"), [((6, 6), 0), ((6, 6), 1), ((7, 5), 1), ((3, 4), 0)])
def test_a_window_layer_pads_the_grid_to_whole_windows(grid: tuple[int, int], shift: int) -> None:
    rows, columns = grid
    cfg = complete({
        "family": "windows", "arch": "encoder", "image_size": rows, "image_width": columns, "patch_size": 1,
        "hidden": 8, "stage_layers": (1,), "stage_heads": (2,), "heads": 2, "layers": 1, "window_side": 3,
        "positions": "none", "dropout": 0.0,
    })  # fmt: skip
    assert cfg.stages[0].covered == -(-rows // 3) * -(-columns // 3) * 9

    def block(g: Graph, x: Any) -> None:
        images.window_stage(g, "stage", x, cfg, Run(2, rows * columns), cfg.stages[0])

    # A repeated block's input is one with the tensor before it: the module keeps it once.
    agree(block, WindowLayer(grid, 3, 8, 2, shift), (2, rows * columns, 8))


class Merge(nn.Module):
    """Four neighbours side by side, normed, and half as wide again."""

    def __init__(self, grid: tuple[int, int], d: int) -> None:
        super().__init__()
        self.grid, self.norm, self.reduce = grid, Norm(4 * d), nn.Linear(4 * d, 2 * d, False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.grid
        x = x.view(-1, rows, columns, x.shape[-1])
        x = nn.functional.pad(x, (0, 0, 0, columns % 2, 0, rows % 2))
        x = torch.cat([x[:, i::2, j::2] for j in range(2) for i in range(2)], -1)
        return self.reduce(self.norm(x.flatten(1, 2)))


@pytest.mark.parametrize("grid", [(6, 4), (5, 3)])
def test_a_merge_of_four_tokens(grid: tuple[int, int]) -> None:
    rows, columns = grid
    cfg = complete({**VIT, "image_size": 4})
    after = -(-rows // 2) * -(-columns // 2)
    from tfcost.config import Stage

    stage = Stage(1, 1, 16, 64, after, after)
    agree(lambda g, x: images.merge(g, x, cfg, stage), Merge(grid, 8), (2, rows * columns, 8))


class Frames(nn.Module):
    """Whisper's way from a spectrogram to positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 8, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.zeros(7, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.gelu(self.second(nn.functional.gelu(self.first(x)))).transpose(1, 2)
        return x + self.positions[: x.shape[1]]


@pytest.mark.parametrize("frames", [14, 13, 5])
def test_convolutions_over_frames(frames: int) -> None:
    config = {"model_type": "whisper", "d_model": 8, "num_mel_bins": 3, "max_source_positions": 7,
              "encoder_attention_heads": 2}  # fmt: skip
    cfg = model(**config).config()
    run = Run(2, 4, -(-frames // 2), frames=frames)
    agree(lambda g, x: speech.frames(g, cfg, run), Frames(), (2, 3, frames), ("b", "c", "n"), grad=False)


# --- Figures of whole models ----------------------------------------------------------------------------------------


def test_vit_base_is_the_users_case() -> None:
    """User case F03: MACs and FLOPs of ViT-B/16, patches, layers and classifier."""
    totals = tfcost.analyze("vit-base-16-224", attention="eager").totals
    assert totals["forward_macs"] == 17_563_828_224
    assert totals["forward_flops"] == 35_127_656_448
    assert totals["parameters"] == 86_567_656
    # Twice forward, but once for the patch projection: nobody asks for the gradient of an image.
    assert totals["backward_flops"] == 2 * totals["forward_flops"] - 2 * 196 * 768 * 768


def test_flags_describe_a_vit() -> None:
    fields = {"image_size": 224, "patch_size": 16, "hidden": 768, "heads": 12, "layers": 12, "classes": 1000}
    by_flags = tfcost.analyze(**fields, final_norm=True, dropout=0.0).totals
    preset = tfcost.analyze("vit-base-16-224", attention="eager").totals
    assert by_flags == preset


def test_another_image_is_a_what_if() -> None:
    assert tfcost.analyze("vit-base-16-224", image_size=384).totals == tfcost.analyze("vit-base-16-384").totals
    assert tfcost.analyze("vit-base-16-224", patch_size=32).totals == tfcost.analyze("vit-base-32-224").totals


def test_what_is_beyond_the_last_patch_is_left_out() -> None:
    assert tfcost.analyze("vit-base-16-224", image_size=239).totals == tfcost.analyze("vit-base-16-224").totals


def test_closed_forms_of_vit_and_swin() -> None:
    b, n, d, l, c, w = [symbol(name) for name in ("b", "N", "d", "l", "C", "w")]  # noqa: E741
    form = closed_form("vit-base-16-224", "forward_flops", attention="eager")
    patches = 2 * b * (n - 1) * 256 * symbol("c") * d
    assert sympy.expand(form - l * (24 * b * n * d**2 + 4 * b * n**2 * d) - patches - 2 * b * d * c) == 0
    # Swin-T: 12 layers of 24bNd² whatever the stage, 3 merges of 4bNd², and 4bNw²d halved from stage to stage.
    form = closed_form("swin-tiny", "forward_flops", attention="eager")
    square = 4 * b * n * w**2 * d * (2 + sympy.Rational(2, 2) + sympy.Rational(6, 4) + sympy.Rational(2, 8))
    rest = 32 * b * n * d * symbol("c") + 2 * b * 8 * d * c
    assert sympy.expand(form - (24 * 12 + 4 * 3) * b * n * d**2 - square - rest) == 0


@pytest.mark.parametrize("image", [224, 256, 250])
def test_closed_forms_of_any_grid_substitute_to_the_numbers(image: int) -> None:
    """250 leaves grids that windows do not cover: there the tokens are numbers."""
    for attention in ("eager", "flash"):
        report = tfcost.analyze("swin-tiny", image_size=image, attention=attention, formula=True, batch=3)
        forms = report.closed.totals(["forward_flops", "parameters", "activation_bytes", "train_flops"])
        assert {key: form.subs(report.closed.values) for key, form in forms.items()} == {
            key: report.totals[key] for key in forms
        }


@pytest.mark.parametrize("name", ["dinov2-base", "deit-tiny-distilled", "clip-vit-base-32", "whisper-tiny"])
def test_closed_forms_substitute_to_the_numbers(name: str) -> None:
    further = {"frames": 2001} if name == "whisper-tiny" else {}
    report = tfcost.analyze(name, batch=2, attention="eager", formula=True, **further)
    keys = ["forward_flops", "parameters", "activation_bytes", "train_flops", "trainable_parameters"]
    for key, form in report.closed.totals(keys).items():
        assert form.subs(report.closed.values) == report.totals[key], key


def test_sines_that_are_not_trained_are_parameters_all_the_same() -> None:
    totals = tfcost.analyze("whisper-tiny").totals
    assert totals["parameters"] - totals["trainable_parameters"] == 1500 * 384


def test_fewer_frames_are_fewer_positions() -> None:
    report = tfcost.analyze("whisper-tiny", frames=3000)
    assert report.inputs == {"batch": 1, "seq_len": 448, "src_len": 1500, "frames": 3000}
    assert tfcost.analyze("whisper-tiny", frames=999).inputs["src_len"] == 500
    assert "beyond the 3,000" in tfcost.analyze("whisper-tiny", frames=3002).warnings[0]


def test_both_towers_meet_in_one_product() -> None:
    one, two = [tfcost.analyze("clip-vit-base-32", batch=b, by="op").rows for b in (1, 2)]
    products = [next(row["flops"] for row in rows if row["path"] == "similarity") for rows in (one, two)]
    assert products == [2 * 512, 4 * 2 * 512]
    towers = [families.family("text-tower"), families.family("image-tower")]
    assert len(set(towers)) == 2


# --- What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 100}, "-N/--seq-len does not apply to a model of images; --image-size"),
        ({"src_len": 100}, "--src-len does not apply to a model of images"),
        ({"frames": 100}, "--frames does not apply to a model of images"),
        ({"image_size": 8}, "--image-size 8 is smaller than --patch-size 16"),
        ({"image_size": 0}, "--image-size must be a whole number of at least 1, not '0'"),
        ({"vocab": 9}, "-V/--vocab does not apply to an image model"),
    ],
)
def test_what_does_not_fit_an_image(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tfcost.analyze("vit-base-16-224", **fields)


def test_a_grid_smaller_than_a_window_is_refused() -> None:
    with pytest.raises(InputError, match=r"--image-size 192 leaves 6 x 6 patches to stage 4, fewer than a window of 7"):
        tfcost.analyze("swin-tiny", image_size=192)
    with pytest.raises(InputError, match=r"-l/--layers does not apply to a model of stages"):
        tfcost.analyze("swin-tiny", layers=4)
    with pytest.raises(InputError, match="-d/--hidden 97 does not divide by -h/--heads 3"):
        tfcost.analyze("swin-tiny", hidden=97)


def test_what_does_not_fit_sound_and_text() -> None:
    with pytest.raises(InputError, match="--src-len does not apply to a model of sound"):
        tfcost.analyze("whisper-tiny", src_len=4)
    with pytest.raises(InputError, match="--frames needs a model of sound"):
        tfcost.analyze("gpt2", frames=4)
    with pytest.raises(InputError, match="missing --patch-size"):
        tfcost.analyze(image_size=8, hidden=4, heads=1, layers=1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "vit", "image_size": [224]}, "image_size must be a positive integer or an array of two"),
        ({"model_type": "swin", "depths": []}, "depths must be an array of positive integers"),
        ({"model_type": "swin", "depths": [2, 2]}, "depths has 2 stages, but num_heads has 4"),
        ({"model_type": "swin", "mlp_ratio": 0}, "mlp_ratio must be above 0"),
        ({"model_type": "clip", "vision_config": 3}, "vision_config must be an object or null, not 3"),
        ({"model_type": "clip", "vision_config": {"patch_size": 0}}, r"vision_config\.patch_size must be a positive"),
        ({"model_type": "vit", "architectures": ["ViTBackbone"]}, "supported: ViTModel"),
    ],
)
def test_configs_that_cannot_be_used(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_hf(config)
