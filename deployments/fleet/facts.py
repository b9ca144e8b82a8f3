"""What a front knows of an engine and a prompt, in the terms of `routing`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deployments.fleet.routing import NOMINAL, Facts
from deployments.links.link import Link, RoutedStream
from llama_core.scheduling.step_costs import CostModel

Costs = Mapping[Link, CostModel]


def costs_of(links: Iterable[Link]) -> Costs:
    """An engine that has not told all its costs yet is thought to be like one that has."""
    told = {link: link.costs for link in links}
    known = next((costs for costs in told.values() if costs.base_ms and costs.token_ms), NOMINAL)
    return {link: costs if costs.base_ms and costs.token_ms else known for link, costs in told.items()}


def look_up(links: Sequence[Link], lives: Iterable[RoutedStream]) -> None:
    """Note which engines know how much of the streams' prompts."""
    last = None
    for live in lives:
        if last is None or live.prefixes is not last.prefixes:
            live.num_known = {}
            for size, window in {(link.state.block_size, link.state.window) for link in links if link.state}:
                live.num_known |= links[0].prefixes.num_known(live.prefixes.keys(size), has_window=window > 0)
            last = live
        live.num_known = last.num_known


def facts_of(link: Link, lives: Sequence[RoutedStream], costs: Costs) -> Facts:
    """For streams that are placed together; without any, for a request that has no tokens."""
    state, load = link.state, link.load
    assert state is not None
    adapter = lives[0].stream.sequence.terms.adapter if lives else ""
    return Facts(
        link.engine_id,
        link.is_ready,
        load.running,
        link.num_sequences - load.running + max(0, len(lives) - 1),
        state.max_batch_size,
        link.queued_tokens,
        num_new=sum(1 if live.is_copy else live.num_new(link) for live in lives),
        num_known=lives[0].num_known.get(link, 0) * state.block_size if lives else 0,
        step_tokens=max(1, state.max_step_tokens),
        num_blocks=state.blocks_total,
        free_blocks=load.free_blocks,
        block_size=state.block_size,
        loads_adapter=bool(adapter) and adapter not in link.places,
        costs=costs[link],
    )


class Waiting(NamedTuple):
    """A stream in an engine's queue. num_from, tokens_from: it and this front's later ones, and their tokens to be computed."""

    live: RoutedStream
    link: Link
    num_from: int
    tokens_from: int

    def facts(self, costs: Costs, num_gone: int = 0, tokens_gone: int = 0) -> Facts:
        """The engine as this stream sees it: without itself, those behind it, and those before it that have just gone."""
        facts = facts_of(self.link, [self.live], costs)
        waiting = max(0, facts.waiting - self.num_from - num_gone)
        return facts._replace(
            waiting=waiting, queued_tokens=max(0, facts.queued_tokens - self.tokens_from - tokens_gone)
        )


def turn(live: RoutedStream) -> tuple[bool, int, float]:
    """Streams that have begun come first, then by priority, then the oldest."""
    return not live.has_begun, live.stream.sequence.terms.priority, live.stream.timeline.submitted_s


def waiting_at(link: Link) -> Iterable[Waiting]:
    """This front's, the last one first."""
    lives = [live for live in link.streams.values() if live.is_accepted and not live.is_admitted]
    num_from = tokens_from = 0
    for live in sorted(lives, key=turn, reverse=True):
        num_from, tokens_from = num_from + 1, tokens_from + live.num_expected
        yield Waiting(live, link, num_from, tokens_from)
