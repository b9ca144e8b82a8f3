"""A stream that goes on after its connection broke: the same request again, with the id of the last event that arrived.

python examples/resume_stream.py --base-url http://127.0.0.1:8000

It breaks the connection twice itself.
"""

import argparse
import json
import uuid
from collections.abc import Iterator

import httpx

REQUEST = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "temperature": 0.8, "ignore_eos": True}


def events(base_url: str, key: str, last_id: str) -> Iterator[tuple[str, str]]:
    """(id, data) of the events after `last_id`; of all events without it."""
    headers = {"Idempotency-Key": key} | ({"Last-Event-ID": last_id} if last_id else {})
    with httpx.stream("POST", f"{base_url}/v1/completions", json=REQUEST, headers=headers, timeout=60) as answer:
        answer.raise_for_status()
        event_id = ""
        for line in answer.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                yield event_id, value


def main() -> None:
    parser = argparse.ArgumentParser(description="Resume a stream.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    args = parser.parse_args()
    key, last_id, num_connections = uuid.uuid4().hex, "", 0
    while True:
        num_connections += 1
        for number, (event_id, data) in enumerate(events(args.base_url, key, last_id)):
            last_id = event_id
            if data == "[DONE]":
                print(f"\n({num_connections} connections)")
                return
            print(json.loads(data)["choices"][0]["text"], end="", flush=True)
            if number == 10 and num_connections < 3:
                break


if __name__ == "__main__":
    main()
