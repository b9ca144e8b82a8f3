"""FakeEngine with a real model behind it: scheduler, ranks' runner and sampler compute each answer when it is submitted."""

from llama_core.generation import Llama
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.scripted_engine import FakeEngine


class ModelEngine(FakeEngine):
    """The demo's small model, in process."""

    max_seq_len = 2048

    def __init__(self, tool_format: str = "auto") -> None:
        super().__init__()
        self.tool_format = tool_format
        folder = GOLDEN / "mp1"
        self.llama = Llama.build(
            str(folder), str(folder / "tokenizer.model"), max_seq_len=self.max_seq_len, max_batch_size=4
        )

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[int]:
        sequence = self.llama._sequence(prompt, params, params.seed)
        self.llama._run([sequence])
        return [token for token in sequence.tokens[len(prompt) :] if token not in self.tokenizer.stop_ids]
