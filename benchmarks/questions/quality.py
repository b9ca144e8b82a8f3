"""The loss of quantized weights: perplexity on held-out text, compared with the unquantized weights.

    python -m benchmarks quality                                                            the demo model on its held-out text
    python -m benchmarks quality --ckpt FILE.gguf --tokenizer FILE.gguf --text pydoc --ways auto

"pydoc" is a text that every Python has: the topics of `help()`, of the standard library's `pydoc_data`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

from benchmarks.harness.common import REPOSITORY, emit, print_table
from benchmarks.harness.in_process import built_llama
from benchmarks.harness.options import add_model_options, model_name, question_parser
from llama_core import Llama
from llama_core.model.weight_formats import QUANTIZED

DTYPES = ("float32", "bfloat16")


def perplexity(llama: Llama, text: str, length: int) -> tuple[float, int]:
    """e^(mean negative log-probability) of the text in chunks of `length` tokens after BOS, if any; and number of tokens."""
    tokens = llama.tokenizer.encode(text, bos=False, eos=False)
    bos = llama.tokenizer.encode("", bos=True, eos=False)
    prompts = [[*bos, *tokens[i : i + length]] for i in range(0, len(tokens), length)]
    _, logprobs = llama.generate(prompts, 0, temperature=0, logprobs=True, echo=True)
    assert logprobs is not None
    values = [value for row in logprobs for value in row[1:]]
    return math.exp(-sum(values) / len(values)), len(values)


def main(argv: Sequence[str]) -> None:
    parser = question_parser("quality", __doc__)
    add_model_options(parser)
    parser.add_argument("--text", default=str(REPOSITORY / "demo" / "heldout.txt"), help="a file, or pydoc")
    parser.add_argument("--length", type=int, default=256, help="tokens of a chunk after its BOS")
    parser.add_argument("--characters", type=int, default=150_000, help="of the text, from its beginning")
    native = [name for name in QUANTIZED if name != "fp8"]
    parser.add_argument(
        "--ways", nargs="*", default=native, help="values of `quantization`, beside none; auto: as stored"
    )
    options = parser.parse_args(argv)
    text = "\n".join(topics.values()) if options.text == "pydoc" else Path(options.text).read_text(encoding="utf-8")
    text, name_of_text = text[: options.characters], Path(options.text).name
    found: dict[str, float] = {}
    count = 0
    # The others are compared with the first.
    for dtype, quantization in ((dtype, way) for way in ("none", *options.ways) for dtype in DTYPES):
        settings = {"max_seq_len": options.length + 2, "max_batch_size": 8, "quantization": quantization}
        with built_llama(options, dtype=dtype, **settings) as llama:
            name = dtype if quantization == "none" else f"{dtype}+{quantization}"
            found[name], count = perplexity(llama, text, options.length)
    exact = next(iter(found.values()))
    cases = {name: {"perplexity": value, "loss": value / exact - 1} for name, value in found.items()}
    print_table(
        f"{model_name(options)}, {count} tokens of {name_of_text}",
        ["weights", "perplexity", "loss, %"],
        [(name, case["perplexity"], f"{100 * case['loss']:.3f}") for name, case in cases.items()],
    )
    emit("quality", {"model": model_name(options), "text": name_of_text, "tokens": count, "cases": cases}, options)
