"""The default runner factory: joins torch's process group and loads the model."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from cluster.wire.rank_runner import RankRunner, RendezvousSpec
from llama_core.config import EngineConfig

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from llama_core.backends.parallel import Parallel


def load_model_runner(
    config: EngineConfig, rendezvous: RendezvousSpec, on_progress: Callable[[int, int], None]
) -> RankRunner:
    """Join the group of all ranks if there are several, and load this rank's share of the weights.

    Raises CheckpointError, ConfigError, RuntimeError.
    """
    import torch

    from llama_core.backends.parallel import alone
    from llama_core.backends.runner import ModelRunner

    # In this thread, because it runs the steps. Setting the number again that OMP_NUM_THREADS has set would cost a thread pool.
    if torch.get_num_threads() != rendezvous.num_threads:
        torch.set_num_threads(rendezvous.num_threads)
    parallel = _join(config, rendezvous) if rendezvous.world_size > 1 else alone(config.device)
    vocabulary = partial(_grammar_vocabulary, config) if config.tokenizer_path else None
    runner = ModelRunner.load(
        config, parallel, on_progress, vocabulary=vocabulary, former_blocks=rendezvous.order.former_blocks
    )
    runner.prepare_grammars()
    return runner


def _grammar_vocabulary(config: EngineConfig) -> "LLTokenizer":
    from llama_core.grammar.vocabulary import load_vocabulary  # most ranks never follow a grammar

    return load_vocabulary(config.tokenizer_path, config.vocab_size, config.stop_ids)


def _join(config: EngineConfig, rendezvous: RendezvousSpec) -> "Parallel":
    import torch.distributed as dist

    from llama_core.backends.parallel import join

    order, timeout = rendezvous.order, timedelta(seconds=rendezvous.order.timeout_s)
    store: dist.Store  # type: ignore[name-defined]
    if order.store_path:  # which no other user can reach
        store = dist.FileStore(order.store_path, rendezvous.world_size)  # type: ignore[attr-defined]
    else:
        from cluster.rank.call_store import CallStore

        assert rendezvous.call_store is not None
        store = CallStore(rendezvous.call_store)
    store.set_timeout(timeout)
    place = rendezvous.rank, rendezvous.world_size
    return join(*place, config.device, store, order.timeout_s, rendezvous.device_index)
