"""What orders engines otherwise than by `deployments.fleet.routing`: one object for all fronts."""

from collections.abc import Sequence
from typing import Any, cast

from deployments.fleet.served_model import ServedModel
from deployments.links import messages
from deployments.links.link import Link, RoutedStream
from tests.support.modelled_fleet import ModelledEngine, ModelledLink


class Chooser:
    """moves: whether streams that wait may move to another engine, as the product's do."""

    moves = False

    def attach(self, engine: ModelledEngine) -> None:
        """The engine has started."""

    def order(self, links: Sequence[ModelledLink], live: RoutedStream) -> Sequence[ModelledLink]:
        """The best one first."""
        raise NotImplementedError

    def sent(self, live: RoutedStream, link: ModelledLink) -> None:
        """To that engine."""

    def began(self, live: RoutedStream) -> None:
        """Its first token has come."""

    def ended(self, live: RoutedStream) -> None: ...
    def close(self) -> None: ...


class ChosenModel(ServedModel):
    """A front's model that asks a chooser."""

    def __init__(self, chooser: Chooser, *given: Any) -> None:
        super().__init__(*given)
        self._chooser = chooser

    def _by_policy(self, links: Sequence[Link], lives: Sequence[RoutedStream]) -> Sequence[Link]:
        return self._chooser.order(cast(Sequence[ModelledLink], links), lives[0])

    def _balance(self) -> None:
        self._balancing = None
        if self._chooser.moves:
            super()._balance()

    def _push(self, live: RoutedStream, tokens: list[int], detail: messages.Detail | None) -> None:
        super()._push(live, tokens, detail)
        if detail is not None and detail.num_cached is not None:
            self._chooser.began(live)

    def _forget(self, live: RoutedStream) -> bool:
        if was_known := super()._forget(live):
            self._chooser.ended(live)
        return was_known
