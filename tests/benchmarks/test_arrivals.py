"""The benchmark of arrivals gives every contender the same requests, and none of them twice."""

from types import SimpleNamespace
from typing import Any, cast

from benchmarks.harness.contenders import Server
from benchmarks.questions.arrivals import Load, Samples, take_turns


def test_contenders_get_the_same_requests_and_no_load_repeats_those_of_another() -> None:
    """A prompt that came before would be found in a prefix cache: its first token would come sooner than a new prompt's."""
    seeds: dict[str, list[int]] = {"a": [], "b": []}

    def run(server: Any, seed: int) -> Samples:
        seeds[server.name].append(seed)
        return Samples()

    servers = [cast(Server, SimpleNamespace(name=name)) for name in seeds]
    take_turns(servers, [Load(name, run) for name in ("open", "light", "aiohttp")], 3, lambda: None)
    assert seeds["a"] == seeds["b"]
    assert len(set(seeds["a"])) == 9 and 0 not in seeds["a"], "0 is the warm-up's"
