"""What structured output costs: the mask of a row, and the steps of rows that have no grammar.

    python -m benchmarks grammars --ckpt FILE.gguf --tokenizer FILE.gguf

Pairs of runs alternate: all rows without a grammar, and some of them with one (`--grammar-rows`, half of them by default). Both
kinds of rows are in the same steps, so the ratio of the steps is what rows without a grammar lose. "mask" is all that a row's
matcher does for a step: it consumes the latest token, computes the mask and looks for forced tokens. Near the limit of tokens
a mask also brings the answer to its end, which takes longer. So these rows also answer ordinary schemas, one after the other,
within each limit of tokens: beside the same steps without a grammar, whose answers have the same lengths.

Where all cores compute, the rows lose what the grammars' thread takes of their processor time. This share is measured too,
because the ratio of two steps is noisy.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.common import Spread, emit, percentile, print_table
from benchmarks.harness.in_process import Step, built_llama, case_name, vocabulary, watched
from benchmarks.harness.options import add_model_options, model_name, question_parser
from benchmarks.harness.workload import random_prompt
from llama_core import Llama
from llama_core.execution.grammars.masks import SlotGrammars
from llama_core.scheduling.request import Sequence as LlamaSequence
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.grammar import checked_grammar, for_answer, json_schema_grammar
from llama_core.text.grammar_vocabulary import grammar_vocabulary

# No text of these ends within the outputs, so that all runs have as many rows in all steps.
SCHEMAS: Sequence[dict[str, Any]] = (
    {"type": "array", "minItems": 5000, "items": {"type": "object", "required": ["name", "age"], "additionalProperties": False,
     "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}}},
    {"type": "array", "minItems": 5000, "items": {"enum": ["red", "green", "blue"]}},
    {"type": "array", "minItems": 5000, "items": {"type": "string", "format": "date"}},
    {"type": "array", "minItems": 5000, "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}},
)  # fmt: skip
LIMITS = (256, 64)  # of tokens
_TEXT: dict[str, Any] = {"type": "string"}
# Answers to these end by themselves, or are brought to their end.
ORDINARY: Sequence[dict[str, Any]] = (
    {"type": "object", "required": ["name", "age", "tags"], "additionalProperties": False,
     "properties": {"name": _TEXT, "age": {"type": "integer"}, "tags": {"type": "array", "items": _TEXT}}},
    {"type": "object", "required": ["city", "unit"], "additionalProperties": False,
     "properties": {"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": {"type": "integer", "maximum": 14}}},
    {"type": "array", "items": {"type": "object", "required": ["title", "done"], "additionalProperties": False,
     "properties": {"title": _TEXT, "done": {"type": "boolean"}, "due": {"type": "string", "format": "date"}}}},
    {"type": "object", "required": ["steps", "answer"], "additionalProperties": False,
     "properties": {"steps": {"type": "array", "items": _TEXT}, "answer": {"anyOf": [_TEXT, {"type": "number"}]}}},
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
    fill_row: Any = grammars._fill_row
    fill: Any = grammars._fill

    def timed_row(job: Any, masks: Any) -> bool:
        begin = time.perf_counter()
        is_ready: bool = fill_row(job, masks)
        if is_ready:
            found.seconds.append(time.perf_counter() - begin)
        return is_ready

    def timed(*masks: Any) -> None:
        begin = time.thread_time()
        fill(*masks)
        found.processor += time.thread_time() - begin

    grammars._fill_row, grammars._fill = timed_row, timed
    try:
        yield found
    finally:
        del grammars._fill_row, grammars._fill


Request = tuple[str, int]  # grammar, or "" for none, and max_tokens


def answer(llama: Llama, options: argparse.Namespace, requests: Iterable[Request]) -> tuple[list[Step], list[int]]:
    """Answer the requests, `rows` at a time. Returns the steps, and the tokens that were sampled for each answer."""
    sequences, limits = [], []
    for i, (grammar, max_tokens) in enumerate(requests):
        limits.append(max_tokens)
        prompt = random_prompt(options.prompt, vocabulary(llama), seed=i)
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=max_tokens, grammar=grammar, ignore_eos=not grammar)
        sequences.append(LlamaSequence(prompt, params, options.prompt + max_tokens))
    with watched(llama.runner) as steps:
        llama._run(sequences)
    for seq in sequences:
        if seq.error is not None:
            raise seq.error
    # The token that ends an answer before its limit is not among its tokens.
    lengths = [len(seq.tokens) - options.prompt + 1 for seq in sequences]
    return steps, [min(length, limit) for length, limit in zip(lengths, limits, strict=True)]


def step_ms(llama: Llama, options: argparse.Namespace, grammars: Sequence[str], num_with: int) -> tuple[float, float]:
    """The median decode step of `rows` rows, of which `num_with` have a grammar; and all processor time, in seconds."""
    begin = time.process_time()
    steps, _ = answer(
        llama,
        options,
        [(grammars[i % len(grammars)] if i < num_with else "", options.output) for i in range(options.rows)],
    )
    processor = time.process_time() - begin
    return statistics.median(step.ms for step in steps if step.is_decode and step.num_rows == options.rows), processor


def beside_ordinary(
    llama: Llama, options: argparse.Namespace, grammars: Sequence[str], limit: int
) -> tuple[list[Request], list[Request]]:
    """Requests of which some rows have no grammar, and the others answer two each: without grammars, and with them. Both have
    answers of the same lengths."""
    plain = [("", limit)] * (options.rows - options.grammar_rows)
    with_grammars = [*plain, *((grammars[i % len(grammars)], limit) for i in range(2 * options.grammar_rows))]
    _, lengths = answer(llama, options, with_grammars)  # compiles, too
    return [*plain, *(("", length) for length in lengths[len(plain) :])], with_grammars


def spread_us(seconds: Sequence[float]) -> dict[str, float]:
    microseconds = sorted(second * 1e6 for second in seconds)
    found = {name: percentile(microseconds, share) for name, share in (("median", 50), ("p90", 90), ("p99", 99))}
    return found | {"count": len(microseconds)}


def interval(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The mean ratio of the second to the first of each pair, with its 95 % interval."""
    ratios = [second / first for first, second in pairs]
    center, margin = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return {"mean": center, "low": center - margin, "high": center + margin, "pairs": len(ratios)}


