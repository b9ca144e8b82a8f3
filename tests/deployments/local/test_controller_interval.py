"""The interval of the control loop of Serve's controller."""

import inspect

import pytest
from ray.serve._private import controller, controller_health_metrics_tracker

from deployments.local.controller_interval import SERVING_S, STARTING_S, _set_interval


def test_the_control_loop_sleeps_for_the_interval_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (controller, controller_health_metrics_tracker):
        monkeypatch.setattr(module, "CONTROL_LOOP_INTERVAL_S", STARTING_S)  # restored after the test
    _set_interval(None, SERVING_S)
    assert vars(controller)["CONTROL_LOOP_INTERVAL_S"] == SERVING_S
    assert vars(controller_health_metrics_tracker)["CONTROL_LOOP_INTERVAL_S"] == SERVING_S
    assert "await asyncio.sleep(CONTROL_LOOP_INTERVAL_S)" in inspect.getsource(controller)
