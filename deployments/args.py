"""The arguments of the server: set in serve_config.yaml, as key=value, or as LLAMA_<NAME> in the environment."""

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from deployments.api_keys import digests_of
from llama_core.checkpoint.registry import checkpoint_path, open_checkpoint
from llama_core.config import (
    DEFAULT_STEP_TOKENS,
    UNKNOWN_CONTEXT,
    BackendName,
    CacheDType,
    Device,
    DType,
    EngineConfig,
    PrefixCacheScope,
)
from llama_core.errors import ConfigError, LlamaError
from llama_core.files.adapter import CONFIG, WEIGHTS, Adapter, open_adapter
from llama_core.files.manifest import Manifest
from llama_core.log_lines import LogFormat
from llama_core.model.config import ModelConfig
from llama_core.model.weight_formats import Quantization
from llama_core.remote.model_files import Kind, RemoteModel
from llama_core.remote.names import remote_name
from llama_core.remote.store import fetched, outline, pin
from llama_core.sizes import parse_size
from llama_core.text.registry import CHAT_FORMAT_NAMES, DEFAULT_CHAT_FORMAT, find_tokenizer
from llama_core.text.tools.tool_format import AUTO as TOOL_FORMAT_AUTO
from llama_core.text.tools.tool_format import TOOL_FORMAT_NAMES

DEMO: Final = Path(__file__).resolve().with_name("demo")


