"""Asks a server for JSON by many schemas, and checks every answer against its schema.

All answers must finish and validate: those to bounded schemas, whose longest text fits the limit of tokens, by themselves; the
others also where the server shortened them to the limit (`finish_reason` length). Half are streamed. Requests without a grammar
run beside them: their texts must be those of the same requests alone.

    python -m tests.programs.structured_output --schemas 500
    python -m tests.programs.structured_output --url http://127.0.0.1:8000 --schemas 500
"""

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema

from tests.support.server import served

MAX_TOKENS = 512
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


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[str, str]:
    """The text and the finish reason; the error's message and "refused" for a 400."""
    if not body.get("stream"):
        response = await client.post("/v1/chat/completions", json=body)
        if response.status_code == 400:
            return response.json()["error"]["message"], "refused"
        choice = response.raise_for_status().json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    text, reason = "", ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code == 400:
            return json.loads(await response.aread())["error"]["message"], "refused"
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
    return text, reason


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
    body = body_of(seed, response_format=form, stream=seed % 2 == 0, **fields)
    if told:
        words = f"Answer with JSON of this schema: {json.dumps(schema)}"
        body["messages"].insert(0, {"role": "system", "content": words})
    return body


async def check(url: str, num_schemas: int, concurrency: int, frequency_penalty: float = 0.0) -> dict[str, Any]:
    """Counts by kind of schema and outcome, and the faults that were found."""
    limit = asyncio.Semaphore(concurrency)
    counts: Counter[str] = Counter()
    faults: list[str] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        context = (await client.get("/v1/models")).json()["data"][0]["max_model_len"]
        fields = {"max_tokens": min(MAX_TOKENS, context - 256), "frequency_penalty": frequency_penalty}

        async def one(seed: int) -> None:
            draw = random.Random(seed)
            is_bounded = seed % 5 != 0
            schema = bounded(draw) if is_bounded else unbounded(draw)
            kind = "bounded" if is_bounded else "unbounded"
            async with limit:
                text, reason = await answer(client, with_schema(seed, schema, told=not is_bounded, **fields))
            counts[f"{kind}: {reason}"] += 1
            if reason == "refused" or (is_bounded and reason != "stop"):
                faults.append(f"{reason}: {json.dumps(schema)}: {text!r}"[:500])
                return
            try:
                jsonschema.validate(json.loads(text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                faults.append(f"{json.dumps(schema)}: {text!r}: {error}"[:500])

        plain = {seed: body_of(seed, max_tokens=40) for seed in range(0, num_schemas, 16)}
        alone = {seed: await answer(client, body) for seed, body in plain.items()}

        async def unchanged(seed: int) -> None:
            async with limit:
                found = await answer(client, plain[seed])
            counts["plain"] += 1
            if found != alone[seed]:
                faults.append(f"the text of plain request {seed} changed: {alone[seed]} {found}")

        work = [one(seed) for seed in range(1, num_schemas + 1)] + [unchanged(seed) for seed in plain]
        random.Random(1).shuffle(work)
        await asyncio.gather(*work)
    num_unbounded = sum(count for kind, count in counts.items() if kind.startswith("unbounded"))
    share = counts["unbounded: stop"] / max(1, num_unbounded)
    summary = {"counts": dict(sorted(counts.items())), "share of unbounded that end by themselves": round(share, 3)}
    return summary | {"faults": faults}


@asynccontextmanager
async def running(url: str | None) -> AsyncIterator[str]:
    """`url`, or that of a server with the demo model for the time of the check."""
    if url is not None:
        yield url
        return
    with served(args={"max_seq_len": 1024}) as server:
        await asyncio.to_thread(server.wait_ready)
        yield server.url


async def run(url: str | None, num_schemas: int, concurrency: int, frequency_penalty: float = 0.0) -> dict[str, Any]:
    async with running(url) as base:
        return await check(base, num_schemas, concurrency, frequency_penalty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--frequency-penalty", type=float, default=0.0, help="of the answers with a schema")
    options = parser.parse_args()
    found = asyncio.run(run(options.url, options.schemas, options.concurrency, options.frequency_penalty))
    print(json.dumps(found, indent=1))
    raise SystemExit(bool(found["faults"]))


if __name__ == "__main__":
    main()
