"""One command for each question about speed: `python -m benchmarks NAME`, from the repository's root, on an idle machine.

This file must stay: an installed package has a directory of the same name, and Python would take it for a part of this one.
"""
