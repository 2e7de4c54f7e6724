"""What the kernels of an implementation keep for backward, beyond and instead of the document's accounting.

``document`` is the document's rule on any model: matmul operands, activation inputs, softmax outputs, masks, norm
inputs. ``reference`` is, to the byte, what our own PyTorch module (:mod:`tfcost.validate.reference`) keeps on a GPU
(``--semantics cuda``) or a CPU; each rule below was measured with ``saved_tensors_hooks`` (torch 2.13, CPU) or is
PyTorch's own meta function for the CUDA op, and ``tfcost validate`` measures it again.
"""

from __future__ import annotations

from typing import NamedTuple

from tfcost.errors import InputError


class Implementation(NamedTuple):
    """The rules in which implementations differ."""

    name: str
    semantics: str = ""
    statistics: bool = False
    """A norm keeps mean and 1/deviation (LayerNorm) or 1/rms (RMSNorm) of each row."""
    statistics_itemsize: int | None = None
    """Bytes of a statistic; None is the activations' own. CUDA kernels reduce and keep in fp32."""
    fused_rmsnorm: bool = True
    """RMSNorm is one kernel; else (CPU) it is steps in fp32, of which two of the input's size are kept."""
    relu_output: bool = False
    """ReLU keeps its output, whose sign its gradient needs; that is the next product's input too."""
    rotary_table: bool = False
    """Each layer keeps the sines and cosines that it multiplied by."""
    math_in_fp32: bool = False
    """Unfused scaled-dot-product attention works on fp32 copies, with keys and values repeated to all heads."""
    math_mask_itemsize: int = 1
    """Bytes of that kernel's dropout mask: a CPU's ``dropout`` keeps it as numbers."""
    fused_dropout: bool = True
    """The fused attention kernel has dropout; where it has not (CPU), the unfused one runs instead."""
    sums_in_place: bool = True
    """Gradients of a tensor with several readers are summed in the first one's buffer, where nothing else reads it."""
    rng_state_bytes: int = 0
    """What a fused kernel keeps to draw its dropout mask again: seed and offset (16) and an unused scalar (8)."""


DOCUMENT = Implementation("document")

REFERENCE = {
    "cuda": Implementation(
        "reference", "cuda", statistics=True, statistics_itemsize=4, relu_output=True, rotary_table=True,
        math_in_fp32=True, rng_state_bytes=24,
    ),
    "cpu": Implementation(
        "reference", "cpu", statistics=True, fused_rmsnorm=False, relu_output=True, rotary_table=True,
        math_in_fp32=True, math_mask_itemsize=4, fused_dropout=False,
    ),
}  # fmt: skip

NAMES = ("document", "reference")
SEMANTICS = ("cuda", "cpu")


def implementation(name: str, semantics: str | None = None) -> Implementation:
    """The implementation of this name, on this device; ``semantics`` is ``cuda`` unless said."""
    if semantics == "cpu" and name == "document":
        raise InputError("--semantics applies to --implementation reference: the document's accounting has no device")
    return DOCUMENT if name == "document" else REFERENCE[semantics or "cuda"]
