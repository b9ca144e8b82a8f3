"""What a server needs, against what there is, before `llama-ray up` starts anything: Ray alone would take 20 s to find it.

`up` looks at arguments, port, placement, and whether the files are there. `up --check` also reads the files, computes digests
and estimates memory, which the ranks do themselves when they load.
"""

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Final, Literal

from cluster.driver.placement import fair_cpus_per_rank, group_bundles, resolve_device, shortage
from deployments.args import ServerArgs
from deployments.local.config_file import ConfigFile, check_port_is_free
from deployments.local.private_files import VARIABLE, private_directory
from llama_core.checkpoint.registry import open_checkpoint
from llama_core.errors import CheckpointError, ConfigError, FetchError, LlamaError
from llama_core.files.source import CheckpointSource, WeightReader
from llama_core.files.text_files import LFS_POINTER, fault_of
from llama_core.host.cgroups import usable_cpus
from llama_core.host.memory import available_host_bytes
from llama_core.model.config import ModelConfig
from llama_core.remote.model_files import RemoteModel
from llama_core.remote.names import remote_name
from llama_core.remote.store import by_name, check_disk, local_path
from llama_core.sizes import format_bytes
from llama_core.text.registry import check_vocabulary, load_tokenizer, open_chat_format, tokenizer_files

CONNECT_TIMEOUT_S: Final = 5.0
NO_GPU: Final = ("", "-1", "NoDevFiles")  # in CUDA_VISIBLE_DEVICES
LEAST_DISK_BYTES: Final = 16 * 2**20
EMPTY_RANK_BYTES: Final = 210 * 10**6  # of a rank process that has imported everything and loaded nothing
SHARE_FOR_CACHE: Final = 0.5  # of the memory that is free after loading
_CHECKPOINT_REMEDY: Final = (
    "set ckpt_dir to a folder or .gguf file with the whole model, or to org/name of a hub, which is then fetched"
)
_TOKENIZER_REMEDY: Final = "put the model's tokenizer beside its weights, or set tokenizer_path to it"
_DIGEST_REMEDY: Final = (
    "download or copy the file again; if it was changed on purpose, write SHA256SUMS again with sha256sum"
)
_MEMORY_REMEDY: Final = (
    "lower max_seq_len, max_batch_size or kv_cache_bytes, or set quantization: int4; `llama-ray estimate` shows the memory by "
    "context"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """status: "fail" where the server cannot start, "warn" where it starts with less than it could have, "skip" where nothing
    was checked. found: what there is, for people. remedy: "" where nothing is to be done."""

    check: str
    status: Literal["ok", "warn", "fail", "skip"]
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}; {self.remedy}" if self.remedy else self.found


def exit_status(findings: Sequence[Finding]) -> int:
    """0 where nothing failed, 2 for wrong arguments, else 1."""
    failed = [finding.check for finding in findings if finding.status == "fail"]
    return (2 if "arguments" in failed else 1) if failed else 0


def joined_cluster() -> str | None:
    """The address of the cluster that RAY_ADDRESS names; None where `up` starts one: Ray would join a running one, and Ctrl-C
    would end all its applications."""
    address = os.environ.get("RAY_ADDRESS", "local")
    return None if address == "local" else address


def examine(config: ConfigFile, cluster: str | None, *, reads_files: bool, replaces: bool = False) -> Iterator[Finding]:
    """The findings. cluster: that of `joined_cluster`, whose nodes may have other variables and files. reads_files: all checks.
    replaces: whether applications that run there may be ended.

    An application of other code has no arguments to check, and one with a `runtime_env` may bring its own files.
    """
    args, nodes = None, _local_nodes() if cluster is None else None
    try:
        if cluster is None or reads_files:
            args = config.server_args
            yield Finding("arguments", "ok", "valid" if args else "of another application")
    except ConfigError as error:
        yield Finding("arguments", "fail", error.message)
    try:
        check_port_is_free(config.host, config.port)
        yield Finding("port", "ok", f"{config.host}:{config.port} is free")
    except ConfigError as error:
        yield Finding("port", "fail", error.message)
    if cluster is not None:
        try:
            _check_listens(cluster)
            nodes = _nodes_of(cluster, replaces) if reads_files else None
            yield Finding("cluster", "ok", f"{cluster} can be joined")
        except Exception as error:  # Ray raises ConnectionError, RuntimeError and others
            found = f"RAY_ADDRESS={cluster}: {type(error).__name__}: {str(error)[:400]}"
            yield Finding("cluster", "fail", found, "unset RAY_ADDRESS to let `llama-ray up` start a cluster")
    elif (finding := _disk()).status == "fail" or reads_files:
        yield finding
    if args is None:
        return
    if nodes is not None:
        yield _placement(args, cluster, nodes)
    if has_runtime_env(config):
        return
    downloads = args.downloads if cluster is None or reads_files else ()
    yield from map(_download, downloads)
    is_here = all(local_path(model) is not None for model in downloads)
    # What is wrong with a remote model is told before its weights are fetched.
    contents = _contents(args, cluster, has_weights=is_here) if reads_files or not is_here else _files(args)
    for finding in contents:
        remedy = "" if remote_name(args.ckpt_dir) and finding.remedy == _CHECKPOINT_REMEDY else finding.remedy
        yield replace(finding, found=by_name(finding.found, downloads), remedy=remedy)


