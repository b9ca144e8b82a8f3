"""`llama-ray up MODEL` or CONFIG: runs `serve run`, reports its progress, and ends with an error if the server cannot start.

`serve run` runs in the main thread, and a second thread follows the deployment. HAProxy in front of the replicas is on
unless RAY_SERVE_ENABLE_HA_PROXY=0.

The command's own cluster starts sooner than that of `serve run`: without processes that a single server does not need
(`small_cluster`), and with concurrent steps that `serve run` performs one after another (`serve_start`).
"""

import importlib
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deployments.local import process_tag
from deployments.local.checks import (
    NO_GPU,
    Finding,
    examine,
    exit_status,
    has_runtime_env,
    joined_cluster,
    refuse_to_replace,
)
from deployments.local.config_file import ConfigFile, claim_port
from deployments.local.console import Console, new_log_file
from deployments.local.deployment_watcher import DeploymentWatcher
from deployments.local.model_argument import fewest_ranks, read_argument, shadowed
from deployments.local.private_files import PARENT, keep_files_private, token_variables
from deployments.local.serve_run import cluster_variables
from deployments.local.shutdown import Shutdown
from llama_core.errors import ConfigError, LlamaError
from llama_core.remote.store import check_disk, fetch, local_path
from llama_core.sizes import format_bytes


def serve(argument: str, overrides: Sequence[str], *, verbose: bool = False, replaces: bool = False) -> int:
    """Serve the model, or the configuration file, until a signal ends the server, and this process with it. Returns the exit
    status only where nothing was started: 2 for wrong settings, else 1.

    overrides: "key=value" arguments of the application. verbose: leave the lines of Ray, Serve and HAProxy on the terminal.
    replaces: end what Serve runs on the cluster that RAY_ADDRESS names.
    """
    if (told := shadowed(argument)) is not None:
        print(told, file=sys.stderr)
    try:
        config = prepared(read_argument(argument, overrides))
        claim = claim_port(config.host, config.port)  # noqa: F841  held until this process ends
        findings = list(examine(config, joined_cluster(), reads_files=False))
        if exit_status(findings) == 0 and joined_cluster() is None:
            keep_files_private()
            _fetch(config, findings)
    except ConfigError as error:
        findings = [Finding("port" if error.param == "port" else "arguments", "fail", error.message)]
    except (LlamaError, OSError) as error:
        findings = [Finding("checkpoint", "fail", str(error))]
    if (status := exit_status(findings)) != 0:
        print(*(finding for finding in findings if finding.status == "fail"), sep="\n", file=sys.stderr)
        return status
    directory = tempfile.TemporaryDirectory(prefix="llama-ray-", dir=PARENT, ignore_cleanup_errors=True)
    config = config.copied_to(Path(directory.name))
    console = Console(None if verbose else new_log_file())
    console.phase(f"starting {config.model}" + ("" if console.log is None else f", log {console.log}"))
    tag = uuid.uuid4().hex
    process_tag.start_watcher(tag, directory.name)
    owns_cluster = _set_environment(tag, Path(directory.name), is_logged=console.log is not None)
    watcher = DeploymentWatcher(config, console, owns_cluster=owns_cluster)
    shutdown = Shutdown(watcher, console, tag, Path(directory.name), directory.cleanup)
    shutdown.start()
    try:
        _run(config, watcher, shutdown, console, replaces)
    except SystemExit:  # `serve run` has ended by itself
        pass
    except Exception as error:
        if not watcher.stopping.is_set():  # else it is an effect of the end
            watcher.fail(f"{type(error).__name__}: {error}")
            console.event(f"\nThe server cannot start: {watcher.failure}")
    shutdown.end()


