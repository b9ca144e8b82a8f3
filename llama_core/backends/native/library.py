"""The compiled engine (`native/engine.cpp`) as a ctypes library: its functions, and the structs of both sides.

`load_library` compares the Python side with the description that the library gives of itself.
"""

import ctypes
import itertools
from enum import IntEnum
from functools import cache

from llama_core.backends.logit_rules import LogitRulesStruct
from llama_core.backends.native.build import Unavailable, library_path
from llama_core.backends.sampling_tensors import SlotSampling


class Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                *("dim", "layers", "heads", "kv_heads", "head_dim", "full_heads", "full_kv_heads", "has_first_copies"),
                *("tables", "hidden", "full_vocab", "rank", "ranks", "sampler"),
                *("bfloat16", "max_tokens", "max_samples", "max_seq_len", "block_size", "blocks_per_sequence"),
                *("threads", "max_loras", "max_lora_rank"),
            )
        ),
        *((name, ctypes.c_float) for name in ("embedding_multiplier", "logits_divisor", "logits_cap")),
    )


class Slots(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("tokens", "block_tables", "sampling", "rules", "adapter_places")
    )


class Row(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("slot", "start", "length", "samples"))


class Tensor(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("rows", "columns"))


class WeightPart(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("tensor", "first", "rows", "columns"))


class Operation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "from_", "to", "tensor", "other", "layer", "window")),
        *((name, ctypes.c_int32) for name in ("query_table", "key_table", "variant", "experts", "chosen")),
        *((name, ctypes.c_float) for name in ("factor", "eps", "offset")),
    )


class Kind(IntEnum):
    """Of an `Operation`; `program.py` has their meanings."""

    EMBEDDING, NORM, LINEAR, GATED_LINEAR, ROTATION, ATTENTION = range(6)
    ROUTE, EXPERT_GATES, EXPERT_SUM, TOKEN_GATE, ADDITION, HEAD = range(6, 12)


class Buffer(IntEnum):
    """What an `Operation` reads and writes: a row for each token of the step."""

    RESIDUAL, NORMED, QKV, ATTENDED, GATED, PROJECTED, SHARED = range(7)


class Variant(IntEnum):
    """Of a kind of `Operation`: a gate's activation, a norm of all heads together, attention whose output is gated, experts'
    weights that are a softmax of all experts, or sigmoids that multiply their inputs."""

    PLAIN, GELU_TANH, ALL_HEADS, SIGMOID_GATE, SCORES_ALL, CLAMPED_SWIGLU, SCALES_INPUTS = range(7)


class TokenMask(ctypes.Structure):
    """One sample's allowed tokens. `bits` is None where its row has no grammar."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("bits", "is_ready"))


_TYPE_NAMES = {ctypes.c_int32: "int32", ctypes.c_int64: "int64", ctypes.c_float: "float32", ctypes.c_void_p: "pointer"}


class AbiMismatch(Exception):
    """The compiled library lays out a struct otherwise than this module does."""


def _description() -> list[str]:
    """One line for each struct and enum, in the form of step_abi.hpp's describe_abi."""
    lines = []
    structs = Shape, Slots, SlotSampling, Row, Tensor, WeightPart, Operation, LogitRulesStruct, TokenMask
    for struct in structs:
        named = [(field, kind) for field, kind in struct._fields_]  # type: ignore[misc]
        fields = [f"{field.rstrip('_')}:{_TYPE_NAMES[kind]}@{getattr(struct, field).offset}" for field, kind in named]
        lines.append(" ".join((struct.__name__.removesuffix("Struct"), str(ctypes.sizeof(struct)), *fields)))
    return lines + [
        " ".join((each.__name__, *(value.name.lower() for value in each))) for each in (Kind, Buffer, Variant)
    ]


def check_abi(described: str) -> None:
    """Raises AbiMismatch unless `described`, the library's own description, is that of this module."""
    theirs = described.split("\n")
    for mine, other in itertools.zip_longest(_description(), theirs, fillvalue="nothing"):
        if mine != other:
            raise AbiMismatch(
                f"the native library does not fit this version of library.py: it has {other}; expected {mine}"
            )


@cache
def load_library() -> ctypes.CDLL:
    """The library, built if there is none yet. Raises Unavailable, or AbiMismatch if the library is not of this source."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise Unavailable(str(error)) from None
    library.llama_abi.restype = ctypes.c_char_p
    check_abi(library.llama_abi().decode())
    of, pointer, integer, size, text = ctypes.POINTER, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_char_p
    counted = pointer, integer
    for name, result, arguments in (
        ("unsupported_reason", text, (integer, integer, integer, text)),
        ("create", pointer, (of(Shape), pointer, of(text), integer, *counted, *counted, of(Slots), pointer, pointer)),
        ("destroy", None, (pointer,)),
        ("pack", None, (pointer, of(WeightPart), pointer, integer)),
        ("pack_groups", None, (pointer, of(WeightPart), pointer, pointer, pointer)),
        ("clear_adapter", None, (pointer, integer)),
        ("pack_adapter", None, (pointer, integer, of(WeightPart), integer, ctypes.c_float, pointer, pointer)),
        ("make_cache", integer, (pointer, integer)),
        ("gather_bytes", size, (of(Shape),)),
        ("shared_bytes", size, (of(Shape),)),
        ("share_memory", None, (pointer, pointer)),
        ("use_fallback", None, (pointer, pointer)),
        ("step", integer, (pointer, pointer, integer, pointer, integer, pointer)),
        ("logits_of", None, (pointer, pointer, integer)),
        ("hidden_states_of", None, (pointer, integer, integer, pointer)),
        ("logits", pointer, (pointer,)),
        ("seconds_sampled", ctypes.c_double, (pointer,)),
        ("waited", ctypes.c_double, (pointer,)),
        ("waited_for_masks", ctypes.c_double, (pointer,)),
        ("weight_bytes", size, (pointer,)),
        ("working_bytes", size, (pointer,)),
        ("instructions", text, ()),
        ("poke_embedding", None, (pointer, integer, pointer)),
    ):
        function = getattr(library, f"llama_{name}")
        function.restype, function.argtypes = result, arguments
    return library
