"""Time for HTTP answers on a busy machine."""

from httpx._config import DEFAULT_TIMEOUT_CONFIG

DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = 60.0  # instead of 5 s