def check(argument: str, overrides: Sequence[str], *, replaces: bool = False) -> int:
    """Print the findings of all checks, start nothing, and fetch no weights. Returns the exit status of `exit_status`."""
    try:
        config = prepared(read_argument(argument, overrides))
    except LlamaError as error:
        print(error.message, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    findings = []
    for finding in examine(config, joined_cluster(), reads_files=True, replaces=replaces):
        findings.append(finding)
        print(f"{finding.status:<5} {finding.check:<11} {finding.found}", flush=True)
        if finding.remedy:
            print(f"      {'':<11} {finding.remedy}")
    return exit_status(findings)


def prepared(config: ConfigFile) -> ConfigFile:
    """With remote models by their present revisions, and, where no file says it, the number of ranks that this machine needs.
    On a cluster that RAY_ADDRESS names, the cluster decides both. Raises LlamaError."""
    args = config.server_args if joined_cluster() is None and not has_runtime_env(config) else None
    if args is None:
        return config
    pinned = args.pinned()
    chosen = {name: value for name, value in pinned if value != getattr(args, name)}
    if config.is_made and args.model_parallel_size is None:
        chosen["model_parallel_size"] = fewest_ranks(pinned)
    return config.with_args(chosen) if chosen else config


def _fetch(config: ConfigFile, findings: Sequence[Finding]) -> None:
    """Fetch remote models before anything starts, under the library's progress bars. Ends with a line on what was chosen."""
    args = config.server_args
    if args is None or has_runtime_env(config):
        return
    for finding in findings:
        if finding.status == "warn" or finding.check == "memory":
            print(finding, file=sys.stderr)
    former = signal.signal(signal.SIGINT, _interrupted)
    for model in args.downloads:
        if local_path(model) is None:
            print(f"fetching {model.name}: {format_bytes(check_disk(model))}", file=sys.stderr)
            fetch(model)
    signal.signal(signal.SIGINT, former)
    if config.is_made:
        num_ranks = args.num_ranks()
        context = f"context {args.max_seq_len:,}" if args.max_seq_len else "the model's context or what memory allows"
        chosen = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {context}"
        print(f"{args.model_id}: {chosen}; --ranks N and max_seq_len=N change this", file=sys.stderr)


def _interrupted(*_: object) -> NoReturn:
    """The libraries' threads would first end the files that they download."""
    print("\ninterrupted; the next start fetches what is missing", file=sys.stderr)
    os._exit(130)


def _set_environment(tag: str, directory: Path, *, is_logged: bool) -> bool:
    """Set the variables that Ray's and Serve's processes inherit. Returns whether this command starts the Ray cluster."""
    os.environ[process_tag.VARIABLE] = tag
    os.environ["SPT_NOENV"] = "1"  # Ray's agents would write their titles over their environment in /proc
    owns_cluster = joined_cluster() is None
    if owns_cluster:
        os.environ.pop("RAY_ADDRESS", None)  # `serve run` would look for another cluster there
        os.environ.update(token_variables(directory))
        if os.environ.get("CUDA_VISIBLE_DEVICES") in NO_GPU:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Ray would count -1 as a GPU
    os.environ["LLAMA_BANNER"] = "0"  # this command prints the banner
    if is_logged:
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # no escape sequences in the log file
    for name, value in cluster_variables(directory).items():
        os.environ.setdefault(name, value)
    return owns_cluster


def _run(config: ConfigFile, watcher: DeploymentWatcher, shutdown: Shutdown, console: Console, replaces: bool) -> None:
    """Start Ray and Serve, deploy, and block until `serve run` ends."""
    import ray

    from deployments.local import small_cluster, worker_lines
    from deployments.local.serve_start import start_serve_early

    # Import Serve while Ray's processes start; both take about as long.
    threading.Thread(target=importlib.import_module, args=("ray.serve.scripts",), daemon=True, name="import").start()
    if watcher.owns_cluster:
        small_cluster.start("serve", console.event)
        console.phase("Ray started")
    else:
        console.phase(f"connecting to Ray at {joined_cluster()}, which RAY_ADDRESS names")
        ray.init(namespace="serve")
        console.phase("connected to Ray")
        if not replaces:
            refuse_to_replace()
    worker_lines.follow(console)
    shutdown.ray_started()
    watcher.start()
    if watcher.owns_cluster:
        start_serve_early(config.content, watcher)
        console.phase("Serve's controller started")
    from ray.serve.scripts import cli

    cli(["run", str(config.path)], standalone_mode=False)