def _whole_number(value: object) -> object:
    """A number, or text such as "8k" or "1Gi". A bool is not a number."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return parse_size(value) if isinstance(value, str) else value


def _names(value: object) -> object:
    """Names separated by commas, as in an environment variable, or a list."""
    return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value


def _host_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", value):
        raise ValueError("must be a plain host name without scheme or port")
    return value


def _origin(value: str) -> str:
    if value != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s*?#@]+", value, re.IGNORECASE):
        raise ValueError("must be an origin as browsers send it, such as https://chat.example.com:8443, or *")
    return value.lower()


def _not_blank(value: str) -> str:
    if not value.strip():
        raise ValueError("is set, but names no file: leave it out to serve without a key file")
    return value


def _one_of(names: Collection[str]) -> AfterValidator:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return value

    return AfterValidator(check)


def _folders(value: object) -> object:
    """Name=folder, separated by commas, as in an environment variable, or a mapping."""
    if not isinstance(value, str):
        return value
    return {
        name.strip(): at.strip() for name, _, at in (each.partition("=") for each in value.split(",")) if name.strip()
    }


log = logging.getLogger(__name__)

Digests = tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...]
Count = Annotated[int, BeforeValidator(_whole_number), Field(ge=1)]
# Marks of arguments. NUMERIC: the tokens of a prompt depend on it; RESOLVED: on what the ranks make of it. SAME: an engine with
# another value does not continue streams either: templates decide which tokens end an answer, `cpus_per_rank` torch's threads.
NUMERIC: Final = "numeric"
RESOLVED: Final = "resolved"
SAME: Final = "same"


class Args(BaseModel):
    """What fronts and engines both take. An unknown or ill-typed argument stops the start with an error that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    drain_timeout_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="Time for live streams to end when a replica stops."
    )
    log_format: LogFormat = Field(
        "text", description="json: each log line of the replica and of its ranks is a JSON object."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_environment(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        settings: dict[str, Any] = {name: os.environ.get(f"LLAMA_{name.upper()}") for name in cls.model_fields}
        for name, variable in {"api_key_digests": "LLAMA_API_KEYS", "admin_key_digests": "LLAMA_ADMIN_KEYS"}.items():
            if name in settings:
                settings[name] = _digests_from_environment(variable)
        return {name: value for name, value in settings.items() if value is not None} | given

    def changed(self, changes: Mapping[str, Any], names: Set[str]) -> Self:
        """With Serve's `user_config`. names: of what may change. Raises ConfigError, or pydantic's error for a bad value."""
        if unknown := changes.keys() - names:
            raise ConfigError(
                f"user_config: {', '.join(sorted(unknown))} cannot change without a restart; {', '.join(sorted(names))} can"
            )
        return type(self).model_validate(self.model_dump() | dict(changes))


class IngressArgs(Args):
    """Arguments of `build_ingress`: HTTP, keys and limits."""

    seed: int | None = Field(
        None,
        description="Requests without a seed get seeds derived from it, which callers can guess; random ones if absent.",
    )
    prefix_cache_scope: PrefixCacheScope = Field(
        "key",
        description="With API keys, share cached prefixes and grammars within one key (key) or with all keys (all).",
    )
    request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] | None = Field(  # RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
        None, description="Longest time of a request over HTTP; x-request-timeout-seconds may ask for less."
    )
    api_key_digests: Digests = Field((), description="SHA-256 of API keys; of the keys in LLAMA_API_KEYS if absent.")
    admin_key_digests: Digests = Field(
        (),
        description="SHA-256 of the keys that may load adapters; of the keys in LLAMA_ADMIN_KEYS if absent.",
    )
    api_key_file: Annotated[str, AfterValidator(_not_blank)] | None = Field(
        None,
        description="File of API keys, one a line, read again when it changes. Without any key, everyone has access.",
    )
    allowed_hosts: Annotated[tuple[Annotated[str, AfterValidator(_host_name)], ...], BeforeValidator(_names)] = Field(
        (),
        description="Names that a Host header may have, beside IP addresses and localhost, where there are no API keys.",
    )
    cors_origins: Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], BeforeValidator(_names)] = Field(
        (),
        description="Origins of web pages that may call the server, such as https://chat.example.com; * for all.",
    )
    log_prompts: bool = Field(
        False, description="Log the prompt of each request, which may be confidential. Never logged otherwise."
    )
    max_body_bytes: Count = Field(16 * 2**20, description="Largest request body.")
    resume_window_s: Annotated[float, Field(ge=0)] = Field(
        120.0,
        description="Streams with an Idempotency-Key, and answers of /v1/responses, are kept this long; 0: they are not.",
    )
    resume_max_bytes: Count = Field(64 * 2**20, description="Memory of all kept streams and answers of a replica.")
    hold_timeout_s: Annotated[float, Field(ge=0)] = Field(
        600.0, description="Streams wait this long for an engine that can continue them, once theirs has ended."
    )
    routing: Literal["expected_time", "least_loaded", "longest_prefix", "power_of_two", "round_robin"] = Field(
        "expected_time",
        description="How a front chooses among engines: by the time to the first token and the delay to other requests, or "
        "by another rule.",
    )

    @property
    def has_api_keys(self) -> bool:
        return bool(self.api_key_digests or self.api_key_file)


