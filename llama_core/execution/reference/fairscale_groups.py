"""The process groups of fairscale's layers, which fairscale keeps in module globals. Only this file touches them."""

import contextlib
import io
import logging

from fairscale.nn.model_parallel import initialize

from llama_core.execution.parallel import Parallel, before_leaving, join_alone

log = logging.getLogger(__name__)


def prepare_layers(parallel: Parallel) -> None:
    """Make the groups that fairscale's layers look up when they are built. A second call does nothing."""
    join_alone(parallel)
    if not initialize.model_parallel_is_initialized():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):  # fairscale prints; a library should not
            initialize.initialize_model_parallel(parallel.world_size)
        log.debug("fairscale: %s", printed.getvalue().strip().replace("\n", "; "))
        before_leaving(initialize.destroy_model_parallel)
