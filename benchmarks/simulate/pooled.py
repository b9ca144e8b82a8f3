"""Perfect placement, to compare with: the caches of all engines are one, and each request goes to the engine of least expected
time, computed from the engines' true state at that moment."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from benchmarks.simulate.choosers import Chooser
from deployments.links.affinity import KEY_BITS
from deployments.links.link import RoutedStream
from llama_core.scheduling.prefix_cache import UNREAD, PrefixCache
from llama_core.scheduling.request import Sequence as Seq
from tests.support.modelled_fleet import Costs, ModelledEngine, ModelledLink


def _key(prefix: bytes) -> int:
    """As in a front's index."""
    return int.from_bytes(prefix[:8], "little") & ((1 << KEY_BITS) - 1)


class Pool(Chooser):
    """What the caches of all engines hold together: the blocks that were used last, as many as they have. Also those of prompts
    that any engine computes now, so that no two compute the same."""

    moves = True

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()
        self._capacity = 0

    def attach(self, engine: ModelledEngine) -> None:
        """A block that the pool has costs this engine nothing."""
        admission = engine.service.loop.scheduler.admission
        blocks, own, admit = admission.pool, admission.prefixes, admission._admit
        admission.prefixes = prefixes = _PooledPrefixes(self, own)
        self._capacity += blocks.num_blocks

        def admit_with_all(seq: Seq, running: Sequence[Seq], cached: list[int]) -> bool:
            """cached: as many as the pool has."""
            hashes, here = seq.block_hashes[: len(cached)], blocks.prefixes._block_of
            local = [here[prefix] for prefix in hashes if prefix in here]
            num_held = sum(blocks._num_holders[block] > 0 for block in local)
            if blocks.num_free < blocks.blocks_for(seq.length) - num_held + len(running):
                return False
            coming = blocks.try_allocate(len(hashes) - len(local), shared=local)
            assert coming is not None
            for block, prefix in zip(coming, [each for each in hashes if each not in here], strict=True):
                blocks.prefixes.register(block, prefix)
            found = [here[prefix] for prefix in hashes]
            blocks.release(found)
            if is_admitted := admit(seq, running, found):
                self.add(prefixes.hashes_of(seq))
            return is_admitted

        admission._admit = admit_with_all  # type: ignore[method-assign]

    def sent(self, live: RoutedStream, link: ModelledLink) -> None:
        link.engine.waiting[link, live.number] = self._weight(live, link.engine)

    def order(self, links: Sequence[ModelledLink], live: RoutedStream) -> Sequence[ModelledLink]:
        return sorted(links, key=lambda link: (_expected_ms(link.engine, *self._weight(live, link.engine)), link.name))

    def _weight(self, live: RoutedStream, engine: ModelledEngine) -> tuple[int, int]:
        """Tokens to compute, and blocks."""
        size, length = engine.service.config.block_size, len(live.prefixes.prompt)
        known = self.num_known(live.prefixes.keys(size)) * size
        return length - min(known, length - 1), -(-length // size)

    def num_known(self, keys: Iterable[int]) -> int:
        count = 0
        for key in keys:
            if key not in self._known:
                break
            self._known.move_to_end(key)
            count += 1
        return count

    def add(self, prefixes: Iterable[bytes]) -> None:
        for key in map(_key, prefixes):
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


class _PooledPrefixes(PrefixCache):
    def __init__(self, pool: Pool, own: PrefixCache) -> None:
        super().__init__(own._index, own._window, is_enabled=True)
        self._pool = pool

    def lookup(self, seq: Seq) -> list[int]:
        hashes = self._hashes(seq, 0, (seq.length - 1) // self._block_size)
        return [UNREAD] * self._pool.num_known(map(_key, hashes))

    def hashes_of(self, seq: Seq) -> Iterable[bytes]:
        return self._hashes(seq, 0, seq.length // self._block_size)

    def register(self, seq: Seq) -> None:
        first = seq.num_registered
        super().register(seq)
        self._pool.add(seq.block_hashes[first : seq.num_registered])


def _expected_ms(engine: ModelledEngine, own_tokens: int, own_blocks: int) -> float:
    """To the first token of a new request."""
    scheduler, waits = engine.service.loop.scheduler, engine.waiting.values()
    costs: Costs = engine.ranks.costs
    blocks, running = scheduler.pool, scheduler._running
    pending = [seq.num_pending for seq in running if seq.num_pending > 1]
    backlog = own_tokens + sum(pending) + sum(tokens for tokens, _ in waits)
    num_decodes = len(running) - len(pending)
    chunk = scheduler.prompt_budget.of_step(num_decodes, len(pending) + len(waits) + 1)
    step_ms = costs.base_ms + num_decodes * costs.row_ms
    prefill_ms = backlog * costs.token_ms + math.ceil(backlog / chunk) * step_ms
    # When so many running sequences have ended that those which wait and this one have slots and blocks.
    slots = len(waits) + 1 - len(scheduler.admission.free_slots)
    room = sum(count for _, count in waits) + own_blocks + len(running) - blocks.num_free
    steps = 0
    for seq in sorted(running, key=lambda seq: seq.max_length - seq.length):
        if slots <= 0 and room <= 0:
            break
        steps, slots, room = seq.max_length - seq.length, slots - 1, room - len(seq.blocks) - 1
    if running and (slots > 0 or room > 0):
        steps += int(steps * max(slots / len(running), room / blocks.num_blocks))
    return max(prefill_ms, steps * step_ms + own_tokens * costs.token_ms)
