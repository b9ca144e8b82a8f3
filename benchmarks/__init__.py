"""One command a question: `python -m benchmarks.bench_decode`, from the repository's root, on an idle machine."""
