"""The batch of `offline` on vLLM, with random weights of the same shape."""

import importlib.util
import json
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.engine import model_of
from benchmarks.gpu.recorder import Recorder, Unavailable
from benchmarks.gpu.sections.offline import batch, longest_of, warm_up
from benchmarks.gpu.settings import Settings
from benchmarks.harness.make_checkpoint import SHAPES, hf_config
from benchmarks.harness.workload import Request


def run(record: Recorder, settings: Settings) -> None:
    if record.has("output_tok_s"):
        return
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable("vLLM is not installed")
    from vllm import LLM, SamplingParams

    requests = batch(settings)
    with tempfile.TemporaryDirectory() as folder:
        described = hf_config(SHAPES[settings.shape], model_of(settings))
        (Path(folder) / "config.json").write_text(json.dumps(described))
        engine = LLM(
            folder,
            dtype=settings.dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=longest_of(requests),
            max_num_seqs=len(requests),
            enable_prefix_caching=False,
        )

    def seconds(some: list[Request]) -> float:
        prompts = [{"prompt_token_ids": request.prompt} for request in some]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request.num_output, ignore_eos=True, detokenize=False)
            for request in some
        ]
        begin = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - begin
        assert [len(one.outputs[0].token_ids) for one in outputs] == [request.num_output for request in some]
        return took

    seconds(warm_up(requests))
    took = seconds(requests)
    record.put("seconds", took)
    record.put("output_tok_s", sum(request.num_output for request in requests) / took)
