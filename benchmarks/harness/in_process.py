"""Drives `Llama` in this process as its own `generate` does, and records when each step began and ended.

Only this file of the benchmarks builds the model and hooks into its steps.
"""

import argparse
import ast
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks.harness.workload import Request
from llama_core.backends import parallel as groups
from llama_core.backends.runner import ModelRunner
from llama_core.batch_loop import run_batch
from llama_core.config import DEFAULT_STEP_TOKENS, DType, EngineConfig
from llama_core.files.adapter import Adapter
from llama_core.model.config import ModelConfig
from llama_core.scheduling.request import Sequence as LlamaSequence
from llama_core.scheduling.request import Terms
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.step import Pending, StepInput, StepOutput

if TYPE_CHECKING:
    from llama_core import Llama
    from llama_core.text.tokenizers.tokenizer import Tokenizer

# Settings that change how much is computed are off unless the command line sets them; peers run without them too.
OFF_BY_DEFAULT = ("speculation", "prefix_caching")
BLOCK_SIZE = 16


class NumbersOnly:
    """Replaces the tokenizer where prompts and outputs are token ids and no id ends a sequence."""

    def __init__(self, n_words: int) -> None:
        self.n_words = n_words
        self.stop_ids: frozenset[int] = frozenset()


@contextmanager
def built_llama(
    options: argparse.Namespace, *, dtype: str, max_seq_len: int, max_batch_size: int, **settings: Any
) -> Iterator["Llama"]:
    """The model that the options name, inside the context. Its memory is freed before another model is built.

    `settings` are further fields of EngineConfig; they override the command line.
    """
    from llama_core.text.registry import load_tokenizer

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
        dtype=cast(DType, dtype),  # EngineConfig refuses an unknown dtype
        # The scheduler keeps a block free for each running sequence, so each needs one block more than its tokens.
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


def llama_of(config: EngineConfig, tokenizer: "Tokenizer | None" = None) -> "Llama":
    """A Llama as Llama.build makes it, but from any engine setting and also without a tokenizer."""
    from llama_core import Llama

    runner = ModelRunner.load(config, groups.alone(config.device))
    num_blocks = runner.max_num_blocks()
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    return Llama(runner, tokenizer or cast("Tokenizer", NumbersOnly(config.vocab_size)), num_blocks, seed=1)


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its begin and end in seconds of time.perf_counter, and its size. `is_decode`: no row reads a prompt."""

    begin_s: float
    end_s: float
    num_rows: int
    num_tokens: int
    num_samples: int
    is_decode: bool

    @property
    def ms(self) -> float:
        return (self.end_s - self.begin_s) * 1e3


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a batch of requests: the generated tokens of each, every step, begin and end."""

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
    def decode_steps(self) -> list[Step]:
        return [step for step in self.steps if step.is_decode]

    def decode_tok_s(self) -> float:
        """Tokens a second from the end of the last step that read a prompt to the end of all.

        The time between steps is included: scheduling and making the next step. For one sequence, or several of one length.
        """
        decodes = self.decode_steps
        begin = max((step.end_s for step in self.steps if not step.is_decode), default=decodes[0].begin_s)
        return sum(step.num_samples for step in decodes) / (decodes[-1].end_s - begin)


def run(llama: "Llama", requests: Iterable[Request], temperature: float = 0.0, adapters: Sequence[Adapter] = ()) -> Run:
    """Generate for all requests as one batch, exactly as many tokens as each asks for. adapters: of the requests, in turn."""
    return run_on(llama.runner, llama._num_blocks, requests, temperature, adapters)


