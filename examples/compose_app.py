"""A second Serve application that asks the model by its handle: it turns a sentence into JSON, sorts it by a label, and lets
the model call a tool.

python examples/compose_app.py
RAY_AUTH_MODE=token python examples/compose_app.py --address HOST:PORT   # where several clusters run
"""

import argparse
import json
import logging
from typing import Any

import ray
from ray import serve

from deployments.handle_types import ChatRequest
from llama_core.grammar.build import json_schema_grammar
from llama_core.scheduling.sampling_params import SamplingParams
from llama_core.text.tools.tool import Tool

ANIMAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "color": {"enum": ["red", "blue", "green", "brown"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 8},
    },
    "required": ["name", "color", "legs"],
    "additionalProperties": False,
}
LABELS = [" happy", " sad"]
LEGS = {
    "type": "object",
    "properties": {"animals": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["animals"],
}
COUNT = Tool("count_legs", "The legs that so many dogs have.", json.dumps({**LEGS, "additionalProperties": False}))


@serve.deployment(ray_actor_options={"num_cpus": 0})  # the ranks may hold every core
class Reader:
    """Reads a sentence with the application `llama`."""

    def __init__(self, app: str) -> None:
        self._llama = serve.get_app_handle(app)

    async def read(self, sentence: str) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, max_tokens=300, grammar=json_schema_grammar(ANIMAL))
        question = [{"role": "user", "content": f"Describe the animal as JSON: {sentence}"}]
        [animal] = await self._llama.sample.remote([question], params, request_id="describe")
        scores = await self._llama.score.remote(f"{sentence} The animal is", LABELS)
        likeliest = max(zip(scores, LABELS, strict=True), key=lambda pair: pair[0].score)
        return {"animal": json.loads(animal.text), "mood": likeliest[1].strip()}

    async def count(self, question: str) -> dict[str, Any]:
        """Two turns: the model calls the tool, and answers from its result."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        params = SamplingParams(temperature=0.0, max_tokens=100)
        required = ChatRequest(messages, [COUNT], "required", parallel_tool_calls=False)
        called = await self._llama.chat.remote(required, params)
        messages.append(called.message())
        calls = {call.id: 4 * json.loads(call.arguments)["animals"] for call in called.tool_calls}
        messages += [call.result(f"{calls[call.id]} legs") for call in called.tool_calls]
        answer = await self._llama.chat.remote(ChatRequest(messages, [COUNT], "none"), params)
        return {"legs": list(calls.values()), "answer": answer.content}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compose an application with the model's Serve handle.")
    parser.add_argument("--address", default="auto", help="of the running cluster, as for ray.init")
    parser.add_argument("--app", default="llama", help="the application's name in serve_config.yaml")
    args = parser.parse_args()
    ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    reader = serve.run(Reader.bind(args.app), name="reader", route_prefix=None)  # type: ignore[attr-defined]
    print(reader.read.remote("The little red dog likes to sing.").result())
    print(reader.count.remote("How many legs do two dogs have?").result())
    serve.delete("reader")
    ray.shutdown()


if __name__ == "__main__":
    main()
