"""The one-shot all-reduce: ranks in processes that share memory, in Triton's interpreter, and the choice of an all-reduce."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.execution.fused import all_reduce, peer_memory
from llama_core.execution.fused.all_reduce import (
    GroupAllReduce,
    MultimemAllReduce,
    OneShotAllReduce,
    choose_all_reduce,
)
from llama_core.execution.fused.ops import TorchOps
from llama_core.execution.fused.peer_memory import PeerMemory, one_shot_rows, peer_bytes
from llama_core.execution.parallel import Parallel
from tests.support import one_shot_ranks
from tests.support.interpreter import interpret

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize(
    ("world_size", "dtype", "has_switch"),
    [
        (3, "float32", False),  # sums of two ranks have one order
        (2, "float32", True),
        pytest.param(2, "float16", False, marks=pytest.mark.full),
        pytest.param(4, "float32", False, marks=pytest.mark.full),
        pytest.param(4, "float32", True, marks=pytest.mark.full),
    ],
)
def test_interpreted_sums_are_those_in_the_order_of_ranks_however_late_a_rank_comes(
    world_size: int, dtype: str, has_switch: bool, tmp_path: Path
) -> None:
    row_bytes = one_shot_ranks.DIM * getattr(torch, dtype).itemsize
    (tmp_path / "memory").write_bytes(bytes(one_shot_ranks.file_bytes(world_size, row_bytes)))
    program = f"""
import torch
from pathlib import Path
from tests.support.one_shot_ranks import run_all
run_all({world_size}, Path({str(tmp_path)!r}), torch.{dtype}, 7, has_switch={has_switch})
"""
    interpret(program)


ORDER = """
import torch, triton
import triton.language as tl
from llama_core.execution.fused.all_reduce_kernels import _in_order

@triton.jit
def kernel(words, out, block: tl.constexpr):
    at = words + tl.arange(0, block // 8) * 4
    tl.store(out + tl.arange(0, block), _in_order([tl.load(at + i) for i in range(4)], tl.bfloat16, block))

values, out = torch.randn(32).bfloat16(), torch.zeros(32)
kernel[(1,)](values.view(torch.int32), out, block=32)
assert torch.equal(out, values.float()), (out, values)
"""


def test_the_switchs_pairs_of_bfloat16_are_put_in_order() -> None:
    interpret(ORDER)


def config(**fields: Any) -> EngineConfig:
    return EngineConfig("", 1000, 64, 4, **fields)


def test_ranks_without_gpus_sum_by_gloo_and_refuse_what_needs_gpus() -> None:
    parallel, ops = Parallel(0, 2, torch.device("cpu")), TorchOps()
    assert isinstance(choose_all_reduce(config(), parallel, ops, 32, torch.float32), GroupAllReduce)
    for name in ("one_shot", "multimem"):
        with pytest.raises(ConfigError, match=f"all_reduce {name} cannot be used: the ranks have no GPUs"):
            choose_all_reduce(config(all_reduce=name), parallel, ops, 32, torch.float32)
        single = Parallel(0, 1, torch.device("cpu"))
        assert isinstance(choose_all_reduce(config(all_reduce=name), single, ops, 32, torch.float32), GroupAllReduce)
    with pytest.raises(ConfigError, match="all_reduce must be one of auto, nccl, one_shot, multimem"):
        config(all_reduce="ring")


class Gpus:
    """Two ranks of one host, of which the other finds what this one finds, and whose GPUs read each other's memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts, self.indices, self.can_read = [0, 1], ["0", "1"], True
        self.smallest: Callable[[int], int] = int
        monkeypatch.setattr(peer_memory, "ranks_with", lambda parallel, value: self.hosts)
        monkeypatch.setattr(
            peer_memory, "gather_bytes", lambda parallel, value: [each.encode() for each in self.indices]
        )
        for module in (peer_memory, all_reduce):
            monkeypatch.setattr(module, "smallest", lambda parallel, value: self.smallest(value))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: self.can_read)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self)
        self.has_atomics = True
        monkeypatch.setattr(peer_memory, "has_native_atomics", lambda own, peer: self.has_atomics)
        self.multi_processor_count = 132


