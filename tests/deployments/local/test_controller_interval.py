"""Serve's controller: that the name which is changed in it is the one that it sleeps for."""

import inspect

import pytest
from ray.serve._private import controller, controller_health_metrics_tracker

from deployments.local.controller_interval import CALM_S, QUICK_S, _set_interval


def test_the_controllers_loop_sleeps_for_the_interval_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (controller, controller_health_metrics_tracker):
        monkeypatch.setattr(module, "CONTROL_LOOP_INTERVAL_S", QUICK_S)  # to have it back
    _set_interval(None, CALM_S)
    assert controller.CONTROL_LOOP_INTERVAL_S == CALM_S
    assert controller_health_metrics_tracker.CONTROL_LOOP_INTERVAL_S == CALM_S
    assert "await asyncio.sleep(CONTROL_LOOP_INTERVAL_S)" in inspect.getsource(controller)
