"""The simulated device itself: it notices what a real one would not forgive."""

import pytest
import torch

from tests.support.simulated_device import SimulatedDevice


def test_the_device_refuses_to_capture_what_waits_for_the_host() -> None:
    values = torch.ones(3)
    with pytest.raises(RuntimeError, match="while a graph is captured"):
        SimulatedDevice().capture(lambda: values.sum().item())


def test_a_replay_clobbers_what_an_earlier_one_left_in_the_graphs_memory() -> None:
    device, source, kept = SimulatedDevice(), torch.ones(3), torch.zeros(3)
    inner = []

    def work() -> None:
        inner.append(source * 2)
        kept.copy_(inner[-1])

    graph = device.capture(work)
    kept.zero_()
    graph()
    assert kept.tolist() == [0, 0, 0]
    device.synchronize()
    assert kept.tolist() == [2, 2, 2] and inner[-1].isnan().all()


def test_a_copy_reads_its_source_when_it_runs() -> None:
    device = SimulatedDevice()
    sent, received = device.page_locked(2), torch.zeros(2, dtype=torch.int64)
    sent[0] = 1
    device.copy(received, sent)
    sent[0] = 2
    event = device.record()
    assert not event.is_reached()
    event.wait()
    assert received.tolist() == [2, 0]