def test_why_gpus_cannot_share_memory_is_said_and_auto_takes_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, parallel = Gpus(monkeypatch), Parallel(0, 2, torch.device("cuda", 0))

    def refused(**fields: Any) -> str:
        assert isinstance(choose_all_reduce(config(), parallel, TorchOps(), 4096, torch.bfloat16), GroupAllReduce)
        with pytest.raises(ConfigError) as error:
            choose_all_reduce(config(**{"all_reduce": "one_shot"} | fields), parallel, TorchOps(), 4096, torch.bfloat16)
        return str(error.value).partition("cannot be used: ")[2]

    gpus.hosts = [0]
    assert refused() == "the ranks are on several hosts"
    gpus.hosts = [0, 1]
    gpus.indices = ["0", "0"]
    assert refused() == "a rank does not see the GPUs of its peers"
    gpus.indices, gpus.can_read = ["0", "1"], False
    assert refused() == refused(all_reduce="multimem") == "GPU 0 cannot read the memory of GPU 1"
    gpus.can_read, gpus.has_atomics = True, False
    assert refused() == refused(all_reduce="multimem") == "the link of GPU 0 to GPU 1 has no native atomics"
    gpus.has_atomics, gpus.smallest = True, lambda value: 0
    assert refused() == "another rank cannot"
    gpus.multi_processor_count = 0
    assert refused() == "a row has 8192 bytes"
    gpus.multi_processor_count = 132
    gpus.smallest = lambda value: value if value > 1 else 0
    assert refused() == "another rank cannot"
    gpus.smallest = int
    assert refused(), "this machine has no symmetric memory"
    assert "batch_invariant" in refused(all_reduce="multimem", batch_invariant=True)


DRIVER = """
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 1; return ordinal == 9; }
int cuDeviceGetP2PAttribute(int *value, int attribute, int device, int peer) {
    *value = attribute == 3 && (device != 1 || peer != 2);
    return device == 3;
}
"""


