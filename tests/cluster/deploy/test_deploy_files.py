"""The files for clusters parse, and Ray and this server accept them."""

import json
import os
import re
import resource
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import RayActorOptionsSchema, ServeDeploySchema

from cluster.driver.placement import group_bundles, shortage
from deployments.args import EngineArgs, IngressArgs
from deployments.local import haproxy
from deployments.local.config_file import read_config
from deployments.local.serve_run import PATIENT
from tests.support.programs import REPOSITORY

DEPLOY = REPOSITORY / "cluster" / "deploy"
MAX_SOCKET_PATH_BYTES = 95  # HAProxy binds a name with its process id first


def load(name: str) -> dict[str, Any]:
    """The file's first document."""
    loaded: dict[str, Any] = next(iter(yaml.safe_load_all((DEPLOY / name).read_text())))
    return loaded


def objects() -> dict[str, dict[str, Any]]:
    """Every Kubernetes object of rayservice.yaml by its kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "rayservice.yaml").read_text())}


def cluster_spec() -> dict[str, Any]:
    spec: dict[str, Any] = load("rayservice.yaml")["spec"]["rayClusterConfig"]
    return spec


def pods() -> list[dict[str, Any]]:
    """The pod templates of the head and of the workers."""
    spec = cluster_spec()
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def worker() -> dict[str, Any]:
    container: dict[str, Any] = pods()[2]["spec"]["containers"][0]
    return container


def shell(script: str, **env: str) -> str:
    """Standard output of the script in a bash with no other variables than PATH and `env`."""
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=REPOSITORY,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["rayservice.yaml", "serve_cluster.yaml"])
def test_serve_and_the_server_accept_the_application(name: str) -> None:
    content = load(name)
    config = ServeDeploySchema(**(yaml.safe_load(content["spec"]["serveConfigV2"]) if "spec" in content else content))
    fronts, engine = config.applications
    assert (fronts.name, fronts.route_prefix, fronts.import_path) == ("llama", "/", "deployments.app:build_ingress")
    assert (engine.route_prefix, engine.import_path) == (None, "deployments.app:build_engine")
    (front,) = fronts.deployments
    assert front.name == "LlamaIngress"
    assert RayActorOptionsSchema.model_validate(front.ray_actor_options).resources == {"front": 1}
    assert [deployment.name for deployment in engine.deployments] == ["LlamaEngine"]
    assert config.http_options.host == "0.0.0.0", "HAProxy and replicas reach each other over the network"
    assert IngressArgs(**fronts.args).api_key_file, "a server that others reach asks for API keys"
    assert EngineArgs(**engine.args)


def test_a_replica_fits_a_node_of_the_rayservice() -> None:
    _, application = yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"])["applications"]
    limits = worker()["resources"]["limits"]
    node = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
    bundles = group_bundles(application["args"]["model_parallel_size"], application["args"]["device"])
    assert shortage(bundles, [node], application["args"]["placement_strategy"]) is None


def test_a_pod_that_ends_drains_before_ray_stops_and_within_its_grace_period() -> None:
    _, application = yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"])["applications"]
    command = " ".join(worker()["lifecycle"]["preStop"]["exec"]["command"])
    match = re.search(r"/app/(\S+) (\d+); ray stop", command)
    assert match is not None and os.access(REPOSITORY / match[1], os.X_OK)
    grace_s = pods()[2]["spec"]["terminationGracePeriodSeconds"]
    limits = EngineArgs(**application["args"])
    assert limits.start_timeout_s + limits.drain_timeout_s + 10 < int(match[2]) < grace_s - 20


def test_a_node_drains_for_as_long_as_a_replacement_may_take_to_load(tmp_path: Path) -> None:
    """Serve ends the old replica its drain's limit before Ray's deadline, whether or not the new one serves."""
    tool = tmp_path / ".venv" / "bin" / "ray"
    tool.parent.mkdir(parents=True)
    tool.write_text('#!/bin/sh\necho "$*"\nexit 1\n')
    tool.chmod(0o755)
    (tmp_path / "grep").write_text("#!/bin/sh\nexit 1\n")  # no replica runs here
    (tmp_path / "grep").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "LLAMA_HOME": str(tmp_path)}
    deadline_s = float(shell(str(DEPLOY / "drain_node.sh"), **env).rpartition(" ")[2])
    limits = EngineArgs()
    assert deadline_s > limits.start_timeout_s + limits.drain_timeout_s + 10


def test_the_rayservice_survives_the_loss_of_its_head_and_the_upgrade_of_its_nodes() -> None:
    address = cluster_spec()["gcsFaultToleranceOptions"]["redisAddress"]
    assert address.split(":")[0] == objects()["Service"]["metadata"]["name"]
    budget = objects()["PodDisruptionBudget"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"]["matchLabels"].items() <= pods()[1]["metadata"]["labels"].items()


def test_only_the_http_port_is_open_to_other_pods() -> None:
    policy = objects()["NetworkPolicy"]["spec"]
    (selector,) = policy["podSelector"]["matchExpressions"]
    redis = objects()["StatefulSet"]["spec"]["template"]
    for pod in (*pods(), redis):
        assert selector["operator"] == "In" and pod["metadata"]["labels"][selector["key"]] in selector["values"]
    assert [rule["ports"] for rule in policy["ingress"] if "from" not in rule] == [[{"port": 8000, "protocol": "TCP"}]]


def test_the_cluster_launcher_accepts_its_file() -> None:
    validate_config(prepare_config(load("launcher.yaml")))


def test_the_launchers_commands_are_shipped_files() -> None:
    text = (DEPLOY / "launcher.yaml").read_text()
    assert text.count("--resources='{\"front\": 1}'") == 2, "nodes without it hold no front"
    paths = re.findall(r"/opt/llama/(cluster/\S+?)['\s]", text)
    assert len(paths) >= 4 and [path for path in paths if not (REPOSITORY / path).exists()] == []
    (deploy,) = (line for line in text.splitlines() if "serve deploy" in line and "ray exec" in line)
    assert "cluster.env && serve deploy" in deploy and "serve_cluster.yaml" in deploy


# cluster.env


def exported(script: str, **env: str) -> dict[str, str]:
    lines = shell(script, **env).splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith(("RAY_", "LLAMA_", "PYTHONPATH=")))


@pytest.mark.parametrize("script", ["env", "sh -c '. cluster/deploy/cluster.env && env'"], ids=["BASH_ENV", "sh"])
def test_the_environment_file_sets_the_same_in_every_shell(script: str) -> None:
    env = {"BASH_ENV": str(DEPLOY / "cluster.env")} if script == "env" else {}
    found = exported(script, **env)
    assert found["RAY_TMPDIR"] == f"/tmp/llama-ray-{os.getuid()}"
    assert found["RAY_AUTH_MODE"] == "token" and found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert found["LLAMA_HOME"] == found["PYTHONPATH"] == str(REPOSITORY)
    assert os.access(found["RAY_SERVE_HAPROXY_BINARY_PATH"], os.X_OK)
    assert float(found["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"]) <= 1, "a replica's drain lasts 2 s, not 30"


def test_the_environment_file_sets_the_times_of_llama_ray_up_and_a_node_without_power_is_dead_within_20_s(
    tmp_path: Path,
) -> None:
    found, ours = exported(". cluster/deploy/cluster.env && env"), haproxy.settings(tmp_path)
    times = {name: value for name, value in ours.items() if name.endswith("_S")} | PATIENT
    assert "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" in times and found | times == found
    # After five checks, each of which waits for its timeout.
    assert 5 * int(found["RAY_health_check_timeout_ms"]) + 4 * int(found["RAY_health_check_period_ms"]) <= 20_000


@pytest.mark.parametrize("env", [{}, {"RAY_TMPDIR": "/scratch/a job of 2026/" + "x" * 80}])
def test_haproxys_sockets_have_short_names_for_every_user_and_in_every_folder(
    tmp_path: Path, env: dict[str, str]
) -> None:
    """Serve puts a folder named by the node's id, 56 digits, before the name of the socket."""
    (tmp_path / "id").write_text("#!/bin/sh\necho 4294967294\n")  # the largest user id
    (tmp_path / "id").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = exported(". cluster/deploy/cluster.env && env", PATH=path, **env)
    folder, name = os.path.split(found["RAY_SERVE_HAPROXY_SOCKET_PATH"])
    assert "4294967294" in folder and "/" not in folder.removeprefix("/tmp/"), "other users cannot replace it in /tmp"
    assert len(f"{folder}/{'0' * 56}/{name}") <= MAX_SOCKET_PATH_BYTES and " " not in folder
    assert found["LLAMA_FRONT_SOCKETS"] == f"{folder}/fronts", "start_node.sh keeps other users out of the folder"


