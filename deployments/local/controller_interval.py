"""The interval of Serve's control loop: 0.1 s at start and shutdown, 0.5 s while the server serves.

One pass of the loop holds a core for 1.5 ms. Where ranks share the cores with the controller, all ranks wait for it. Serve
has an environment variable for the interval, but its value holds for the controller's whole life.
"""

import contextlib
from typing import Any, Final

from deployments.local import ray_patches

STARTING_S: Final = 0.1  # Serve's own default
SERVING_S: Final = 0.5


def set_interval(interval_s: float) -> None:
    """Ask the controller to change its interval. Does not wait; does nothing without a controller."""
    if not ray_patches.is_supported():
        return
    with contextlib.suppress(Exception):  # the interval is an optimization
        import ray
        import ray.serve._private.constants as constants

        controller = ray.get_actor(constants.SERVE_CONTROLLER_NAME, namespace=constants.SERVE_NAMESPACE)
        controller.__ray_call__.remote(_set_interval, interval_s)


def _set_interval(controller: Any, interval_s: float) -> None:
    """Runs in the controller's process."""
    import ray.serve._private.controller as loop
    import ray.serve._private.controller_health_metrics_tracker as tracker

    vars(loop)["CONTROL_LOOP_INTERVAL_S"] = interval_s
    vars(tracker)["CONTROL_LOOP_INTERVAL_S"] = interval_s
