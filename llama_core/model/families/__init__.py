"""The families whose checkpoints are read: each module of this folder has some in FAMILIES."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from llama_core.model.family import Family


@cache
def families() -> Mapping[str, Family]:
    """By model_type, in the order of the modules' names."""
    names = [f"{__name__}.{module.name}" for module in iter_modules(__path__)]
    return {family.model_type: family for name in names for family in import_module(name).FAMILIES}


@cache
def wrapped_families() -> Mapping[str, Family]:
    """By the model_type of models with images: the family of a text_config that names none."""
    return {wrapper: family for family in reversed(list(families().values())) for wrapper in family.wrappers}


@cache
def gguf_families() -> Mapping[tuple[str, bool], Family]:
    """By the architecture's name in GGUF files, and whether the model has experts."""
    return {(family.gguf, family.gguf_has_experts): family for family in families().values() if family.gguf}
