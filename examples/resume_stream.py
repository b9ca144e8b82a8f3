"""A stream that goes on after its connection broke, through the openai package or, with --anthropic, through anthropic's.

python examples/resume_stream.py --base-url http://127.0.0.1:8000

It breaks the connection twice itself.
"""

import argparse
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

QUESTION = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "max_tokens": 200}


def resumed(open_stream: Callable[[dict[str, str]], Any]) -> Iterator[Any]:
    """The events of a stream; `open_stream` sends the request, each time with the same body and with these headers."""
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    for attempt in range(10):
        try:
            with open_stream(headers) as stream:
                for number, event in enumerate(stream):
                    headers["Last-Event-ID"] = event.last_event_id
                    yield event
                    if number == 10 and attempt < 2:
                        raise ConnectionError("broken on purpose")
            return
        except Exception as error:  # of the package, or of its HTTP library: names depend on their versions
            if getattr(error, "body", None) is not None:
                raise  # an error that the server has sent
            print(f"[{error}, after event {headers.get('Last-Event-ID')}]", end="", flush=True)
            time.sleep(0.1 * attempt)
    raise ConnectionError("the connection broke ten times")


def openai_text(base_url: str) -> Iterator[str]:
    from openai import OpenAI

    client = OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=10)
    body: Any = QUESTION | {"model": client.models.list().data[0].id, "stream": True}
    for chunk in resumed(lambda headers: client.chat.completions.create(**body, extra_headers=headers)):
        yield from (choice.delta.content or "" for choice in chunk.choices)


def anthropic_text(base_url: str) -> Iterator[str]:
    from anthropic import Anthropic

    client = Anthropic(base_url=base_url, api_key="none", max_retries=10)
    body: Any = QUESTION | {"model": client.models.list().data[0].id, "stream": True}
    for event in resumed(lambda headers: client.messages.create(**body, extra_headers=headers)):
        if event.type == "content_block_delta":
            yield event.delta.text


def main() -> None:
    parser = argparse.ArgumentParser(description="Resume a stream.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--anthropic", action="store_true")
    args = parser.parse_args()
    for text in (anthropic_text if args.anthropic else openai_text)(args.base_url.rstrip("/")):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
