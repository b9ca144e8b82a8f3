"""`llama-ray doctor`: compares what a server needs with what there is."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cli.doctor.findings import Finding, as_data, exit_status, fail, show, skip
from cli.doctor.machine import (
    Machine,
    check_compiler,
    check_gpus,
    check_placement,
    check_port,
    cluster_nodes,
    device_of,
    machine_checks,
)
from cli.doctor.model import check_arguments, check_checkpoint, check_digests, check_memory, check_tokenizer
from deployments.args import ServerArgs
from llama_core.errors import ConfigError

DEFAULT_PORT = 8000


def run(config: Path | None, overrides: Sequence[str], *, reads_files: bool, as_json: bool) -> int:
    """Print the findings. Returns 1 if a check failed."""
    findings = examine(config, overrides, Machine(), reads_files=reads_files)
    if as_json:
        json.dump(as_data(findings), sys.stdout, indent=2)
        print()
    else:
        show(findings)
    return exit_status(findings)


def examine(
    config: Path | None, overrides: Sequence[str], machine: Machine, *, reads_files: bool = True
) -> list[Finding]:
    """Every check, whatever the others found. config: None for the defaults of `ServerArgs`."""
    try:
        given, host, port = _read(config, overrides)
    except ConfigError as error:
        needs = fail("configuration", "a Serve configuration file", error.message, "correct the file or the override")
        return [*(check() for check in machine_checks(machine, None)), needs]
    args, findings = check_arguments(given)
    findings = [*(check() for check in machine_checks(machine, args)), check_port(host, port), *findings]
    if args is None:
        return findings
    return [*findings, *_of_cluster(args, machine), *_of_model(args, machine, reads_files=reads_files)]


def _read(config: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], str, int]:
    """The application's arguments, host and port. Raises ConfigError."""
    from deployments.local.config_file import read_config

    with tempfile.TemporaryDirectory() as directory:
        if config is None:
            config = Path(directory) / "defaults.yaml"
            config.write_text(
                f"http_options: {{host: 127.0.0.1, port: {DEFAULT_PORT}}}\napplications: [{{name: llama}}]\n"
            )
        read = read_config(config, overrides, Path(directory))
        return dict(read.content["applications"][0].get("args") or {}), read.host, read.port


def _of_cluster(args: ServerArgs, machine: Machine) -> list[Finding]:
    found = cluster_nodes(machine)
    if isinstance(found, Finding):
        return [found, skip("GPUs", "one for each rank", "the cluster is unknown")]
    nodes, whose = found
    compiler = check_compiler(args, device_of(args, nodes))
    return [compiler, check_gpus(args, nodes), check_placement(args, nodes, whose)]


def _of_model(args: ServerArgs, machine: Machine, *, reads_files: bool) -> list[Finding]:
    try:
        model, checkpoint = check_checkpoint(args)
    except OSError as error:
        return [fail("checkpoint", "readable", str(error), "correct the permissions of the files")]
    return [
        checkpoint,
        check_tokenizer(args, model),
        check_digests(args, model, reads_files=reads_files),
        check_memory(args, model, machine),
    ]
