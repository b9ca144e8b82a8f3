"""An agent with a running server through the openai package: two turns that must call a tool, then an answer.

Both turns offer both tools, so the model chooses which one it calls.

python examples/agent_openai.py --base-url http://127.0.0.1:8000
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

QUESTION = "Translate the word cat to Italian. What is the weather in Rome?"
CLOSING = "Write one sentence about the weather in Rome."
NUM_CALLS = 2
ITALIAN = {"cat": "gatto", "dog": "cane", "fox": "volpe"}


def translate(word: str, language: str) -> str:
    return f"{word} is '{ITALIAN.get(word, word)}' in {language}"


def get_weather(city: str) -> str:
    return "sunny, 24 degrees"


FUNCTIONS: dict[str, Callable[..., str]] = {"translate": translate, "get_weather": get_weather}


def tool(name: str, description: str, properties: dict[str, Any]) -> ChatCompletionToolParam:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool(
        "translate",
        "Translate a word to another language.",
        {"word": {"type": "string", "maxLength": 40}, "language": {"type": "string", "maxLength": 20}},
    ),
    tool("get_weather", "Get the current weather in a city.", {"city": {"type": "string", "maxLength": 40}}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a running server's model call tools.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--closing", default=CLOSING, help="asks for the answer")
    args = parser.parse_args()
    # The server needs no key, but the package does.
    client = OpenAI(base_url=args.base_url.rstrip("/").removesuffix("/v1") + "/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"user: {args.question}")
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": args.question}]
    for _ in range(NUM_CALLS):
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=100,
        )
        for call in reply.choices[0].message.tool_calls or ():
            assert call.type == "function"
            name, arguments = call.function.name, call.function.arguments
            result = FUNCTIONS[name](**json.loads(arguments))
            print(f"assistant calls {name}({arguments})\n{name}: {result}")
            called: Any = {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": args.closing})
    print(f"user: {args.closing}")
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=100)
    print(f"assistant: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
