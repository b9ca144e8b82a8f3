"""A model that clients ask for as structured output; in environments that have pydantic."""

from pydantic import BaseModel, ConfigDict, Field


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
