"""The per-slot fields of `SamplingParams` as tensors that lie together as an array of one C struct a slot.

The fields, their order and their types come from the marks in `scheduling/sampling_params.py`; `logit_rules.hpp` declares the
same struct, and the native backend compares the two when it loads its library.
"""

import ctypes
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from llama_core.scheduling.sampling_params import SLOT_FIELDS, SamplingParams, ScalarType

_C_TYPES: dict[ScalarType, type[ctypes.c_float] | type[ctypes.c_int64]] = {
    "float32": ctypes.c_float,
    "int64": ctypes.c_int64,
}
_TORCH_TYPES = {"float32": torch.float32, "int64": torch.int64}


class SlotSampling(ctypes.Structure):
    """One slot's values, as `native/logit_rules.hpp` declares them."""

    _fields_ = tuple((name, _C_TYPES[mark.dtype]) for name, mark in SLOT_FIELDS.items())


def words_of(params: SamplingParams) -> npt.NDArray[np.int64]:
    """The bytes of one slot's struct, int64 [sizeof(SlotSampling) / 8]."""
    struct = SlotSampling(*(getattr(params, name) for name in SLOT_FIELDS))
    return np.frombuffer(bytes(struct), dtype=np.int64)


class SamplingTensors:
    """One tensor [B] for each PerSlot field, by the field's name: `sampling.temperature` is float32 [B]."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def __getattr__(self, name: str) -> torch.Tensor:
        try:
            return self.__dict__["_tensors"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"SamplingParams has no per-slot field {name!r}") from None

    def at(self, index: torch.Tensor) -> "SamplingTensors":
        """The rows at `index`, int64 [D], as new tensors [D]."""
        return SamplingTensors({name: tensor[index] for name, tensor in self._tensors.items()})

    def set(self, slot: int, params: SamplingParams) -> None:
        for name, tensor in self._tensors.items():
            tensor[slot] = getattr(params, name)


class SlotSamplingArray(SamplingTensors):
    """`SlotSampling [num_slots]` in one buffer; its tensors are views of the fields."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        size = ctypes.sizeof(SlotSampling)
        self._structs = torch.zeros((num_slots, size), dtype=torch.uint8, device=device)
        fields = {}
        for name, mark in SLOT_FIELDS.items():
            values = self._structs.view(_TORCH_TYPES[mark.dtype])
            fields[name] = values[:, getattr(SlotSampling, name).offset // values.itemsize]
        super().__init__(fields)
        for slot in range(num_slots):
            self.set(slot, SamplingParams(temperature=0.0))

    @property
    def words(self) -> torch.Tensor:
        """The structs as int64 [num_slots, words], as `words_of` has them."""
        return self._structs.view(torch.int64)

    @property
    def address(self) -> int:
        """The address of the first struct, valid as long as this object lives."""
        return self._structs.data_ptr()