class EngineArgs(Args):
    """Arguments of `build_engine`: checkpoint, ranks and scheduling."""

    model_id: Annotated[str, SAME] = Field("llama-demo", min_length=1, description="Name of the model over HTTP.")
    ckpt_dir: Annotated[str, SAME] = Field(
        "demo",
        description="Folder of Hugging Face's or Meta's files, or a .gguf file, on every node; or the name of a model that "
        "each node fetches: org/name, s3://bucket/folder, https://host/model.gguf.",
    )
    tokenizer_path: Annotated[str | None, SAME] = Field(
        None, description="Tokenizer file or folder, or a name as of ckpt_dir; what lies in ckpt_dir if absent."
    )
    chat_format: Annotated[str, _one_of(CHAT_FORMAT_NAMES), SAME] = Field(
        DEFAULT_CHAT_FORMAT,
        description="Prompt format of the chat model; auto: its own template, else Llama 2's or 3's.",
    )
    chat_template: Annotated[str | None, SAME] = Field(
        None, min_length=1, description="Jinja2 chat template instead of the model's: a path, or the text itself."
    )
    tool_format: Annotated[str, _one_of(TOOL_FORMAT_NAMES)] = Field(
        TOOL_FORMAT_AUTO, description="How the model writes tool calls; auto: found from its template and vocabulary."
    )
    sampling_defaults: Literal["builtin", "model", "greedy"] = Field(
        "builtin",
        description="Sampling where a request says nothing: Meta's reference's, generation_config.json's, or greedy.",
    )
    model_parallel_size: Annotated[Count | None, NUMERIC, RESOLVED] = Field(
        None, description="Number of ranks; if absent, that of Meta's shards, else 1."
    )
    max_seq_len: Annotated[Count | None, NUMERIC, RESOLVED] = Field(
        None,
        description="Prompt and generated tokens of one sequence; if absent, the model's context or what memory holds.",
    )
    max_batch_size: Count = Field(32, description="Sequences that run at once.")
    max_queue: Count = Field(256, description="Sequences that may wait; more are answered 429.")
    max_queue_tokens: Count = Field(65_536, description="Tokens of the prompts that wait; more are answered 429.")
    max_step_tokens: Count | None = Field(
        None, description="Tokens of one step at most; 2048, or max_batch_size if that is more."
    )
    device: Annotated[Device, NUMERIC, RESOLVED] = "auto"
    dtype: Annotated[DType, NUMERIC, RESOLVED] = Field("auto", description="auto: the checkpoint's own.")
    block_size: Count = Field(16, description="Tokens of one cache block.")
    kv_cache_bytes: Count | None = Field(None, description="Cache memory of one rank.")
    kv_cache_dtype: Annotated[CacheDType, NUMERIC] = Field(
        "auto", description="fp8: a cache of 8-bit floating-point numbers, on GPUs."
    )
    verify_checksums: bool = Field(True, description="Compare every shard with its own checksums before serving.")
    sha256_manifest: str | None = Field(
        None,
        description="SHA-256 of all files, in sha256sum's format; SHA256SUMS in ckpt_dir if absent.",
    )
    speculation: bool = Field(
        True, description="Propose tokens that repeat earlier text, and verify several in one step."
    )
    backend: Annotated[BackendName, NUMERIC, RESOLVED] = Field(
        "auto", description="native (C++, on a CPU), fused (CUDA graphs), or torch; auto: the fastest one possible."
    )
    quantization: Annotated[Quantization, NUMERIC] = Field(
        "auto", description="Weights of linear layers: as stored (auto), as dtype (none), or in 8 or 4 bits."
    )
    batch_invariant: Annotated[bool, NUMERIC] = Field(
        False, description="On GPUs, compute each request with the same bits beside any others, which is slower."
    )
    lora_adapters: Annotated[
        dict[Annotated[str, Field(min_length=1)], Annotated[str, Field(min_length=1)]], BeforeValidator(_folders), SAME
    ] = Field(
        {},
        description="Folders of LoRA adapters in PEFT's files, on every node, or names as of ckpt_dir, by their models' names.",
    )
    lora_root: Annotated[str | None, SAME] = Field(
        None,
        min_length=1,
        description="Folder, on every node, below which adapters may be loaded while the engine serves.",
    )
    max_loras: Count = Field(8, description="Adapters that run at once, where there may be any.")
    max_lora_rank: Annotated[Count, NUMERIC] = Field(
        16, description="Largest rank of an adapter; ranks hold memory for max_loras of it."
    )
    prefix_caching: bool = Field(True, description="Compute a prefix that prompts share once.")
    cpus_per_rank: Annotated[Annotated[float, Field(gt=0)] | None, SAME] = Field(
        None, description="CPUs of one rank; if absent, a node's CPUs shared by its ranks, or 1 with CUDA."
    )
    placement_strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] | None = Field(
        None, description="Strategy of the placement group; PACK if absent."
    )
    step_timeout_s: Annotated[float, Field(gt=0)] = Field(
        60.0, description="A rank that takes longer for a step counts as hung."
    )
    start_timeout_s: Annotated[float, Field(gt=0)] = Field(1800.0, description="Deadline for loading and warming up.")
    recovery_timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="The replica fails if its ranks cannot be started again within this time."
    )
    shrink_after_s: Annotated[float, Field(ge=0)] = Field(
        60.0,
        description="After this time without room for all ranks, fewer ranks serve, if the model can be split over them.",
    )
    min_ranks: Count | None = Field(
        None, description="The fewest ranks that may serve; 1 if absent. With the number of ranks, fewer never serve."
    )
    spare_ranks: bool = Field(
        True,
        description="Keep a warm standby process beside each rank where 2 GiB of memory are free, for a faster recovery.",
    )
    runner_factory: Annotated[str | None, SAME] = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="module:function that makes a rank's runner instead of the model's; for tests of failures.",
    )

    @property
    def checkpoint(self) -> Path:
        """Of a folder with nothing but a GGUF model, that file."""
        return checkpoint_path(found(self.ckpt_dir))

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's main file: `tokenizer_path`, or what lies in the checkpoint."""
        return find_tokenizer(found(self.tokenizer_path, "tokenizer") if self.tokenizer_path else self.checkpoint)

    def pinned(self) -> Self:
        """With remote models by their present revisions, which all nodes then fetch. Raises FetchError."""
        update: dict[str, Any] = {"ckpt_dir": _pinned(self.ckpt_dir, "model")}
        if self.tokenizer_path is not None:
            update["tokenizer_path"] = _pinned(self.tokenizer_path, "tokenizer")
        update["lora_adapters"] = {name: _pinned(at, "adapter") for name, at in self.lora_adapters.items()}
        return self.model_copy(update=update)

    @property
    def downloads(self) -> tuple[RemoteModel, ...]:
        """Remote models among the arguments. Raises FetchError."""
        kinds: list[tuple[str | None, Kind]] = [(self.ckpt_dir, "model"), (self.tokenizer_path, "tokenizer")]
        kinds += [(at, "adapter") for at in self.lora_adapters.values()]
        names = ((remote_name(path), kind) for path, kind in kinds if path is not None)
        return tuple(pin(name, kind) for name, kind in names if name is not None)

    def marked(self, mark: str, but: str = "") -> dict[str, Any]:
        """The arguments with a mark, but for those that have the other one too."""
        fields = type(self).model_fields.items()
        return {
            name: getattr(self, name) for name, field in fields if mark in field.metadata and but not in field.metadata
        }

    def num_ranks(self) -> int:
        """Raises CheckpointError if the number depends on the shards and some are missing."""
        return self.model_parallel_size or open_checkpoint(self.checkpoint).num_shards()

    def manifest(self) -> Manifest | None:
        """The SHA-256 that the files must have, if a manifest exists. Raises CheckpointError or ConfigError."""
        if self.sha256_manifest is not None and remote_name(self.ckpt_dir) is not None:
            raise ConfigError.of(
                "sha256_manifest", "is for files of this machine; a hub publishes the SHA-256 of its own"
            )
        return Manifest.find(self.checkpoint, resolve(self.sha256_manifest) if self.sha256_manifest else None)

    def open_adapters(self, model: ModelConfig) -> dict[str, Adapter]:
        """By name. Raises ConfigError or CheckpointError that names the file at fault."""
        if self.lora_root is not None and not resolve(self.lora_root).is_dir():
            raise ConfigError.of("lora_root", f"{self.lora_root} is not a directory")
        if self.model_id in self.lora_adapters:
            raise ConfigError.of("lora_adapters", f"{self.model_id!r} is the base's model_id")
        return {
            name: replace(
                self._open_adapter(found(at, "adapter"), model), folder=at if remote_name(at) else str(resolve(at))
            )
            for name, at in self.lora_adapters.items()
        }

    def open_loaded_adapter(self, folder: str, model: ModelConfig) -> Adapter:
        """folder: absolute, or of `lora_root`, below which it must be. Raises as `open_adapters`."""
        if self.lora_root is None:
            raise ConfigError(
                "lora_root: is not set in the engine's arguments: set it to load adapters while it serves"
            )
        root = resolve(self.lora_root).resolve()
        try:
            at = (root / folder).resolve()
            if not all(file.resolve().is_relative_to(root) for file in (at, at / CONFIG, at / WEIGHTS)):
                raise ConfigError("lora_path: the folder and its files must be below lora_root")
            return self._open_adapter(at, model)
        except LlamaError as error:  # first: ConfigError is a ValueError
            raise type(error)(error.message.replace(f"{root}/", ""), param=error.param) from None
        except (OSError, RuntimeError, ValueError) as error:  # no permission; a circle of links; a zero byte
            raise ConfigError(f"lora_path: cannot be read: {type(error).__name__}") from None

    def _open_adapter(self, folder: Path, model: ModelConfig) -> Adapter:
        adapter = open_adapter(folder, model, self.max_lora_rank)
        # One model has many names and paths, so another one is no proof of another base.
        of_hub = remote_name(self.ckpt_dir)
        path = of_hub.path if of_hub is not None else self.ckpt_dir
        name, own = Path(adapter.base).name, (self.model_id, Path(path).stem, Path(path).name)
        if name and name.lower() not in map(str.lower, own):
            log.warning("%s: the adapter's base is named %r; check that it is %r", folder, name[:200], self.model_id)
        return adapter

    def engine_config(
        self,
        vocab_size: int,
        manifest: Manifest | None = None,
        *,
        context_length: int | None,
        stop_ids: Iterable[int] = (),
    ) -> EngineConfig:
        """The engine's configuration: every argument that has the name of one of its fields. Raises ConfigError that names the
        field. context_length: the model's own; None if unknown. stop_ids: all that end an answer."""
        names = {field.name for field in fields(EngineConfig)} & set(type(self).model_fields)
        same: dict[str, Any] = {name: getattr(self, name) for name in names}
        return EngineConfig(
            **same
            | {
                "ckpt_dir": self.ckpt_dir if remote_name(self.ckpt_dir) else str(self.checkpoint),
                "vocab_size": vocab_size,
                "max_seq_len": self.max_seq_len or context_length or UNKNOWN_CONTEXT,
                "lowers_max_seq_len": self.max_seq_len is None,
                "serves_with_fewer_ranks": (self.min_ranks or 1) < self.num_ranks(),
                "max_step_tokens": self.max_step_tokens or max(DEFAULT_STEP_TOKENS, self.max_batch_size),
                "manifest": manifest,
                "max_loras": self.max_loras if self.lora_adapters or self.lora_root else 0,
                "wants_digest": True,
                "tokenizer_path": given
                if remote_name(given := self.tokenizer_path or self.ckpt_dir)
                else str(self.tokenizer),
                "stop_ids": tuple(sorted(stop_ids)),
            }
        )


class ServerArgs(IngressArgs, EngineArgs):
    """Arguments of `build_app`: one process for HTTP and engine."""

    answer_after_s: Annotated[float, Field(ge=0)] = Field(
        20.0,
        description="Requests wait this long for the first replica to load; then it answers 503 with Retry-After.",
    )


def _digests_from_environment(variable: str) -> tuple[str, ...] | None:
    if (keys := os.environ.get(variable)) is None:
        return None
    if not (digests := digests_of(keys)):
        raise ValueError(f"{variable} is set, but has no key in it: unset it")
    return digests


def resolve(path: str) -> Path:
    """A relative path is resolved in the working directory. Where that has no `demo`, it is the demo model of this package."""
    here = Path(path).expanduser()
    return DEMO if path == "demo" and not here.exists() else here.absolute()


def found(path: str, kind: Kind = "model") -> Path:
    """As `resolve`; of a remote model an outline, which needs no weights, of a remote adapter all files. Raises FetchError."""
    if (name := remote_name(path)) is None:
        return resolve(path)
    return fetched(path, kind) if kind == "adapter" else outline(pin(name, kind))


def _pinned(path: str, kind: Kind) -> str:
    name = remote_name(path)
    return path if name is None else str(pin(name, kind).name)
