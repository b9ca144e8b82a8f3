"""Checks of arguments and of the model's files: checkpoint, tokenizer, digests, and memory by the estimate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cli.doctor.findings import Finding, fail, judge, ok, skip, warn
from cli.doctor.machine import Machine
from deployments.args import ServerArgs
from deployments.local.config_file import argument_error, similar_argument
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import LlamaError
from llama_core.model_config import ModelConfig
from llama_core.sizes import format_bytes
from llama_core.text.registry import check_vocabulary, load_tokenizer, open_chat_format, tokenizer_files

EMPTY_RANK_BYTES: Final = 210 * 10**6  # of a rank process that has imported everything and loaded nothing
SHARE_FOR_CACHE: Final = 0.5  # of the memory that is free after loading


def check_arguments(given: Mapping[str, Any]) -> tuple[ServerArgs | None, list[Finding]]:
    """The arguments, and a finding for each that is wrong."""
    try:
        return ServerArgs.model_validate(dict(given)), [ok("arguments", "valid", f"{len(given)} set")]
    except ValidationError as error:
        return None, [_argument_finding(each) for each in error.errors()]
    except LlamaError as error:
        return None, [fail("arguments", "valid", error.message, "correct it; docs/configuration.md has every argument")]


def _argument_finding(error: ErrorDetails) -> Finding:
    name, why = argument_error(error)
    if error["type"] == "extra_forbidden":
        return fail("arguments", "names of arguments", f"{name}: {why}", similar_argument(name))
    name = name or "arguments"
    return fail("arguments", f"{name}: a valid value", why, f"correct {name}; see docs/configuration.md")


def check_checkpoint(args: ServerArgs) -> tuple[ModelConfig | None, Finding]:
    """The architecture where the tokenizer is readable too, and whether names, shapes and sizes of the files are right."""
    need = "readable, complete, of a supported architecture"
    remedy = (
        "set ckpt_dir to a folder of Hugging Face's or Meta's files or to a .gguf file, tokenizer_path to the tokenizer of the "
        "same model, and download damaged files again"
    )
    try:
        source = open_checkpoint(args.checkpoint)
        num_rows = source.num_rows()  # first: an unsupported family is named before other faults
        num_shards = source.num_shards()
        num_tokens = _num_tokens(args, num_rows)
        if num_tokens is None:
            return None, skip("checkpoint", need, f"{num_shards} shards are complete; the rest needs the tokenizer")
        model = source.model_config(num_tokens)
        model.check_world_size(args.num_ranks())
        source.open_weights(model)
    except LlamaError as error:
        if error.param == "model_parallel_size":
            remedy = "lower model_parallel_size"
        return None, fail("checkpoint", need, error.message, remedy)
    shards = f"{num_shards} shard{'s' if num_shards != 1 else ''}"
    return model, ok("checkpoint", need, f"{args.checkpoint}: {shards}, {model.n_layers} layers, dim {model.dim}")


def _num_tokens(args: ServerArgs, num_rows: int | None) -> int | None:
    """The tokenizer's size; None where it cannot be read, which `check_tokenizer` tells."""
    try:
        return load_tokenizer(args.tokenizer, num_rows).n_words
    except LlamaError:
        return None


def check_tokenizer(args: ServerArgs, model: ModelConfig | None) -> Finding:
    need = "readable, with the checkpoint's vocabulary"
    remedy = "put the model's tokenizer beside its weights, or set tokenizer_path"
    try:
        tokenizer = load_tokenizer(args.tokenizer, None if model is None else model.vocab_size)
        if model is None:
            return ok("tokenizer", "readable", f"{args.tokenizer}: {tokenizer.n_words:,} tokens")
        check_vocabulary(args.tokenizer, tokenizer.n_words, args.checkpoint, model.vocab_size)
        if tokenizer.n_words > model.vocab_size:
            have = f"{args.tokenizer}: {tokenizer.n_words:,} tokens, the model has {model.vocab_size:,} rows"
            return fail("tokenizer", need, have, remedy)
        open_chat_format(args.chat_format, tokenizer, args.checkpoint, args.chat_template)
    except LlamaError as error:
        return fail("tokenizer", need, error.message, remedy)
    return ok("tokenizer", need, f"{tokenizer.n_words:,} tokens, the model has {model.vocab_size:,} rows")


