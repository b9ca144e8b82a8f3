"""One command a question: `python -m benchmarks.questions.decode`, from the repository's root, on an idle machine.

This file must stay: an installed package has a directory of the same name, and would be taken for a part of this one.
"""
