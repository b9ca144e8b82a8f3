"""The weights in Hugging Face's safetensors files. Reads them through memory maps, a slice at a time.

Rotary embedding turns adjacent pairs of a head's values (2i, 2i + 1) in Meta's layout, and pairs (i, i + head_dim / 2) in
Hugging Face's. So this reader gives the rows of q and k, with their biases and norms, in Meta's order.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import torch

from llama_core.errors import CheckpointError
from llama_core.files.hf.coded_layers import Quantization
from llama_core.files.hf.coding import Coding
from llama_core.files.hf.files import Located, open_file
from llama_core.files.json_fields import refuse_faults
from llama_core.files.source import DENSE, GROUP, GroupedSlice, Slice, WeightReader
from llama_core.model.config import ModelConfig
from llama_core.model.fields import shown
from llama_core.model.weight_formats import CODINGS, held_as
from llama_core.model.weights import EMBEDDING, OUTPUT, Box, WeightSpec, weight_specs
from llama_core.weights.coded import CodedWeight
from llama_core.weights.mapped import file_begin, release, row_chunks
from llama_core.weights.mxfp4 import Mxfp4Weight

_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # old versions of transformers stored the frequencies
# Of quantized activations and caches, which are computed as floats here.
_ACTIVATIONS = re.compile(r"\.((?:input|output|activation|[qkv])_(?:scale|zero_point))$")
_WEIGHT = ".weight"
_IMAGES: Final = ("vision_tower.", "vision_model.", "multi_modal_projector.", "vision_adapter.", "vision_projection.")
_LAYERS, _IN_LAYER, _HEAD = "model.", "layers.", "lm_head."
# How files name the layers and the output layer: as a language model, without its head, and as the text part of a model with
# images by transformers 5 and 4.
_PREFIXES: Final = (
    (_LAYERS, _HEAD),
    ("", _HEAD),
    ("model.language_model.", _HEAD),
    ("language_model.model.", "language_model.lm_head."),
)


class HuggingFaceWeights(WeightReader):
    """Mapped files whose names, shapes and dtypes have been checked against the architecture."""

    def __init__(
        self,
        directory: Path,
        located: Mapping[str, Located],
        config: ModelConfig,
        quantization: Quantization | None = None,
    ) -> None:
        """quantization: of a model whose linear layers may be in codes. Raises CheckpointError that names the folder, and the
        first five weights at fault."""
        self._head_dim, self._rotated = config.head_dim, config.rope.rotated(config.head_dim)
        self._specs = _as_stored(weight_specs(config), located)
        found = _by_own_name(directory, located, config, self._specs, quantization)
        self._located, self.ignored, self.of_images = found.dense, found.ignored, found.of_images
        self._files = {file: open_file(file, "pt") for file in {each.file for each in located.values()}}
        self._begins: dict[Path, int | None] = {}  # addresses of byte 0
        self._coded: dict[str, tuple[Path, CodedWeight | Mxfp4Weight]] = {}
        for name, (layer, coding) in found.coded.items():
            shape = self._specs[name].stored_shape
            at = {part.name: located.get(f"{layer}.{part.name}") for part, _ in coding.parts(shape)}
            tensors = {part: self._stored(each) for part, each in at.items() if each is not None}
            weight = CodedWeight(f"{directory}: {layer}", coding, shape, tensors)
            self._coded[name] = located[f"{layer}.{coding.codes.name}"].file, weight
        for name, parts in found.mxfp4.items():
            blocks, scales = (self._own_rows(name, self._stored(each)) for each in parts)
            self._coded[name] = parts[0].file, Mxfp4Weight(blocks, scales)
        for name in found.spare_biases:
            if self._stored(located[name]).any():
                raise CheckpointError(f"{directory}: {name} is unexpected, and not zero")
        if config.tied_embeddings and self._located[OUTPUT] != self._located[EMBEDDING]:
            self._check_tied(directory)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output layer; of the embedding if that is in codes."""
        return _DTYPES[self._located[EMBEDDING if OUTPUT in self._coded else OUTPUT].dtype]

    def slices(self, name: str, box: Box) -> Iterator[Slice]:
        """Rows of the mapped file; rows of q and k copied in Meta's order. Releases the pages of a slice when the next slice
        is requested."""
        if name in self._coded:
            file, weight = self._coded[name]
            for start, chunk in self._chunks(name, box):
                yield Slice(file, self._in_order(name, weight.values(chunk)), start)
            return
        file, stored = self._located[name].file, self._own_rows(name, self._stored(self._located[name]))
        if file not in self._begins:
            self._begins[file] = file_begin(stored)
        spec = self._specs[name]
        begin = None if spec.is_rotated or spec.rows else self._begins[file]
        for first, rows in self._rows(stored, name, box):
            offset = None if begin is None else rows.data_ptr() - begin
            yield Slice(file, rows, (first, *(0,) * (rows.dim() - 1)), offset)

    def stored_format(self, name: str) -> str:
        return self._coded[name][1].stored_format if name in self._coded else DENSE

    def grouped_slices(self, name: str, box: Box, coding: str) -> Iterator[GroupedSlice]:
        if not held_as(self.stored_format(name), CODINGS):
            raise LookupError(f"{name} is not stored as {coding}")
        file, weight = self._coded[name]
        for start, chunk in self._chunks(name, box):
            codes, scales, minima = weight.groups(chunk, coding)
            minima = None if minima is None else self._in_order(name, minima)
            yield GroupedSlice(file, self._in_order(name, codes), self._in_order(name, scales), minima, start)

    def _chunks(self, name: str, box: Box) -> Iterator[tuple[tuple[int, int], Box]]:
        """Parts of a box of a weight in codes: (first index in the box, the part in the stored tensor)."""
        first, column = box.start[0] + self._specs[name].first_row, box.start[1]
        for chunk in self._coded[name][1].chunks(Box((first, column), box.shape), self._unit(name)):
            yield (chunk.start[0] - first, chunk.start[1] - column), chunk

    def _unit(self, name: str) -> int:
        """Rows that a part of a weight has whole: those of a head of q or k."""
        return self._head_dim if self._specs[name].is_rotated else 1

    def _in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows in Meta's order: a copy of whole heads of q or k, else as they are."""
        unit = self._unit(name)
        return interleaved(rows, unit, self._rotated) if unit > 1 else rows

    def _rows(self, stored: torch.Tensor, name: str, box: Box) -> Iterator[tuple[int, torch.Tensor]]:
        """(first row in the box, rows of the mapped `stored`): those of q and k copied in Meta's order."""
        first, *others = box.start
        starts = first + self._specs[name].first_row, *others
        region = tuple(slice(begin, begin + size) for begin, size in zip(starts, box.shape, strict=True))
        unit = self._unit(name)
        assert box.start[0] % unit == box.shape[0] % unit == 0, "a box of q or k consists of whole heads"
        wanted = stored[region]
        for begin, end in row_chunks(wanted, unit):
            rows = wanted[begin:end]
            yield begin, self._in_order(name, rows)
            release(rows)

    def _stored(self, located: Located) -> torch.Tensor:
        """A view of the mapped file."""
        mapped: torch.Tensor = self._files[located.file].get_tensor(located.name)
        return mapped

    def _own_rows(self, name: str, stored: torch.Tensor) -> torch.Tensor:
        """Of a tensor that holds a weight of all experts."""
        spec = self._specs[name]
        if spec.rows is None:
            return stored
        own = stored[spec.expert]
        is_turned = spec.rows.is_turned and own.ndim == len(spec.shape) == 2 and stored.dtype != torch.uint8
        own = own.T if is_turned else own
        return own[spec.rows.of(len(own))]

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


