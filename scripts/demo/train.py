"""Makes the demo model: corpus, tokenizer, weights, two bfloat16 shards in Meta's format.

    python scripts/demo/train.py --out demo --steps 2400
    python scripts/demo/train.py --out demo --minutes 25    # by the clock
    python scripts/demo/train.py --out demo --sample "What is the capital of France?"

The training model below is a plain Llama 2 whose parameter names are Meta's. It has no cache and no ranks: it is
for training and for samples of the result, not for serving.
"""

import argparse
import io
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece as spm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # to import the modules beside this file, however this file is loaded
from corpus import Document, chat_round, stream

BOS, EOS = 1, 2
TOKENS_PER_STEP = 4096
TYPED_WEIGHT = 0.1
HELDOUT_SEED_OFFSET = 1_000_003


@dataclass(frozen=True)
class Shape:
    """params.json, without the vocabulary size, which the tokenizer decides."""

    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    multiple_of: int = 32
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def hidden_dim(self) -> int:
        """Llama's feed-forward width: two thirds of 4 dim, rounded up to a multiple."""
        return self.multiple_of * math.ceil(int(2 * 4 * self.dim / 3) / self.multiple_of)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the adjacent pairs (2i, 2i+1). x: [batch, heads, time, head_dim]; cos, sin: [time, head_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wq = nn.Linear(shape.dim, shape.n_heads * shape.head_dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.n_kv_heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.n_heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        groups = self.shape.n_heads // self.shape.n_kv_heads

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)

        query = rotate(heads(self.wq(x)), cos, sin)
        key = rotate(heads(self.wk(x)), cos, sin).repeat_interleave(groups, dim=1)
        value = heads(self.wv(x)).repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(query.to(value.dtype), key.to(value.dtype), value, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.hidden_dim, bias=False)
        self.w2 = nn.Linear(shape.hidden_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feed_forward = FeedForward(shape)
        self.attention_norm = RMSNorm(shape.dim, shape.norm_eps)
        self.ffn_norm = RMSNorm(shape.dim, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """[batch, time] token ids -> [batch, time, vocabulary] logits."""

    def __init__(self, shape: Shape, vocab_size: int, max_length: int = 2048, theta: float = 10000.0) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = RMSNorm(shape.dim, shape.norm_eps)
        self.output = nn.Linear(shape.dim, vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(
                    ("wo.weight", "w2.weight")
                )  # weights whose output is added to the residual stream start small
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.n_layers) if last else 1.0))
        frequency = theta ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angle = torch.outer(torch.arange(max_length).float(), frequency)
        # Plain attributes, not buffers: Meta's checkpoints need no rope.freqs.
        self.cos, self.sin = angle.cos(), angle.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits: Tensor = self.output(self.norm(x))
        return logits


def train_tokenizer(out: Path, seed: int, vocab_size: int, num_documents: int = 12000) -> None:
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
        logits = model(batch[:, :-1])
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def learning_rate(progress: float, peak: float) -> float:
    """Linear warm-up over 3 %, then a cosine to 1 % of the peak."""
    if progress < 0.03:
        return peak * progress / 0.03
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (progress - 0.03) / 0.97)))


