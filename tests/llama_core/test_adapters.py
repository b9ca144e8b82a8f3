"""LoRA adapters of requests: transformers' tokens with merged weights, in any batch, on any backend and number of ranks."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from llama_core import Llama
from llama_core.backends.memory_estimate import estimate_memory
from llama_core.backends.parallel import alone
from llama_core.errors import InvalidParameter, NonFiniteLogits
from llama_core.files.adapter import open_adapter
from tests.conftest import GOLDEN
from tests.support import adapters, families
from tests.support.forking import interpret
from tests.support.full_runs import with_full_ones
from tests.support.simulated_device import CapturableOps, SimulatedDevice

# Biases on every matrix; and norms of heads, with widths that neither tiles nor 2 or 3 ranks divide.
FAMILIES = ("llama-biases", "smollm2", "exaone4", "phi4-mini")


class Case:
    """A model, four adapters of different shapes, and what transformers generates: without an adapter, then with each."""

    def __init__(self, root: Path, family: str) -> None:
        self.base, self.expected = root / family, [families.write(root / family, family)]
        self.folders: list[str | None] = [None]
        for seed, (name, fields) in enumerate(adapters.SHAPES.items()):
            merged = adapters.write(root / f"{family}-{name}", self.base, fields, seed)
            self.expected.append(adapters.expected(self.base, merged))
            self.folders.append(str(root / f"{family}-{name}"))
        assert len({tuple(map(tuple, each.tokens)) for each in self.expected}) == 5, "every adapter changes the text"

    def run(self, backend: str, *, together: bool = True, **overrides: Any) -> adapters.Generated:
        return adapters.run(alone("cpu"), str(self.base), backend, self.folders, together, **overrides)

    def check(self, generated: adapters.Generated, tolerance: float = 1e-4) -> None:
        each = [(tokens, logits) for e in self.expected for tokens, logits in zip(e.tokens, e.logits, strict=True)]
        for (tokens, logprobs), (wanted, logits) in zip(generated, each, strict=True):
            assert tokens == wanted
            theirs = logits.log_softmax(-1)[range(len(wanted)), wanted]
            assert torch.tensor(logprobs) == pytest.approx(theirs, abs=tolerance)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {family: Case(tmp_path_factory.mktemp("adapters"), family) for family in FAMILIES}


@pytest.mark.parametrize(
    ("world_size", "backend"),
    with_full_ones(
        [(world_size, backend) for world_size in (1, 2, 3) for backend in ("native", "torch")],
        in_each_run=[(1, "native"), (1, "torch"), (2, "torch"), (3, "native")],
    ),
)
def test_four_adapters_and_the_base_in_one_batch_have_the_tokens_of_transformers(
    ranks: Any, cases: dict[str, Case], world_size: int, backend: str
) -> None:
    """Three places for four adapters: one has to wait for the end of another's sequences."""
    for case in cases.values():
        if world_size == 1:
            results = [case.run(backend)]
        else:
            results = ranks(world_size).call(adapters.run, str(case.base), backend, case.folders, True)
        for generated in results:
            case.check(generated)


@pytest.mark.parametrize(
    "fields", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
def test_native_bits_depend_on_the_row_and_its_adapter_alone(cases: dict[str, Case], fields: dict[str, Any]) -> None:
    for case in cases.values():
        together = case.run("native", **fields)
        assert together == case.run("native", together=False, **fields)
        assert together[:2] == adapters.run(alone("cpu"), str(case.base), "native", [None], True, max_loras=0, **fields)


def test_graphs_with_adapters_compute_what_transformers_does(cases: dict[str, Case]) -> None:
    device = SimulatedDevice(1, 0.3)
    with patch("llama_core.backends.rank_loading.choose_ops", lambda kind, where, **options: (CapturableOps(), device)):
        cases["smollm2"].check(cases["smollm2"].run("fused"))
    assert device.num_replays > 0


def test_tritons_kernels_add_what_torch_does_in_the_interpreter() -> None:
    interpret("""
import torch
from tests.llama_core.backends.fused.kernel_differences import check_adapters
check_adapters(torch.device("cpu"))
""")


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_adapter_whose_files_have_changed_costs_its_own_requests_an_error(
    cases: dict[str, Case], tmp_path: Path, backend: str
) -> None:
    case = cases["smollm2"]
    adapters.write(tmp_path / "a", case.base, adapters.SHAPES["all"], seed=9)
    runner = adapters.new_runner(alone("cpu"), str(case.base), backend)
    opened = open_adapter(tmp_path / "a", runner.model_config, adapters.MAX_RANK)
    whole = open_adapter(str(case.folders[1]), runner.model_config, adapters.MAX_RANK)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"damaged")
    prompt = families.PROMPTS[0]
    broken, other, base = adapters.generate(runner, [(prompt, opened), (prompt, whole), (prompt, None)])
    assert isinstance(broken.error, NonFiniteLogits) and broken.output == []
    assert other.output == case.expected[1].tokens[0] and base.output == case.expected[0].tokens[0]


def test_sequences_of_another_adapter_find_no_cached_prefix(cases: dict[str, Case]) -> None:
    case = cases["smollm2"]
    runner = adapters.new_runner(alone("cpu"), str(case.base), "native")
    first, second = (open_adapter(str(folder), runner.model_config, 16) for folder in case.folders[1:3])
    prompt = families.PROMPTS[0]
    done = adapters.generate(runner, [(prompt, None), (prompt, first), (prompt, second), (prompt, first)])
    assert [seq.num_cached for seq in done] == [0, 0, 0, 80]
    assert done[1].output == done[3].output == case.expected[1].tokens[0]


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_memory_plan_has_the_places_of_adapters(cases: dict[str, Case], backend: str) -> None:
    case = cases["smollm2"]
    with_places, without = (
        adapters.new_runner(alone("cpu"), str(case.base), backend, max_loras=places) for places in (3, 0)
    )
    pairs = open_adapter(str(case.folders[1]), without.model_config, adapters.MAX_RANK).pairs.values()
    least = 3 * adapters.MAX_RANK * 4 * sum(pair.a.shape[1] + pair.b.shape[0] for pair in pairs)
    planned = (estimate_memory(runner.config, 1).ranks[0].working for runner in (with_places, without))
    assert least <= with_places.backend.working_bytes - without.backend.working_bytes <= 1.5 * least
    assert least <= next(planned) - next(planned) <= 1.5 * least


def test_the_model_in_process_takes_an_adapter_for_each_prompt(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("all", "attention")}
    for name, folder in folders.items():
        adapters.write(folder, GOLDEN / "mp1", adapters.SHAPES[name])
    llama = Llama.build(
        GOLDEN / "mp1", GOLDEN / "mp1" / "tokenizer.model", 64, 4, device="cpu", lora_adapters=folders, max_loras=1
    )
    names, prompt = ["", "all", "attention", "all"], [5, 6, 7, 8, 9]
    alone_each = [llama.generate([prompt], 12, temperature=0, adapter=name)[0][0] for name in names]
    together, _ = llama.generate([prompt] * 4, 12, temperature=0, adapter=names)
    assert together == alone_each and len(set(map(tuple, together))) == 3
    with pytest.raises(InvalidParameter, match="'poet' is not one of lora_adapters"):
        llama.generate([prompt], 4, adapter="poet")
