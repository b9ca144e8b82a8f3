"""Linear layers in codes: the values are those of the format's definition and of other packages, on every rank."""

import json
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError, ConfigError
from llama_core.files.hf.quantization import read_quantization
from llama_core.files.source import WeightReader
from llama_core.model import weight_formats
from llama_core.model.fields import Fields
from llama_core.model.share import RankShare
from llama_core.model.weight_formats import PORTABLE, WIDE, held_as
from llama_core.model.weights import Box
from llama_core.weights import coded as coded_module
from llama_core.weights.coded import CodedWeight
from llama_core.weights.loader import GroupedWeight, dense, planned_weights
from tests.support import families
from tests.support.coded_models import Coded, Tensors, layer, quantization_config, write_pair
from tests.support.hugging_face import CONFIGS, VOCAB_SIZE, random_weights, read, write
from tests.support.plans import plan_of
from tests.support.rank_weights import rank_weights

CPU = torch.device("cpu")
LAYER = "model.layers.0.self_attn.q_proj"
PACKED = Path(__file__).parents[2] / "data" / "packed_layers.safetensors"  # see tests/programs/packed_layers.py
with safe_open(PACKED, "pt") as file:
    MADE = dict(sorted(file.metadata().items()))  # pytest-xdist needs one order


def opened_layer(config: dict[str, Any], tensors: Tensors, shape: tuple[int, int]) -> CodedWeight:
    """Of tensors that are mapped from a file, whose pages the reader releases."""
    quantization = read_quantization(Fields({"quantization_config": config}, "config.json"))
    assert quantization is not None
    coding = quantization.coding(LAYER)
    assert coding is not None
    with tempfile.NamedTemporaryFile() as file:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file.name)
        with safe_open(file.name, "pt") as mapped:
            return CodedWeight(LAYER, coding, shape, {name: mapped.get_tensor(name) for name in tensors})


def values_of(weight: GroupedWeight, name: str) -> torch.Tensor:
    return dense(weight, weight_formats.CODINGS[name])


# By the name of a layer in PACKED; all others keep their groups.
EXPANDED = {
    "pack-quantized-8-32-zeros": "8-bit codes and zeros in groups of 32",
    "gptq-8-64-zeros": "8-bit codes and zeros in groups of 64",
    "gptq-4-64-act_order": "4-bit codes in scattered groups of 64",
    "float-quantized-8-channel": "float8 codes with a scale an output",
    "float-quantized-8-tensor": "float8 codes with one scale",
    "float-quantized-8-block": "float8 codes in blocks of 24 x 96",
    "fp8-blocks": "float8 codes in blocks of 16 x 128",
}


@pytest.mark.parametrize("name", MADE)
def test_a_layer_packed_by_other_code_has_the_values_that_it_reads(name: str) -> None:
    tensors = {part.partition("/")[2]: each for part, each in load_file(PACKED).items() if part.startswith(f"{name}/")}
    expected = tensors.pop("expected")
    shape = (expected.shape[0], expected.shape[1])
    weight = opened_layer(json.loads(MADE[name])["quantization_config"], tensors, shape)
    whole = Box((0, 0), shape)
    assert torch.equal(weight.values(whole).to(expected.dtype), expected)  # rounded as its packer rounds
    has_zeros = name.startswith("awq") or "zeros" in name
    is_long = any(width in name for width in ("-128", "--1", "-channel"))
    as_groups = "int8_groups" if "-8-" in name else f"int4{'_zero' * has_zeros}{'_128' * is_long}"
    assert weight.stored_format.removesuffix(WIDE) == EXPANDED.get(name, as_groups)
    for coding in held_as(weight.stored_format, weight_formats.CODINGS):
        if name not in EXPANDED and not (coding == "int4_min" and not has_zeros):
            assert torch.equal(values_of(weight.groups(whole, coding), coding), weight.values(whole))


