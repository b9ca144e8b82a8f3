"""The bodies of `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, vLLM's."""

from pydantic import Field

from deployments.openai.field_types import Body, Flag


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$", description="The model's name.")
    base_model_name: str | None = Field(None, description="Needed where several models are served.")


class LoadAdapterBody(UnloadAdapterBody):
    lora_path: str = Field(
        min_length=1,
        max_length=2000,
        description="Folder of PEFT's files, on every node, below the engine's lora_root.",
    )
    load_inplace: Flag = Field(None, description="true: replaces a loaded adapter of this name.")
