"""The table of model types: which keys of a ``config.json`` mean what, with the defaults of transformers 5.24."""

from __future__ import annotations

from tfcost.model_types.encoder_decoders import ENCODER_DECODER_TYPES
from tfcost.model_types.encoders import ENCODER_TYPES
from tfcost.model_types.gpt import GPT_TYPES
from tfcost.model_types.llama import LLAMA_TYPES
from tfcost.model_types.spec import COMMON_INERT, COMMON_MUST_BE, LABELS, Key, ModelType, Nested

__all__ = ["COMMON_INERT", "COMMON_MUST_BE", "LABELS", "MODEL_TYPES", "Key", "ModelType", "Nested"]

MODEL_TYPES: dict[str, ModelType] = {**GPT_TYPES, **LLAMA_TYPES, **ENCODER_TYPES, **ENCODER_DECODER_TYPES}
"""Every ``model_type`` that tfcost understands, with its row."""
