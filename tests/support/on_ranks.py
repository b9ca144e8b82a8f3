"""Functions that tests run on every rank of a group, in a module that the rank processes can import."""

from functools import partial
from pathlib import Path
from typing import Any

from llama_core.backends.parallel import Parallel
from llama_core.backends.runner import ModelRunner
from llama_core.config import EngineConfig
from llama_core.generation import Llama
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.scheduling.block_pool import BlockPool
from llama_core.scheduling.request import Sequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.scheduling.scheduler import Scheduler
from llama_core.scheduling.scheduler_config import SchedulerConfig
from llama_core.scheduling.step import Row, SlotInit, StepInput
from llama_core.text.registry import find_chat_format, load_tokenizer

_built: dict[tuple[Any, ...], Llama] = {}


def new_runner(parallel: Parallel, ckpt_dir: str, dtype: str = "float32", **overrides: Any) -> ModelRunner:
    """A runner over `parallel` that has its cache and is warm."""
    tokenizer = load_tokenizer(Path(ckpt_dir) / "tokenizer.model")
    fields = {"max_seq_len": 160, "max_batch_size": 8, "max_step_tokens": 64} | overrides
    config = EngineConfig(ckpt_dir, tokenizer.n_words, device="cpu", dtype=dtype, **fields)  # type: ignore[arg-type]
    vocabulary = partial(grammar_vocabulary, tokenizer, tokenizer.stop_ids)
    runner = ModelRunner.load(config, parallel, vocabulary=vocabulary)
    runner.allocate_cache(runner.max_num_blocks())
    runner.warm_up()
    return runner


def build(parallel: Parallel, ckpt_dir: str, dtype: str = "float32", **overrides: Any) -> Llama:
    """A Llama over `parallel`, cached for later tests with the same arguments."""
    key = (parallel, ckpt_dir, dtype, *sorted(overrides.items()))
    if key not in _built:
        runner = new_runner(parallel, ckpt_dir, dtype, **overrides)
        tokenizer = load_tokenizer(Path(ckpt_dir) / "tokenizer.model")
        chat_format = find_chat_format("llama2", tokenizer)
        _built[key] = Llama(runner, tokenizer, runner.max_num_blocks(), seed=1, chat_format=chat_format)
    return _built[key]


def golden_outputs(parallel: Parallel, ckpt_dir: str, backend: str, golden: dict[str, Any]) -> dict[str, Any]:
    llama = build(parallel, ckpt_dir, backend=backend)
    completions, texts, chats = [], [], []
    for case in golden["completions"]:
        flags = {"logprobs": case["logprobs"], "echo": case["echo"]}
        completions.append(llama.generate(case["prompt_tokens"], case["max_gen_len"], temperature=0, **flags))
        texts.append(llama.text_completion(case["prompts"], 0, max_gen_len=case["max_gen_len"], **flags))
    for case in golden["chats"]:
        chats.append(llama.chat_completion(case["dialogs"], 0, max_gen_len=case["max_gen_len"], logprobs=True))
    model = type(getattr(llama.runner.backend, "model", None)).__name__
    return {"completions": completions, "texts": texts, "chats": chats, "model": model}


def last_logits(
    parallel: Parallel, ckpt_dir: str, tokens: list[int], chunks: list[int], dtype: str = "float32", **overrides: Any
) -> Any:
    """Logits (float32 [vocab]) at the last of `tokens`, computed in chunks of these lengths."""
    runner = build(parallel, ckpt_dir, dtype, **overrides).runner
    block_size = runner.config.block_size
    # Blocks in reverse order, so that a cache which ignores its block table gives other logits.
    blocks = list(range(-(-len(tokens) // block_size)))[::-1]
    admit, start = [SlotInit(3, tokens, blocks, SamplingParams(temperature=0.0, logprobs=0))], 0
    assert sum(chunks) == len(tokens)
    for count in chunks:
        last = start + count == len(tokens)
        runner.step(StepInput(0, 0, [Row(3, start, count, last)], admit=admit))
        admit, start = [], start + count
    return runner.backend.logits_of_samples([0])[0].tolist()


def serve(
    parallel: Parallel,
    ckpt_dir: str,
    requests: list[tuple[list[int], SamplingParams]],
    *,
    dtype: str = "float32",
    max_batch_size: int = 8,
    max_step_tokens: int = 64,
    num_blocks: int | None = None,
    arrivals: list[int] | None = None,
    max_drafts: int = 0,
    **overrides: Any,
) -> dict[str, Any]:
    """Run requests through scheduler and runner; request i arrives before step arrivals[i]. Outputs, logprobs, preemptions."""
    llama = build(parallel, ckpt_dir, dtype, **overrides)
    runner = llama.runner
    pool = BlockPool(num_blocks or runner.max_num_blocks(), runner.config.block_size)
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size,
            max_step_tokens,
            llama.tokenizer.stop_ids,
            window=runner.model_config.longest_window,
            max_drafts=max_drafts,
        ),
        pool,
    )
    sequences = [Sequence(prompt, params, min(160, len(prompt) + params.max_tokens)) for prompt, params in requests]
    waiting = sorted(zip(arrivals or [0] * len(sequences), range(len(sequences)), strict=True))
    step = 0
    while waiting or scheduler.has_work:
        while waiting and waiting[0][0] <= step:
            scheduler.add(sequences[waiting.pop(0)[1]])
        if (batch := scheduler.schedule()) is not None:
            scheduler.commit(runner.step(batch))
        step += 1
    return {
        "outputs": [seq.output for seq in sequences],
        "logprobs": [[p.logprob for p in seq.logprobs] for seq in sequences],
        "preemptions": scheduler.num_preemptions,
        "prefix_hits": scheduler.num_prefix_hits,
        "drafts_accepted": scheduler.speculation.num_accepted,
        "errors": [None if seq.error is None else seq.error.message for seq in sequences],
        "reasons": [seq.finish_reason.value if seq.finish_reason else None for seq in sequences],
        "blocks_used": pool.num_used,
    }