def test_the_driver_is_asked_for_native_atomics_of_the_two_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver whose GPUs 0 and 1 are linked by PCIe in one direction, and in which calls for GPUs 9 and 2 fail."""
    (tmp_path / "driver.c").write_text(DRIVER)
    library = tmp_path / "driver.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    monkeypatch.setattr(peer_memory, "_DRIVER", str(library))
    asked = [(0, 1), (1, 0), (0, 9), (9, 0), (2, 0)]
    assert [peer_memory.has_native_atomics(*pair) for pair in asked] == [False, True, False, False, False]
    monkeypatch.setattr(peer_memory, "_DRIVER", str(tmp_path / "none.so"))
    assert not peer_memory.has_native_atomics(1, 0)


def test_no_rank_waits_at_the_rendezvous_for_one_that_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus, parallel = Gpus(monkeypatch), Parallel(0, 2, torch.device("cuda", 0))
    votes = iter([1, 0])
    gpus.smallest = lambda value: next(votes)
    monkeypatch.setattr(symmetric_memory, "empty", lambda *args, **options: torch.empty(1, dtype=torch.uint8))
    monkeypatch.setattr(symmetric_memory, "rendezvous", lambda *args: pytest.fail("the other rank does not come"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert peer_memory.share_memory(parallel, 1, 64) == "another rank cannot"


def test_the_switchs_address_is_taken_as_it_is_and_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch)
    parallel = Parallel(0, 2, torch.device("cpu"))
    handle = SimpleNamespace(buffer_ptrs=[4096, 8192], offset=256, multicast_ptr=1 << 20)
    monkeypatch.setattr(peer_memory, "_symmetric", lambda *args: peer_memory._Symmetric(torch.empty(0), handle))
    memory = peer_memory.share_memory(parallel, 4, 64, multicast=True)
    assert isinstance(memory, PeerMemory) and memory.has_multicast and memory.multicast.tolist() == [1 << 20]
    assert memory.buffers.tolist() == [4096 + 256, 8192 + 256]
    without = peer_memory.share_memory(parallel, 4, 64)
    assert isinstance(without, PeerMemory) and not without.has_multicast
    assert peer_memory.share_memory(parallel, 4, 24, multicast=True) == "a row's 24 bytes are no multiple of 16"
    handle.multicast_ptr = 0
    assert peer_memory.share_memory(parallel, 4, 64, multicast=True) == "the GPUs have no multicast"


def test_multimem_sums_few_rows_in_one_kernel_and_more_with_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    Gpus(monkeypatch)
    parallel, fault = Parallel(0, 2, torch.device("cuda", 0)), ""
    memory = PeerMemory.of(0, 4, 8192, [0, 4096], torch.device("cpu"), None, 1 << 20)
    monkeypatch.setattr(all_reduce, "share_memory", lambda *args, multicast: memory if multicast else None)
    monkeypatch.setattr(all_reduce, "multicast_buffer", lambda parallel, rows, dim, dtype: torch.empty(rows, dim))
    monkeypatch.setattr(all_reduce, "world_group", lambda: SimpleNamespace(group_name="0"))
    monkeypatch.setattr(OneShotAllReduce, "fault", lambda *args: fault)
    asked = config(all_reduce="multimem"), parallel, TorchOps(), 4096, torch.bfloat16
    chosen = choose_all_reduce(*asked)
    assert isinstance(chosen, OneShotAllReduce) and isinstance(chosen._large, MultimemAllReduce)
    assert chosen.nbytes == memory.nbytes + chosen._large.nbytes
    fault = "sums in the self-test were wrong"
    with pytest.raises(ConfigError, match="multimem cannot be used: sums in the self-test"):
        choose_all_reduce(*asked)


def test_a_self_test_that_fails_leaves_the_sums_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch)
    parallel, fault = Parallel(0, 2, torch.device("cuda", 0)), ""
    memory = PeerMemory.of(0, 4, 8192, [0, 4096], torch.device("cpu"), None)
    monkeypatch.setattr(all_reduce, "share_memory", lambda *args: memory)
    monkeypatch.setattr(OneShotAllReduce, "fault", lambda *args: fault)
    assert isinstance(choose_all_reduce(config(), parallel, TorchOps(), 4096, torch.bfloat16), OneShotAllReduce)
    fault = "sums in the self-test were wrong"
    assert isinstance(choose_all_reduce(config(), parallel, TorchOps(), 4096, torch.bfloat16), GroupAllReduce)


def test_rows_of_a_one_shot_sum_are_bounded_by_what_is_read_and_by_multiprocessors() -> None:
    assert one_shot_rows(2, 8192, 132) == 132 and one_shot_rows(2, 8192, 400) == 256
    assert one_shot_rows(4, 16384, 132) == 42 and one_shot_rows(8, 16384, 132) == 18
    assert one_shot_rows(2, 2**22, 132) == 0


def test_large_steps_go_to_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    memory = PeerMemory.of(0, 2, 32, [0, 4096], torch.device("cpu"), None)
    large = GroupAllReduce(Parallel(0, 1, torch.device("cpu")), TorchOps())
    summed = OneShotAllReduce(memory, large)
    monkeypatch.setattr(summed, "_sum_add_norm", lambda memory, turn, *args: turn)
    for rows, is_small in ((1, True), (2, True), (3, False)):
        states = torch.zeros(rows, 8)
        found = summed.add_norm(states, torch.ones(rows, 8), torch.ones(8), 1e-5, None, 1)
        assert isinstance(found, int) == is_small and states.sum() == (0 if is_small else rows * 8)


LAYOUTS = """
import json, re, torch
from tests.support.kernel_compiler import compiling_for
found = {}
with compiling_for(90):
    from triton.runtime.jit import JITFunction
    from llama_core.execution.fused.all_reduce_kernels import sum_add_norm
    from llama_core.execution.fused.kernels import TritonOps
    from llama_core.execution.fused.peer_memory import PeerMemory

    launch = JITFunction.run

    def run(self, *args, **kwargs):
        compiled = launch(self, *args, **kwargs)
        text = compiled.asm["ttgir"]
        layouts = dict(re.findall(r"^(#\\w+) = (#ttg.*)$", text, re.MULTILINE))
        sums = re.findall(r"^ *}\\) : \\(tensor<(\\d+)xf32, (#\\w+)>\\) -> f32", text, re.MULTILINE)
        found[case].append([(int(count), layouts[name]) for count, name in sums])
        return compiled

    JITFunction.run = run
    for dtype, dim in ((torch.bfloat16, 2048), (torch.bfloat16, 5120), (torch.float32, 4096)):
        case = f"{dtype} {dim}"
        found[case] = []
        rows, weight = torch.zeros((2, dim), dtype=dtype), torch.zeros(dim, dtype=dtype)
        TritonOps().add_norm(rows, rows.clone(), weight, 1e-5)
        memory = PeerMemory.of(0, 8, dim * dtype.itemsize, [2**20] * 2, torch.device("cpu"), None)
        sum_add_norm(memory, 0, rows, rows, weight, 1e-5)
