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


def look_up(links: Sequence[Link], lives: Iterable[RoutedStream]) -> bytes:
    """Note which engines know how much of the streams' prompts. Returns the name of the first prompt, as of `Prompt`."""
    last, name = None, b""
    sizes = {(state.block_size, state.window) for link in links if (state := link.state)}
    for live in lives:
        if last is None or live.prefixes is not last.prefixes:
            live.num_known = {}
            for size, window in sizes:
                live.num_known |= links[0].prefixes.num_known(live.prefixes.keys(size), has_window=window > 0)
            name = name or live.prefixes.name(min(sizes)[0], max([live.num_known.get(link, 0) for link in links]))
            last = live
        live.num_known = last.num_known
    return name


def facts_of(link: Link, lives: Sequence[RoutedStream], costs: Costs) -> Facts:
    """For streams that are placed together; without any, for a request that has no tokens."""
    state, load, num_others, num_new, num_known, adapter = link.state, link.load, 0, 0, 0, ""
    assert state is not None
    if lives:
        first, num_others = lives[0], len(lives) - 1
        for live in lives:
            num_new += live.num_new(link)
        num_known = first.num_known.get(link, 0) * state.block_size
        adapter = first.stream.sequence.terms.adapter
    return Facts(
        link.engine_id,
        link.is_ready,
        load.running,
        link.num_sequences - load.running + num_others,
        state.max_batch_size,
        link.queued_tokens,
        num_new,
        num_known,
        state.max_step_tokens or 1,
        state.blocks_total,
        load.free_blocks,
        state.block_size,
        bool(adapter) and adapter not in link.places,
        costs[link],
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