SIZES = st.integers(1, 9).map(lambda n: 8 * n), st.integers(2, 40).map(lambda n: 8 * n)
GROUPS = st.sampled_from([(1, 16), (1, 32), (1, 40), (1, 64), (1, 128), (1, 0)])
BLOCKS = st.sampled_from([(0, 0), (1, 0), (128, 128), (16, 48), (24, 96)])
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])
INTEGERS = st.sampled_from(["gptq", "gptq_v2", "pack-quantized", "int-quantized"])
CODED = st.one_of(
    st.builds(Coded, INTEGERS, st.sampled_from([4, 8]), GROUPS, st.booleans(), st.booleans(), DTYPES).filter(
        lambda each: each.block[1] or not each.scattered
    ),
    st.builds(Coded, st.just("awq"), st.just(4), GROUPS, st.booleans(), st.just(False), DTYPES),
    st.builds(
        Coded, st.sampled_from(["float-quantized", "fp8"]), st.just(8), BLOCKS, st.just(True), st.just(False), DTYPES
    ),
).filter(lambda each: each.form != "fp8" or each.block != (1, 0))


@settings(max_examples=300, deadline=None)
@given(CODED, st.tuples(*SIZES), st.integers(0, 2**16), st.data())
def test_every_part_of_every_coding_has_the_values_of_its_definition(
    coded: Coded, shape: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    tensors, expected = layer(coded, shape, seed)
    weight = opened_layer(quantization_config(coded), tensors, shape)
    (row, column) = (data.draw(st.integers(0, size - 1)) for size in shape)
    rows, columns = (data.draw(st.integers(1, size - at)) for size, at in zip(shape, (row, column), strict=True))
    got = torch.full((rows, columns), torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coded_module, "_CHUNK_VALUES", 200)
        for chunk in weight.chunks(Box((row, column), (rows, columns)), 1):
            first, last = chunk.start[0] - row, chunk.start[1] - column
            got[first : first + chunk.shape[0], last : last + chunk.shape[1]] = weight.values(chunk)
    assert torch.equal(got, expected[row : row + rows, column : column + columns])
    whole = shape[1] // 32 * 32
    if not (stored := weight.stored_format).removesuffix(WIDE).startswith("int"):
        return
    assert shape[1] == whole and coded.block[1] % 32 == 0
    is_short = coded.bits == 4 and coded.form != "int-quantized"
    name = f"int4{'' if coded.symmetric else '_zero'}" if is_short else "int8_groups"
    assert stored.removesuffix(WIDE).removesuffix("_128") == name
    native, portable = held_as(stored, weight_formats.CODINGS), held_as(stored, PORTABLE)
    assert native and (portable or stored.endswith(WIDE))
    for coding in {*native, *portable} - ({"int4_min"} if coded.symmetric else set()):
        group = weight_formats.CODINGS[coding].group
        if shape[1] % group:
            continue
        box = Box((row, column // group * group), (rows, whole - column // group * group))
        part = expected[row : row + rows, column // group * group :]
        got = values_of(weight.groups(box, coding), coding)
        # A zero * scale may have more digits than float32.
        assert torch.allclose(got, part, rtol=1e-5, atol=1e-6) if WIDE in stored else torch.equal(got, part)


@pytest.mark.parametrize(("bits", "held"), [(4, "int4_zero_128"), (8, "8-bit codes and zeros in groups of 128")])
def test_zeros_count_also_where_config_json_calls_them_symmetric(bits: int, held: str) -> None:
    tensors, expected = layer(Coded("gptq", bits, symmetric=False), (32, 256), 0)
    weight = opened_layer(quantization_config(Coded("gptq", bits)), tensors, (32, 256))
    assert weight.stored_format == held
    assert torch.equal(weight.values(Box((0, 0), (32, 256))), expected)
    for coding in held_as(held, weight_formats.CODINGS):
        assert torch.equal(values_of(weight.groups(Box((0, 0), (32, 256)), coding), coding), expected)


CONFIG = CONFIGS["llama-biases"] | {
    "hidden_size": 192,
    "intermediate_size": 384,
    "head_dim": 24,
    "num_hidden_layers": 1,
}
MODEL = read(CONFIG)
# On three ranks, parts of wo have 48 or 96 inputs, of w2 128; on two, 96 and 192.
CODINGS = {
    "gptq-g128": Coded("gptq"),
    "gptq-zeros": Coded("gptq", symmetric=False, block=(1, 64)),
    "gptq_v2-8": Coded("gptq_v2", 8, block=(1, 0)),
    "gptq-act-order": Coded("gptq", scattered=True, block=(1, 64)),
    "awq": Coded("awq", symmetric=False, block=(1, 64)),
    "packed": Coded("pack-quantized", block=(1, 96)),
    "packed-32": Coded("pack-quantized", block=(1, 32), scale=torch.bfloat16),
    "packed-zeros": Coded("pack-quantized", symmetric=False, block=(1, 0)),
    "packed-8": Coded("pack-quantized", 8, block=(1, 192)),
    "int8": Coded("int-quantized", 8, block=(1, 0), scale=torch.bfloat16),
    "float": Coded("float-quantized", 8, block=(1, 0), scale=torch.bfloat16),
    "fp8": Coded("fp8", 8, block=(128, 128), scale=torch.float32),
}


def pair_of(folder: Path, coded: Coded) -> tuple[Path, Path]:
    """A model in these codes, and the same one in their values."""
    write(folder / "dense", CONFIG, random_weights(MODEL))
    return write_pair(folder / "dense", {"": coded}, quantization_config(coded), folder)


def opened(folder: Path) -> WeightReader:
    source = open_checkpoint(folder)
    return source.open_weights(source.model_config(VOCAB_SIZE))


@pytest.mark.parametrize("name", CODINGS)
def test_each_rank_reads_its_part(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded_module, "_CHUNK_VALUES", 5000)
    reader, expected = map(opened, pair_of(tmp_path, CODINGS[name]))
    for world_size in (1, 2, 3):
        plan = plan_of(MODEL, reader.stored_format, world_size=world_size)
        for rank in range(world_size):
            share = RankShare.of(MODEL, rank, world_size)
            wanted = dict(rank_weights(expected, MODEL, share, torch.float32))
            got = dict(planned_weights(reader, MODEL, share, torch.float32, CPU, plan.coding_of))
            for weight, values in rank_weights(reader, MODEL, share, torch.float32):
                assert torch.equal(values, wanted[weight]), weight
            for weight, part in got.items():
                if isinstance(part, GroupedWeight):
                    part = values_of(part, plan.stored[weight])
                assert torch.equal(part, wanted[weight]), weight


def test_groups_longer_than_32_inputs_are_cut_by_ranks_without_expansion(tmp_path: Path) -> None:
    reader = opened(pair_of(tmp_path, Coded("gptq"))[0])
    assert plan_of(MODEL, reader.stored_format, world_size=2).expanded == {}
    assert plan_of(MODEL, reader.stored_format, world_size=3).expanded == {"layers.0.out": "int4"}


@pytest.mark.parametrize(
    ("coded", "is_native", "text"),
    [
        (Coded("gptq"), False, "int4 (4 matrices)"),
        (Coded("awq", symmetric=False), False, "int8_groups (4 matrices)"),
        (Coded("awq", symmetric=False), True, "int4_min (3 matrices), int4_zero_128 (layers.0.down)"),
        (Coded("gptq", scattered=True), False, "4 matrices expanded from 4-bit codes in scattered groups of 128"),
        (
            Coded("fp8", 8, (128, 128)),
            True,
            "int8_groups (4 matrices), 4 matrices expanded from float8 codes in blocks of 128 x 128",
        ),
        (Coded("pack-quantized", block=(1, 16)), False, "4 matrices expanded from 4-bit codes in groups of 16"),
        (
            Coded("gptq", scale=torch.float32),
            False,
            "4 matrices expanded from int4 with float32 scales, int4_128 with float32 scales",
        ),
        (Coded("gptq", scale=torch.float32), True, "int4 (3 matrices), int4_128 (layers.0.down)"),
    ],
    ids=lambda each: each[0] if isinstance(each, Coded) else "",
)
def test_the_plan_says_what_is_held_and_what_is_expanded(
    tmp_path: Path, coded: Coded, is_native: bool, text: str
) -> None:
    reader = opened(pair_of(tmp_path, coded)[0])
    plan = plan_of(MODEL, reader.stored_format, dtype="bfloat16", is_native=is_native)
    assert str(plan) == f"bfloat16 with {text}"
    assert plan.format_of("output.weight") == "bfloat16"
    assert "expanded" not in str(plan_of(MODEL, reader.stored_format, "none", "bfloat16", is_native=is_native))


PACKED_4, GPTQ_4, BLOCKS_8 = Coded("pack-quantized"), Coded("gptq"), Coded("fp8", 8, (128, 128))
INTS = torch.zeros(192, 24, dtype=torch.int32)
NAN = torch.full((192, 192), torch.nan)


@pytest.mark.parametrize(
    ("coded", "part", "value", "message"),
    [
        (PACKED_4, "weight_scale", None, f"{LAYER}.weight_scale is missing"),
        (PACKED_4, "weight_shape", None, f"{LAYER}.weight_shape is missing"),
        (PACKED_4, "weight_packed", INTS[:, :8], r"weight_packed has shape \[192, 8\], expected \[192, 24\]"),
        (PACKED_4, "weight_packed", INTS.float(), "weight_packed has dtype F32, expected I32"),
        (PACKED_4, "weight_shape", torch.tensor([192, 60]), r"weight_shape is \[192, 60\], expected \[192, 192\]"),
        (PACKED_4, "weight_zero_point", INTS[:24, :2], "weight_zero_point' in .* is unexpected"),
        (PACKED_4, "weight", torch.zeros(192, 192), f"{LAYER}.weight' in .* is unexpected"),
        (PACKED_4, "weight_scale", NAN[:, :2].half(), r"layers\.0\.attention\.wq.* not finite"),
        (GPTQ_4._replace(scattered=True), "g_idx", None, f"{LAYER}.g_idx is missing"),
        (GPTQ_4, "g_idx", INTS[:, 0] + 7, f"{LAYER}.g_idx names a group outside of the 2 there are"),
        (GPTQ_4, "g_idx", INTS[:, 0] - 2, "names a group outside"),
        (GPTQ_4, "lora_A", torch.zeros(1), "lora_A' in .* is unexpected"),
        (Coded("awq"), "qzeros", None, f"{LAYER}.qzeros is missing"),
        (BLOCKS_8, "weight", NAN.to(torch.float8_e5m2), "weight has dtype F8_E5M2, expected F8_E4M3"),
        (BLOCKS_8, "weight_scale_inv", torch.ones(1, 2), r"_inv has shape \[1, 2\], expected \[2, 2\]"),
        (Coded("fp8", 8, (0, 0)), "weight", NAN.to(torch.float8_e4m3fn), r"layers\.0\.attention\.wq.* not finite"),
    ],
)
def test_damaged_parts_are_refused_by_name(
    tmp_path: Path, coded: Coded, part: str, value: torch.Tensor | None, message: str
) -> None:
    folder, _ = pair_of(tmp_path, coded)
    stored = load_file(folder / "model.safetensors")
    changed = {name: tensor for name, tensor in stored.items() if name != f"{LAYER}.{part}"}
    if value is not None:
        changed[f"{LAYER}.{part}"] = value.contiguous()
    save_file(changed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        dict(rank_weights(opened(folder), MODEL, RankShare.of(MODEL, 0, 1), torch.float32))


def test_one_scale_of_fp8_has_either_of_two_names(tmp_path: Path) -> None:
    """Ministral 3's files call it as if there were blocks."""
    folder, values = pair_of(tmp_path, Coded("fp8", 8, (0, 0)))
    stored = load_file(folder / "model.safetensors")
    renamed = {name.replace("weight_scale", "weight_scale_inv"): each for name, each in stored.items()}
    assert renamed.keys() != stored.keys()
    save_file(renamed, folder / "model.safetensors")
    got, expected = (
        dict(rank_weights(opened(each), MODEL, RankShare.of(MODEL, 0, 1), torch.float32)) for each in (folder, values)
    )
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_biases_of_zeros_are_passed_over_and_others_refused(tmp_path: Path) -> None:
    """AutoGPTQ has written biases of all layers, of models without."""
    config = CONFIG | {"attention_bias": False, "mlp_bias": False}
    coded = Coded("gptq")
    write(tmp_path / "dense", config, random_weights(read(config)))
    folder, _ = write_pair(tmp_path / "dense", {"": coded}, quantization_config(coded), tmp_path)
    stored = load_file(folder / "model.safetensors")
    for value, is_accepted in ((0.0, True), (0.5, False)):
        save_file(stored | {f"{LAYER}.bias": torch.full((192,), value)}, folder / "model.safetensors")
        if is_accepted:
            assert opened(folder).stored_format("layers.0.attention.wq.weight") == "int4"
        else:
            with pytest.raises(CheckpointError, match=rf"{LAYER}.bias is unexpected, and not zero"):
                opened(folder)


def test_what_quantizes_activations_and_caches_is_named_and_passed_over(tmp_path: Path) -> None:
    coded = Coded("float-quantized", 8, (0, 0))
    config = quantization_config(coded) | {"kv_cache_scheme": {"num_bits": 8}}
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False}
    write(tmp_path / "dense", CONFIG, random_weights(MODEL))
    folder, values = write_pair(tmp_path / "dense", {"": coded}, config, tmp_path)
    stored = load_file(folder / "model.safetensors")
    more = {f"{LAYER}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(stored | more, folder / "model.safetensors")
    assert tuple(opened(folder).ignored) == ("kv_cache_scheme", "input_activations", "input_scale", "k_scale")
    save_file(load_file(values / "model.safetensors") | more, values / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"input_scale' in model\.safetensors is unexpected"):
        opened(values)


def test_llama_4s_experts_may_have_tensors_of_their_own(tmp_path: Path) -> None:
    """As LLM Compressor writes them."""
    model = read(CONFIGS["llama4-moe"])
    stacked, alone, coded = tmp_path / "stacked", tmp_path / "alone", Coded("float-quantized", 8, (1, 0))
    families.new_model(stacked, "llama4-moe")
    stored: Tensors = {}
    for name, weight in load_file(stacked / "model.safetensors").items():
        if ".experts." not in name:
            stored[name] = weight
            continue
        for expert, each in enumerate(weight.transpose(1, 2)):
            own = name.replace("experts.", f"experts.{expert}.")
            parts = each.chunk(2) if "gate_up" in name else (each,)
            kinds = ("gate", "up") if "gate_up" in name else ("down",)
            for kind, part in zip(kinds, parts, strict=True):
                stored[f"{own.replace('gate_up', kind)}.weight"] = part.contiguous()
    alone.mkdir()
    save_file(stored, alone / "model.safetensors")
    (alone / "config.json").write_text((stacked / "config.json").read_text())
    pairs = (alone, stacked), write_pair(alone, {"": coded}, quantization_config(coded), tmp_path / "quantized")
    for folder, same in pairs:
        for rank in range(2):
            share = RankShare.of(model, rank, 2)
            wanted = dict(rank_weights(opened(same), model, share, torch.float32))
            for weight_name, values in rank_weights(opened(folder), model, share, torch.float32):
                assert torch.equal(values, wanted[weight_name]), weight_name
    assert opened(pairs[1][0]).stored_format("layers.0.feed_forward.experts.3.w2.weight").startswith("float8 codes")


# quantization_config.


def quantization_of(config: dict[str, Any]) -> Any:
    return read_quantization(Fields({"quantization_config": config}, "config.json"))


GPTQ, PACK = quantization_config(Coded("gptq")), quantization_config(Coded("pack-quantized"))
AWQ, FP8 = quantization_config(Coded("awq")), quantization_config(Coded("fp8", 8, (128, 128)))


def changed_group(**changes: Any) -> dict[str, Any]:
    """PACK with other fields of its group, or of the group's weights."""
    config = deepcopy(PACK)
    group = config["config_groups"]["group_0"]
    for name, value in changes.items():
        (group if name in group else group["weights"])[name] = value
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "by 'bitsandbytes' are not supported, only by awq, compressed-tensors, fp8, gptq"),
        ({"quant_method": "nvfp4"}, "weights quantized by 'nvfp4' are not supported"),
        ({"bits": 4}, "weights quantized by 'unknown' are not supported"),
        (GPTQ | {"bits": 3}, "bits 3 is not supported, only 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported, only 'gptq', 'gptq_v2'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format True"),
        (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard' is not supported"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype 'int8'"),
        (GPTQ | {"dynamic": {".*down.*": {"bits": 2}}}, "'.*down.*': bits 2 is not supported"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported, only 'gemm', 'GEMM'"),
        (AWQ | {"bits": 8}, "bits 8 is not supported, only 4"),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        (PACK | {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported, only 'pack-quantized'"),
        (PACK | {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized'"),
        (PACK | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask'"),
        (PACK | {"transform_config": {"R1": {}}}, "transform_config"),
        (PACK | {"config_groups": {}}, "config_groups must have a group"),
        (changed_group(num_bits=3), "num_bits 3 is not supported, only 4, 8"),
        (changed_group(num_bits=4.0), r"num_bits 4\.0"),
        (changed_group(type="float"), "symmetric float of 4 bits in format 'pack-quantized' is not supported"),
        (changed_group(format="int-quantized", type="float"), "symmetric float of 4 bits in format 'int-quantized'"),
        (changed_group(strategy="tensor_group"), "strategy 'tensor_group'"),
        (changed_group(dynamic=True), "dynamic True"),
    ],
)  # fmt: skip
def test_other_quantizations_are_refused_by_name_with_the_remedy(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_config.*{message}.*; use the model's original weights"):
        quantization_of(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed_group(group_size=None), "field 'group_size' is missing"),
        (GPTQ | {"group_size": 0}, "field 'group_size' must be a positive integer"),
        (GPTQ | {"dynamic": {"(": {}}}, r"'\(' is not a regular expression"),
        (GPTQ | {"dynamic": {"-:q": []}}, "field '-:q' must be an object"),
        (FP8 | {"weight_block_size": [128]}, "must be a list of two sizes"),
        (FP8 | {"weight_block_size": [128, 10**20]}, "weight_block_size: field 'inputs' must be a positive integer"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "a list of strings"),
        (PACK | {"config_groups": {"W4A16": ["Linear"]}}, "field 'W4A16' must be an object"),
        (PACK | {"ignore": ["re:["]}, "is not a regular expression"),
    ],
)
def test_damaged_fields_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_config.*{message}"):
        quantization_of(config)


def bits_of(config: dict[str, Any]) -> dict[str, int | None]:
    """Bits of some layers, by short names; None where they are dense."""
    layers = {
        "q": LAYER,
        "o10": "model.layers.10.self_attn.o_proj",
        "gate1": "model.layers.1.mlp.gate_proj",
        "down": "model.layers.0.mlp.down_proj",
        "head": "lm_head",
    }
    found = {short: quantization_of(config).coding(layer) for short, layer in layers.items()}
    return {short: None if coding is None else coding.bits for short, coding in found.items()}


ALL = dict.fromkeys(("q", "o10", "gate1", "down"), 4)
MIXED = changed_group(targets=["re:.*self_attn.*", "Linear"])
MIXED["config_groups"]["group_1"] = changed_group(
    num_bits=8, targets=["model.layers.0.self_attn.q_proj", "re:.*mlp.*"]
)["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPTQ, ALL | {"head": None}),
        (GPTQ | {"lm_head": True}, ALL | {"head": 4}),
        (GPTQ | {"dynamic": {"-:.*down": {}, r"+:.*\.1\..*": {"bits": 8}}}, ALL | {"down": None, "gate1": 8, "head": None}),
        (GPTQ | {"dynamic": {r".*\.10\.": {"bits": 8}, "-:model": {}}}, dict.fromkeys(ALL) | {"o10": 8, "head": None}),
        (AWQ | {"modules_to_not_convert": ["self_attn"]}, ALL | {"q": None, "o10": None, "head": None}),
        (AWQ | {"modules_to_not_convert": ["model.layers.1", "mlp.gate"]}, ALL | {"gate1": None, "head": None}),
        (FP8, dict.fromkeys(ALL, 8) | {"head": None}),
        (FP8 | {"modules_to_not_convert": [r"layers\.\d+\.mlp"]}, dict.fromkeys(ALL) | {"q": 8, "o10": 8, "head": 8}),
        (PACK, ALL | {"head": None}),
        (PACK | {"ignore": ["re:.*self_attn.*", "model.layers.0.mlp.down"]}, ALL | {"q": None, "o10": None, "head": 4}),
        (changed_group(targets=["re:.*mlp.*"]), {"q": None, "o10": None, "gate1": 4, "down": 4, "head": None}),
        (MIXED, {"q": 8, "o10": 4, "gate1": 8, "down": 8, "head": None}),
    ],
)  # fmt: skip
def test_layers_are_chosen_as_the_packages_choose_them(config: dict[str, Any], expected: dict[str, int | None]) -> None:
    assert bits_of(config) == expected


def test_expressions_of_exponential_time_or_memory_are_refused() -> None:
    for expression in (r"(?:(?:a+)+)+", "(?:a{1000}){1000}", "a" * 10_001):
        with pytest.raises(ConfigError, match="is not supported: it is too long, or repeats a group"):
            quantization_of(GPTQ | {"dynamic": {f"-:{expression}": {}}})
    slow = quantization_of(PACK | {"ignore": [r"re:" + r"(.|\w|[a-z])" * 25 + "(?<=!)"]})
    with pytest.raises(ConfigError, match="takes too long to match a name"):
        slow.coding(LAYER)
