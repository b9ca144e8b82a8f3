"""Fronts and engines one version apart: nothing that a later one sends is dropped."""

import msgspec

from cluster.wire.messages import HEADER_BYTES
from deployments.links import messages
from llama_core.errors import NotReady
from llama_core.scheduling.request import Request
from llama_core.scheduling.sampling_params import SamplingParams
from tests.support.fake_rank_group import until
from tests.support.fleets import FleetOfEngines
from tests.support.recovering_service import read

PARAMS = SamplingParams(temperature=0.5, top_p=0.9, max_tokens=7, seed=3)


def test_a_front_of_this_version_works_with_the_former_one_and_not_with_an_older_one() -> None:
    assert [messages.works_with(messages.PROTOCOL + by) for by in (-2, -1, 0, 1, 2)] == [False, True, True, True, False]


def _with_a_later_parameter(payload: bytes) -> bytes:
    submit = msgspec.msgpack.decode(payload)
    submit[2]["params"][0]["a_later_one"] = 1
    return msgspec.msgpack.encode(submit)


def test_a_parameter_of_a_later_version_is_noticed() -> None:
    submit = messages.Submit(1, Request([[1, 2]], [SamplingParams(temperature=0, logit_bias=((5, 1.0),))]))
    payload = msgspec.msgpack.encode(submit)
    assert messages.knows_all_of(messages.decode_from_front(payload), payload)
    later = _with_a_later_parameter(payload)
    assert not messages.knows_all_of(messages.decode_from_front(later), later)
    longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(payload), "a later field"])
    assert not messages.knows_all_of(messages.decode_from_front(longer), longer)


async def test_an_engine_refuses_a_request_with_a_parameter_that_it_does_not_know() -> None:
    async with FleetOfEngines() as fleet:
        await fleet.start()
        (link,) = fleet.links
        refused: list[messages.Refused] = []
        take = link.take

        def note(message: messages.FromEngine) -> None:
            if isinstance(message, messages.Refused):
                refused.append(message)
            take(message)

        link.take = note  # type: ignore[method-assign]
        payload = msgspec.msgpack.encode(messages.Submit(1, Request([[1, 2]], [PARAMS])))
        later = _with_a_later_parameter(payload)
        assert link._transport is not None
        link._transport.write(len(later).to_bytes(HEADER_BYTES, "big") + later)
        await until(lambda: bool(refused))
        assert refused[0].fault.code == NotReady.code
        (stream,) = await fleet.submit([1, 5], SamplingParams(temperature=0.0, max_tokens=3))
        assert len(await read(stream)) == 3
