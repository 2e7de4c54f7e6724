"""The table of model types: which keys of a ``config.json`` mean what, with the defaults of transformers 5.24.

The rows stand in the modules beside this one, by kinship; a module is imported when one of its rows is first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from tfcost.model_types.spec import COMMON_INERT, COMMON_MUST_BE, LABELS, Key, ModelType, Nested

__all__ = ["COMMON_INERT", "COMMON_MUST_BE", "LABELS", "MODEL_TYPES", "Key", "ModelType", "Nested"]

MODULES = {
    "gpt": "gpt2 gpt_bigcode gpt_neo gptj gpt_neox bloom opt falcon RefinedWeb RefinedWebModel mpt",
    "llama": "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 starcoder2",
    "experts": "mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 gpt_oss granitemoe dbrx",
    "encoders": "bert roberta xlm-roberta camembert distilbert electra albert mobilebert",
    "encoder_decoders": "t5 mt5 bart mbart",
    "vision": "vit deit dinov2 dinov2_with_registers swin",
    "multimodal": "clip clip_text_model clip_vision_model whisper",
}
"""The module that holds each row: a command reads one model, and loads one module."""


class Rows(Mapping[str, ModelType]):
    """Rows by model type, each loaded from its module when it is first asked for."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = {name: module for module, names in modules.items() for name in names.split()}
        self.added: dict[str, ModelType] = {}

    def add(self, name: str, row: ModelType) -> None:
        """A row for a further model type; nothing else is needed for its configs to be read."""
        self.added[name] = row

    def __getitem__(self, name: str) -> ModelType:
        if name in self.added:
            return self.added[name]
        row: ModelType = import_module(f"{__name__}.{self.modules[name]}").TYPES[name]
        return row

    def __contains__(self, name: object) -> bool:
        return name in self.modules or name in self.added

    def __iter__(self) -> Iterator[str]:
        return iter({**self.modules, **self.added})

    def __len__(self) -> int:
        return len({**self.modules, **self.added})


MODEL_TYPES = Rows(MODULES)
"""Every ``model_type`` that tfcost understands, with its row."""
