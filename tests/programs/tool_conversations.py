"""Holds conversations with tools in every tool format, and checks each call against the schema of its tool.

Each conversation has two turns: a request that offers generated tools, and one with the calls' results. Each request is sent
streamed and not, with the same seed, and both answers must be the same. A call names an offered tool, and its arguments are
JSON that validates, whether the tool is `strict` or not; the last one may be cut off at `max_tokens`. Calls that `tool_choice`
requires must come; `max_tokens` may only end an answer that chose to call, or that may call several times.

    python -m tests.programs.tool_conversations
    python -m tests.programs.tool_conversations --ckpt models/SmolLM2-135M-Instruct.Q4_1.gguf --formats hermes mistral

tool_conversations.json has the results of the demo model and of SmolLM2 in all formats: `--json FILE` replaces the rows of the
checkpoint that ran, and keeps those of others.
"""

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema

from llama_core.text.tools.tool_format import TOOL_FORMATS
from tests.programs.structured_output import WORDS, bounded
from tests.support.server import served

MAX_TOKENS: Final = 400
MODES: Final = ("auto", "required", "named", "none")

Json = dict[str, Any]


def tool(draw: random.Random, name: str) -> Json:
    """A function whose arguments have at most some hundred characters."""
    names = draw.sample([*WORDS, "größe", "a-b", "x y"], draw.randrange(4))
    schema: Json = {"type": "object", "properties": {each: bounded(draw, depth=1) for each in names}}
    schema |= {"required": draw.sample(names, draw.randrange(len(names) + 1)), "additionalProperties": False}
    function: Json = {"name": name, "description": f"About the {draw.choice(WORDS)}.", "parameters": schema}
    if draw.random() < 0.5:
        function["strict"] = True
    return {"type": "function", "function": function}


def request(draw: random.Random, messages: list[Json], tools: list[Json], mode: str) -> Json:
    names = [each["function"]["name"] for each in tools]
    named = {"type": "function", "function": {"name": draw.choice(names)}}
    return {
        "messages": messages,
        "tools": tools,
        "tool_choice": named if mode == "named" else mode,
        "parallel_tool_calls": draw.random() < 0.5,
        "max_tokens": MAX_TOKENS,
        "temperature": draw.choice([0.0, 0.8, 1.2]),
        "seed": draw.randrange(2**31),
    }


async def whole(client: httpx.AsyncClient, body: Json) -> tuple[Json, str]:
    """The message and its finish reason."""
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


async def streamed(client: httpx.AsyncClient, body: Json) -> tuple[Json, str]:
    """What the chunks of a stream add up to, as OpenAI's clients add them."""
    message: Json = {"content": None, "refusal": None}
    reason = ""
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            delta, reason = choice["delta"], choice["finish_reason"] or reason
            message |= {"role": delta["role"]} if "role" in delta else {}
            for name in ("content", "reasoning_content"):
                if delta.get(name) is not None:
                    message[name] = (message.get(name) or "") + delta[name]
            for call in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    assert set(call) == {"index", "id", "type", "function"} and call["function"]["arguments"] == ""
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return message, reason


