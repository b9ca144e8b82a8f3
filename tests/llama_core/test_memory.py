"""What does not fit is refused before it is allocated."""

import pytest

from llama_core import memory
from llama_core.config import EngineConfig
from llama_core.errors import ConfigError
from llama_core.parallel import alone
from llama_core.runner import ModelRunner
from tests.conftest import GOLDEN


def test_weights_that_do_not_fit_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(ckpt_dir=str(GOLDEN / "mp2"), vocab_size=640, max_seq_len=64, max_batch_size=2, device="cpu")
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match=r"the weights of rank 0 of 1 need [\d,]+ bytes, and 100,000 are free"):
        ModelRunner.load(config, alone("cpu"))