def check_digests(args: ServerArgs, model: ModelConfig | None, *, reads_files: bool) -> Finding:
    """Every file against the manifest, and every shard against the checksums inside it."""
    need = "every file as its digest says"
    remedy = "download or copy the file again; if it was changed on purpose, write SHA256SUMS again with sha256sum"
    try:
        manifest = args.manifest()
        source = open_checkpoint(args.checkpoint)
        if manifest is not None:
            manifest.check_complete(source)
        if not reads_files:
            return skip("digests", need, "not read, by --no-digests")
        if manifest is not None:
            manifest.verify(list(dict.fromkeys([*source.files, *tokenizer_files(args.tokenizer)])), num_threads=2)
        if model is not None and args.verify_checksums:
            source.open_weights(model).verify_checksums(0, 1)
    except LlamaError as error:
        return fail("digests", need, error.message, remedy)
    except OSError as error:
        return fail("digests", need, f"{error.filename}: {error.strerror}", remedy)
    if manifest is None:
        if model is None:
            return skip("digests", need, "no SHA256SUMS, and the checkpoint cannot be read")
        if not args.verify_checksums:
            return skip("digests", need, "no SHA256SUMS, and verify_checksums is false")
        return ok("digests", need, "no SHA256SUMS; the shards' own checksums, where their format has them, are right")
    return ok("digests", need, f"{len(source.files)} files as in {Path(manifest.path).name}")


def check_memory(args: ServerArgs, model: ModelConfig | None, machine: Machine) -> Finding:
    """The estimate of all ranks against the free memory of this machine."""
    need = "weights, working memory and the cache of one sequence, for all ranks"
    if machine.ray_address is not None:
        return skip("memory", need, "the ranks run on the cluster's nodes: run doctor there")
    if model is None:
        return skip("memory", need, "the checkpoint cannot be read")
    from llama_core.memory_estimate import at_least_context, estimate_memory

    try:
        config = at_least_context(args.engine_config(model.vocab_size, context_length=model.context_length))
        estimate = estimate_memory(config, args.num_ranks())
        if estimate.device.type == "cuda":
            return skip("memory", need, "of GPUs: the ranks compare their plan with the device when they load")
        least = args.kv_cache_bytes or estimate.least_cache
        bytes_without_cache = sum(one.weights + one.working + EMPTY_RANK_BYTES for one in estimate.ranks)
        needed = bytes_without_cache + least * estimate.num_ranks
        full = bytes_without_cache + sum(one.cache for one in estimate.ranks)
    except (LlamaError, MemoryError) as error:
        return fail("memory", need, str(error), "correct the argument that is named")
    have, remedy = (
        f"{format_bytes(machine.free_bytes)} free",
        (
            "lower max_seq_len, max_batch_size or kv_cache_bytes, set quantization: int4, or use a machine with more memory; "
            "`llama-ray estimate` shows the memory by context"
        ),
    )
    amount = f"{format_bytes(needed)} for {estimate.num_ranks} ranks with the cache of one sequence"
    if needed > machine.free_bytes:
        return fail("memory", amount, have, remedy)
    if args.kv_cache_bytes is None and (full - bytes_without_cache) > SHARE_FOR_CACHE * (
        machine.free_bytes - bytes_without_cache
    ):
        all_of_it = f"{amount}; {format_bytes(full)} for {config.max_batch_size} sequences of full length"
        return warn("memory", all_of_it, have, f"fewer sequences of full length run at once; for all: {remedy}")
    return judge("memory", amount, have, remedy, good=True)