print(json.dumps(found))
"""


def test_both_norms_add_a_rows_squares_in_the_same_order(tmp_path: Path) -> None:
    """With `batch_invariant`, large steps take the norm behind NCCL and small ones that of the one-shot sum. The interpreter
    adds in one order, whatever the compiler does."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)  # the assembler says nothing of a kernel from a cache
    command = [sys.executable, "-c", LAYOUTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 3
    for case, (behind_nccl, one_shot) in found.items():
        [(count, _)] = behind_nccl
        assert count >= int(case.split()[1]) and behind_nccl == one_shot, case


def on_streams(streams: list[Any], run: Callable[[int], object]) -> None:
    """Both ranks on one GPU: run(rank) queues work on the rank's stream."""
    for rank, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(rank)
    torch.cuda.synchronize()


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_two_ranks_on_one_gpu_have_the_bits_of_the_sum_in_the_order_of_ranks(dtype: torch.dtype) -> None:
    """Also from graphs, whose launches repeat the same arguments, and with the norm's bits of the kernel without a sum."""
    from llama_core.execution.fused.all_reduce_kernels import sum_add_norm
    from llama_core.execution.fused.kernels import TritonOps

    device, dim, max_rows = torch.device("cuda"), 4096, 16
    row_bytes = dim * dtype.itemsize
    own = [torch.zeros(peer_bytes(2, max_rows, row_bytes), dtype=torch.uint8, device=device) for _ in range(2)]
    bases = [each.data_ptr() for each in own]
    memories = [PeerMemory.of(rank, max_rows, row_bytes, bases, device, own) for rank in range(2)]
    weight = torch.randn(dim, device=device).to(dtype)
    parts = [torch.empty(max_rows, dim, dtype=dtype, device=device) for _ in range(2)]
    states = [torch.empty(max_rows, dim, dtype=dtype, device=device) for _ in range(2)]
    outputs: list[list[torch.Tensor]] = [[], []]
    # Made once: torch keeps memory for each stream, and an allocation of the device waits for a kernel that waits for its peer.
    streams = [torch.cuda.Stream() for _ in range(2)]

    def both_turns(rank: int) -> None:
        for turn in (0, 1):
            outputs[rank] = [sum_add_norm(memories[rank], turn, states[rank], parts[rank], weight, 1e-5)]

    def check(run: Callable[[int], object]) -> None:
        for part in parts:
            part.copy_(torch.randn(max_rows, dim, device=device))
        begin = torch.randn(max_rows, dim, device=device).to(dtype)
        for each in states:
            each.copy_(begin)
        on_streams(streams, run)
        total = (parts[0].float() + parts[1].float()).to(dtype)
        for _ in range(2):
            out = TritonOps().add_norm(begin, total, weight, 1e-5)
        for rank in range(2):
            assert memories[rank].missed.item() == 0
            assert torch.equal(states[rank], begin) and torch.equal(outputs[rank][0], out)

    for memory in memories:
        memory.polls.fill_(0)
    for _ in range(2):  # compiles and allocates; no rank waits
        on_streams(streams, both_turns)
    for memory in memories:
        memory.missed.zero_()
        memory.polls.fill_(20_000_000)
    for _ in range(20):
        check(both_turns)
    graphs = []
    for rank in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            both_turns(rank)
        graphs.append(graph)
    for _ in range(20):
        check(lambda rank: graphs[rank].replay())
