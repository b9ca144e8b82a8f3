"""`llama-ray convert`: writes a checkpoint in another format."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from llama_core.config import DType
from llama_core.errors import LlamaError

if TYPE_CHECKING:
    from llama_core.convert.conversion import Format, Quantize


def run(
    source: Path,
    target: Path,
    target_format: "Format",
    num_shards: int,
    tokenizer: Path | None,
    dtype: DType,
    quantize: "Quantize | None",
    *,
    verify: bool,
) -> int:
    """Convert with a progress bar, and print the files. Returns the exit status."""
    from llama_core.convert.conversion import convert  # imports torch

    try:
        with tqdm(total=1, unit="B", unit_scale=True, desc=f"writing {target.name}") as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            converted = convert(
                source,
                target,
                target_format,
                num_shards,
                tokenizer_path=tokenizer,
                dtype=dtype,
                quantize=quantize,
                verify=verify,
                on_progress=show,
            )
    except LlamaError as error:
        print(f"convert: {error.message}", file=sys.stderr)
        return 1
    for file in converted.files:
        print(file)
    if converted.difference is not None:
        what = "source" if quantize is None else f"source, quantized to {quantize} while it loads,"
        print(f"the logits of {what} and target differ by {converted.difference:.3g} at most")
    return 0