def _check_listens(cluster: str) -> None:
    """Raises OSError or ConnectionError where nothing listens: `ray.init` would try for minutes."""
    from ray._private.services import canonicalize_bootstrap_address  # finds "auto"

    host, _, port = (canonicalize_bootstrap_address(cluster.removeprefix("ray://")) or "").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


def refuse_to_replace() -> None:
    """Raises ConfigError where the cluster that this process is connected to has applications: deploying ends those that a
    configuration does not name."""
    from ray import serve

    if running := ", ".join(sorted(serve.status().applications)):
        raise ConfigError(f"Serve runs {running} there, which would be replaced or end: --replace does so")


def _nodes_of(cluster: str, replaces: bool) -> Sequence[Mapping[str, float]]:
    """Resources of each living node. Raises what Ray raises if the cluster cannot be reached, and ConfigError as above."""
    import ray

    try:
        ray.init(address=cluster, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
        if not replaces:
            refuse_to_replace()
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def _local_nodes() -> Sequence[Mapping[str, float]]:
    """The resources that Ray gets here from `up`."""
    gpus, visible = len(glob("/dev/nvidia[0-9]*")), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = min(gpus, sum(each not in NO_GPU for each in visible.split(",")))
    return [{"CPU": float(usable_cpus()), "GPU": float(gpus)}]


def _disk() -> Finding:
    """Whether Ray can write its session. It tells of a full disk in a log of that session alone."""
    try:
        directory = private_directory()
    except ConfigError as error:
        return Finding("disk", "fail", error.message)
    space = os.statvfs(directory)
    free = space.f_bavail * space.f_frsize
    found = f"{format_bytes(free)} free in {directory}"
    if free < LEAST_DISK_BYTES:
        return Finding("disk", "fail", found, f"make room there, or set {VARIABLE} to another directory")
    return Finding("disk", "ok", found)


def _placement(args: ServerArgs, cluster: str | None, nodes: Sequence[Mapping[str, float]]) -> Finding:
    try:
        num_ranks = args.num_ranks()
    except LlamaError as error:  # of the checkpoint, which has a finding of its own
        return Finding("placement", "skip", error.message)
    device = resolve_device(args.device, nodes)
    strategy = args.placement_strategy or "PACK"
    cpus = args.cpus_per_rank or fair_cpus_per_rank(device, num_ranks, nodes, strategy)
    what = f"{num_ranks} ranks of {cpus:g} CPU" + (" and 1 GPU" if device == "cuda" else "")
    lacking = shortage(group_bundles(num_ranks, device, cpus_per_rank=cpus), nodes, strategy)
    if lacking is None:
        return Finding("placement", "ok", what)
    remedy = "lower model_parallel_size or cpus_per_rank (0.5 shares a core), set device: cpu, or add nodes"
    where = "this machine" if cluster is None else f"the cluster at {cluster}"
    return Finding("placement", "fail", f"{what}: {lacking.replace('the cluster', where)}", remedy)


def has_runtime_env(config: ConfigFile) -> bool:
    """Whether the application, or a deployment of it, may bring files of its own."""
    deployments = config.application.get("deployments") or ()
    options = ((deployment.get("ray_actor_options") or {}) for deployment in deployments)
    return any(each.get("runtime_env") for each in (config.application, *options))


def _download(model: RemoteModel) -> Finding:
    try:
        missing = check_disk(model)
    except FetchError as error:
        return Finding("download", "fail", error.message)
    what = f"{format_bytes(missing)} of {format_bytes(model.size)} to fetch" if missing else "all files are here"
    return Finding("download", "ok", f"{model.name}: {what}")


def _files(args: ServerArgs) -> Iterator[Finding]:
    """Whether all files are there, and readable."""
    try:
        path = args.checkpoint
        if path.is_dir():
            os.listdir(path)  # a folder without permission looks empty to `glob`
        else:
            path.stat()
        source = open_checkpoint(path)
        source.num_shards()
        _read_first_bytes(source.files)
        yield Finding("checkpoint", "ok", str(path))
    except (LlamaError, OSError) as error:
        yield _refused("checkpoint", error, "ckpt_dir", _CHECKPOINT_REMEDY)
        return
    try:
        _read_first_bytes(tokenizer_files(args.tokenizer))
        yield Finding("tokenizer", "ok", str(args.tokenizer))
    except (LlamaError, OSError) as error:
        yield _refused("tokenizer", error, "tokenizer_path", _TOKENIZER_REMEDY)


def _read_first_bytes(files: Sequence[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            opened.read(1)
        if fault := fault_of(file):
            raise CheckpointError(f"{file}: {fault}")


def _refused(check: str, error: LlamaError | OSError, argument: str, remedy: str) -> Finding:
    """argument: which the remedy names, and some errors too, with a better remedy."""
    if isinstance(error, OSError):
        return Finding(check, "fail", f"{error.filename} cannot be read: {error.strerror}", remedy)
    has_remedy = argument in error.message or LFS_POINTER in error.message
    return Finding(check, "fail", error.message, "" if has_remedy else remedy)


def _contents(args: ServerArgs, cluster: str | None, *, has_weights: bool) -> Iterator[Finding]:
    """Whether the files are those of one supported model, undamaged, and small enough for this machine. has_weights: False
    where there are only headers."""
    readable = list(_files(args))
    if any(finding.status == "fail" for finding in readable):
        yield from readable
        return
    try:
        source = open_checkpoint(args.checkpoint)
        tokenizer = load_tokenizer(args.tokenizer, source.num_rows())
        model = source.model_config(tokenizer.n_words)
        model.check_world_size(args.num_ranks())
        weights = source.open_weights(model)
        yield Finding("checkpoint", "ok", f"{args.checkpoint}: {model.n_layers} layers, dim {model.dim}")
    except LlamaError as error:
        remedy = "lower model_parallel_size" if error.param == "model_parallel_size" else _CHECKPOINT_REMEDY
        yield _refused("checkpoint", error, "ckpt_dir", remedy)
        return
    try:
        check_vocabulary(args.tokenizer, tokenizer.n_words, args.checkpoint, model.vocab_size)
        open_chat_format(args.chat_format, tokenizer, args.checkpoint, args.chat_template)
        yield Finding("tokenizer", "ok", f"{tokenizer.n_words:,} tokens, the model has {model.vocab_size:,} rows")
    except LlamaError as error:
        yield _refused("tokenizer", error, "tokenizer_path", _TOKENIZER_REMEDY)
    if has_weights:
        yield _digests(args, source, tokenizer_files(args.tokenizer), weights)
    yield Finding("memory", "skip", "the ranks run on the cluster's nodes") if cluster else _memory(args, model)


def _digests(args: ServerArgs, source: CheckpointSource, texts: Sequence[Path], weights: WeightReader) -> Finding:
    try:
        if (manifest := args.manifest()) is not None:
            manifest.check_complete(source)
            manifest.verify(list(dict.fromkeys([*source.files, *texts])), num_threads=2)
        if args.verify_checksums:
            weights.verify_checksums(0, 1)
        names = "no SHA256SUMS" if manifest is None else Path(manifest.path).name
        return Finding(
            "digests", "ok", f"{names}; the shards' own checksums are {'right' * args.verify_checksums or 'off'}"
        )
    except (LlamaError, OSError) as error:
        return _refused("digests", error, "sha256sum", _DIGEST_REMEDY)


def _memory(args: ServerArgs, model: ModelConfig) -> Finding:
    """The estimate of all ranks against the free memory of this machine."""
    from llama_core.backends.memory_estimate import at_least_context, estimate_memory  # imports torch

    try:
        config = at_least_context(args.engine_config(model.vocab_size, context_length=model.context_length))
        config = replace(config, ckpt_dir=str(args.checkpoint))
        estimate = estimate_memory(config, args.num_ranks())
    except (LlamaError, MemoryError) as error:
        return Finding("memory", "fail", str(error), "correct the argument that is named")
    if estimate.device.type == "cuda":
        return Finding("memory", "skip", "of GPUs: the ranks compare their plan with the device when they load")
    free = available_host_bytes()
    without_cache = sum(one.weights + one.working + EMPTY_RANK_BYTES for one in estimate.ranks)
    needed = without_cache + (args.kv_cache_bytes or estimate.least_cache) * estimate.num_ranks
    cache = sum(one.cache for one in estimate.ranks)
    found = f"{format_bytes(needed)} for {estimate.num_ranks} ranks with the cache of one sequence, {format_bytes(free)} free"
    if expansion := estimate.expansion:
        found += f"; {expansion}"
    if needed > free:
        return Finding("memory", "fail", found, _MEMORY_REMEDY)
    if args.kv_cache_bytes is None and cache > SHARE_FOR_CACHE * (free - without_cache):
        all_of_it = f"{found}, {format_bytes(without_cache + cache)} for {config.max_batch_size} of full length"
        return Finding("memory", "warn", all_of_it, f"fewer sequences run at once; for all: {_MEMORY_REMEDY}")
    return Finding("memory", "ok", found)
