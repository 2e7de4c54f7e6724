"""Hypothesis strategies that all property tests share: a new structural feature joins :func:`structures` here.

Sizes are small and rarely divide each other, so that an axis taken for another one shows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st

from tfcost import analyze
from tfcost.report import Report

LAW = settings(deadline=None, max_examples=60)
"""How every property is tried. No deadline: the first example pays for the import of sympy."""

QUICK = settings(LAW, max_examples=150)
"""For properties that need no sympy."""

THOROUGH = settings(LAW, max_examples=300)
"""For the counts by hand, on which everything else stands."""


class Case(NamedTuple):
    """A model as keywords of :func:`tfcost.analyze`, and a pass of it as further ones."""

    fields: dict[str, Any]
    run: dict[str, Any]

    def analyze(self, command: str | None = None, **changes: Any) -> Report:
        """The report of this case, with ``changes`` laid over its keywords."""
        return analyze(command=command, **{**self.fields, **self.run, **changes})

    def totals(self, **changes: Any) -> dict[str, Any]:
        """The totals of every command."""
        return self.analyze(**changes).totals


def _sizes(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)


@st.composite
def structures(draw: st.DrawFn, arch: str | None = None) -> dict[str, Any]:
    """A complete model: every structural choice of the flags, and those of real models that have no flag."""
    arch = arch or draw(st.sampled_from(("decoder", "encoder", "encoder-decoder")))
    kv_heads, group = draw(_sizes(1, 3)), draw(_sizes(1, 3))
    heads = kv_heads * group
    fields: dict[str, Any] = {"arch": arch, "heads": heads}
    if draw(st.booleans()):
        fields |= {"hidden": heads * draw(_sizes(1, 4))}
    else:
        fields |= {"hidden": draw(_sizes(1, 13)), "head_dim": draw(_sizes(1, 5))}
    if group > 1 or draw(st.booleans()):
        fields["kv_heads"] = kv_heads
    if draw(st.booleans()):
        fields["ffn_hidden"] = draw(_sizes(1, 17))
    layers, other = draw(_sizes(1, 4)), draw(_sizes(1, 4))
    if arch != "encoder-decoder":
        fields["layers"] = layers
    else:
        fields |= draw(
            st.sampled_from(
                (
                    {"layers": layers},
                    {"encoder_layers": layers, "decoder_layers": other},
                    {"layers": layers, "encoder_layers": other},
                )
            )
        )
    if draw(st.integers(0, 3)):
        fields["vocab"] = draw(_sizes(1, 31))
        if arch == "encoder-decoder" and draw(st.booleans()):
            fields["src_vocab"] = draw(_sizes(1, 31))
    fields |= {
        "ffn": draw(st.sampled_from(("mlp", "glu"))),
        "activation": draw(st.sampled_from(("relu", "gelu", "silu"))),
        "norm": draw(st.sampled_from(("layernorm", "rmsnorm"))),
        "positions": draw(st.sampled_from(("sinusoidal", "learned", "rotary", "alibi", "relative", "none"))),
        "dropout": draw(st.sampled_from((0.0, 0.1))),
        "attention_dropout": draw(st.sampled_from((None, 0.0, 0.2))),
        "ffn_dropout": draw(st.sampled_from((0.0, 0.1))),
        "embedding_dropout": draw(st.sampled_from((0.0, 0.1))),
        "type_vocab": draw(st.sampled_from((0, 2))),
    }
    if fields["positions"] == "learned":
        fields["max_positions"] = draw(_sizes(7, 19))
    for name in ("pre_norm", "final_norm", "bias", "tied", "head", "embedding_norm", "head_bias"):
        fields[name] = draw(st.booleans())
    if arch == "decoder":
        fields["parallel"] = draw(st.booleans())
        fields["cross_attention"] = not fields["parallel"] and draw(st.booleans())
    if fields.get("parallel"):
        fields["parallel_norms"] = draw(st.sampled_from((1, 2)))
        fields["parallel_dropout"] = draw(st.sampled_from((0.0, 0.1)))
    else:
        fields["sandwich_norm"] = draw(st.booleans())
        fields["ffn_count"] = draw(_sizes(1, 3))
    if arch == "encoder":
        fields["head_transform"] = draw(st.booleans())
        fields["pooler"] = draw(st.booleans())
        fields["next_sentence"] = draw(st.sampled_from((0, 2))) if fields["pooler"] else 0
        fields["classes"] = draw(st.sampled_from((0, 3)))
    if fields.get("classes"):
        fields["classifier_tokens"] = draw(st.sampled_from(("all", "first")))
        fields["classifier_dense"] = draw(st.sampled_from(("", "tanh")))
        fields["classifier_dropout"] = draw(st.sampled_from((0.0, 0.1)))
        for name in ("classifier_bias", "classifier_input_dropout"):
            fields[name] = draw(st.booleans())
    fields["qk_norm"] = draw(st.sampled_from(("", "", "rmsnorm", "layernorm")))
    fields["final_dropout"] = draw(st.sampled_from((0.0, 0.1)))
    for name in ("attention_softcap", "logit_softcap"):
        fields[name] = draw(st.booleans())
    if draw(st.booleans()):
        fields["window"] = draw(_sizes(1, 8))
    if arch != "encoder-decoder" and layers > 1:
        if "window" in fields and draw(st.booleans()):
            fields["local_layers"] = draw(_sizes(1, layers - 1))
        elif draw(st.booleans()):
            fields["layer_sets"] = draw(_sizes(1, layers))
    # Logits by a table of another width need what leads back to it: BERT's transform, or OPT's projection.
    back = arch != "encoder" or fields["head_transform"] or not fields["head"]
    if "vocab" in fields and back and draw(st.booleans()):
        fields["embedding_size"] = draw(_sizes(1, 9))
        fields["embedding_projection"] = draw(st.sampled_from(("before", "after")))
        fields["embedding_projection_bias"] = draw(st.booleans())
        fields["embedding_context"] = draw(st.sampled_from((1, 3)))
        fields["output_projection"] = arch != "encoder"
    return fields


@st.composite
def cases(draw: st.DrawFn, arch: str | None = None) -> Case:
    """A model and one pass of it."""
    fields = draw(structures(arch))
    run: dict[str, Any] = {
        "batch": draw(_sizes(1, 3)),
        "seq_len": draw(_sizes(1, 7)),
        "attention": draw(st.sampled_from(("eager", "flash", "math"))),
        "dtype": draw(st.sampled_from(("bf16", "fp16", "fp32", "fp8"))),
    }
    if fields["arch"] == "encoder-decoder" or fields.get("cross_attention"):
        run["src_len"] = draw(_sizes(1, 7))
    return Case(fields, run)
