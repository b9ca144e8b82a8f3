"""Weights in codes, written from the formats' descriptions by arithmetic of their own, with the values that they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, torch.Tensor]


class Coded(NamedTuple):
    """form: gptq, gptq_v2, awq, fp8 or a format of compressed-tensors. block: outputs and inputs that share a scale, 0 for all.
    scattered: in any order of the inputs. scale: dtype of the scales."""

    form: str
    bits: int = 4
    block: tuple[int, int] = (1, 128)
    symmetric: bool = True
    scattered: bool = False
    scale: torch.dtype = torch.float16


def weights_config(coded: Coded) -> dict[str, Any]:
    """compressed-tensors' arguments of the weights."""
    strategy = {(1, 0): "channel", (0, 0): "tensor"}.get(coded.block, "group" if coded.block[0] == 1 else "block")
    return {
        "num_bits": coded.bits,
        "type": "float" if coded.form == "float-quantized" else "int",
        "symmetric": coded.symmetric,
        "strategy": strategy,
        "group_size": coded.block[1] if strategy == "group" else None,
        "block_structure": list(coded.block) if strategy == "block" else None,
        "dynamic": False,
        "actorder": "group" if coded.scattered else None,
        "observer": "minmax",
    }


def quantization_config(coded: Coded, targets: str = "Linear") -> dict[str, Any]:
    """Of a model whose linear layers, all but the output layer, are in these codes."""
    if coded.form == "fp8":
        blocks = list(coded.block) if coded.block != (0, 0) else None
        dense = {"modules_to_not_convert": ["lm_head"]}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": blocks,
        } | dense
    group = {"bits": coded.bits, "group_size": coded.block[1] or -1}
    if coded.form == "awq":
        return {"quant_method": "awq", "version": "gemm", "zero_point": not coded.symmetric} | group
    if coded.form in ("gptq", "gptq_v2"):
        order = {"sym": coded.symmetric, "desc_act": coded.scattered, "damp_percent": 0.1}
        return {"quant_method": "gptq", "checkpoint_format": coded.form} | group | order
    weights = {"targets": [targets], "weights": weights_config(coded), "format": coded.form}
    return {
        "quant_method": "compressed-tensors",
        "format": coded.form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": weights | {"input_activations": None, "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def layer(coded: Coded, shape: tuple[int, int], seed: int) -> tuple[Tensors, torch.Tensor]:
    """Random tensors of a layer [outputs, inputs], by their names in it, and the float32 weight that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    (outputs, inputs), (height, width) = shape, (coded.block[0] or shape[0], coded.block[1] or shape[1])
    blocks = -(-outputs // height), -(-inputs // width)
    group_of = torch.arange(inputs) // width
    if coded.scattered:
        group_of = group_of[torch.randperm(inputs, generator=generator)]
    row_of = torch.arange(outputs) // height
    scales = (0.5 + torch.rand(blocks, generator=generator)).mul(0.6 / 2**coded.bits).to(coded.scale)
    top, middle = 2**coded.bits, 2 ** (coded.bits - 1)
    zeros = torch.full(blocks, middle)
    if not coded.symmetric:
        zeros = torch.randint(0, top, blocks, generator=generator)
    codes = torch.randint(0, top, shape, generator=generator)
    if coded.form in ("float-quantized", "fp8"):
        floats = torch.randn(shape, generator=generator).mul(60).to(torch.float8_e4m3fn)
        values = floats.float() * scales.float()[row_of][:, group_of]
        is_whole = coded.form == "fp8" and coded.block == (0, 0)
        scale = "weight_scale" if coded.form != "fp8" or is_whole else "weight_scale_inv"
        return {"weight": floats, scale: scales.flatten() if coded.block == (0, 0) else scales}, values
    values = (codes - zeros[row_of][:, group_of]).float() * scales.float()[row_of][:, group_of]
    if coded.form in ("gptq", "gptq_v2", "awq"):
        order = AWQ_ORDER if coded.form == "awq" else None
        ones = sum(2 ** (coded.bits * i) for i in range(32 // coded.bits)) if coded.form == "gptq" else 0
        found = {
            "qweight": words(codes.T, coded.bits, int(coded.form == "awq"), order),
            "qzeros": words(zeros.T, coded.bits, 1, order, less=ones),
            "scales": scales.T,
        }
        return found if coded.form == "awq" else found | {"g_idx": group_of.int()}, values
    found = {"weight_scale": scales.flatten() if coded.block == (0, 0) else scales}
    if coded.form == "pack-quantized":
        found |= {"weight_packed": words(codes, coded.bits, 1), "weight_shape": torch.tensor(shape)}
        if not coded.symmetric:
            found["weight_zero_point"] = words(zeros, coded.bits, 0)
    else:
        found["weight"] = (codes - middle).to(torch.int8)
        if not coded.symmetric:
            found["weight_zero_point"] = (zeros - middle).to(torch.int8)
    if coded.scattered:
        found["weight_g_idx"] = group_of.int()
    return found, values


def words(
    codes: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None, less: int = 0
) -> torch.Tensor:
    """int32, with 32 / bits codes of `dim` in a word, the first in the lowest bits; in place i the code order[i] of each
    word's. less: taken from each word, as 32 bits."""
    per_word = 32 // bits
    rows = codes.T if dim == 0 else codes
    packed = []
    for row in rows.tolist():
        row += [0] * (-len(row) % per_word)
        numbers = []
        for first in range(0, len(row), per_word):
            word = [row[first + (order[i] if order else i)] for i in range(per_word)]
            number = (sum(code << (bits * i) for i, code in enumerate(word)) - less) % 2**32
            numbers.append(number - 2**32 if number >= 2**31 else number)
        packed.append(numbers)
    found = torch.tensor(packed, dtype=torch.int32)
    return found.T if dim == 0 else found


def write_pair(
    dense: Path, coded: Mapping[str, Coded], config: Mapping[str, Any], folder: Path, but: str = "lm_head"
) -> tuple[Path, Path]:
    """Two folders with the model at `dense`, whose linear layers have new weights: in codes, and as the values of these.

    coded: by a part of a layer's name. config: the quantization_config. but: this layer stays as it is.
    """
    values = load_file(dense / "model.safetensors")
    stored = dict(values)
    for i, (name, weight) in enumerate(sorted(values.items())):
        layer_name = name.removesuffix(".weight")
        if name == layer_name or not layer_name.endswith(("_proj", "lm_head")) or layer_name == but:
            continue
        how = next(each for part, each in coded.items() if part in name)
        parts, values[name] = layer(how, (weight.shape[0], weight.shape[1]), i)
        del stored[name]
        stored |= {f"{layer_name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    given = json.loads((dense / "config.json").read_text())
    pair = folder / "coded", folder / "values"
    for each, tensors, more in zip(pair, (stored, values), ({"quantization_config": config}, {}), strict=True):
        each.mkdir(parents=True)
        (each / "config.json").write_text(json.dumps(given | more))
        save_file(tensors, each / "model.safetensors")
    return pair