def _as_stored(specs: Mapping[str, WeightSpec], located: Mapping[str, Located]) -> Mapping[str, WeightSpec]:
    """The weights, with the names of tensors that experts have alone."""
    modules = {name.partition(_IN_LAYER)[2].rpartition(".")[0] for name in located}
    return {
        name: replace(spec, hugging_face=spec.alone, rows=None)
        if spec.alone and spec.alone.partition(_IN_LAYER)[2].removesuffix(_WEIGHT) in modules
        else spec
        for name, spec in specs.items()
    }


class _Found(NamedTuple):
    """dense: the tensor of each dense weight. mxfp4: the blocks and scales of others. coded: the layer of each other one in the
    files, and its coding. spare_biases: of such layers in models without biases. ignored, of_images: see `WeightReader`."""

    dense: dict[str, Located]
    coded: dict[str, tuple[str, Coding]]
    mxfp4: dict[str, tuple[Located, Located]]
    spare_biases: list[str]
    ignored: tuple[str, ...]
    of_images: tuple[str, ...]


def _by_own_name(
    directory: Path,
    located: Mapping[str, Located],
    config: ModelConfig,
    specs: Mapping[str, WeightSpec],
    quantization: Quantization | None,
) -> _Found:
    """What the files have for each weight of the architecture. Raises CheckpointError for a set of weights that does not fit
    it."""
    names = {name: spec.hugging_face for name, spec in specs.items()}
    embedding = names[EMBEDDING].removeprefix(_LAYERS)
    layers, head = next((each for each in _PREFIXES if f"{each[0]}{embedding}" in located), (_LAYERS, _HEAD))
    names = {name: _replaced(stored, layers, head) for name, stored in names.items()}
    of_images = {
        name for name in located if "language_model" in layers and name.removeprefix(_LAYERS).startswith(_IMAGES)
    }
    if config.tied_embeddings:  # one of the two is enough
        if names[OUTPUT] not in located:
            names[OUTPUT] = names[EMBEDDING]
        elif names[EMBEDDING] not in located:
            names[EMBEDDING] = names[OUTPUT]
    coded = {} if quantization is None else dict(_coded_layers(names, located, specs, quantization))
    mxfp4 = {
        name: (located[f"{stored}_blocks"], located[f"{stored}_scales"])
        for name, stored in names.items()
        if specs[name].rows and f"{stored}_blocks" in located and f"{stored}_scales" in located
    }
    dense = {name: stored for name, stored in names.items() if name not in coded and name not in mxfp4}
    faults: list[str] = []
    known = {*dense.values(), *(each.name for pair in mxfp4.values() for each in pair)}
    for name, (blocks, scales) in mxfp4.items():
        outputs, inputs = specs[name].part_shape(config.n_experts, is_turned=False)[1:]
        for each, shape in ((blocks, (inputs // GROUP, GROUP // 2)), (scales, (inputs // GROUP,))):
            if each.shape != (config.n_experts, outputs, *shape) or each.dtype != "U8" or inputs % GROUP:
                faults.append(f"{each.name} has shape {shown(list(each.shape))} in {each.dtype}")
    for name, (layer, coding) in coded.items():
        faults += coding.faults(layer, specs[name].stored_shape, located)
        known.update(f"{layer}.{part.name}" for part, _ in coding.parts(specs[name].stored_shape))
    faults += [
        fault for name, stored in dense.items() if (fault := _fault(stored, located, specs[name], config.n_experts))
    ]
    biases = {f"{layer}.bias" for layer, _ in coded.values()} - known
    rest = (name for name in located if name not in known and name not in biases and name not in of_images)
    others = [name for name in rest if not _DERIVED.search(name)]
    ignored = {name: found[1] for name in others if quantization is not None and (found := _ACTIVATIONS.search(name))}
    faults += [f"{shown(name)} in {located[name].file.name} is unexpected" for name in others if name not in ignored]
    refuse_faults(f"{directory}: weights do not fit config.json", faults)
    fields = quantization.ignored if quantization is not None else ()
    return _Found(
        {name: located[stored] for name, stored in dense.items()},
        coded,
        mxfp4,
        [name for name in biases if name in located],
        (*fields, *sorted(set(ignored.values()))),
        tuple(sorted({name.removeprefix(_LAYERS).partition(".")[0] for name in of_images})),
    )


def _replaced(name: str, layers: str, head: str) -> str:
    """A name as the files have it."""
    return f"{layers}{name.removeprefix(_LAYERS)}" if name.startswith(_LAYERS) else f"{head}{name.removeprefix(_HEAD)}"


def _coded_layers(
    names: Mapping[str, str],
    located: Mapping[str, Located],
    specs: Mapping[str, WeightSpec],
    quantization: Quantization,
) -> Iterator[tuple[str, tuple[str, Coding]]]:
    """The weights that the files have in codes: config.json names their coding, but some models have fewer than it says.
    names: in the files."""
    for name, stored in names.items():
        if not specs[name].is_linear:
            continue
        layer, coding = (
            stored.removesuffix(_WEIGHT),
            quantization.coding(specs[name].hugging_face.removesuffix(_WEIGHT)),
        )
        if coding is not None and f"{layer}.{coding.scales.other_name}" in located:
            coding = replace(coding, scales=replace(coding.scales, name=coding.scales.other_name))
        codes = located.get(f"{layer}.{coding.codes.name}") if coding is not None else None
        if coding is not None and codes is not None and (codes.name != stored or codes.dtype not in _DTYPES):
            yield name, (layer, coding)


def _fault(name: str, located: Mapping[str, Located], spec: WeightSpec, n_experts: int) -> str | None:
    if name not in located:
        return f"{name} is missing"
    tensor = located[name]
    expected = spec.part_shape(n_experts) if spec.rows else spec.stored_shape
    if tensor.shape != expected:
        return f"{name} has shape {shown(list(tensor.shape))}, expected {list(expected)}"
    if tensor.dtype not in _DTYPES:
        return f"{name} has dtype {tensor.dtype}, expected one of {', '.join(_DTYPES)}"
    return None
