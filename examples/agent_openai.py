"""An agent with a running server through the openai package: two turns that must call a tool, then an answer.

python examples/agent_openai.py --base-url http://127.0.0.1:8000
"""

import argparse
import json
from typing import Any

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

QUESTION = "What is the weather in Rome? And what is 17 times 23?"
CLOSING = "Thank you. Now tell me in one sentence how the weather in Rome is."


def get_weather(city: str) -> str:
    return f"It is sunny in {city}, with 24 degrees."


def multiply(a: int, b: int) -> str:
    return str(a * b)


FUNCTIONS: dict[str, Any] = {"get_weather": get_weather, "multiply": multiply}


def tool(name: str, description: str, properties: dict[str, Any]) -> ChatCompletionToolParam:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = {
    "get_weather": tool("get_weather", "The weather in a city.", {"city": {"type": "string", "maxLength": 40}}),
    "multiply": tool("multiply", "The product of two numbers.", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a running server's model call tools.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--question", default=QUESTION)
    args = parser.parse_args()
    # The server needs no key, but the package does.
    client = OpenAI(base_url=args.base_url.rstrip("/").removesuffix("/v1") + "/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"user: {args.question}")
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": args.question}]
    remaining = dict(TOOLS)
    while remaining:
        reply = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=list(remaining.values()),
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
        )
        for call in reply.choices[0].message.tool_calls or ():
            assert call.type == "function"
            name, arguments = call.function.name, call.function.arguments
            result = FUNCTIONS[name](**json.loads(arguments))
            print(f"assistant calls {name}({arguments})\n{name}: {result}")
            called: Any = {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [called]})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            del remaining[name]  # a small model may call one tool again and again
    messages.append({"role": "user", "content": CLOSING})
    print(f"user: {CLOSING}")
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=100)
    print(f"assistant: {answer.choices[0].message.content}")


if __name__ == "__main__":
    main()
