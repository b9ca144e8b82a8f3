"""The routers of other projects, with packages of their own, which need not be installed."""

from collections.abc import Sequence
from random import Random

from benchmarks.simulate.choosers import Chooser
from deployments.links.link import RoutedStream
from tests.support.modelled_fleet import ModelledEngine, ModelledLink


class RayPrefixTree(Chooser):
    """Ray's router by cached prefixes with its defaults: of the engines with the longest prefix, the one with the shorter
    queue of two. A block of tokens is one character here. Ray's own class keeps the tree; the few lines that use it are its
    router's, which needs a cluster."""

    LEAST_MATCH = 0.1  # else those with the smallest part of the tree

    def __init__(self) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._tree, self._draw, self._count = PrefixTree(), Random(1), 0

    def attach(self, engine: ModelledEngine) -> None:
        self._tree.add_tenants([engine.name], 0.0)

    def order(self, links: Sequence[ModelledLink], live: RoutedStream) -> Sequence[ModelledLink]:
        text, names = self._text(live, links[0]), [link.engine_id for link in links]
        matched, tenants = self._tree.prefix_match(text, names)
        if len(matched) < self.LEAST_MATCH * len(text):
            tenants = self._tree.get_smallest_tenants()
        best = [link for link in links if link.engine_id in (tenants or names)] or [*links]
        two = self._draw.sample(best, min(2, len(best)))
        two.sort(key=lambda link: link.engine.num_sequences)
        return [*two, *(link for link in links if link not in two)]

    def sent(self, live: RoutedStream, link: ModelledLink) -> None:
        self._count += 1
        self._tree.insert(self._text(live, link), link.engine_id, float(self._count))

    def _text(self, live: RoutedStream, link: ModelledLink) -> str:
        keys = live.prefixes.keys(link.engine.service.config.block_size)
        # Not the code points of surrogates; two equal ones of 55,000 cost a detour.
        return "".join(chr(1 + key % 55_000) for key in keys) or chr(1 + len(live.prefixes.prompt) % 55_000)
