"""What the server adds to a request by its caller: a seed where it names none, and the scope of what it may share."""

import secrets
from hashlib import blake2b

from deployments.args import IngressArgs
from llama_core.scheduling.sampling_params import mix_seed


class Callers:
    """Of one process that takes requests."""

    def __init__(self, args: IngressArgs, salt: int = 0) -> None:
        """salt: distinguishes the seeds of several such processes, where the operator sets one."""
        self._seed = None if args.seed is None else mix_seed(args.seed, salt)
        self._num_seeds = 0
        self._separates_caches = args.has_api_keys and args.prefix_cache_scope == "key"

    def next_seed(self) -> int:
        """A random one; where the operator sets a seed, derived from it and the number of such requests: a client that knows
        that seed, or guesses it from answers, can foretell the answers to others."""
        if self._seed is None:
            return secrets.randbits(64) - 2**63
        self._num_seeds += 1
        return mix_seed(self._seed, self._num_seeds)

    def cache_scope(self, owner: str) -> str:
        if not (owner and self._separates_caches):
            return ""
        return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