def test_the_environment_file_keeps_what_is_set() -> None:
    own = {"RAY_AUTH_MODE": "disabled", "RAY_SERVE_ENABLE_HA_PROXY": "0", "PYTHONPATH": "/x"}
    for home, path in (
        (str(REPOSITORY), f"{REPOSITORY}:/x"),
        ("/app", "/x"),
    ):  # a clone, and where the wheel is installed
        found = exported(". cluster/deploy/cluster.env && . cluster/deploy/cluster.env && env", LLAMA_HOME=home, **own)
        assert found | own | {"LLAMA_HOME": home, "PYTHONPATH": path} == found


def test_the_docs_table_has_every_variable_of_the_environment_file() -> None:
    names = set(re.findall(r"^export (\w+)=", (DEPLOY / "cluster.env").read_text(), re.MULTILINE))
    rows = set(re.findall(r"^\| `(\w+)` \|", (REPOSITORY / "docs" / "cluster.md").read_text(), re.MULTILINE))
    assert len(names) >= 8 and names - rows == set()


def start_node(directory: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run start_node.sh with a `ray` that prints how it was called. All files are in `directory`."""
    ray = directory / "ray"
    ray.write_text('#!/bin/sh\necho "$(ulimit -n) $(umask) $RAY_AUTH_MODE $*"\n')
    ray.chmod(0o755)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 2048))

    own = {"PATH": f"{directory}:{os.environ['PATH']}", "LLAMA_HOME": str(directory), "HOME": str(directory)}
    own |= {
        "RAY_TMPDIR": str(directory / "sessions"),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy/haproxy.cfg",
    }
    return subprocess.run(
        [DEPLOY / "start_node.sh", "--head"],
        env=own | env,
        preexec_fn=lower,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


def test_a_node_starts_with_private_files_and_where_the_hard_limit_of_open_files_is_low(tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    token = tmp_path / ".ray" / "auth_token"
    token.touch(mode=0o644)
    sessions = tmp_path / "sessions"
    for _ in range(2):  # the second start finds the directories
        done = start_node(tmp_path)
        assert done.stdout == f"2048 0077 token start --temp-dir={sessions}/ray --head\n", done.stderr
    modes = [path.stat().st_mode & 0o777 for path in (sessions, tmp_path / "haproxy", token)]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("variable", ["RAY_TMPDIR", "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"])
def test_a_node_does_not_start_where_other_users_could_replace_rays_files(tmp_path: Path, variable: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o755)
    done = start_node(tmp_path, **{variable: str(shared if variable == "RAY_TMPDIR" else shared / "haproxy.cfg")})
    assert (done.returncode, done.stdout) == (2, "") and f"{shared} must be a directory of yours" in done.stderr


STUB = """#!/bin/sh
echo "$(basename "$0") $* auth=$RAY_AUTH_MODE" >>~/calls
case "$*" in deploy*) test -s ~/.llama/api_keys ;; esac
"""


def test_each_command_of_the_docs_works_in_the_order_written(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "cluster.md").read_text()
    block = text.partition("By hand")[2].partition("\n\n")[2].partition("\n\n")[0]
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("ray", "serve"):  # found only where cluster.env has been read
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    commands = "\n".join(line for line in block.splitlines() if "curl" not in line)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LLAMA_HOME": str(tmp_path)}
    shell(f"set -e\n{commands}", **env)
    lines = (tmp_path / "calls").read_text().splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["ray", "get-auth-token"],
        ["ray", "start"],
        ["ray", "start"],
        ["serve", "deploy"],
    ]
    assert all(line.endswith("auth=token") for line in lines)


# Dockerfile


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_copies_the_wheel_and_files_that_exist_and_that_the_context_has() -> None:
    context = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]}
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    wheel = f"dist/llama_on_ray-{version}-py3-none-any.whl"
    assert copied == {"constraints.txt", "serve_config.yaml", wheel}
    assert [name for name in copied - {wheel} if not (REPOSITORY / name).exists()] == []
    assert context[0] == "*" and [name for name in copied if not any(fnmatch(f"!{name}", one) for one in context)] == []


def test_the_image_serves_beyond_its_loopback_and_can_export_traces(tmp_path: Path) -> None:
    command = json.loads(dict(instructions())["CMD"])
    name, _, path, *options = command
    assert (name, path) == ("llama-ray", "/app/serve_config.yaml")
    overrides = [option for option in options if "=" in option]
    assert read_config(REPOSITORY / "serve_config.yaml", overrides).host == "0.0.0.0"
    assert '.whl[otlp]"' in [rest for word, rest in instructions() if word == "RUN"][-1]
