"""The short form of the fuzz command's part for chats, and the findings that it must report."""

from random import Random

import pytest

from llama_core.text.template.marked_text import MarkedText
from tests.fuzz import chats


def test_hostile_and_clean_dialogs_keep_the_rules_of_chats() -> None:
    outcome = chats.run(600, seed=Random().randrange(10**6))
    assert outcome.findings == []
    assert outcome.counts["qwen: hostile"] > 10 and outcome.counts["qwen: clean"] > 2
    assert outcome.counts["built-in llama3: hostile"] > 10


def test_contents_that_count_as_the_templates_text_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def trust(value: object) -> object:
        return {name: MarkedText.written(text) for name, text in value.items()} if isinstance(value, dict) else value

    monkeypatch.setattr("llama_core.text.template.chat_template.mark_contents", trust)
    outcome = chats.run(300, seed=1)
    assert any("control tokens" in finding for finding in outcome.findings)