def run_on(
    runner: ModelRunner,
    num_blocks: int,
    requests: Iterable[Request],
    temperature: float = 0.0,
    adapters: Sequence[Adapter] = (),
) -> Run:
    """Like `run`, on a runner with a cache of `num_blocks` blocks. A request's seed is its index."""
    sequences = []
    for i, request in enumerate(requests):
        params = SamplingParams(
            temperature=temperature, top_p=0.9, seed=i, max_tokens=request.num_output, ignore_eos=True
        )
        adapter = adapters[i % len(adapters)].digest if adapters else ""
        length = len(request.prompt) + request.num_output
        sequences.append(LlamaSequence(request.prompt, params, length, Terms(adapter=adapter)))
    with watched(runner) as steps:
        begin = time.perf_counter()
        run_batch(runner, num_blocks, frozenset(), sequences, adapters)
        end = time.perf_counter()
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    return Run([seq.output for seq in sequences], steps, begin, end)


@contextmanager
def watched(runner: Any) -> Iterator[list[Step]]:
    """Every step that `runner` runs inside the context, in order."""
    steps: list[Step] = []
    start: Callable[[StepInput], Pending[StepOutput]] = runner.start

    def watch(batch: StepInput) -> Pending[StepOutput]:
        begin = time.perf_counter()
        in_flight = start(batch)

        def result() -> StepOutput:
            nonlocal begin
            output = in_flight.result()
            begin = max(begin, steps[-1].end_s if steps else begin)  # on a GPU the step waited for the previous one
            # A row with drafts has several tokens and reads no prompt.
            is_decode = all(row.length == 1 + row.num_drafts for row in batch.rows)
            end = time.perf_counter()
            steps.append(Step(begin, end, len(batch.rows), batch.num_tokens, len(output.tokens), is_decode))
            return output

        return Pending.done(result()) if in_flight.is_done else Pending(result, in_flight.is_ready)

    runner.start = watch
    try:
        yield steps
    finally:
        del runner.start
    assert steps, "no step went through runner.start, so no step was recorded"


# The least cost of a token.


def torch_dtype(llama: "Llama") -> torch.dtype:
    """The dtype of activations, cache and unquantized weights."""
    dtype = getattr(torch, llama.runner.report.dtype.split()[0])
    assert isinstance(dtype, torch.dtype)
    return dtype


def bytes_per_token(llama: "Llama", context: float) -> int:
    """Bytes read to decode one token of one sequence: every weight, but one row of the embedding,
    and the keys and values of `context` tokens."""
    config, itemsize = llama.runner.model_config, torch_dtype(llama).itemsize
    embedding = config.vocab_size * config.dim * itemsize
    cached = 2 * config.n_layers * config.n_kv_heads * config.head_dim * itemsize
    return llama.runner.report.weight_bytes - embedding + int(cached * context)


def prefill_operations(config: ModelConfig, length: int) -> int:
    """Floating-point operations of the prefill of `length` tokens: projections of every token, attention to all tokens before
    it, and logits of the last."""
    kv_dim = config.n_kv_heads * config.head_dim
    layer = config.dim * (2 * config.dim + 2 * kv_dim) + 3 * config.dim * config.hidden_dim
    attention = 2 * config.dim * length * (length + 1) // 2
    return 2 * (config.n_layers * (layer * length + attention) + config.dim * config.vocab_size)


def case_name(llama: "Llama", options: argparse.Namespace) -> str:
    """The key of a case in a result: "bfloat16", or such as "bfloat16+int4" where weights have other formats."""
    dtype = str(torch_dtype(llama)).removeprefix("torch.")
    return dtype if llama.runner.report.dtype == dtype else f"{dtype}+{options.quantization}"


def vocabulary(llama: "Llama") -> int:
    return llama.tokenizer.n_words


def repeat_runs(llama: "Llama", requests: Sequence[Request], repeats: int) -> list[Run]:
    """`repeats` runs after an uncounted one, which builds kernels and touches pages."""
    return [run(llama, requests) for _ in range(repeats + 1)][1:]


def _plain_value(text: str) -> bool | int | float | str | None:
    """A word of the command line as a value: true, false, none, a number, or the word itself."""
    named = {"true": True, "false": False, "none": None}
    try:
        return named[text.lower()] if text.lower() in named else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