def faults_of(body: Json, mode: str, message: Json, reason: str) -> list[str]:
    """What is wrong with an answer."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in body["tools"]}
    calls, found = message.get("tool_calls", []), []
    is_cut = reason == "length"
    for number, call in enumerate(calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if is_cut and number == len(calls) - 1:
            continue
        if name not in schemas or (mode == "named" and name != body["tool_choice"]["function"]["name"]):
            found.append(f"calls {name}")
            continue
        try:
            jsonschema.validate(json.loads(arguments), schemas[name])
        except (ValueError, jsonschema.ValidationError) as error:
            found.append(f"{arguments!r} against {json.dumps(schemas[name])}: {str(error)[:200]}")
    if mode in ("required", "named") and not calls:
        found.append("no call")
    if mode == "none" and calls:
        found.append("a call in spite of tool_choice none")
    if not body["parallel_tool_calls"] and len(calls) > 1:
        found.append(f"{len(calls)} calls, not one")
    if is_cut and mode in ("required", "named") and not body["parallel_tool_calls"]:
        found.append(f"one call does not end within {MAX_TOKENS} tokens: {calls}")
    expected = "length" if is_cut else "tool_calls" if calls else "stop"
    if reason != expected:
        found.append(f"finish_reason {reason}, not {expected}")
    return found


async def converse(client: httpx.AsyncClient, tool_format: str, seed: int, counts: Counter[str]) -> list[str]:
    """Both turns of a conversation. Returns its faults."""
    draw = random.Random(f"{tool_format} {seed}")
    tools = [tool(draw, name) for name in draw.sample(["get_weather", "look-up", "f", "set_x"], draw.randrange(1, 4))]
    messages: list[Json] = [{"role": "user", "content": f"Tell me about the {draw.choice(WORDS)}."}]
    faults: list[str] = []
    for mode in (MODES[seed % 3], draw.choice(MODES)):
        body = request(draw, messages, tools, mode)
        message, reason = await whole(client, body)
        parts, streamed_reason = await streamed(client, body)
        same = all(message.get(key) == parts.get(key) for key in ("content", "tool_calls"))
        if not same or reason != streamed_reason:
            faults.append(f"streamed {parts} {streamed_reason}, whole {message} {reason}")
        faults += faults_of(body, mode, message, reason)
        calls = message.get("tool_calls", [])
        counts["answers"] += 1
        counts["calls"] += len(calls)
        counts["cut"] += reason == "length"
        if reason == "length" or not calls:
            # Llama 2's chats refuse messages with their own tags, as Meta's reference does.
            content = re.sub(r"\[/?INST\]|<</?SYS>>", "", message["content"] or "") or "-"
            messages = [*messages, {"role": "assistant", "content": content}]
            messages.append({"role": "user", "content": "Go on."})
            continue
        results = [{"role": "tool", "tool_call_id": call["id"], "content": draw.choice(WORDS)} for call in calls]
        messages = [*messages, message, *results]
    return [f"{tool_format}, conversation {seed}: {fault}" for fault in faults]


def with_rows(file: Path, checkpoint: str, rows: list[Json]) -> list[Json]:
    """The rows of `file`, if there is one, with those of the checkpoint replaced."""
    others = json.loads(file.read_text()) if file.exists() else []
    kept = [row for row in others if row["checkpoint"] != checkpoint]
    return sorted([*kept, *rows], key=lambda row: row["checkpoint"] != "demo")


async def check(url: str, tool_format: str, seeds: range, concurrency: int) -> tuple[Counter[str], list[str]]:
    limit, counts = asyncio.Semaphore(concurrency), Counter[str]()

    async def one(seed: int) -> list[str]:
        async with limit:
            return await converse(client, tool_format, seed, counts)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        found = await asyncio.gather(*map(one, seeds))
    return counts, [fault for faults in found for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=204, help="in all formats together")
    parser.add_argument("--formats", nargs="+", default=list(TOOL_FORMATS), choices=list(TOOL_FORMATS))
    parser.add_argument("--ckpt", default="demo", help="a folder, or a .gguf file")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the results to this file")
    options = parser.parse_args()
    args = {"ckpt_dir": options.ckpt, "max_seq_len": 4096}
    each, all_faults, rows = -(-options.conversations // len(options.formats)), [], []
    print(f"{'format':14}{'conversations':>14}{'answers':>9}{'calls':>7}{'cut':>5}{'faults':>8}", flush=True)
    for tool_format in options.formats:
        with served(args=args | {"tool_format": tool_format}) as server:
            server.wait_ready()
            counts, faults = asyncio.run(check(server.url, tool_format, range(each), options.concurrency))
        all_faults += faults
        row = {"checkpoint": Path(options.ckpt).name, "format": tool_format, "conversations": each}
        rows.append(row | {key: counts[key] for key in ("answers", "calls", "cut")} | {"faults": faults})
        numbers = f"{counts['answers']:9}{counts['calls']:7}{counts['cut']:5}{len(faults):8}"
        print(f"{tool_format:14}{each:14}{numbers}", flush=True)
    for fault in all_faults:
        print(fault)
    if options.json:
        found = with_rows(options.json, Path(options.ckpt).name, rows)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    raise SystemExit(bool(all_faults))


if __name__ == "__main__":
    main()
