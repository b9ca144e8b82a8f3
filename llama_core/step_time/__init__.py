"""How long a step takes on a GPU, from published figures of the device: a model, no measurement."""
