"""Seeds of requests without one: nobody foretells them, unless the operator wants a run that can be repeated."""

from deployments.args import IngressArgs
from deployments.engine.callers import Callers
from llama_core.scheduling.sampling_params import INT64_MAX, mix_seed


def test_seeds_cannot_be_foretold_from_the_arguments() -> None:
    seeds = [callers.next_seed() for callers in (Callers(IngressArgs()), Callers(IngressArgs())) for _ in range(1000)]
    assert len(set(seeds)) == 2000 and all(-INT64_MAX - 1 <= seed <= INT64_MAX for seed in seeds)
    assert not {mix_seed(1, number) for number in range(10_000)} & set(seeds), "as those of the former default"
    assert min(seeds) < -(2**62) and max(seeds) > 2**62, "they use all 64 bits"


def test_a_set_seed_repeats_a_run() -> None:
    first, second, other = (Callers(IngressArgs(seed=7), salt) for salt in (0, 0, 5))
    seeds = [first.next_seed() for _ in range(100)]
    assert seeds == [second.next_seed() for _ in range(100)] and len(set(seeds)) == 100
    assert not set(seeds) & {other.next_seed() for _ in range(100)}
