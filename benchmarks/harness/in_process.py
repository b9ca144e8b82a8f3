"""Drives `Llama` in this process as its own `generate` does, and says when each step began and ended.

The one file of the benchmarks that knows how the model is built and where its steps can be watched.
"""

import argparse
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from benchmarks.harness.workload import Request
from llama_core import Llama
from llama_core.config import DEFAULT_STEP_TOKENS, DType, EngineConfig
from llama_core.execution import parallel as groups
from llama_core.execution.runner import ModelRunner
from llama_core.model_config import ModelConfig
from llama_core.scheduling.request import Sequence as LlamaSequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Pending, StepInput, StepOutput
from llama_core.text.registry import load_tokenizer
from llama_core.text.tokenizer import Tokenizer

# What would change how much is computed: off, unless the command line says otherwise. Peers run without them too.
OFF_BY_DEFAULT = ("speculation", "prefix_caching")
BLOCK_SIZE = 16
StartFunction = Callable[[StepInput], Pending[StepOutput]]


class NumbersOnly:
    """In a tokenizer's place where there is no text: prompts and outputs are ids, and none of them ends anything."""

    def __init__(self, n_words: int) -> None:
        self.n_words = n_words
        self.stop_ids: frozenset[int] = frozenset()


@contextmanager
def built_llama(
    options: argparse.Namespace, *, dtype: str, max_seq_len: int, max_batch_size: int, **settings: Any
) -> Iterator[Llama]:
    """The model that the options name, for a while: its memory is free again before another one is built.

    `settings` are further fields of EngineConfig, above what the command line says.
    """
    if options.threads:
        torch.set_num_threads(options.threads)
    chosen: dict[str, Any] = dict.fromkeys(OFF_BY_DEFAULT, False)
    chosen |= {"device": options.device, "quantization": options.quantization}
    for pair in options.set:
        name, _, value = pair.partition("=")
        chosen[name] = _plain_value(value)
    tokenizer = load_tokenizer(options.tokenizer or options.ckpt / "tokenizer.model")
    config = EngineConfig(
        ckpt_dir=str(options.ckpt),
        vocab_size=tokenizer.n_words,
        dtype=cast(DType, dtype),  # refused there if it is none
        # The scheduler admits nobody unless a block stays free for each that runs: room for one more in every sequence.
        max_seq_len=max_seq_len + BLOCK_SIZE,
        max_batch_size=max_batch_size,
        block_size=BLOCK_SIZE,
        **({"max_step_tokens": max(DEFAULT_STEP_TOKENS, max_batch_size)} | chosen | settings),
    )
    llama = llama_of(config, tokenizer)
    try:
        yield llama
    finally:
        del llama
        gc.collect()


def llama_of(config: EngineConfig, tokenizer: Tokenizer | None = None) -> Llama:
    """As Llama.build makes it, but from every setting that an engine has, and without a tokenizer if need be."""
    runner = ModelRunner.load(config, groups.alone(config.device))
    num_blocks = runner.max_num_blocks()
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    return Llama(runner, tokenizer or cast(Tokenizer, NumbersOnly(config.vocab_size)), num_blocks, seed=1)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: when, in seconds of time.perf_counter, and how much. `is_decode`: no row reads a prompt."""

    begin_s: float
    end_s: float
    num_rows: int
    num_tokens: int
    num_draws: int
    is_decode: bool

    @property
    def ms(self) -> float:
        return (self.end_s - self.begin_s) * 1e3


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a batch of requests: the tokens generated for each, every step, and when it began and ended."""

    outputs: list[list[int]]
    steps: list[Step]
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def num_output(self) -> int:
        return sum(len(output) for output in self.outputs)

    @property
    def prefill_steps(self) -> list[Step]:
        return [step for step in self.steps if not step.is_decode]

    @property
    def decode_steps(self) -> list[Step]:
        return [step for step in self.steps if step.is_decode]

    @property
    def num_prefilled(self) -> int:
        """Tokens that went through the model in rows that read a prompt, and beside them."""
        return sum(step.num_tokens for step in self.prefill_steps)

    def decode_tok_s(self) -> float:
        """Tokens a second from the end of the last step that read a prompt to the end of all.

        Everything between steps counts: scheduling, and making the next step. For one sequence, or several of one length.
        """
        decodes = self.decode_steps
        begin = max((step.end_s for step in self.prefill_steps), default=decodes[0].begin_s)
        return sum(step.num_draws for step in decodes) / (decodes[-1].end_s - begin)


