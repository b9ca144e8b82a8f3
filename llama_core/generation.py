"""The reference's API, in process: `Llama.build`, `generate`, `text_completion`, `chat_completion`.

Uses the server's scheduler and runner, in a plain loop instead of an event loop. Under torchrun every rank runs the same
program and makes the same schedule; rank 0 samples the tokens for all.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from pathlib import Path

from llguidance import LLTokenizer
from tqdm import tqdm

from llama_core.backends import parallel as groups
from llama_core.backends.runner import ModelRunner
from llama_core.batch_loop import run_batch
from llama_core.checkpoint.registry import checkpoint_path, open_checkpoint
from llama_core.config import DEFAULT_STEP_TOKENS, BackendName, Device, DType, EngineConfig
from llama_core.errors import ConfigError, InvalidParameter
from llama_core.files.adapter import Adapter, open_adapter
from llama_core.files.manifest import Manifest
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.remote.store import fetched
from llama_core.results import (
    ChatPrediction,
    CompletionPrediction,
    DialogBatch,
    Generated,
    completion_predictions,
    generation_params,
    generation_result,
)
from llama_core.scheduling.request import Sequence, Terms, check_prompt, describe_request, log_unfinished
from llama_core.scheduling.sampling_params import SamplingParams, mix_seed
from llama_core.text.chat_format import ChatFormat, Dialog, NoChatFormat
from llama_core.text.registry import (
    DEFAULT_CHAT_FORMAT,
    check_vocabulary,
    find_tokenizer,
    load_tokenizer,
    open_chat_format,
    tokenizer_files,
)
from llama_core.text.template.files import template_files
from llama_core.text.tokenizers.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class Llama:
    """A model and its tokenizer, ready to generate. Not thread-safe."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        num_blocks: int,
        seed: int,
        chat_format: ChatFormat | None = None,
        stop_ids: frozenset[int] = frozenset(),
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        """stop_ids: ids that end a generation, in addition to those of the tokenizer and the chat format. adapters: by name."""
        self.runner = runner
        self.tokenizer = tokenizer
        self.chat_format = chat_format or NoChatFormat(tokenizer)
        self._stop_ids = tokenizer.stop_ids | self.chat_format.stop_ids | stop_ids
        self._num_blocks = num_blocks
        self._seed = seed
        self._adapters = dict(adapters or {})
        self._num_requests = 0

    @staticmethod
    def build(
        ckpt_dir: str | Path,
        tokenizer_path: str | Path | None = None,
        max_seq_len: int = 512,
        max_batch_size: int = 32,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: Device = "auto",
        dtype: DType = "auto",
        max_step_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        verify_checksums: bool = True,
        sha256_manifest: str | Path | None = None,
        speculation: bool = True,
        prefix_caching: bool = True,
        backend: BackendName = "auto",
        quantization: str = "auto",
        chat_format: str = DEFAULT_CHAT_FORMAT,
        chat_template: str | None = None,
        lora_adapters: Mapping[str, str | Path] | None = None,
        max_loras: int = 8,
        max_lora_rank: int = 16,
    ) -> "Llama":
        """Load a checkpoint with any number of shards on the ranks of this process group: one rank, or torchrun's.

        ckpt_dir: a folder, a .gguf file, or the name of a remote model (`llama_core.remote.names`), which is fetched.
        tokenizer_path: a file or folder; default: what lies in `ckpt_dir`. max_seq_len: prompt and generated tokens of one
        sequence. max_batch_size: sequences that run at once; further ones wait. model_parallel_size: the expected number of
        ranks, if it is to be checked. seed: requests without a seed of their own get seeds derived from it, in order of
        arrival. sha256_manifest: file with the SHA-256 that the files must have; default SHA256SUMS beside the checkpoint, if
        it exists. dtype: "auto" is the checkpoint's own. speculation: verify draft tokens where a text repeats itself.
        prefix_caching: compute a prefix that the prompts of a call share once. Neither changes a token. backend: "auto" is
        "native" (C++) on a CPU where the library can be built, "fused" (CUDA graphs) on a GPU, else "torch". quantization:
        how the weights of linear layers are held: "auto" as they are stored, "none" in dtype, or in fewer bits ("int8",
        "int8_groups", "int4", "int4_min"; "fp8" on GPUs). chat_format: "auto" is the model's own template if it has one, else
        the format of Meta's files. chat_template: a Jinja2 template instead, its path or its text. lora_adapters: folders of
        PEFT's files by the names that `generate` takes; max_loras of them, of ranks up to max_lora_rank, run at once. Raises
        ConfigError, CheckpointError, TokenizerError.
        """
        begin = time.perf_counter()
        parallel = groups.from_torchrun(device) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else groups.alone(device)
        if model_parallel_size not in (None, parallel.world_size):
            raise ConfigError(
                f"model_parallel_size is {model_parallel_size}, but this process group has {parallel.world_size} ranks: "
                "start with torchrun --nproc-per-node, or use the server",
                param="model_parallel_size",
            )
        ckpt_dir = checkpoint_path(fetched(ckpt_dir))
        source = open_checkpoint(ckpt_dir)
        tokenizer_path = find_tokenizer(fetched(tokenizer_path, "tokenizer") if tokenizer_path else ckpt_dir)
        manifest = Manifest.find(ckpt_dir, sha256_manifest)
        if manifest is not None:
            manifest.verify_metadata(source, [*tokenizer_files(tokenizer_path), *template_files(ckpt_dir)])
        tokenizer = load_tokenizer(tokenizer_path, source.num_rows())
        chat = open_chat_format(chat_format, tokenizer, ckpt_dir, chat_template)  # before the load, which takes long
        model = source.model_config(tokenizer.n_words)
        check_vocabulary(tokenizer_path, tokenizer.n_words, ckpt_dir, model.vocab_size)
        tokenizer = chat.guard(tokenizer.padded(model.vocab_size))
        config = EngineConfig(
            ckpt_dir=str(ckpt_dir),
            vocab_size=model.vocab_size,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            max_step_tokens=max_step_tokens or max(DEFAULT_STEP_TOKENS, max_batch_size),
            device=device,
            dtype=dtype,
            kv_cache_bytes=kv_cache_bytes,
            verify_checksums=verify_checksums,
            manifest=manifest,
            speculation=speculation,
            prefix_caching=prefix_caching,
            backend=backend,
            quantization=quantization,
            max_loras=max_loras if lora_adapters else 0,
            max_lora_rank=max_lora_rank,
        )
        if lora_adapters and max_loras < 1:
            raise ConfigError.of("max_loras", "must be at least 1 where there are adapters")
        adapters = {
            name: open_adapter(fetched(at, "adapter"), model, max_lora_rank)
            for name, at in (lora_adapters or {}).items()
        }
        of_files = frozenset(token_id for token_id in source.stop_ids if token_id < model.vocab_size)
        stop_ids = tokenizer.stop_ids | chat.stop_ids | of_files
        runner = _load_with_progress_bar(config, parallel, partial(grammar_vocabulary, tokenizer, stop_ids))
        num_blocks = groups.smallest(parallel, runner.max_num_blocks())
        runner.allocate_cache(num_blocks)
        runner.warm_up()
        log.info("rank %d of %d: built in %.2f s", parallel.rank, parallel.world_size, time.perf_counter() - begin)
        return Llama(runner, tokenizer, num_blocks, seed, chat, of_files, adapters)

    @property
    def max_seq_len(self) -> int:
        return self.runner.config.max_seq_len

    def generate(
        self,
        prompt_tokens: Seq[Seq[int]],
        max_gen_len: int,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
        *,
        top_k: int = 0,
        seed: int | None = None,
        adapter: str | Seq[str] = "",
    ) -> Generated:
        """Continue each prompt by at most `max_gen_len` tokens, up to the first stop token, which is left out.

        With `logprobs`, also returns the natural log of the softmax of the raw logits at each returned token; an echoed
        prompt begins with 0.0. With `seed`, the output for a prompt depends on that prompt and the seed alone. adapter: the
        name of one of `lora_adapters`, of all prompts or of each; "" for the base. Raises InvalidParameter,
        ContextLengthExceeded, NonFiniteLogits.
        """
        names = [adapter] * len(prompt_tokens) if isinstance(adapter, str) else adapter
        params = generation_params(
            max_gen_len, temperature, top_p, logprobs, echo, top_k=top_k, seed=0 if seed is None else seed
        )
        sequences = [
            self._sequence(list(prompt), params, seed, name) for prompt, name in zip(prompt_tokens, names, strict=True)
        ]
        log.info("generate: %s", describe_request(prompt_tokens, max_gen_len, temperature, top_p))
        self._run(sequences)
        for seq in sequences:
            if seq.error is not None:
                raise seq.error
        log_unfinished(sequences)
        return generation_result(sequences, logprobs, echo)

    def text_completion(
        self,
        prompts: Seq[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
        *,
        top_k: int = 0,
        seed: int | None = None,
        adapter: str | Seq[str] = "",
    ) -> list[CompletionPrediction]:
        """Continue each text. `max_gen_len` defaults to the rest of the context. adapter: as in `generate`."""
        if max_gen_len is None:
            max_gen_len = self.max_seq_len - 1
        prompt_tokens = [self.tokenizer.encode(prompt, bos=True, eos=False) for prompt in prompts]
        generated = self.generate(
            prompt_tokens, max_gen_len, temperature, top_p, logprobs, echo, top_k=top_k, seed=seed, adapter=adapter
        )
        return completion_predictions(self.tokenizer, generated)

    def chat_completion(
        self,
        dialogs: Seq[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        *,
        top_k: int = 0,
        seed: int | None = None,
        adapter: str = "",
    ) -> list[ChatPrediction]:
        """The assistant's next message for each dialog. A dialog that contains the template's own tags gets the reference's
        refusal without any generation. adapter: of all dialogs. Raises InvalidDialog that names the message's index."""
        if max_gen_len is None:
            max_gen_len = self.max_seq_len - 1
        batch = DialogBatch(dialogs, self.chat_format.encode)
        generated = self.generate(
            batch.prompts, max_gen_len, temperature, top_p, logprobs, top_k=top_k, seed=seed, adapter=adapter
        )
        return batch.predictions(self.tokenizer, generated)

    def _sequence(self, prompt: list[int], params: SamplingParams, seed: int | None, adapter: str = "") -> Sequence:
        if adapter and adapter not in self._adapters:
            raise InvalidParameter.of("adapter", f"{adapter!r} is not one of lora_adapters")
        digest = self._adapters[adapter].digest if adapter else ""
        prompt = check_prompt(prompt, self.tokenizer.n_words, self.max_seq_len)
        self._num_requests += 1
        if seed is None:
            params = replace(params, seed=mix_seed(self._seed, self._num_requests))
        return Sequence(
            prompt, params, min(self.max_seq_len, len(prompt) + params.max_tokens), terms=Terms(adapter=digest)
        )

    def _run(self, sequences: list[Sequence]) -> None:
        run_batch(self.runner, self._num_blocks, self._stop_ids, sequences, self._adapters.values())


def _load_with_progress_bar(
    config: EngineConfig, parallel: groups.Parallel, vocabulary: Callable[[], LLTokenizer]
) -> ModelRunner:
    """Load this rank's weights; show a progress bar if stderr is a terminal."""
    with tqdm(
        desc=f"rank {parallel.rank} weights",
        unit="B",
        unit_scale=True,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return ModelRunner.load(config, parallel, show, vocabulary=vocabulary)
