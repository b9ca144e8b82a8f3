"""Asks a server for JSON by many schemas, and checks every answer against its schema.

All answers that finish must validate. Those to bounded schemas, whose longest text fits the limit of tokens, must finish; the
others may be cut off at the limit (`finish_reason` length). Each schema is asked for twice, streamed and not, for the same
text. Requests without a grammar run beside them: their texts must be those of the same requests alone.

    python -m tests.programs.structured_output --schemas 500
    python -m tests.programs.structured_output --url http://127.0.0.1:8000 --schemas 500

`--suite` asks also for the schemas of the official JSON-Schema-Test-Suite that have a valid instance, as the source
distribution of jsonschema has them. The server may refuse them; what it answers must follow them. The refused are counted by
reason.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0
    python -m tests.programs.structured_output --suite jsonschema-4.26.0.tar.gz
"""

import argparse
import asyncio
import json
import random
import re
import tarfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema

from tests.support.server import served

MAX_TOKENS = 512
MAX_TOLD = 400  # characters of a schema in a prompt: the demo model reads characters
SUITE = "json/tests/draft2020-12/"
WORDS = ("red", "blue", "dog", "cat", "tree", "house", "river", "stone")


def bounded(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose texts have at most some hundred characters."""
    kinds = ["enum", "const", "boolean", "null", "integer", "string", "pattern", "format"]
    nested = ["array", "object", "object", "anyOf"] if depth < 2 else []
    kind = draw.choice([*kinds, *nested, *(["ref"] if depth == 0 else [])])
    if kind == "enum":
        return {"enum": draw.sample([*WORDS, 1, 2.5, True, None, ["x"]], 3)}
    if kind == "const":
        return {"const": draw.choice([*WORDS, 7, {"a": 1}])}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "integer":
        low = draw.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randrange(200)}
    if kind == "string":
        return {"type": "string", "minLength": draw.randrange(3), "maxLength": draw.randrange(3, 12)}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-z]{1,6}$", "^[A-Z][0-9]{2}(-[0-9]{2})?$", "^(yes|no)$"])}
    if kind == "format":
        return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])}
    if kind == "array":
        return {"type": "array", "items": bounded(draw, depth + 1), "minItems": 1, "maxItems": draw.randrange(1, 4)}
    if kind == "anyOf":
        return {"anyOf": [bounded(draw, depth + 1) for _ in range(2)]}
    if kind == "ref":
        return {
            "$defs": {"x": bounded(draw, depth + 2)},
            "type": "array",
            "items": {"$ref": "#/$defs/x"},
            "maxItems": 2,
        }
    names = draw.sample(WORDS, draw.randrange(1, 4))
    return {
        "type": "object",
        "properties": {name: bounded(draw, depth + 1) for name in names},
        "required": draw.sample(names, draw.randrange(len(names) + 1)),
        "additionalProperties": False,
    }


def unbounded(draw: random.Random) -> dict[str, Any]:
    """A schema that allows texts of any length."""
    return draw.choice(
        [
            {"type": "object"},
            {"type": "array", "items": {"type": "integer"}},
            {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
            {"type": "array", "items": {"type": "string"}, "minItems": 2},
            {"type": "object", "additionalProperties": {"type": "number"}, "minProperties": 1},
            {"type": "string"},
            {"type": "string", "format": "time"},
            {"type": "number", "exclusiveMinimum": 0},
        ]
    )  # fmt: skip


def suite_schemas(source: Path) -> Iterator[Any]:
    """The schemas of the JSON-Schema-Test-Suite with a valid instance: from jsonschema's source distribution, packed or not."""
    texts = (
        _packed(source) if source.is_file() else [each.read_text() for each in sorted(source.rglob(f"{SUITE}*.json"))]
    )
    groups = [group for text in texts for group in json.loads(text)]
    assert groups, f"{source} has no {SUITE}*.json"
    yield from (group["schema"] for group in groups if any(test["valid"] for test in group["tests"]))


def _packed(source: Path) -> list[str]:
    with tarfile.open(source) as archive:
        names = sorted(name for name in archive.getnames() if re.search(f"{SUITE}[^/]+[.]json$", name))
        return [file.read().decode() for name in names if (file := archive.extractfile(name)) is not None]


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """The text and the finish reason; the reason of the error and "refused" for a 400."""
    if not body.get("stream"):
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code == 400:
            return _reason(response.json()["error"]), "refused"
        choice = response.raise_for_status().json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason = "", ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code == 400:
            return _reason(json.loads(await response.aread())["error"]), "refused"
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
    return text, reason


def _reason(error: dict[str, Any]) -> str:
    return str(error["message"]).partition(": ")[2][:80]


def body_of(seed: int, **fields: Any) -> dict[str, Any]:
    content = f"Write JSON about a {random.Random(seed).choice(WORDS)}."
    return {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0.8,
        "seed": seed,
    } | fields


def with_schema(seed: int, schema: dict[str, Any], *, told: bool = False, **fields: Any) -> dict[str, Any]:
    """told: the prompt has the schema, as clients' prompts do. A model without it has no reason to come to an end."""
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    body = body_of(seed, response_format=form, **fields)
    if told:
        words = f"Answer with JSON of this schema: {json.dumps(schema)}"
        body["messages"].insert(0, {"role": "system", "content": words})
    return body


@dataclass
class Findings:
    """counts: by kind of schema and outcome. refused: reasons, each schema's once, by kind."""

    counts: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=lambda: {"generated": Counter(), "suite": Counter()})
    faults: list[str] = field(default_factory=list)

    def summary(self, num_generated: int, num_suite: int) -> dict[str, Any]:
        def ended(kind: str) -> float:
            answered = sum(self.counts[f"{kind}: {reason}"] for reason in ("stop", "length"))
            return round(self.counts[f"{kind}: stop"] / max(1, answered), 3)

        kinds = {"generated": num_generated} | ({"suite": num_suite} if num_suite else {})
        return {
            "counts": dict(sorted(self.counts.items())),
            "share of answers that end by themselves": {
                kind: ended(kind) for kind in ("bounded", "unbounded", "suite")
            },
            "refused schemas": {
                kind: {
                    "share": round(self.refused[kind].total() / max(1, total), 3),
                    "by reason": dict(self.refused[kind].most_common()),
                }
                for kind, total in kinds.items()
            },
            "faults": self.faults,
        }