def round_to_bfloat16(model: nn.Module) -> None:
    """Round the weights as saving does, so that the reported loss is that of the served weights."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())


def heldout_loss(model: Llama, tokenizer: spm.SentencePieceProcessor, seed: int) -> float:
    source = rows(tokenizer, stream(seed + HELDOUT_SEED_OFFSET, "heldout"), 512)
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, list(islice(source, 8))).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def train(
    out: Path, shape: Shape, vocab_size: int, steps: int, minutes: float, seed: int, peak_rate: float, resume: bool
) -> None:
    """Train, save and report.

    With `steps` > 0 the run is as deterministic as the threads allow. Otherwise the schedule follows the clock, which
    bounds the time on a busy machine but makes the number of steps, and so the weights, differ from run to run.
    """
    started = time.monotonic()
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    earlier: list[dict[str, Any]] = []
    if resume:
        earlier = json.loads((out / "TRAINING.json").read_text())["runs"]
        model, tokenizer = load(out)
        model.train()
    else:
        train_tokenizer(out, seed, vocab_size)
        tokenizer = spm.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
        model = Llama(shape, tokenizer.vocab_size())
    num_parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{num_parameters:,} parameters, {tokenizer.vocab_size()} pieces", flush=True)
    decayed = [weight for weight in model.parameters() if weight.dim() == 2]
    kept = [weight for weight in model.parameters() if weight.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}],
        lr=0.0,
        betas=(0.9, 0.97),
        fused=True,
    )
    documents = stream(seed + 1 + len(earlier), "train")
    # Every fourth step has rows of 1,024, so that positions beyond 512 are known too. A step keeps its tokens.
    sources = {length: rows(tokenizer, documents, length) for length in (512, 1024)}
    smoothed, step, progress = 0.0, 0, 0.0
    while progress < 1:
        length = 1024 if step % 4 == 3 else 512
        batch = list(islice(sources[length], TOKENS_PER_STEP // length))
        rate = learning_rate(progress, peak_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        elapsed_s = time.monotonic() - started
        progress = step / steps if steps else elapsed_s / (60 * minutes)
        smoothed = loss.item() if step == 1 else 0.97 * smoothed + 0.03 * loss.item()
        if step % 50 == 0:
            print(f"step {step} ({progress:.0%}) loss {smoothed:.4f} rate {rate:.5f} {elapsed_s:.0f} s", flush=True)
        if step % 500 == 0:
            save(out, model, shape)  # for --sample during training
    before = heldout_loss(model, tokenizer, seed)
    round_to_bfloat16(model)
    after = heldout_loss(model, tokenizer, seed)
    save(out, model, shape)
    write_heldout(out, seed)
    report = {
        "seed": seed,
        "peak_rate": peak_rate,
        "typed_weight": TYPED_WEIGHT,
        "steps": step,
        "tokens": step * TOKENS_PER_STEP,
        "wall_time_s": round(time.monotonic() - started),
        "parameters": num_parameters,
        "vocab_size": tokenizer.vocab_size(),
        "final_train_loss": round(smoothed, 4),
        "heldout_loss_float32": round(before, 4),
        "heldout_loss_bfloat16": round(after, 4),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "sentencepiece": spm.__version__},
    }
    (out / "TRAINING.json").write_text(json.dumps({"runs": [*earlier, report]}, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def shard(name: str, weight: Tensor, rank: int, num_ranks: int) -> Tensor:
    """The rank's part of a weight, split as in Llama 2's checkpoints: a copy in bfloat16."""
    if name.endswith("norm.weight"):
        part = weight
    else:
        by_columns = name.endswith(("wo.weight", "w2.weight", "tok_embeddings.weight"))
        part = weight.chunk(num_ranks, dim=1 if by_columns else 0)[rank]
    return part.detach().to(torch.bfloat16).clone().contiguous()


def save(out: Path, model: Llama, shape: Shape, num_ranks: int = 2) -> None:
    for rank in range(num_ranks):
        part = {name: shard(name, weight, rank, num_ranks) for name, weight in model.state_dict().items()}
        # torch names the folder inside the archive after the file, as in Meta's files.
        torch.save(part, str(out / f"consolidated.{rank:02d}.pth"))
    (out / "params.json").write_text(json.dumps({**asdict(shape), "vocab_size": -1}) + "\n")


def write_heldout(out: Path, seed: int, num_bytes: int = 40_000) -> None:
    """Write documents that are not in the training set, separated by empty lines, to measure perplexity."""
    texts: list[str] = []
    for document in stream(seed + HELDOUT_SEED_OFFSET + 1, "heldout"):
        if document.kind in ("story", "lines"):
            texts.append(document.text)
        if sum(map(len, texts)) > num_bytes:
            break
    (out / "heldout.txt").write_text("\n\n".join(texts) + "\n")


def load(out: Path) -> tuple[Llama, spm.SentencePieceProcessor]:
    """The saved shards, joined again."""
    tokenizer = spm.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    params: dict[str, Any] = json.loads((out / "params.json").read_text())
    params.pop("vocab_size")
    model = Llama(Shape(**params), tokenizer.vocab_size())
    parts = [torch.load(path, weights_only=True) for path in sorted(out.glob("consolidated.*.pth"))]
    joined: dict[str, Tensor] = {}
    for name, weight in parts[0].items():
        if name.endswith("norm.weight"):
            joined[name] = weight.float()
        else:
            by_columns = name.endswith(("wo.weight", "w2.weight", "tok_embeddings.weight"))
            joined[name] = torch.cat([part[name] for part in parts], dim=1 if by_columns else 0).float()
    model.load_state_dict(joined)
    return model.eval(), tokenizer


@torch.no_grad()
def sample(
    model: Llama, prompt: list[int], temperature: float, generator: torch.Generator, limit: int = 300
) -> list[int]:
    """Continue `prompt` until EOS (left out) or `limit` tokens, with top-p 0.9; temperature 0 is greedy."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < limit:
        logits = model(torch.tensor([tokens]))[0, -1]
        if temperature == 0:
            following = int(logits.argmax())
        else:
            ordered, ids = torch.softmax(logits / temperature, -1).sort(descending=True)
            ordered[ordered.cumsum(0) - ordered > 0.9] = 0
            following = int(ids[torch.multinomial(ordered, 1, generator=generator)])
        if following == EOS:
            break
        tokens.append(following)
    return tokens[len(prompt) :]


def chat_prompt(
    tokenizer: spm.SentencePieceProcessor, finished: list[tuple[str, str]], user: str, system: str | None = None
) -> list[int]:
    """The tokens of a dialog up to the next answer."""
    tokens: list[int] = []
    for index, (question, answer) in enumerate([*finished, (user, "")]):
        text = chat_round(question, answer, system if index == 0 else None)
        if index == len(finished):
            tokens += [BOS, *tokenizer.encode(text.rstrip())]
        else:
            tokens += [BOS, *tokenizer.encode(text), EOS]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument(
        "--steps", type=int, default=0, help="exact number of steps (default: by the clock, see --minutes)"
    )
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak-rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--resume", action="store_true", help="continue from the model in --out, with new documents")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab-size", type=int, default=1280)
    parser.add_argument("--sample", metavar="PROMPT", help="do not train: answer PROMPT with the model in --out")
    parser.add_argument("--plain", action="store_true", help="with --sample: complete PROMPT instead of answering it")
    parser.add_argument("--system", help="with --sample: a system message")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.sample is None:
        train(
            arguments.out,
            Shape(),
            arguments.vocab_size,
            arguments.steps,
            arguments.minutes,
            arguments.seed,
            arguments.peak_rate,
            arguments.resume,
        )
        return
    model, tokenizer = load(arguments.out)
    if arguments.plain:
        prompt = [BOS, *tokenizer.encode(arguments.sample)]
    else:
        prompt = chat_prompt(tokenizer, [], arguments.sample, arguments.system)
    for temperature in (0.0, 0.6):
        generator = torch.Generator().manual_seed(arguments.seed)
        print(f"[{temperature}]", tokenizer.decode(sample(model, prompt, temperature, generator)))


if __name__ == "__main__":
    main()
