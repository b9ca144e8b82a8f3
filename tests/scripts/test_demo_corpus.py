"""The corpus and the committed artefacts of the demo model (scripts/demo, demo). Nothing here trains."""

import importlib
import json
import random
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "demo"
DEMO = ROOT / "demo"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of scripts/demo as the scripts do: by its bare name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("grammar", "facts", "stories", "talk", "corpus")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


def test_the_same_seed_gives_the_same_documents_and_another_seed_does_not(demo: Any) -> None:
    stream = demo("corpus").stream
    first = list(islice(stream(7, "train"), 200))
    assert first == list(islice(stream(7, "train"), 200))
    assert first != list(islice(stream(8, "train"), 200))


def test_heldout_documents_never_occur_in_training(demo: Any) -> None:
    stream = demo("corpus").stream
    heldout = {document.text for document in islice(stream(3, "heldout"), 100)}
    training = {document.text for document in islice(stream(3, "train"), 8000)}
    assert not heldout & training


def test_a_chat_round_has_the_format_of_llama_2(demo: Any) -> None:
    chat_round = demo("corpus").chat_round
    assert chat_round(" Hi ", " Hello! ") == "[INST] Hi [/INST] Hello! "
    assert chat_round("Hi", "Hello!", "Be kind.") == "[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST] Hello! "


def test_sums_in_the_corpus_are_right(demo: Any) -> None:
    talk, rng = demo("talk"), random.Random(0)
    for _ in range(500):
        answer = talk.ARITHMETIC.exchange(rng).answer
        match = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", answer)
        assert match
        left, sign, right, result = match.groups()
        x, y = int(left), int(right)
        assert int(result) == {"+": x + y, "-": x - y, "*": x * y, "/": x // max(y, 1)}[sign]


def test_no_question_has_an_unfilled_slot_or_bracket(demo: Any) -> None:
    talk, rng = demo("talk"), random.Random(0)
    for _ in range(3000):
        exchange = talk.draw(rng)
        assert exchange.user.strip()
        assert exchange.answer.strip()
        assert not re.search(r"[\[\]{}|]", exchange.user + exchange.answer + exchange.brief)


def test_expand_draws_nested_alternatives(demo: Any) -> None:
    expand = demo("grammar").expand
    sentences = {expand(random.Random(seed), "[a[b|c]|{d}]", d="x") for seed in range(50)}
    assert sentences == {"ab", "ac", "x"}


@pytest.fixture(scope="module")
def shards() -> list[dict[str, Any]]:
    torch = pytest.importorskip("torch")
    return [torch.load(DEMO / f"consolidated.{rank:02d}.pth", weights_only=True) for rank in range(2)]


def test_the_shards_have_the_names_shapes_and_type_of_a_llama_2_checkpoint(shards: list[dict[str, Any]]) -> None:
    torch = pytest.importorskip("torch")
    spm = pytest.importorskip("sentencepiece")
    params = json.loads((DEMO / "params.json").read_text())
    vocab = spm.SentencePieceProcessor(model_file=str(DEMO / "tokenizer.model")).vocab_size()
    dim, head = params["dim"], params["dim"] // params["n_heads"]
    multiple = params["multiple_of"]
    hidden = multiple * -(-int(2 * 4 * dim / 3) // multiple)
    expected = {"tok_embeddings.weight": (vocab, dim // 2), "norm.weight": (dim,), "output.weight": (vocab // 2, dim)}
    for index in range(params["n_layers"]):
        layer = f"layers.{index}."
        expected |= {
            layer + "attention.wq.weight": (params["n_heads"] * head // 2, dim),
            layer + "attention.wk.weight": (params["n_kv_heads"] * head // 2, dim),
            layer + "attention.wv.weight": (params["n_kv_heads"] * head // 2, dim),
            layer + "attention.wo.weight": (dim, dim // 2),
            layer + "feed_forward.w1.weight": (hidden // 2, dim),
            layer + "feed_forward.w2.weight": (dim, hidden // 2),
            layer + "feed_forward.w3.weight": (hidden // 2, dim),
            layer + "attention_norm.weight": (dim,),
            layer + "ffn_norm.weight": (dim,),
        }
    for shard in shards:
        assert {name: tuple(weight.shape) for name, weight in shard.items()} == expected
        assert all(weight.dtype == torch.bfloat16 and weight.is_contiguous() for weight in shard.values())
        assert all(torch.isfinite(weight).all() for weight in shard.values())


def test_norms_are_the_same_in_every_shard(shards: list[dict[str, Any]]) -> None:
    for name in shards[0]:
        if name.endswith("norm.weight"):
            assert shards[0][name].equal(shards[1][name])


def test_both_shards_together_take_at_most_8_megabytes() -> None:
    assert sum((DEMO / f"consolidated.{rank:02d}.pth").stat().st_size for rank in range(2)) <= 8_000_000


def test_the_tokenizer_has_the_ids_and_options_of_llama_2() -> None:
    spm = pytest.importorskip("sentencepiece")
    tokenizer = spm.SentencePieceProcessor(model_file=str(DEMO / "tokenizer.model"))
    assert (tokenizer.unk_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()) == (0, 1, 2, -1)
    assert tokenizer.vocab_size() % 8 == 0
    assert len(tokenizer.encode("[INST]")) > 1  # plain text, no control piece
    assert tokenizer.decode(tokenizer.encode("A  b\n 12 你好 [INST]")) == "A  b\n 12 你好 [INST]"
    assert tokenizer.encode("\n", out_type=str)[-1] == "<0x0A>"


def test_the_heldout_text_exists_and_is_short() -> None:
    assert 20_000 <= (DEMO / "heldout.txt").stat().st_size <= 60_000
