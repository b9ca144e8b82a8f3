"""What clients and rules see of a simulated cluster."""

from collections.abc import Sequence
from typing import Protocol

from llama_core.text.tokenizers.tokenizer import Tokenizer
from tests.simulation.expected_answers import Origin
from tests.simulation.history import Setting
from tests.simulation.processes import Application, OwnRanks, SimulatedEngine, SimulatedFront
from tests.support.fake_cluster import FakeCluster


class Simulated(Protocol):
    """num_ends: of engines and ranks so far. changes: kinds of events so far that change what an answer is computed from."""

    setting: Setting
    cluster: FakeCluster
    applications: list[Application]
    fronts: list[SimulatedFront]
    engines: list[SimulatedEngine]
    tokenizer: Tokenizer
    adapter_names: Sequence[str]
    changes: set[str]
    num_ends: int

    def origins(self, application: Application, adapter: str) -> list[Origin]:
        """What may compute an answer of a request that is sent now."""

    def open_fronts(self) -> list[SimulatedFront]:
        """To which Serve sends requests."""

    def fronts_with_ranks(self) -> list[OwnRanks]: ...
    def serves(self, front: SimulatedFront, application: Application) -> bool:
        """Whether the front must be able to serve the application now."""

    def check_deadline(self, front: SimulatedFront, seconds: float, limit_s: float) -> None:
        """Of an answer that has taken so long. Raises Wrong."""
