"""The cluster files parse, and what they say to Ray and to our server is what those understand."""

from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cluster.driver.placement import group_bundles, shortage
from deployments.args import ServerArgs

DEPLOY = Path(__file__).parents[3] / "cluster" / "deploy"


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text())
    return loaded


def test_the_rayservices_application_is_one_that_serve_and_the_server_accept() -> None:
    config = ServeDeploySchema(**yaml.safe_load(load("rayservice.yaml")["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "deployments.app:build_app"
    assert [deployment.name for deployment in application.deployments] == ["LlamaIngress"]
    ServerArgs(**application.args)


def test_a_replica_fits_a_node_of_the_rayservice() -> None:
    spec = load("rayservice.yaml")["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    (group,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    node = {"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"])}
    bundles = group_bundles(application["args"]["model_parallel_size"], application["args"]["device"])
    assert shortage(bundles, [node], application["args"]["placement_strategy"]) is None


def test_the_cluster_launcher_accepts_its_file() -> None:
    validate_config(prepare_config(load("launcher.yaml")))
