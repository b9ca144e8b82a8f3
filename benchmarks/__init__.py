"""One command for each question about speed: `python -m benchmarks NAME`, from the repository's root, on an idle machine.

This file must stay: an installed package also has a directory `benchmarks`, which Python would import instead.
"""
