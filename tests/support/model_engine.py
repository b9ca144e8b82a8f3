"""FakeEngine with a real model behind it: scheduler, ranks' runner and sampler compute each answer when it is submitted."""

from collections.abc import Sequence

from llama_core.generation import Llama
from llama_core.scheduling.sampling_params import SamplingParams
from tests.conftest import GOLDEN
from tests.support.scripted_engine import FakeEngine, FakeStream


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

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        stop: Sequence[str] = (),
        owner: str = "",
        priority: int = 0,
    ) -> FakeStream:
        sequence = self.llama._sequence(prompt, params, params.seed)
        self.llama._run([sequence])
        answer = sequence.tokens[len(prompt) :]
        stream = FakeStream(
            self,
            prompt,
            params,
            stop,
            [token for token in answer if token not in self.tokenizer.stop_ids],
        )
        self.streams.append(stream)
        return stream
