"""What a model is: :class:`ModelConfig`, and how stated fields become a complete one.

Sizes may be ints or symbols: :mod:`tfcost.symbols` puts symbols into the same dataclass to get closed forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tfcost.errors import InputError
from tfcost.graph import Size, div

CHOICES: dict[str, tuple[str, ...]] = {
    "arch": ("decoder", "encoder", "encoder-decoder"),
    "ffn": ("mlp", "glu"),
    "activation": ("relu", "gelu", "silu"),
    "norm": ("layernorm", "rmsnorm"),
    "positions": ("sinusoidal", "learned", "rotary", "alibi", "relative", "none"),
}
"""The fields whose values are names, and the names that a flag may give. (A config.json may bring further ones.)"""

PROJECTIONS = ("none", "before", "after", "unused")
"""Where the projection from E to d stands: before positions are added, after the embedding's norm and dropout, or
nowhere, its weights held all the same."""

ATTENTION_KINDS = ("softmax", "latent", "linear", "lsh")
"""How queries meet keys: :data:`tfcost.blocks.ATTENTION_KINDS` has the function of each."""

INNER_CHOICES: dict[str, tuple[str, ...]] = {
    "qk_norm": ("", "rmsnorm", "layernorm"),
    "attention_kind": ATTENTION_KINDS,
    "router": ("softmax", "chosen", "sigmoid"),
    "embedding_projection": PROJECTIONS,
    "cell": ("", "rnn", "lstm", "gru"),
    "classifier_tokens": ("all", "first", "mean", "mean_after_first", "first_and_mean"),
}
"""The same for fields that no flag states."""


class Stage(NamedTuple):
    """One stage of a model whose stages differ (Swin): its sizes, tokens of an image, and those that windows cover."""

    layers: Size
    heads: Size
    hidden: Size
    ffn_hidden: Size
    tokens: Size
    covered: Size


class ModelConfig(NamedTuple):
    """A Transformer's structure, complete: every field that the result depends on has its value.

    Sizes are in elements. The names are the long flags' with underscores; the fields below the first block are those
    that only real models need.
    """

    # The letters of the documents: d, h, l, V (and d_k, d_ff, h_kv).
    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn_hidden: Size
    encoder_layers: Size = 0
    decoder_layers: Size = 0
    vocab: Size | None = None
    src_vocab: Size | None = None
    arch: str = "decoder"
    ffn: str = "mlp"
    activation: str = "gelu"
    norm: str = "layernorm"
    pre_norm: bool = True
    final_norm: bool = False
    bias: bool = True
    tied: bool = True
    head: bool = True
    positions: str = "sinusoidal"
    max_positions: Size | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.1
    ffn_dropout: float = 0.0
    # Attention: biases of Q, K, V and of the output, a norm of queries and keys over head_dim ("", "rmsnorm",
    # "layernorm"), tanh on the scores, dropout of what it returns.
    attention_bias: bool = True
    attention_output_bias: bool = True
    key_bias: bool = True  # of K, where Q and V have one
    qk_norm: str = ""
    attention_softcap: bool = False
    scores_with_bias: bool = False  # the position bias is added in the product's own call (baddbmm)
    attention_output_dropout: float = 0.1
    bidirectional: bool = False  # a decoder without its causal mask
    attention_sinks: bool = False  # a learned score per head that takes part in the softmax and leads nowhere
    # Sliding windows: keys per query, and how many layers have one (None: all, where there is a window).
    window: Size | None = None
    local_layers: Size | None = None
    # How queries meet keys (ATTENTION_KINDS). Latent attention: the widths of the compressed queries (None: not
    # compressed) and keys and values, how much of head_dim turns with the position, the width of a value, and whether
    # the expansion of keys and values is absorbed into the queries and the output.
    attention_kind: str = "softmax"
    query_rank: Size | None = None
    kv_rank: Size | None = None
    rope_dim: Size | None = None
    value_dim: Size | None = None
    absorbed: bool = False
    # Random features of linear attention. Hashed attention: rounds of hashing, buckets of a round, tokens of a chunk.
    features: Size | None = None
    hashes: Size | None = None
    buckets: Size | None = None
    chunk_length: Size | None = None
    # The feed-forward, the norms, and how branches and norms are wired.
    ffn_bias: bool = True
    ffn_output_dropout: float = 0.1
    ffn_count: int = 1  # feed-forwards one after another in a layer
    # Mixture of experts: how many there are (None: no mixture), how many a token uses, the width of one, of all shared
    # experts together and of the dense layers' feed-forward (ffn_hidden), and how many layers are dense (None: none).
    experts: Size | None = None
    experts_per_token: Size = 1
    expert_hidden: Size | None = None
    shared_expert_hidden: Size = 0
    shared_expert_gate: bool = False
    expert_bias: bool = False
    router: str = "softmax"  # over all experts, over the chosen ones, or a sigmoid each
    router_bias: bool = False
    capacity_factor: str | None = None  # slots per routed token, "1.25" (None: each token is served)
    dense_layers: Size | None = None
    local_dense_layers: Size = 0  # how many of them have a window, where only some layers do
    norm_bias: bool = True
    norm_affine: bool = True
    sandwich_norm: bool = False  # a second norm on what a branch returns
    parallel: bool = False  # attention and feed-forward read the same input
    parallel_norms: int = 1
    parallel_dropout: float = 0.0  # of the sum of both branches
    # MobileBERT's bottleneck: its width, and which of queries and values come from one.
    bottleneck: Size | None = None
    bottleneck_queries: bool = False
    bottleneck_values: bool = False
    # Weights: distinct sets of layer weights (None: each layer has its own).
    layer_sets: Size | None = None
    # Embeddings: their width E where it differs from d and where the projection to d stands (PROJECTIONS).
    embedding_dropout: float = 0.0
    embedding_norm: bool = False
    embedding_size: Size | None = None
    embedding_projection: str = "none"
    embedding_projection_bias: bool = True
    embedding_context: int = 1  # neighbouring tokens whose embeddings are joined (3: trigrams)
    output_projection: bool = False  # back to E before the head
    type_vocab: Size = 0
    position_offset: Size = 0
    relative_buckets: Size = 32
    separate_tables: bool = False  # encoder and decoder have one each, and a third is left over
    # A decoder whose heads or feed-forward differ from the encoder's.
    decoder_heads: Size | None = None
    decoder_ffn_hidden: Size | None = None
    # What follows the last layer.
    final_dropout: float = 0.0
    pooler: bool = False
    pooler_dense: bool = True
    next_sentence: Size = 0
    head_transform: bool = False
    head_activation: str = ""
    head_bias: bool = False
    head_spare_bias: bool = False  # an untied head keeps a second bias that is not used
    head_factored: bool = False  # logits by the E columns of the table and d - E more
    logit_softcap: bool = False
    classes: Size = 0
    classifier_bias: bool = True
    classifier_tokens: str = "all"
    classifier_dense: str = ""  # the activation of a dense layer before it
    classifier_dropout: float = 0.0
    classifier_input_dropout: bool = False
    # A decoder-only model that can also attend to an encoder (GPT-2's add_cross_attention).
    cross_attention: bool = False
    # An image: its rows, columns (None: as many) and channels, those of a patch, whole patches, further tokens before
    # them and how many of these have no position, what stands around the projection, and a scale on each branch.
    family: str = ""  # which function builds the model (tfcost.families); empty: that of arch
    image_size: Size = None
    image_width: Size | None = None
    patch_size: Size = None
    patch_width: Size | None = None
    channels: Size = 3
    patches: Size = None
    prefix_tokens: int = 0
    plain_tokens: int = 0
    mask_token: bool = False
    patch_bias: bool = True
    patch_norm: bool = False
    layer_scale: bool = False
    # Swin: the side of a window, depth and heads of each stage, d_ff in widths of a stage, and the stages themselves.
    window_side: Size = None
    stage_layers: tuple[int, ...] = ()
    stage_heads: tuple[int, ...] = ()
    ffn_ratio: float | None = None
    stages: tuple[Stage, ...] = ()
    # Heads of these: the pooler's width and activation, classifiers side by side, a norm of the pooled token alone.
    pooler_size: Size | None = None
    pooler_activation: str = "tanh"
    classifiers: int = 1
    pooled_norm: bool = False
    pixel_stride: Size = 0  # the side of the square of pixels that a head predicts from each patch
    # Diffusion: frequencies of the time step, labels (with that of none), and channels of what is predicted.
    frequencies: Size = 256
    labels: Size = None
    output_channels: Size = None
    # Recurrent cells (rnn, lstm, gru) and their biases per gate (PyTorch has two), or the tokens of a convolution.
    cell: str = ""
    gate_biases: int = 1
    kernel: Size = None
    # Two towers: the other one, and the width in which they meet. Sound: positions of the encoder, of two frames each.
    projection_size: Size | None = None
    tower: ModelConfig | None = None
    source_positions: Size = None
    # Where it came from: the model_type of a config.json, or "" for the document's model described by flags.
    model_type: str = ""

    @property
    def layers(self) -> Size:
        """Layers of the one stack (l), or of each stack where both have as many; else the sum of both."""
        if self.arch != "encoder-decoder":
            return self.encoder_layers + self.decoder_layers
        return (
            self.encoder_layers
            if self.encoder_layers == self.decoder_layers
            else self.encoder_layers + (self.decoder_layers)
        )


FIELDS = ModelConfig._fields
SIZE_FIELDS = (
    "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "layers", "encoder_layers", "decoder_layers", "vocab",
    "src_vocab", "max_positions", "window", "local_layers", "experts", "experts_per_token", "expert_hidden",
    "shared_expert_hidden", "dense_layers", "query_rank", "kv_rank", "rope_dim", "value_dim", "image_size",
    "image_width", "patch_size", "patch_width", "channels", "window_side", "projection_size", "features", "hashes",
    "buckets", "chunk_length", "kernel",
)  # fmt: skip
"""Sizes of at least 1, where a model has them, that a person may state."""
FLAG = {"hidden": "-d/--hidden", "heads": "-h/--heads", "layers": "-l/--layers", "vocab": "-V/--vocab"}
"""How a message names a field where the flag has a short form."""


def flag(field: str) -> str:
    """The flag that states a field, as messages name it."""
    return FLAG.get(field, "--" + field.replace("_", "-"))


def choice(name: str, value: Any, allowed: Iterable[str]) -> str:
    """The value of a flag that takes names; :class:`InputError` for another."""
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}, not {str(value)[:40]!r}")
    return value


MAX_SIZE = 10**30
"""Beyond it a size is a slip of the keyboard; per-token ratios, which are floats, stay finite below it."""


def size(name: str, value: Any, least: int = 1) -> None:
    """Raise :class:`InputError` unless a value is a size: a whole number from ``least`` on, or an expression."""
    if hasattr(value, "free_symbols"):
        return
    if isinstance(value, int) and not -MAX_SIZE <= value <= MAX_SIZE:
        raise InputError(f"{name} must be at most 10^30")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {str(value)[:40]!r}")


def check_factor(value: Any) -> None:
    """Raise :class:`InputError` unless a value is a capacity factor: a positive decimal number such as 1.25."""
    text = str(value)
    digits = text.replace(".", "", 1)
    good = not isinstance(value, bool) and digits.isascii() and digits.isdecimal() and 0 < float(text) < MAX_SIZE
    if not good:
        raise InputError(f"--capacity-factor must be a positive number such as 1.25, not {str(value)[:40]!r}")


def check(stated: Mapping[str, Any]) -> None:
    """Raise :class:`InputError` unless every field that a person states, by flag or keyword, has an allowed value."""
    for field, value in stated.items():
        if value is None:
            continue
        if field not in FIELDS and field != "layers":
            raise InputError(f"unknown model field {field!r}")
        default = ModelConfig._field_defaults.get(field)
        if field == "capacity_factor":
            check_factor(value)
        elif field in SIZE_FIELDS:
            size(flag(field), value)
        elif field in CHOICES or field in INNER_CHOICES:
            choice(flag(field), value, CHOICES.get(field) or INNER_CHOICES[field])
        elif isinstance(default, bool):
            if not isinstance(value, bool):
                raise InputError(f"{flag(field)} must be true or false, not {str(value)[:40]!r}")
        elif field.endswith("dropout"):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
                shown = (
                    str(value)[:40] if not isinstance(value, int) or -MAX_SIZE < value < MAX_SIZE else "a huge number"
                )
                raise InputError(f"{flag(field)} must be a number from 0 to below 1, not {shown!r}")
        elif default is None or isinstance(default, int):
            size(flag(field), value, 1 if default is None else 0)
        elif not isinstance(value, str):
            raise InputError(f"{flag(field)} must be a name, not {str(value)[:40]!r}")


LAYER_RULES = frozenset(("window_pattern", "window_from", "window_rule", "expert_rule"))
"""Stated fields that say which layers are of which kind: :mod:`tfcost.layer_kinds` makes counts of them."""


def complete(stated: Mapping[str, Any]) -> ModelConfig:
    """The complete config from the fields that are stated; what is left out (or None) is derived.

    Derived: ``kv_heads = heads``, ``head_dim = hidden / heads``, ``ffn_hidden = 4 hidden``, both stacks' layers from
    ``layers``, attention's and the branches' dropout from ``dropout`` (and that of the fields which ``follows_dropout``
    names), every kind of bias from ``bias``, how many layers are of which kind (:mod:`tfcost.layer_kinds`), the
    experts' width, and whether E differs from d. Raises :class:`InputError` naming the flag for
    a missing, zero, negative or non-dividing size.
    """
    given = {key: value for key, value in stated.items() if value is not None}
    if "image_size" in given and "family" not in given:
        given["family"] = "image"
        given.setdefault("arch", "encoder")
    arch = given.setdefault("arch", "decoder")
    if given.get("family") in ("recurrent", "convolutions"):
        given.setdefault("heads", 1)  # which such a layer has none of
    missing = [field for field in ("hidden", "heads") if field not in given]
    layers = given.pop("layers", None)
    for stack in ("encoder", "decoder"):
        key = f"{stack}_layers"
        if stack not in arch:
            if key in given:
                raise InputError(f"{flag(key)} does not apply to --arch {arch}")
        elif key not in given:
            if layers is None:
                missing.append(key if arch == "encoder-decoder" else "layers")
            else:
                given[key] = layers
    if missing:
        raise InputError("missing " + ", ".join(flag(field) for field in missing))
    if "src_vocab" in given and arch != "encoder-decoder":
        raise InputError("--src-vocab needs --arch encoder-decoder")
    if "src_vocab" in given and "vocab" not in given:
        raise InputError("--src-vocab needs -V/--vocab, the target vocabulary")
    hidden, heads = given["hidden"], given["heads"]
    kv_heads = given.setdefault("kv_heads", heads)
    div(heads, kv_heads, "-h/--heads", "--kv-heads")
    if "head_dim" not in given:
        given["head_dim"] = div(given.get("bottleneck", hidden), heads, "-d/--hidden", "-h/--heads")
    given.setdefault("ffn_hidden", 4 * hidden)
    bias = given.setdefault("bias", True)
    for field in ("attention_bias", "attention_output_bias", "ffn_bias"):
        given.setdefault(field, bias)
    given.setdefault("norm_bias", bias and given.get("norm", "layernorm") == "layernorm")
    if given.get("positions") == "learned" and not {"max_positions", "image_size"} & given.keys():
        raise InputError("--positions learned needs --max-positions, the rows of the table")
    dropout = given.setdefault("dropout", 0.1)
    follows = ("attention_dropout", "attention_output_dropout", "ffn_output_dropout", *given.pop("follows_dropout", ()))
    for field in follows:
        given.setdefault(field, dropout)
    _complete_experts(given)
    _complete_kind(given)
    if not LAYER_RULES.isdisjoint(given):
        from tfcost.layer_kinds import complete_kinds

        complete_kinds(given)
    _complete_embedding(given)
    local, layers = given.get("local_layers"), given.get("decoder_layers", given.get("encoder_layers"))
    if isinstance(local, int) and isinstance(layers, int) and local > layers:
        raise InputError(f"--local-layers {local} is more than the {layers} layers that there are")
    if "family" in given:
        from tfcost.inputs import complete_family

        complete_family(given)
    return ModelConfig(**given)


def as_dict(cfg: ModelConfig) -> dict[str, Any]:
    """The fields by name, with the config of another tower and the stages as dicts of their own."""
    fields = cfg._asdict()
    if cfg.tower is not None:
        fields["tower"] = as_dict(cfg.tower)
    fields["stages"] = [stage._asdict() for stage in cfg.stages]
    return fields


def from_dict(fields: Mapping[str, Any]) -> ModelConfig:
    """What :func:`as_dict` gave."""
    cfg = ModelConfig(**fields)
    tower = fields["tower"]
    stages = tuple([Stage(**stage) for stage in fields["stages"]])
    return cfg._replace(tower=None if tower is None else from_dict(tower), stages=stages)


EXPERT_FIELDS = (
    "experts_per_token", "expert_hidden", "shared_expert_hidden", "shared_expert_gate", "expert_bias", "router",
    "router_bias", "capacity_factor",
)  # fmt: skip
"""Fields that mean nothing without ``experts``."""


def _complete_experts(given: dict[str, Any]) -> None:
    """Check the experts, and give them the width of the feed-forward where they have none of their own."""
    experts = given.get("experts")
    if experts is None:
        for field in EXPERT_FIELDS:
            if field in given:
                raise InputError(f"{flag(field)} needs --experts, the number of experts")
        return
    given.setdefault("expert_hidden", given["ffn_hidden"])
    for field in ("expert_bias", "router_bias"):
        given.setdefault(field, given["bias"])
    chosen = given.get("experts_per_token", 1)
    if isinstance(chosen, int) and isinstance(experts, int) and chosen > experts:
        raise InputError(f"--experts-per-token {chosen} is more than --experts {experts}")
    if "capacity_factor" in given:
        given["capacity_factor"] = str(given["capacity_factor"])


KIND_FIELDS = {
    "latent": ("kv_rank", "rope_dim"),
    "linear": ("features",),
    "lsh": ("hashes", "buckets", "chunk_length"),
}
"""What each kind of attention cannot do without."""


def _complete_kind(given: dict[str, Any]) -> None:
    """Check that a kind of attention has its sizes. Latent: values as wide as keys, rotary width within a head."""
    kind = given.get("attention_kind")
    missing = [field for field in KIND_FIELDS.get(kind or "", ()) if field not in given]
    if missing:
        raise InputError(f"--attention-kind {kind} needs " + ", ".join(flag(field) for field in missing))
    for other, fields in KIND_FIELDS.items():
        if other != kind and (stray := [field for field in fields if field in given]):
            raise InputError(f"{flag(stray[0])} needs --attention-kind {other}")
    if kind != "latent":
        return
    given.setdefault("value_dim", given["head_dim"])
    width, turned = given["head_dim"], given["rope_dim"]
    if isinstance(width, int) and isinstance(turned, int) and turned > width:
        raise InputError(f"--rope-dim {turned} is more than --head-dim {width}")


def _complete_embedding(given: dict[str, Any]) -> None:
    """Settle whether embeddings of width E are projected to d. Where E = d that takes ``projection_if_equal``."""
    equal = given.pop("projection_if_equal", "none")
    if given.get("embedding_size") == given["hidden"] and given.get("embedding_projection", "none") != "none":
        given["embedding_projection"] = equal
        given["output_projection"] = False
