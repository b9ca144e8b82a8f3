"""What the server adds to a request by its caller: a seed where it names none, and the scope of what it may share."""

from hashlib import blake2b

from deployments.args import IngressArgs
from llama_core.scheduling.sampling_params import mix_seed


class Callers:
    """Of one process that takes requests."""

    def __init__(self, args: IngressArgs, salt: int = 0) -> None:
        """salt: distinguishes the seeds of several such processes."""
        self._seed = mix_seed(args.seed, salt)
        self._num_seeds = 0
        self._separates_caches = args.has_api_keys and args.prefix_cache_scope == "key"

    def next_seed(self) -> int:
        """Derived from the server's seed and the number of such requests."""
        self._num_seeds += 1
        return mix_seed(self._seed, self._num_seeds)

    def cache_scope(self, owner: str) -> str:
        if not (owner and self._separates_caches):
            return ""
        return blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
