"""Random examples by seed. Machines with GPUs may lack hypothesis, whose search takes minutes in Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import numpy as np

Check = Callable[[Any], object]


class Strategy:
    """As hypothesis's, as far as our checks use them."""

    def __init__(self, sampled: Callable[[np.random.Generator], Any]) -> None:
        self.sampled = sampled

    def map(self, function: Callable[[Any], Any]) -> "Strategy":
        return Strategy(lambda generator: function(self.sampled(generator)))


class Strategies:
    """The functions of `hypothesis.strategies` that our checks use, by their names there."""

    @staticmethod
    def sampled_from(values: Any) -> Strategy:
        return Strategy(lambda generator: values[int(generator.integers(len(values)))])

    @staticmethod
    def just(value: object) -> Strategy:
        return Strategy(lambda generator: value)

    @staticmethod
    def booleans() -> Strategy:
        return Strategies.sampled_from((False, True))

    @staticmethod
    def integers(least: int, greatest: int) -> Strategy:
        def sampled(generator: np.random.Generator) -> int:
            ends = (least, greatest, min(max(0, least), greatest))
            return (
                ends[choice]
                if (choice := int(generator.integers(12))) < 3
                else least + _below(greatest - least + 1, generator)
            )

        return Strategy(sampled)

    @staticmethod
    def floats(least: float, greatest: float, width: int) -> Strategy:
        return Strategy(lambda generator: float(np.float32(generator.uniform(least, greatest))))

    @staticmethod
    def tuples(*strategies: Strategy) -> Strategy:
        return Strategy(lambda generator: tuple(each.sampled(generator) for each in strategies))

    @staticmethod
    def one_of(*strategies: Strategy) -> Strategy:
        return Strategy(lambda generator: Strategies.sampled_from(strategies).sampled(generator).sampled(generator))

    @staticmethod
    def lists(of: Strategy, min_size: int = 0, max_size: int = 8, unique: bool = False) -> Strategy:
        def sampled(generator: np.random.Generator) -> list[Any]:
            values = [of.sampled(generator) for _ in range(int(generator.integers(min_size, max_size + 1)))]
            return list(dict.fromkeys(values)) if unique else values

        return Strategy(sampled)

    @staticmethod
    def composite(function: Callable[..., Any]) -> Callable[..., Strategy]:
        def make(*args: Any, **options: Any) -> Strategy:
            return Strategy(lambda generator: function(lambda each: each.sampled(generator), *args, **options))

        return make


def _below(count: int, generator: np.random.Generator) -> int:
    return int.from_bytes(generator.bytes(16), "little") % count


st = Strategies


def each_example(examples: int, strategy: Strategy) -> Callable[[Check], Callable[[], None]]:
    """Makes a check of one example a function that checks as many, the same in each run."""

    def decorate(check: Check) -> Callable[[], None]:
        def run() -> None:
            for seed in range(examples):
                check(strategy.sampled(np.random.default_rng(seed)))

        return run

    return decorate
