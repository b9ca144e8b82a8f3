"""Makes the demo model: corpus, tokenizer, weights, two bfloat16 shards in Meta's format.

python scripts/demo/train.py --out /tmp/demo --steps 2400
python scripts/demo/train.py --out /tmp/demo --minutes 25    # by the clock
"""

import argparse
import io
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece as spm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parent))  # to import the modules beside this file, however this file is loaded
from corpus import Document, stream

BOS, EOS = 1, 2
TOKENS_PER_STEP = 4096
TYPED_WEIGHT = 0.1
HELDOUT_SEED_OFFSET = 1_000_003
# params.json; the tokenizer decides the size of the vocabulary.
PARAMS = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "multiple_of": 32, "norm_eps": 1e-5}
HEAD_DIM = 32
# Meta's names of the parts of a layer, by transformers' names.
NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def new_model(vocab_size: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=PARAMS["dim"],
        intermediate_size=704,  # two thirds of 4 dim, rounded up to a multiple of 32
        num_hidden_layers=PARAMS["n_layers"],
        num_attention_heads=PARAMS["n_heads"],
        num_key_value_heads=PARAMS["n_kv_heads"],
        rms_norm_eps=PARAMS["norm_eps"],
        initializer_range=0.02,
        max_position_embeddings=2048,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # weights whose output is added to the residual stream start small
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
            layer.mlp.down_proj.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model


def train_tokenizer(out: Path, seed: int, vocab_size: int, num_documents: int = 12000) -> spm.SentencePieceProcessor:
    """SentencePiece BPE with Llama 2's options. Lines are fed one by one: a newline stays a byte, as in Llama 2."""
    lines = (line for document in islice(stream(seed, "train"), num_documents) for line in document.text.split("\n"))
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=(line for line in lines if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        unk_surface=" ⁇ ",
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        character_coverage=0.99995,  # all of ASCII; the few foreign letters of the corpus stay bytes
        # Characters that users type and that are rare in the corpus.
        required_chars="!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
        num_threads=1,
        minloglevel=2,
    )
    (out / "tokenizer.model").write_bytes(model.getvalue())
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def encode(tokenizer: spm.SentencePieceProcessor, document: Document) -> list[tuple[int, float]]:
    """(token, weight of its loss). The user's text has a low weight: the model need not predict it."""
    tokens: list[tuple[int, float]] = []
    for text in document.rounds:
        ids = [BOS, *tokenizer.encode(text), EOS]
        typed = text.find("[/INST]") + len("[/INST]") if text.startswith("[INST]") else 0
        num_typed = 1 + len(tokenizer.encode(text[:typed]))
        tokens += [(token, TYPED_WEIGHT if index < num_typed else 1.0) for index, token in enumerate(ids)]
    return tokens


def rows(
    tokenizer: spm.SentencePieceProcessor, documents: Iterator[Document], length: int
) -> Iterator[list[tuple[int, float]]]:
    """Rows of length + 1 tokens. Each starts with a document; the last document is cut off at the end."""
    while True:
        row: list[tuple[int, float]] = []
        while len(row) < length + 1:
            row += encode(tokenizer, next(documents))
        yield row[: length + 1]


def loss_of(model: nn.Module, rows_: list[list[tuple[int, float]]]) -> Tensor:
    """Weighted mean cross-entropy in nats. A row holds length + 1 pairs of token and weight."""
    batch = torch.tensor([[token for token, _ in row] for row in rows_])
    weights = torch.tensor([[weight for _, weight in row[1:]] for row in rows_])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1]).logits
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 3 %, then a cosine to 1 % of the peak."""
    if progress < 0.03:
        return peak * progress / 0.03
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97)))


@torch.no_grad()
def heldout_loss(model: nn.Module, tokenizer: spm.SentencePieceProcessor, seed: int) -> float:
    source = rows(tokenizer, stream(seed + HELDOUT_SEED_OFFSET, "heldout"), 512)
    return sum(loss_of(model, list(islice(source, 8))).item() for _ in range(4)) / 4


def train(out: Path, vocab_size: int, steps: int, minutes: float, seed: int, peak_rate: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, started = train_tokenizer(out, seed, vocab_size), time.monotonic()
    model = new_model(vocab_size)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    others = [weight for weight in model.parameters() if weight.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.97),
        fused=True,
    )
    documents = stream(seed + 1, "train")
    # Every fourth step has rows of 1,024, so that positions beyond 512 are known too. A step keeps its tokens.
    sources = {length: rows(tokenizer, documents, length) for length in (512, 1024)}
    smoothed, step, progress = 0.0, 0, 0.0
    while progress < 1:
        length = 1024 if step % 4 == 3 else 512
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, peak_rate)
        loss = loss_of(model, list(islice(sources[length], TOKENS_PER_STEP // length)))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        elapsed_s = time.monotonic() - started
        progress = step / steps if steps else elapsed_s / (60 * minutes)
        smoothed = loss.item() if step == 1 else 0.97 * smoothed + 0.03 * loss.item()
        if step % 50 == 0:
            print(f"step {step} ({progress:.0%}) loss {smoothed:.4f} {elapsed_s:.0f} s", flush=True)
    before = heldout_loss(model, tokenizer, seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    after = heldout_loss(model, tokenizer, seed)
    save(out, model)
    write_heldout(out, seed)
    report = {
        "seed": seed,
        "peak_rate": peak_rate,
        "typed_weight": TYPED_WEIGHT,
        "steps": step,
        "tokens": step * TOKENS_PER_STEP,
        "wall_time_s": round(time.monotonic() - started),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocab_size": vocab_size,
        "final_train_loss": round(smoothed, 4),
        "heldout_loss_float32": round(before, 4),
        "heldout_loss_bfloat16": round(after, 4),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "sentencepiece": spm.__version__},
    }
    (out / "TRAINING.json").write_text(json.dumps({"runs": [report]}, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def meta_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights by Meta's names, with queries' and keys' rows in Meta's order: pairs (2i, 2i + 1) are rotated."""
    for name, weight in model.state_dict().items():
        kind = name.removesuffix(".weight").removeprefix("model.")
        for theirs, ours in NAMES.items():
            kind = kind.replace(theirs, ours)
        if kind.endswith(("wq", "wk")):
            halves = weight.view(-1, 2, HEAD_DIM // 2, weight.shape[1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        yield f"{kind}.weight", weight


def save(out: Path, model: nn.Module, num_ranks: int = 2) -> None:
    """Shards split as in Llama 2's checkpoints, in bfloat16."""
    weights = dict(meta_weights(model))
    for rank in range(num_ranks):
        part = {}
        for name, weight in weights.items():
            by_columns = name.endswith(("wo.weight", "w2.weight", "tok_embeddings.weight"))
            split = weight if weight.dim() == 1 else weight.chunk(num_ranks, dim=1 if by_columns else 0)[rank]
            part[name] = split.to(torch.bfloat16).clone().contiguous()
        # torch names the folder inside the archive after the file, as in Meta's files.
        torch.save(part, str(out / f"consolidated.{rank:02d}.pth"))
    (out / "params.json").write_text(json.dumps({**PARAMS, "vocab_size": -1}) + "\n")


def write_heldout(out: Path, seed: int, num_bytes: int = 40_000) -> None:
    """Write documents that are not in the training set, separated by empty lines, to measure perplexity."""
    texts: list[str] = []
    for document in stream(seed + HELDOUT_SEED_OFFSET + 1, "heldout"):
        if document.kind in ("story", "lines"):
            texts.append(document.text)
        if sum(map(len, texts)) > num_bytes:
            break
    (out / "heldout.txt").write_text("\n\n".join(texts) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="exact number of steps; by the clock if absent")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=1280)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.vocab_size, options.steps, options.minutes, options.seed, options.peak_rate)


if __name__ == "__main__":
    main()