async def check(
    url: str, num_schemas: int, concurrency: int, frequency_penalty: float = 0.0, suite: list[Any] | None = None
) -> dict[str, Any]:
    """Counts by kind of schema and outcome, the refused schemas by reason, and the faults that were found."""
    limit = asyncio.Semaphore(concurrency)
    found = Findings()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        context = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        fields = {"max_tokens": min(MAX_TOKENS, context - 256), "frequency_penalty": frequency_penalty}

        async def one(seed: int, kind: str, schema: Any) -> None:
            body = with_schema(seed, schema, told=kind != "bounded" and len(json.dumps(schema)) < MAX_TOLD, **fields)
            answers = []
            for stream in (False, True):
                async with limit:
                    answers.append(await answer(client, body | {"stream": stream}))
            for _, reason in answers:
                found.counts[f"{kind}: {reason}"] += 1
            if answers[1] != answers[0]:
                found.faults.append(f"the streamed answer differs: {json.dumps(schema)}: {answers}"[:500])
            text, reason = answers[0]
            if reason == "refused":
                found.refused["suite" if kind == "suite" else "generated"][text] += 1
            if (reason == "refused" and kind != "suite") or (reason != "stop" and kind == "bounded"):
                found.faults.append(f"{reason}: {json.dumps(schema)}: {text!r}"[:500])
            elif reason == "stop":
                try:
                    jsonschema.validate(json.loads(text), schema)
                except (ValueError, jsonschema.ValidationError) as error:
                    found.faults.append(f"{json.dumps(schema)}: {text!r}: {error}"[:500])

        plain = {seed: body_of(seed, max_tokens=40) for seed in range(0, num_schemas, 16)}
        alone = {seed: await answer(client, body) for seed, body in plain.items()}

        async def unchanged(seed: int) -> None:
            async with limit:
                again = await answer(client, plain[seed])
            found.counts["plain"] += 1
            if again != alone[seed]:
                found.faults.append(f"the text of plain request {seed} changed: {alone[seed]} {again}")

        work = [one(seed, *generated(seed)) for seed in range(1, num_schemas + 1)]
        work += [one(seed, "suite", schema) for seed, schema in enumerate(suite or (), num_schemas + 1)]
        work += [unchanged(seed) for seed in plain]
        random.Random(1).shuffle(work)
        await asyncio.gather(*work)
    return found.summary(num_schemas, len(suite or ()))


def generated(seed: int) -> tuple[str, dict[str, Any]]:
    """The kind and the schema."""
    draw = random.Random(seed)
    return ("bounded", bounded(draw)) if seed % 5 != 0 else ("unbounded", unbounded(draw))


@asynccontextmanager
async def running(url: str | None) -> AsyncIterator[str]:
    """`url`, or that of a server with the demo model for the time of the check."""
    if url is not None:
        yield url
        return
    with served(args={"max_seq_len": 1024}) as server:
        await asyncio.to_thread(server.wait_ready)
        yield server.url


async def run(
    url: str | None, num_schemas: int, concurrency: int, frequency_penalty: float = 0.0, suite: list[Any] | None = None
) -> dict[str, Any]:
    async with running(url) as base:
        return await check(base, num_schemas, concurrency, frequency_penalty, suite)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--schemas", type=int, default=500, help="how many are generated")
    parser.add_argument("--suite", type=Path, help="jsonschema's source distribution, a file or a folder")
    parser.add_argument("--suite-schemas", type=int, help="how many of the suite, chosen at random; all by default")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="of the answers with a schema")
    options = parser.parse_args()
    suite = list(suite_schemas(options.suite)) if options.suite else []
    if options.suite_schemas is not None:
        suite = random.Random(1).sample(suite, min(options.suite_schemas, len(suite)))
    found = asyncio.run(run(options.url, options.schemas, options.concurrency, options.frequency_penalty, suite))
    print(json.dumps(found, indent=1))
    raise SystemExit(bool(found["faults"]))


if __name__ == "__main__":
    main()
