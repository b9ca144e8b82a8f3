"""The configuration file of `llama-ray up` and the command line's key=value arguments."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve._private.haproxy import HAProxyConfig
from ray.serve.config import HTTPOptions

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
    config = read_config(file, ())
    assert config.path == file
    assert (config.host, config.port, config.app_name, config.model) == ("127.0.0.1", 8000, "llama", "demo")


def test_overrides_replace_arguments_of_the_application_in_a_copy_of_the_file(file: Path, tmp_path: Path) -> None:
    directory = tmp_path / "copies"
    directory.mkdir()
    overrides = ["max_batch_size=8", "speculation=false", "kv_cache_bytes=2Gi", "http_options.port=8001"]
    config = read_config(file, overrides).copied_to(directory)
    assert file.read_text() == CONFIG and config.path.parent == directory
    assert yaml.safe_load(config.path.read_text()) == config.content
    assert config.content["applications"][0]["args"] == {
        "model_id": "demo",
        "max_batch_size": 8,
        "speculation": False,
        "kv_cache_bytes": "2Gi",
    }
    assert config.route_prefix == "" and config.port == 8001 and config.host == "127.0.0.1"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_read_the_same_in_every_locale_and_serve_gets_it_in_ascii(file: Path, encoding: str) -> None:
    file.write_bytes(CONFIG.replace("demo", "démo").encode(encoding))
    program = (
        "import locale, sys; from pathlib import Path; from deployments.local.config_file import read_config;"
        "config = read_config(Path(sys.argv[1]), ()); copy = config.copied_to(Path(sys.argv[2]));"
        "assert locale.getencoding() == 'ISO-8859-1'; assert config.model == copy.model == 'd\\xe9mo', ascii(config.model)"
    )
    program = "import locale; locale.getencoding = lambda: 'ISO-8859-1'\n" + program
    (file.parent / "copy").mkdir()
    environ = dict(os.environ) | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", program, str(file), str(file.parent / "copy")]
    subprocess.run(command, env=environ, check=True, timeout=120)
    assert (
        yaml.safe_load((file.parent / "copy" / file.name).read_bytes().decode("ascii")) == read_config(file, ()).content
    )


def test_a_file_in_another_encoding_is_refused_by_name(file: Path) -> None:
    file.write_bytes(CONFIG.replace("demo", "démo").encode("latin-1"))
    with pytest.raises(ConfigError, match=r"^\S*serve_config\.yaml is not text in UTF-8: .* at byte \d+$"):
        read_config(file, ())


def test_every_address_of_ipv6_is_not_that_of_ipv4_alone(file: Path) -> None:
    """Serve has HAProxy listen at `*`, IPv4, for "::", and at what is given for every other host."""
    file.write_text(CONFIG.replace("127.0.0.1", "'::'"))
    host = read_config(file, ()).content["http_options"]["host"]
    assert HAProxyConfig(http_options=HTTPOptions(host=host)).frontend_host == host != "*"
    with socket.socket(socket.AF_INET6) as listener, socket.socket() as client:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()
        client.connect(("127.0.0.1", listener.getsockname()[1]))


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
        read_config(path, ())


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


@pytest.mark.parametrize(("given", "prefix"), [("/", ""), ("/llama", "/llama"), ("/llama/", "/llama"), ("null", "")])
def test_the_route_prefix_goes_in_front_of_a_route(tmp_path: Path, given: str, prefix: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"applications: [{{name: llama, route_prefix: {given}}}]")
    assert read_config(path, ()).route_prefix == prefix
