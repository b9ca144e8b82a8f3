"""The model without a server and without Ray, by the API of Meta's reference.

python examples/in_process.py
torchrun --nproc-per-node 2 examples/in_process.py      # the same on two ranks, from the same checkpoint
"""

import argparse
import os
from pathlib import Path

from llama_core import Llama
from llama_core.text.chat_format import Dialog

DEMO = Path(__file__).resolve().parent.parent / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate in this process.")
    parser.add_argument("--ckpt-dir", type=Path, default=DEMO)
    parser.add_argument("--tokenizer-path", type=Path, help="default: what lies in the checkpoint's directory")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--max-seq-len", type=int, default=256)
    args = parser.parse_args()
    llama = Llama.build(
        args.ckpt_dir,
        args.tokenizer_path,
        max_seq_len=args.max_seq_len,
        max_batch_size=4,
        device=args.device,
    )
    dialogs: list[Dialog] = [
        [{"role": "user", "content": "What is the capital of Italy?"}],
        [{"role": "user", "content": "Tell me a story about a fox."}],
    ]
    answers = llama.chat_completion(dialogs, temperature=0.6, top_p=0.9, max_gen_len=64)
    (continued,) = llama.text_completion(["Once upon a time"], temperature=0.0, max_gen_len=24, logprobs=True)

    if os.environ.get("RANK", "0") != "0":
        return  # all ranks have the same results; rank 0 prints them
    for dialog, answer in zip(dialogs, answers, strict=True):
        print(f"user: {dialog[-1]['content']}\nassistant: {answer['generation']['content']}\n")
    print(f"Once upon a time ... {continued['generation']}")
    print(f"log-probability of the whole continuation: {sum(continued['logprobs']):.3f}")


if __name__ == "__main__":
    main()