def run(llama: Llama, requests: Iterable[Request], temperature: float = 0.0) -> Run:
    """Generate for all requests as one batch, exactly as many tokens as each asks for."""
    sequences = []
    for i, request in enumerate(requests):
        params = SamplingParams(
            temperature=temperature, top_p=0.9, seed=i, max_tokens=request.num_output, ignore_eos=True
        )
        sequences.append(LlamaSequence(request.prompt, params, len(request.prompt) + request.num_output))
    with watched(llama.runner) as steps:
        begin = time.perf_counter()
        llama._run(sequences)  # what `generate` calls; that has one number of tokens for all, and may end before it
        end = time.perf_counter()
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    return Run([seq.output for seq in sequences], steps, begin, end)


@contextmanager
def watched(runner: Any) -> Iterator[list[Step]]:
    """Every step that `runner` takes meanwhile, in order."""
    steps: list[Step] = []

    def watch(start: StartFunction, batch: StepInput) -> Pending[StepOutput]:
        begin = time.perf_counter()
        under_way = start(batch)

        def result() -> StepOutput:
            nonlocal begin
            output = under_way.result()
            begin = max(begin, steps[-1].end_s if steps else begin)  # it waited for the step before it, on a GPU
            # A row with drafts has several tokens and reads no prompt.
            is_decode = all(row.length == 1 + row.num_drafts for row in batch.rows)
            end = time.perf_counter()
            steps.append(Step(begin, end, len(batch.rows), batch.num_tokens, len(output.tokens), is_decode))
            return output

        return Pending.done(result()) if under_way.is_done else Pending(result, under_way.is_ready)

    with around_steps(runner, watch):
        yield steps
    assert steps, "nothing went through runner.start: the place where steps can be watched has moved"


@contextmanager
def around_steps(runner: Any, around: Callable[[StartFunction, StepInput], Pending[StepOutput]]) -> Iterator[None]:
    """Meanwhile `runner.start(batch)` is around(start, batch), with `start` as it was. Contexts may be nested."""
    before = vars(runner).get("start")
    runner.start = functools.partial(around, runner.start)
    try:
        yield
    finally:
        del runner.start
        if before is not None:
            runner.start = before


# What a token costs at least.


def torch_dtype(llama: Llama) -> torch.dtype:
    """Of the activations, the cache, and the weights unless they are quantized."""
    dtype = getattr(torch, llama.runner.report.dtype.split()[0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def bytes_per_token(llama: Llama, context: float) -> int:
    """Bytes that decoding one token of one sequence reads: every weight but the embedding's, of which it needs one row,
    and the keys and values of `context` tokens."""
    config, itemsize = llama.runner.model_config, torch_dtype(llama).itemsize
    embedding = config.vocab_size * config.dim * itemsize
    cached = 2 * config.n_layers * config.n_kv_heads * config.head_dim * itemsize
    return llama.runner.report.weight_bytes - embedding + int(cached * context)


def prefill_operations(config: ModelConfig, length: int) -> int:
    """Multiplications and additions that reading a prompt of `length` tokens takes: projections of every token, attention
    to all before it, and logits of the last."""
    kv_dim = config.n_kv_heads * config.head_dim
    layer = config.dim * (2 * config.dim + 2 * kv_dim) + 3 * config.dim * config.hidden_dim
    attention = 2 * config.dim * length * (length + 1) // 2
    return 2 * (config.n_layers * (layer * length + attention) + config.dim * config.vocab_size)


def case_name(llama: Llama, options: argparse.Namespace) -> str:
    """The key of a case in a result: "bfloat16", or "bfloat16+int8" with weights quantized."""
    dtype = str(torch_dtype(llama)).removeprefix("torch.")
    return dtype if options.quantization == "none" else f"{dtype}+{options.quantization}"


def vocabulary(llama: Llama) -> int:
    return llama.tokenizer.n_words


def repeat_runs(llama: Llama, requests: Sequence[Request], repeats: int) -> list[Run]:
    """`repeats` runs after one that is not counted: kernels are built and pages touched by then."""
    return [run(llama, requests) for _ in range(repeats + 1)][1:]


def _plain_value(text: str) -> bool | int | float | str | None:
    """A command line's word as what it says: true, false, none, a number, or itself."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