def by_name(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each figure with a name of one line."""
    for name, value in found.items():
        if isinstance(value, dict):
            yield from ((f"{name}: {inner}", each) for inner, each in value.items())
        else:
            yield name, value


def endless_answers(llama: Llama, options: argparse.Namespace, grammars: Sequence[str]) -> dict[str, Any]:
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
        "ratio": interval(pairs),
        "mask_us": spread_us(masks.seconds),
        "share_of_processor_time": masks.processor / all_processor,
    }


def ordinary_answers(llama: Llama, options: argparse.Namespace, grammars: Sequence[str], limit: int) -> dict[str, Any]:
    """All steps beside answers that end by themselves or at the limit, and beside as many tokens without grammars."""
    runs = beside_ordinary(llama, options, grammars, limit)
    whole: list[tuple[float, float]] = []
    worst: list[tuple[float, float]] = []
    all_processor = 0.0
    with timed_masks(llama) as masks:
        for i in range(options.pairs):
            steps: dict[int, list[float]] = {}
            for k in ((0, 1), (1, 0))[i % 2]:
                begin = time.process_time()
                steps[k] = [step.ms for step in answer(llama, options, runs[k])[0]]
                all_processor += time.process_time() - begin if k else 0.0
            assert len(steps[0]) == len(steps[1])
            whole.append((sum(steps[0]), sum(steps[1])))
            worst.append((percentile(steps[0], 99), percentile(steps[1], 99)))
    return {
        "mask_us": spread_us(masks.seconds),
        "share_of_processor_time": masks.processor / all_processor,
        "ratio_of_all_steps": interval(whole),
        "step_ms_p99_without": Spread.of(one for one, _ in worst),
        "step_ms_p99_with": Spread.of(one for _, one in worst),
    }


def print_figures(title: str, figures: dict[str, Any]) -> None:
    print_table(
        title,
        ["figure", "value"],
        [
            ("decode step without grammars, ms", figures["step_ms_without"]),
            ("decode step with grammars in some rows, ms", figures["step_ms_with"]),
            ("the grammars' thread, share of the processor time", figures["share_of_processor_time"]),
            *((f"ratio: {name}", value) for name, value in figures["ratio"].items()),
            *((f"a row's mask, us: {name}", value) for name, value in figures["mask_us"].items()),
            *(
                (f"ordinary answers of at most {limit} tokens, {figure}", value)
                for limit, found in figures["ordinary_answers_by_limit"].items()
                for figure, value in by_name(found)
            ),
        ],
    )


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
    context = options.prompt + max(options.output, *LIMITS)
    with built_llama(options, dtype=options.dtype, max_seq_len=context, max_batch_size=options.rows) as llama:
        tokenizer = llama.tokenizer
        llama.runner._grammars = SlotGrammars(
            lambda: grammar_vocabulary(tokenizer, tokenizer.stop_ids),
            vocabulary(llama),
            options.rows,
            context,
        )
        checked = [checked_grammar(json_schema_grammar(schema), "schema") for schema in (*SCHEMAS, *ORDINARY)]
        both = [for_answer(grammar, tokenizer) for grammar in checked]
        grammars, ordinary = both[: len(SCHEMAS)], both[len(SCHEMAS) :]
        figures = endless_answers(llama, options, grammars)
        figures["ordinary_answers_by_limit"] = {
            str(limit): ordinary_answers(llama, options, ordinary, limit) for limit in LIMITS
        }
        weights = case_name(llama, options)
    rows = {"rows": options.rows, "rows_with_grammar": options.grammar_rows}
    print_figures(f"Grammars, {model_name(options)} {weights}, {rows}", figures)
    emit("grammars", {"model": model_name(options), "weights": weights, **rows, **figures}, options)
