"""An OpenAI server that needs no model: python -m tests.benchmarks.fake_server PORT"""

import sys

import uvicorn

from deployments.http.app import build_http_app
from deployments.observe.metrics import Metrics
from tests.support.scripted_engine import FakeEngine


def main() -> None:
    engine = FakeEngine("One two three.", step_s=0.003)  # so that tokens arrive one by one
    uvicorn.run(
        build_http_app(engine, Metrics(in_ray=False)), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning"
    )


if __name__ == "__main__":
    main()
