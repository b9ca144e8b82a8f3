"""The weights in Hugging Face's safetensors files. Reads them through memory maps, a slice at a time.

Rotary embedding turns adjacent pairs of a head's values (2i, 2i + 1) in Meta's layout, and pairs (i, i + head_dim / 2) in
Hugging Face's. So this reader gives the rows of q and k, with their biases and norms, in Meta's order.

Linear layers [n, k] may be packed, as compressed-tensors' "pack-quantized" stores them: weight_packed, int32
[n, k * bits / 32], holds codes plus 2^(bits - 1), the first code in the lowest bits. So its bytes hold two codes of 4 bits
each, the low half first, or one of 8 bits. weight_scale [n, k / GROUP] has a scale for each group of inputs. weight_shape is
[n, k]. A weight is code * scale.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from llama_core.errors import CheckpointError
from llama_core.files.hf.files import Located, open_file
from llama_core.files.hf.quantization import FORMATS
from llama_core.files.json_fields import refuse_faults
from llama_core.files.source import DENSE, GROUP, GroupedSlice, Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.fields import shown
from llama_core.model.weights import EMBEDDING, OUTPUT, Box, WeightSpec, weight_specs
from llama_core.weights.loader import GroupedWeight, dense
from llama_core.weights.mapped import file_begin, release, row_chunks

SCALE_DTYPES: Final = ("BF16", "F16", "F32")
_PARTS = ("packed", "scale", "shape")


@dataclass(frozen=True, slots=True)
class PackedTensors:
    """The tensors of one linear layer, and the bits of a code."""

    packed: Located
    scale: Located
    shape: Located
    bits: int


def part_names(weight: str) -> dict[str, str]:
    """The names in the files of the parts of a packed weight. weight: its name if it were dense."""
    return {part: f"{weight}_{part}" for part in _PARTS}


def find_packed(
    weight: str, shape: tuple[int, ...], bits: int, located: Mapping[str, Located]
) -> tuple[PackedTensors | None, list[str]]:
    """The parts of a packed weight, or what is wrong with their headers. shape: of the weight."""
    names = part_names(weight)
    if missing := [name for name in names.values() if name not in located]:
        return None, [f"{name} is missing" for name in missing]
    rows, columns = shape
    if columns % GROUP:
        return None, [f"{names['packed']} has {columns} inputs, no multiple of {GROUP}"]
    expected = {
        "packed": ((rows, columns * bits // 32), ("I32",)),
        "scale": ((rows, columns // GROUP), SCALE_DTYPES),
        "shape": ((2,), ("I64", "I32")),
    }
    faults = []
    for part, (size, dtypes) in expected.items():
        tensor = located[names[part]]
        if tensor.shape != size:
            faults.append(f"{names[part]} has shape {shown(list(tensor.shape))}, expected {list(size)}")
        elif tensor.dtype not in dtypes:
            faults.append(f"{names[part]} has dtype {tensor.dtype}, expected {' or '.join(dtypes)}")
    packed, scale, said = (located[names[part]] for part in _PARTS)
    found = PackedTensors(packed, scale, said, bits)
    return (None, faults) if faults else (found, [])


def unpack(stored: torch.Tensor, bits: int) -> torch.Tensor:
    """The bytes of weight_packed, uint8 [n, k * bits / 8] -> codes [n, k] of a `GroupedSlice`; allocates."""
    if bits == 8:
        return (stored ^ 128).view(torch.int8)
    return torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1)


_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old versions of transformers stored the frequencies
_PREFIX = "model."


class HuggingFaceWeights(WeightReader):
    """Mapped files whose names, shapes and dtypes have been checked against the architecture."""

    def __init__(
        self, directory: Path, located: Mapping[str, Located], config: ModelConfig, packed_bits: int | None = None
    ) -> None:
        """packed_bits: of a code, in a model whose linear layers may be packed. Raises CheckpointError that names the folder,
        and the first five weights at fault."""
        self._head_dim, self._rotated = config.head_dim, config.rope.rotated(config.head_dim)
        self._specs = weight_specs(config)
        self._located, self._packed = _by_own_name(directory, located, config, self._specs, packed_bits)
        self._files = {file: open_file(file, "pt") for file in {each.file for each in located.values()}}
        self._begins: dict[Path, int | None] = {}  # addresses of byte 0
        self._formats: dict[str, str] = {}
        self._check_shapes(directory)
        if config.tied_embeddings and self._located[OUTPUT] != self._located[EMBEDDING]:
            self._check_tied(directory)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output layer; of the embedding if that is packed."""
        return _DTYPES[self._located[EMBEDDING if OUTPUT in self._packed else OUTPUT].dtype]

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        """Rows of the mapped file; rows of q and k copied in Meta's order. Releases the pages of a slice when the next slice
        is requested."""
        if name in self._packed:
            yield from self._dequantized(name, box)
            return
        file, stored = self._located[name].file, self._stored(self._located[name])
        if file not in self._begins:
            self._begins[file] = file_begin(stored)
        begin = None if self._specs[name].is_rotated else self._begins[file]
        for first, rows in self._rows(stored, name, box):
            offset = None if begin is None else rows.data_ptr() - begin
            yield Slice(file, rows, (first, *(0,) * (rows.dim() - 1)), offset)

    def stored_format(self, name: str) -> str:
        """Packed weights whose scales are not exact in float16 count as dense. Reads the scales, once."""
        if name not in self._packed:
            return DENSE
        if name not in self._formats:
            scales = self._stored(self._packed[name].scale)
            is_exact = True
            for begin, end in row_chunks(scales):
                some = scales[begin:end].float()
                is_exact = is_exact and bool((some == some.half().float()).all())  # false for NaN
                release(scales[begin:end])
            self._formats[name] = FORMATS[self._packed[name].bits] if is_exact else DENSE
        return self._formats[name]

    def grouped_slices(self, name: str, box: Box) -> Iterator[GroupedSlice]:
        if self.stored_format(name) == DENSE:
            raise LookupError(f"{name} is not stored in groups")
        yield from self._groups(name, box)

    def _groups(self, name: str, box: Box) -> Iterator[GroupedSlice]:
        """Of a packed weight, whatever its scales are."""
        parts = self._packed[name]
        (row, column), (rows, columns) = box
        assert column % GROUP == columns % GROUP == 0, "a box of a packed weight consists of whole groups"
        codes = self._stored(parts.packed).view(torch.uint8)
        codes_box = Box((row, column * parts.bits // 8), (rows, columns * parts.bits // 8))
        scales = self._stored(parts.scale)[:, column // GROUP : (column + columns) // GROUP]
        for first, packed in self._rows(codes, name, codes_box):
            some = Box((row + first, 0), (len(packed), scales.shape[1]))
            own = torch.cat([chunk.float() for _, chunk in self._rows(scales, name, some)])
            yield GroupedSlice(parts.packed.file, unpack(packed, parts.bits), own, None, (first, 0))

    def _dequantized(self, name: str, box: Box) -> Iterator[Slice]:
        begin, end = box.start[1], box.start[1] + box.shape[1]
        first = begin - begin % GROUP
        whole = Box((box.start[0], first), (box.shape[0], -(-end // GROUP) * GROUP - first))
        for file, codes, scales, _, start in self._groups(name, whole):
            values = dense(GroupedWeight(codes, scales, None), 8 if self._packed[name].bits == 4 else 0)
            yield Slice(file, values[:, begin - first : end - first], start)

    def _rows(self, stored: torch.Tensor, name: str, box: Box) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row in the box, rows of the mapped `stored`): those of q and k copied in Meta's order."""
        first, *others = box.start
        starts = first + self._specs[name].first_row, *others
        region = tuple(slice(begin, begin + size) for begin, size in zip(starts, box.shape, strict=True))
        unit = self._head_dim if self._specs[name].is_rotated else 1
        assert box.start[0] % unit == box.shape[0] % unit == 0, "a box of q or k consists of whole heads"
        wanted = stored[region]
        for begin, end in row_chunks(wanted, unit):
            rows = wanted[begin:end]
            yield begin, interleaved(rows, unit, self._rotated) if unit > 1 else rows
            release(rows)

    def _stored(self, located: Located) -> torch.Tensor:
        """A view of the mapped file."""
        mapped: torch.Tensor = self._files[located.file].get_tensor(located.name)
        return mapped

    def _check_shapes(self, directory: Path) -> None:
        """Raises CheckpointError for a packed weight that says it has another shape."""
        for name, parts in self._packed.items():
            spec = self._specs[name]
            if (said := self._stored(parts.shape).tolist()) != list(spec.stored_shape):
                stored = part_names(spec.hugging_face)["shape"]
                raise CheckpointError(f"{directory}: {stored} is {said}, expected {list(spec.stored_shape)}")

    def _check_tied(self, directory: Path) -> None:
        """Raises CheckpointError if the files have an output layer beside an embedding with other values."""
        embedding, output = self._stored(self._located[EMBEDDING]), self._stored(self._located[OUTPUT])
        for begin, end in row_chunks(embedding):
            pair = embedding[begin:end], output[begin:end]
            is_equal = torch.equal(*pair)
            for rows in pair:
                release(rows)
            if not is_equal:
                raise CheckpointError(
                    f"{directory}: config.json says tie_word_embeddings, but lm_head.weight differs from the embedding; "
                    "tie_word_embeddings false serves it"
                )


def interleaved(rows: torch.Tensor, head_dim: int, rotated: int) -> torch.Tensor:
    """Whole heads in Meta's order: values (i, i + rotated / 2) of each head's first ones become (2i, 2i + 1). A copy."""
    heads = rows.reshape(-1, head_dim, *rows.shape[1:])
    halves = heads[:, :rotated].reshape(len(heads), 2, rotated // 2, *rows.shape[1:])
    turned = halves.transpose(1, 2).flatten(1, 2)
    return (turned if rotated == head_dim else torch.cat((turned, heads[:, rotated:]), dim=1)).view(rows.shape)


def _by_own_name(
    directory: Path,
    located: Mapping[str, Located],
    config: ModelConfig,
    specs: Mapping[str, WeightSpec],
    packed_bits: int | None,
) -> tuple[dict[str, Located], dict[str, PackedTensors]]:
    """The tensor of each weight of the architecture, and the tensors of each packed one. Raises CheckpointError for a set of
    weights that does not fit it."""
    names = {name: spec.hugging_face for name, spec in specs.items()}
    if names[EMBEDDING].removeprefix(_PREFIX) in located:
        names = {name: stored.removeprefix(_PREFIX) for name, stored in names.items()}
    if config.tied_embeddings:  # one of the two is enough
        if names[OUTPUT] not in located:
            names[OUTPUT] = names[EMBEDDING]
        elif names[EMBEDDING] not in located:
            names[EMBEDDING] = names[OUTPUT]
    faults: list[str] = []
    packed: dict[str, PackedTensors] = {}
    for name in [name for name in names if packed_bits is not None and specs[name].is_linear]:
        parts = part_names(names[name])
        if names[name] in located or located.keys().isdisjoint(parts.values()):
            continue
        assert packed_bits is not None
        found, wrong = find_packed(names.pop(name), specs[name].stored_shape, packed_bits, located)
        faults += wrong
        if found is not None:
            packed[name] = found
        names |= {f"{name}_{part}": stored for part, stored in parts.items()}
    dense = {name: stored for name, stored in names.items() if name in specs}
    faults += [fault for name, stored in dense.items() if (fault := _fault(stored, located, specs[name]))]
    known = set(names.values())
    faults += [
        f"{shown(name)} in {at.file.name} is unexpected"
        for name, at in located.items()
        if name not in known and not _DERIVED.search(name)
    ]
    refuse_faults(f"{directory}: weights do not fit config.json", faults)
    return {name: located[stored] for name, stored in dense.items()}, packed


def _fault(name: str, located: Mapping[str, Located], spec: WeightSpec) -> str | None:
    if name not in located:
        return f"{name} is missing"
    tensor = located[name]
    if tensor.shape != spec.stored_shape:
        return f"{name} has shape {shown(list(tensor.shape))}, expected {list(spec.stored_shape)}"
    if tensor.dtype not in _DTYPES:
        return f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_DTYPES)}"
    return None
