"""The short form of `python -m tests.programs.clients`: the one client that the tests' own environment has."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.clients.__main__ import SERVER_ARGS, run_client
from tests.programs.clients.table import CLIENTS
from tests.support.server import served

pytestmark = pytest.mark.timeout(600)


@pytest.mark.full
def test_the_openai_package_finds_what_its_program_expects(tmp_path: Path) -> None:
    client = replace(CLIENTS["openai-3"], kind="command")  # in this environment
    with served(args=SERVER_ARGS | {"spare_ranks": False}) as server:
        server.wait_ready()
        result = run_client("openai", client, server.url, tmp_path)
    assert result.outcome == "passed", result.failures
    assert result.passed >= 10


def test_every_client_and_what_it_needs_is_pinned_to_a_version() -> None:
    for name, client in CLIENTS.items():
        folder = Path("tests/programs/clients")
        file = client.program if client.kind == "node" else f"{client.program}.py"
        assert (Path(__file__).parents[2] / folder / file).is_file(), name
        separator = "@" if client.kind == "node" else "=="
        assert all(separator in requirement[1:] for requirement in client.requirements[:1]), name
