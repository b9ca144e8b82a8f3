"""A chat with a running server through the openai package: a streamed answer, then a second turn that is not streamed.

python examples/chat_openai.py --base-url http://127.0.0.1:8000
"""

import argparse

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a running server.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--question", default="Tell me a story about a fox.")
    args = parser.parse_args()
    # The server needs no key, but the package does.
    client = OpenAI(base_url=args.base_url.rstrip("/").removesuffix("/v1") + "/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"model: {model}\n")

    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": args.question}]
    print(f"user: {args.question}\nassistant: ", end="")
    answer = ""
    stream = client.chat.completions.create(
        model=model, messages=messages, seed=1, max_tokens=200, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        for choice in chunk.choices:
            text = choice.delta.content or ""
            answer += text
            print(text, end="", flush=True)
        if chunk.usage is not None:
            print(f"\n({chunk.usage.prompt_tokens} tokens read, {chunk.usage.completion_tokens} written)\n")

    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "What is 2 + 3?"}]
    reply = client.chat.completions.create(model=model, messages=messages, temperature=0)
    print(f"user: What is 2 + 3?\nassistant: {reply.choices[0].message.content}")


if __name__ == "__main__":
    main()
