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
        # On a terminal alone; the names of the files follow it.
        with tqdm(total=1, unit="B", unit_scale=True, desc=f"writing {target.name}", leave=False, disable=None) as bar:

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
        what = "SOURCE" if quantize is None else f"SOURCE, quantized to {quantize} as it loads,"
        print(f"largest difference of the logits of {what} and TARGET: {converted.difference:.3g}")
    return 0
