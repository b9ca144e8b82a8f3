"""Makes tests/data/packed_layers.safetensors: one linear layer packed by the code that writes people's checkpoints, with the
weights that the same code makes of it again.

    python -m tests.programs.packed_layers --sources FOLDER

Needs compressed-tensors 0.20.1, and in FOLDER the unpacked distributions gptqmodel-7.7.0, auto_gptq-0.7.1 and autoawq-0.2.9. It
imports their packers alone, because the packages need GPUs; gptqmodel's need pypcre, logbar, threadpoolctl, device-smi and
tokenicer.
"""

# mypy: disable-error-code="import-not-found"

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from safetensors.torch import save_file

FILE: Final = Path(__file__).parents[1] / "data" / "packed_layers.safetensors"
OUTPUTS, INPUTS = 32, 256


class Packed(NamedTuple):
    """config: the quantization_config. tensors: of the layer, and "expected", what its packer's own reader makes of it."""

    name: str
    maker: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def import_from(folder: Path, *packages: str) -> None:
    """Make packages importable from `folder` without what their own __init__ imports."""
    for name in packages:
        module = ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module


def dense_layer(seed: int = 0) -> torch.nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.float16)
    layer.weight.data = torch.randn((OUTPUTS, INPUTS), generator=generator).half() / 8
    return layer


def scales_and_zeros(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, group_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 scales and whole zeros [outputs, groups], both as float32."""
    num_groups = int(group_of.max()) + 1
    least, most = (torch.zeros(OUTPUTS, num_groups) for _ in range(2))
    for i in range(num_groups):
        part = weight[:, group_of == i].float()
        least[:, i], most[:, i] = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
    top = 2**bits - 1
    if symmetric:
        return (torch.maximum(-least, most) * 2 / top).half().float(), torch.full_like(least, (top + 1) / 2)
    least[::3] = 0  # outputs with the zero 0, which GPTQ's first version stores as -1
    scales = ((most - least) / top).half().float()
    return scales, (-least / scales).round().clamp(0, top)


def gptq_layers() -> Iterator[Packed]:
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    for bits, group, symmetric, scattered, version in (
        (4, 128, True, False, "gptq"),
        (4, 32, False, False, "gptq"),
        (4, 64, False, False, "gptq_v2"),
        (4, -1, True, False, "gptq"),
        (8, 128, True, False, "gptq"),
        (8, 64, False, False, "gptq"),
        (4, 64, True, True, "gptq"),
    ):
        layer, width = dense_layer(), group if group > 0 else INPUTS
        group_of = torch.arange(INPUTS) // width
        if scattered:
            group_of = group_of[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
        scales, zeros = scales_and_zeros(layer.weight.data, bits, width, symmetric, group_of)
        packed = TorchLinear(bits, group, symmetric, scattered, INPUTS, OUTPUTS, register_buffers=True)
        packed.pack_original(layer, scales, zeros, group_of.int())
        packed.post_init()
        expected = packed.dequantize_weight().T
        if version == "gptq":
            convert_gptq_v2_to_v1_format_module(packed, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": scattered}
        name = f"{version}-{bits}-{group}{'' if symmetric else '-zeros'}{'-act_order' if scattered else ''}"
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {each: getattr(packed, each) for each in names} | {"expected": expected}
        yield Packed(name, "GPTQModel 7.7.0", config | {"checkpoint_format": version}, tensors)
    layer, group_of = dense_layer(2), torch.arange(INPUTS) // 128
    scales, zeros = scales_and_zeros(layer.weight.data, 4, 128, False, group_of)
    older = QuantLinear(4, 128, INPUTS, OUTPUTS, bias=False)
    older.pack(layer, scales.half(), zeros.clamp(min=1), None)  # it writes no zero 0
    one = torch.eye(INPUTS, dtype=torch.float16)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
    tensors = {each: getattr(older, each) for each in ("qweight", "qzeros", "scales", "g_idx")}
    yield Packed("gptq-auto-4-128-zeros", "AutoGPTQ 0.7.1", config, tensors | {"expected": older(one).T})


def awq_layers() -> Iterator[Packed]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for group in (64, 128):
        layer = dense_layer(group)
        scales, zeros = scales_and_zeros(layer.weight.data, 4, group, False, torch.arange(INPUTS) // group)
        packed = WQLinear_GEMM.from_linear(layer, 4, group, scales=scales.half().T, zeros=zeros.T)
        tensors = {each: getattr(packed, each) for each in ("qweight", "qzeros", "scales")}
        expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, group).T
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
        yield Packed(f"awq-{group}", "AutoAWQ 0.2.9", config, tensors | {"expected": expected})


def compressed_layers() -> Iterator[Packed]:
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    for form, changes in (
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        ("pack-quantized", {"num_bits": 4, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 96]}),
    ):
        args = QuantizationArgs(**changes)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        weight = dense_layer(len(str(changes))).weight.data.bfloat16()
        rows, columns = {
            "group": (1, args.group_size),
            "channel": (1, INPUTS),
            "tensor": (OUTPUTS, INPUTS),
            "block": args.block_structure,
        }[args.strategy]
        least, most = (
            torch.stack([
                torch.stack([getattr(part, how)() for part in band.split(columns, 1)]) for band in weight.split(rows)
            ])
            for how in ("min", "max")
        )  # fmt: skip
        scale, zero = calculate_qparams(least, most, args)
        if args.strategy == "tensor":
            scale, zero = scale.flatten(), zero.flatten()
        compressor = BaseCompressor.get_value_from_registry(form)
        state = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        tensors = state | {"expected": compressor.decompress(state, scheme)["weight"]}
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}},
            "ignore": ["lm_head"],
        }
        zeros = "" if args.symmetric else "-zeros"
        name = f"{form}-{args.num_bits}-{args.group_size or args.strategy}{zeros}"
        yield Packed(name, "compressed-tensors 0.20.1", config, tensors)


def fp8_layer() -> Packed:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    quantizer = type("Quantizer", (), {"quantization_config": FineGrainedFP8Config(weight_block_size=(16, 128))})
    tensors = Fp8Quantize(quantizer)._quantize_one("weight", dense_layer(3).weight.data.float())
    expected = Fp8Dequantize(quantizer)._dequantize_one(tensors["weight"], tensors["weight_scale_inv"])
    config = {"quant_method": "fp8", "weight_block_size": [16, 128], "activation_scheme": "dynamic"}
    return Packed("fp8-blocks", "transformers 5.23.0", config, tensors | {"expected": expected})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sources", type=Path, required=True)
    sources = parser.parse_args().sources
    import_from(sources / "gptqmodel-7.7.0", "gptqmodel", "gptqmodel.models")
    sys.modules["gptqmodel"].DEBUG_ON = False  # type: ignore[attr-defined]
    import_from(sources / "auto_gptq-0.7.1", "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    import_from(sources / "autoawq-0.2.9", "awq", "awq.modules", "awq.modules.linear", "awq.utils")
    layers = [*gptq_layers(), *awq_layers(), *compressed_layers(), fp8_layer()]
    tensors = {f"{each.name}/{part}": value for each in layers for part, value in each.tensors.items()}
    about = {each.name: json.dumps({"made_by": each.maker, "quantization_config": each.config}) for each in layers}
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, about)
    print(f"{FILE}: {len(layers)} layers, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
