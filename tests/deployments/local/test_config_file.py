"""The configuration file of `llama-ray up` and the command line's key=value arguments."""

import os
import re
import socket
from pathlib import Path

import pytest
import yaml

from deployments.local.config_file import HttpOptions, check_port_is_free, claim_port, read_config
from llama_core.errors import ConfigError

CONFIG = """
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: llama
    import_path: deployments.app:build_app
    args: {model_id: demo, max_batch_size: 32}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "serve_config.yaml"
    path.write_text(CONFIG)
    return path


def test_a_file_without_overrides_is_served_as_it_is(file: Path, tmp_path: Path) -> None:
    config = read_config(file, (), tmp_path)
    assert config.path == file
    assert (config.host, config.port, config.app_name, config.model) == ("127.0.0.1", 8000, "llama", "demo")


def test_overrides_replace_arguments_of_the_application_in_a_copy_of_the_file(file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copies"
    directory.mkdir()
    overrides = ["max_batch_size=8", "speculation=false", "kv_cache_bytes=2Gi", "http_options.port=8001"]
    config = read_config(file, overrides, directory)
    assert file.read_text() == CONFIG and config.path.parent == directory
    assert yaml.safe_load(config.path.read_text()) == config.content
    assert config.content["applications"][0]["args"] == {
        "model_id": "demo",
        "max_batch_size": 8,
        "speculation": False,
        "kv_cache_bytes": "2Gi",
    }
    assert config.route_prefix == "" and config.port == 8001 and config.host == "127.0.0.1"


@pytest.mark.parametrize("override", ["max_batch_size", "=3", "deployments.name=x"])
def test_an_override_of_another_form_is_refused_by_name(file: Path, tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        read_config(file, [override], tmp_path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("http_options.port=99999", "http_options.port: must be a whole number from 1 to 65535"),
        ("http_options.port=0", "http_options.port: must be a whole number from 1 to 65535"),
        ("http_options.port=true", "http_options.port: must be a whole number from 1 to 65535"),
        ("http_options.port=null", "http_options.port: must be a whole number from 1 to 65535"),
        ("http_options.host=1", "http_options.host: must be a text"),
        ("http_options.nosuch=1", "http_options.nosuch: no such argument; docs/configuration.md lists every argument"),
        ("http_options.prot=1", "http_options.prot: no such argument; did you mean port?"),
        ("max_seq_len=", "max_seq_len: has no value; max_seq_len=null is null, for what is optional"),
        ("http_options.port= ", "http_options.port: has no value"),
        ("model_id=#1", "model_id: has no value"),
        ("model_id={", "model_id: the value is not valid YAML"),
        ("seed=2026-02-30", "seed: the value is not valid YAML"),
        ("seed=" + "9" * 5000, "seed: the value is not valid YAML"),
    ],
)
def test_a_wrong_override_is_refused_with_its_name_and_the_reason(
    file: Path, tmp_path: Path, override: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}") as refusal:
        read_config(file, [override], tmp_path)
    assert "\n" not in refusal.value.message


def test_null_replaces_the_files_value(file: Path, tmp_path: Path) -> None:
    for value in ("null", "~"):
        config = read_config(file, [f"max_seq_len={value}", "model_id=''"], tmp_path)
        assert config.content["applications"][0]["args"] == {"model_id": "", "max_batch_size": 32, "max_seq_len": None}


def test_overrides_fill_empty_sections_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("http_options:\napplications: [{name: llama, args: }]")
    config = read_config(path, ["http_options.port=8001", "seed=2"], tmp_path)
    assert config.port == 8001 and config.content["applications"][0]["args"] == {"seed": 2}


@pytest.mark.parametrize("section", ["http_options: 3", "http_options: {nosuch: 1}", "http_options: {port: 70000}"])
def test_wrong_http_options_of_a_file_are_refused_by_name(tmp_path: Path, section: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"applications: [{{name: llama}}]\n{section}")
    with pytest.raises(ConfigError, match="http_options"):
        read_config(path, (), tmp_path)


def test_http_options_are_those_of_serve() -> None:
    from ray.serve.schema import HTTPOptionsSchema

    defaults = {name: field.default for name, field in HTTPOptionsSchema.model_fields.items()}
    assert HttpOptions().model_dump() == defaults


@pytest.mark.parametrize(
    "text",
    ["applications: []", "applications: [3]", "applications: [{args: 3}]", "seed: 2026-02-30", "- 1", "a: [", ""],
)
def test_a_file_without_applications_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        read_config(path, (), tmp_path)


def test_a_port_in_use_is_refused_by_name() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be used"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"http_options\.host"):
        check_port_is_free("a" * 64 + ".é", port)


def test_a_port_belongs_to_the_first_command_before_a_server_listens_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with claim_port("127.0.0.1", port):
        check_port_is_free("127.0.0.1", port)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} is the port of another .* process {os.getpid()}\\."):
            claim_port("127.0.0.1", port)
    claim_port("127.0.0.1", port).close()


def test_a_port_with_a_connection_that_its_server_has_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
    check_port_is_free("127.0.0.1", port)


@pytest.mark.parametrize(("given", "prefix"), [("/", ""), ("/llama", "/llama"), ("/llama/", "/llama"), ("null", "")])
def test_the_route_prefix_goes_in_front_of_a_route(tmp_path: Path, given: str, prefix: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"applications: [{{name: llama, route_prefix: {given}}}]")
    assert read_config(path, (), tmp_path).route_prefix == prefix
