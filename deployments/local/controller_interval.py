"""How often Serve's controller looks whether anything has changed: every 0.1 s, which brings a server up and down quickly.

In between there is nothing to see, and each look holds a core for a millisecond and a half, which all ranks wait for where
they share the cores with it. The interval has a variable in the environment, but only for all of the controller's life.
"""

import contextlib
from typing import Any, Final

import ray
import ray.serve._private.constants as constants

QUICK_S: Final = constants.CONTROL_LOOP_INTERVAL_S
CALM_S: Final = 0.5


def set_pace(interval_s: float) -> None:
    """Does not wait; without a controller it does nothing."""
    with contextlib.suppress(Exception):  # it is a matter of comfort
        controller = ray.get_actor(constants.SERVE_CONTROLLER_NAME, namespace=constants.SERVE_NAMESPACE)
        controller.__ray_call__.remote(_set_interval, interval_s)


def _set_interval(controller: Any, interval_s: float) -> None:
    """Runs in the controller's process."""
    import ray.serve._private.controller as loop
    import ray.serve._private.controller_health_metrics_tracker as tracker

    vars(loop)["CONTROL_LOOP_INTERVAL_S"] = interval_s
    vars(tracker)["CONTROL_LOOP_INTERVAL_S"] = interval_s
