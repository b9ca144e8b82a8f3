"""Another program on the same Ray cluster calls the model by its Serve handle: Meta's API, no HTTP.

    python examples/handle_from_ray_app.py
    RAY_AUTH_MODE=token python examples/handle_from_ray_app.py --address HOST:PORT   # where several clusters run

Inside another Serve application, await the same handle: `await handle.chat_completion.remote(dialogs)`.
"""

import argparse
import logging

import ray
from ray import serve
from ray.serve.handle import DeploymentResponseGenerator


def main() -> None:
    parser = argparse.ArgumentParser(description="Call the model by its Ray Serve handle.")
    parser.add_argument("--address", default="auto", help="of the running cluster, as for ray.init")
    parser.add_argument("--app", default="llama", help="the application's name in serve_config.yaml")
    args = parser.parse_args()
    ray.init(address=args.address, log_to_driver=False, logging_level=logging.ERROR)
    handle = serve.get_app_handle(args.app)

    prompts = ["Once upon a time", "The capital of France is"]
    results = handle.text_completion.remote(prompts, temperature=0.0, max_gen_len=16).result()
    for prompt, result in zip(prompts, results, strict=True):
        print(f"{prompt} ... {result['generation']}")

    dialogs = [
        [{"role": "user", "content": "What is 2 + 3?"}],
        [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "What is the capital of Italy?"},
        ],
    ]
    for dialog, answer in zip(dialogs, handle.chat_completion.remote(dialogs, temperature=0.0).result(), strict=True):
        print(f"{dialog[-1]['content']} ... {answer['generation']['content']}")

    print("Streamed: ", end="")
    stream = handle.options(stream=True).stream.remote(dialogs[0], max_gen_len=32, seed=1)
    assert isinstance(stream, DeploymentResponseGenerator)
    for part in stream:
        print(part["generation"], end="", flush=True)
    print()
    ray.shutdown()


if __name__ == "__main__":
    main()
