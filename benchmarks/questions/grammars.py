"""What structured output costs: the mask of a row, and the steps of rows that have no grammar.

    python -m benchmarks grammars --ckpt FILE.gguf --tokenizer FILE.gguf

Pairs of runs alternate: all rows without a grammar, and some of them with one (`--grammar-rows`, half of them by default). Both
kinds of rows are in the same steps, so the ratio of the steps is what rows without a grammar lose. "mask" is all that a row's
matcher does for a step: it consumes the latest token, computes the mask and looks for forced tokens.

Where all cores compute, the rows lose what the grammars' thread takes of their processor time. This share is measured too,
because the ratio of two steps is noisy.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.common import Spread, emit, interval, percentile, print_table
from benchmarks.harness.in_process import built_llama, case_name, vocabulary, watched
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import random_prompt
from llama_core import Llama
from llama_core.grammar.answers import answer_grammar
from llama_core.grammar.build import json_schema_grammar
from llama_core.grammar.masks import SlotGrammars
from llama_core.grammar.vocabulary import grammar_vocabulary
from llama_core.scheduling.request import Sequence as LlamaSequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.answer_format import AnswerFormat
from llama_core.text.tools.tool_format import find_tool_format

# No text of these ends within the outputs, so that all runs have as many rows in all steps.
SCHEMAS: Sequence[dict[str, Any]] = (
    {"type": "array", "minItems": 5000, "items": {"type": "object", "required": ["name", "age"], "additionalProperties": False,
     "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}}},
    {"type": "array", "minItems": 5000, "items": {"enum": ["red", "green", "blue"]}},
    {"type": "array", "minItems": 5000, "items": {"type": "string", "format": "date"}},
    {"type": "array", "minItems": 5000, "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}},
)  # fmt: skip


@dataclass(slots=True)
class MaskTimes:
    """seconds: of each row's mask. processor: seconds of processor time in the grammars' thread."""

    seconds: list[float] = field(default_factory=list)
    processor: float = 0.0


@contextmanager
def timed_masks(llama: Llama) -> Iterator[MaskTimes]:
    """What masks take inside the context."""
    grammars: Any = llama.runner._grammars
    found = MaskTimes()
    match: Any = grammars._match
    fill: Any = grammars._fill

    def timed_row(*row: Any) -> Any:
        begin = time.perf_counter()
        forced = match(*row)
        found.seconds.append(time.perf_counter() - begin)
        return forced

    def timed(*masks: Any) -> None:
        begin = time.thread_time()
        fill(*masks)
        found.processor += time.thread_time() - begin

    grammars._match, grammars._fill = timed_row, timed
    try:
        yield found
    finally:
        del grammars._match, grammars._fill


def step_ms(llama: Llama, options: argparse.Namespace, grammars: Sequence[str], num_with: int) -> tuple[float, float]:
    """The median decode step of `rows` rows, of which `num_with` have a grammar; and all processor time, in seconds."""
    sequences = []
    for i in range(options.rows):
        grammar = grammars[i % len(grammars)] if i < num_with else ""
        prompt = random_prompt(options.prompt, vocabulary(llama), seed=i)
        params = SamplingParams(
            temperature=1.0, seed=i, max_tokens=options.output, grammar=grammar, ignore_eos=not grammar
        )
        sequences.append(LlamaSequence(prompt, params, options.prompt + options.output))
    begin = time.process_time()
    with watched(llama.runner) as steps:
        llama._run(sequences)
    processor = time.process_time() - begin
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    return statistics.median(step.ms for step in steps if step.is_decode and step.num_rows == options.rows), processor


def spread_us(seconds: Sequence[float]) -> dict[str, float]:
    microseconds = sorted(second * 1e6 for second in seconds)
    found = {name: percentile(microseconds, share) for name, share in (("median", 50), ("p90", 90), ("p99", 99))}
    return found | {"count": len(microseconds)}


def measure(llama: Llama, options: argparse.Namespace, grammars: Sequence[str]) -> dict[str, Any]:
    """Decode steps without grammars, and with one in some of the rows."""
    step_ms(llama, options, grammars, options.rows)  # compiles grammars, builds kernels, touches pages
    some = options.grammar_rows
    pairs: list[tuple[float, float]] = []
    all_processor = 0.0
    with timed_masks(llama) as masks:
        for i in range(options.pairs):
            order = (0, some) if i % 2 == 0 else (some, 0)
            found = {num: step_ms(llama, options, grammars, num) for num in order}
            (without, _), (with_some, processor) = found[0], found[some]
            pairs.append((without, with_some))
            all_processor += processor
    return {
        "step_ms_without": Spread.of(one for one, _ in pairs),
        "step_ms_with": Spread.of(one for _, one in pairs),
        "ratio": interval([with_some / without for without, with_some in pairs]),
        "mask_us": spread_us(masks.seconds),
        "share_of_processor_time": masks.processor / all_processor,
    }


def main(argv: Sequence[str]) -> None:
    parser = question_parser("grammars", __doc__)
    add_model_options(parser)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--grammar-rows", type=int, help="rows with a grammar; half of all by default")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--output", type=int, default=128, help="tokens")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args(argv)
    if options.grammar_rows is None:
        options.grammar_rows = options.rows // 2
    context = options.prompt + options.output
    with built_llama(options, dtype=options.dtype, max_seq_len=context, max_batch_size=options.rows) as llama:
        tokenizer = llama.tokenizer
        llama.runner._grammars = SlotGrammars(
            lambda: grammar_vocabulary(tokenizer, tokenizer.stop_ids),
            vocabulary(llama),
            options.rows,
        )
        form = AnswerFormat(tokenizer, find_tool_format("hermes"), marks=None)
        grammars = [answer_grammar(form, json_schema_grammar(schema), "schema") for schema in SCHEMAS]
        figures = measure(llama, options, grammars)
        weights = case_name(llama, options)
    rows = {"rows": options.rows, "rows_with_grammar": options.grammar_rows}
    print_table(f"Grammars, {model_name(options)} {weights}, {rows}", ["figure", "value"], figures.items())
    emit("grammars", {"model": model_name(options), "weights": weights, **rows, **figures}, options)
