"""The table of model types: which keys of a ``config.json`` mean what, with the defaults of transformers 5.24.

The rows stand in the modules beside this one, by kinship; a module is imported when one of its rows is first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from tfcost.model_types.spec import COMMON_INERT, COMMON_MUST_BE, LABELS, Key, ModelType, Nested

__all__ = ["COMMON_INERT", "COMMON_MUST_BE", "LABELS", "MODEL_TYPES", "Key", "ModelType", "Nested"]

MODULES = {
    "gpt": "gpt2 gpt_bigcode gpt_neo gptj gpt_neox bloom opt falcon RefinedWebModel RefinedWeb mpt",
    "llama": "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3",
    "experts": "mixtral qwen2_moe qwen3_moe deepseek_v2 deepseek_v3 gpt_oss granitemoe dbrx",
    "encoders": "bert roberta xlm-roberta camembert distilbert electra albert mobilebert",
    "encoder_decoders": "t5 mt5 bart mbart",
}
"""Each module and the model types whose rows it has, in its ``TYPES``."""


class _Rows(Mapping[str, ModelType]):
    """The rows by name, each module imported when it is first needed."""

    def __init__(self) -> None:
        self._modules = {name: module for module, names in MODULES.items() for name in names.split()}

    def __getitem__(self, name: str) -> ModelType:
        types: dict[str, ModelType] = import_module(f"{__name__}.{self._modules[name]}").TYPES
        return types[name]

    def __contains__(self, name: object) -> bool:
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


MODEL_TYPES: Mapping[str, ModelType] = _Rows()
"""Every ``model_type`` that tfcost understands, with its row."""
