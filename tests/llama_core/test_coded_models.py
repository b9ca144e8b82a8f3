"""Models in each coding: the logits of the same model in the values of its codes, on one, two and three ranks."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core.backends.parallel import alone
from tests.support import families
from tests.support.coded_models import Coded, quantization_config, write_pair
from tests.support.full_runs import with_full_ones
from tests.support.hugging_face import CONFIGS, random_weights, read, write

# On three ranks, parts of wo have 48 or 96 inputs, of w2 128; on two, 96 and 192.
CONFIG = CONFIGS["llama2"] | {"hidden_size": 192, "intermediate_size": 384, "head_dim": 24, "num_hidden_layers": 2}
CODINGS = {
    "gptq": Coded("gptq"),
    "gptq-8": Coded("gptq_v2", 8, block=(1, 0)),
    "gptq-act-order": Coded("gptq", scattered=True, symmetric=False, block=(1, 64)),
    "awq": Coded("awq", symmetric=False, block=(1, 64)),
    "packed": Coded("pack-quantized", block=(1, 192), scale=torch.bfloat16),
    "packed-zeros": Coded("pack-quantized", symmetric=False, block=(1, 64)),
    "int8": Coded("int-quantized", 8, block=(1, 0), scale=torch.bfloat16),
    "float8": Coded("float-quantized", 8, block=(1, 0), scale=torch.bfloat16),
    "fp8": Coded("fp8", 8, block=(128, 128), scale=torch.float32),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """The folder of a model in each coding, and of the same one in the values of its codes."""
    root: Path = tmp_path_factory.mktemp("coded")
    dense = write(root / "dense", CONFIG, random_weights(read(CONFIG)))
    made = {
        name: write_pair(dense, {"": coded}, quantization_config(coded), root / name) for name, coded in CODINGS.items()
    }
    attention, others = Coded("pack-quantized", 8, block=(1, 64)), Coded("pack-quantized", block=(1, 32))
    config = quantization_config(others) | {"ignore": []}
    groups = quantization_config(attention, "re:.*self_attn.*")["config_groups"]
    config["config_groups"]["group_1"] = groups["group_0"]
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    made["mixed, and the output layer"] = write_pair(
        dense, {"self_attn": attention, "": others}, config, root / "mixed", but=""
    )
    families.new_model(root / "phi3", "phi4")
    fused = Coded("gptq", block=(1, 32), symmetric=False)
    made["fused projections"] = write_pair(root / "phi3", {"": fused}, quantization_config(fused), root / "fused")
    return {name: (str(coded), str(values)) for name, (coded, values) in made.items()}


@pytest.mark.parametrize(
    ("world_size", "backend"),
    with_full_ones(
        [(world_size, backend) for world_size in (1, 2, 3) for backend in ("native", "torch")],
        in_each_run=[(1, "native"), (2, "torch"), (3, "native")],
    ),
)
def test_logits_are_those_of_the_values(
    ranks: Any, pairs: dict[str, tuple[str, str]], world_size: int, backend: str
) -> None:
    for name, (coded, values) in pairs.items():
        if world_size == 1:
            got, expected = (families.run(alone("cpu"), folder, backend) for folder in (coded, values))
        else:
            size = 2 if name == "fused projections" else world_size  # it has two key/value heads
            got, expected = (ranks(size).call(families.run, folder, backend)[0] for folder in (coded, values))
        assert families.difference(got, expected) < 1e-4, name


def test_the_log_says_what_is_expanded_and_what_is_not_quantized(
    pairs: dict[str, tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llama_core.backends.backend_choice"):
        families.run(alone("cpu"), pairs["fp8"][0], "native", num_tokens=1)
        families.run(alone("cpu"), pairs["mixed, and the output layer"][0], "native", num_tokens=1)
    assert [record.message for record in caplog.records if "backend_choice" in record.name] == [
        "activations and cache are not quantized as the files say (activation_scheme)",
        "8 matrices that are stored as float8 codes in blocks of 128 x 128 are held in float32: "
        "layers.0.qkv, layers.0.out, layers.0.gate_up, layers.0.down, ...",
        "activations and cache are not quantized as the files say (input_activations)",
    ]
