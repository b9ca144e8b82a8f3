"""Perfect placement, to compare with: the caches of all engines are one, and each request goes to the engine of least expected
time, computed from the engines' true state at that moment."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from benchmarks.simulate.fleet import SimulatedEngine, VirtualLink
from deployments.fleet.served_model import ServedModel
from deployments.links.affinity import KEY_BITS
from deployments.links.link import Link, RoutedStream
from llama_core.scheduling.prefix_cache import UNREAD, PrefixCache
from llama_core.scheduling.request import Sequence as Seq


def _key(prefix: bytes) -> int:
    """As in a front's index."""
    return int.from_bytes(prefix[:8], "little") & ((1 << KEY_BITS) - 1)


class Pool:
    """What the caches of all engines hold together: the blocks that were used last, as many as they have."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, None] = OrderedDict()
        self._capacity = 0

    def attach(self, engine: SimulatedEngine) -> None:
        """A block that any engine has computed costs this engine nothing."""
        admission = engine.service.loop.scheduler.admission
        own = admission.prefixes
        blocks, prefixes = admission.pool, _PooledPrefixes(own._index, own._window, is_enabled=True)
        prefixes.pool = self
        self._capacity += blocks.num_blocks
        admission.prefixes, admit = prefixes, admission._admit

        def admit_with_all(seq: Seq, running: Sequence[Seq], cached: list[int]) -> bool:
            hashes = seq.block_hashes[: len(cached)]
            here = blocks.prefixes._block_of
            local = [here[prefix] for prefix in hashes if prefix in here]
            num_held = sum(blocks._num_holders[block] > 0 for block in local)
            if blocks.num_free < blocks.blocks_for(seq.length) - num_held + len(running):
                return False
            coming = blocks.try_allocate(len(hashes) - len(local), shared=local)
            assert coming is not None
            for block, prefix in zip(coming, (each for each in hashes if each not in here), strict=True):
                blocks.prefixes.register(block, prefix)
            found = [here[prefix] for prefix in hashes]
            blocks.release(found)
            if is_admitted := admit(seq, running, found):
                self.add(map(_key, prefixes.hashes_of(seq)))  # so that no engine computes what another one computes now
            return is_admitted

        admission._admit = admit_with_all  # type: ignore[method-assign]

    def num_known(self, keys: Iterable[int]) -> int:
        count = 0
        for key in keys:
            if key not in self._known:
                break
            self._known.move_to_end(key)
            count += 1
        return count

    def add(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)


class _PooledPrefixes(PrefixCache):
    pool: Pool

    def lookup(self, seq: Seq) -> list[int]:
        """As many as the pool has; `admit_with_all` finds blocks for them."""
        hashes = self._hashes(seq, 0, (seq.length - 1) // self._block_size)
        return [UNREAD] * self.pool.num_known(map(_key, hashes))

    def hashes_of(self, seq: Seq) -> Iterable[bytes]:
        return self._hashes(seq, 0, seq.length // self._block_size)

    def register(self, seq: Seq) -> None:
        first = seq.num_registered
        super().register(seq)
        self.pool.add(map(_key, seq.block_hashes[first : seq.num_registered]))


class PooledLink(VirtualLink):
    """Knows what the engine has to do for streams that it has not admitted, of all fronts."""

    def take_on(self, live: RoutedStream) -> None:
        super().take_on(live)
        block_size = self.engine.service.config.block_size
        keys = live.prefixes.keys(block_size)
        length = len(live.prefixes.prompt)
        known = self.engine.pool.num_known(keys) * block_size
        self.engine.waiting[self, live.number] = length - min(known, length - 1), -(-length // block_size)


class PooledModel(ServedModel):
    """A front's model that orders engines by their true state."""

    def _by_policy(self, links: Sequence[Link], lives: Sequence[RoutedStream]) -> Sequence[Link]:
        return sorted(links, key=lambda link: (_expected_ms(link, lives[0]), link.engine_id))  # type: ignore[arg-type]


def _expected_ms(link: VirtualLink, live: RoutedStream) -> float:
    """To the first token of a new request at the engine."""
    engine, scheduler = link.engine, link.engine.service.loop.scheduler
    costs, blocks, running = engine.ranks.costs, scheduler.pool, scheduler._running
    keys, length = live.prefixes.keys(blocks.block_size), len(live.prefixes.prompt)
    own = length - min(engine.pool.num_known(keys) * blocks.block_size, length - 1)
    waits = engine.waiting.values()
    pending = [seq.num_pending for seq in running if seq.num_pending > 1]
    backlog = own + sum(pending) + sum(tokens for tokens, _ in waits)
    rows = len(running) - len(pending)
    chunk = scheduler.prompt_budget.of_step(rows, len(pending) + len(waits) + 1)
    row_step_ms = costs.base_ms + rows * costs.row_ms
    prefill_ms = backlog * costs.token_ms + math.ceil(backlog / chunk) * row_step_ms
    # When enough running sequences have ended for those that wait and this one.
    slots = len(waits) + 1 - len(scheduler.admission.free_slots)
    room = sum(count for _, count in waits) + -(-length // blocks.block_size) + len(running) - blocks.num_free
    steps = 0
    for seq in sorted(running, key=lambda seq: seq.max_length - seq.length):
        if slots <= 0 and room <= 0:
            break
        steps, slots, room = seq.max_length - seq.length, slots - 1, room - len(seq.blocks) - 1
    if running and (slots > 0 or room > 0):
        steps += int(steps * max(slots / len(running), room / blocks.num_blocks))
    return max(prefill_ms, steps * row_step_ms + own * costs.token_ms)
