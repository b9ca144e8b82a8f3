"""Lines of JSON: what they have, and that nothing in a message can begin a line of its own."""

import json
import logging
from datetime import datetime

from llama_core.log_lines import JsonFormatter, LogSubject, SubjectFilter, log_subject, of_request, where


def record(message: str, *args: object, **attributes: object) -> logging.LogRecord:
    made = logging.LogRecord("llama.test", logging.WARNING, "file.py", 1, message, args, None)
    made.__dict__.update(attributes)
    return made


def test_a_line_has_time_level_logger_and_message() -> None:
    made = record("%d blocks", 7, **of_request("abc"), trace_id="12")
    line = json.loads(JsonFormatter({"rank": 1}).format(made))
    assert datetime.fromisoformat(line.pop("time")).timestamp() - made.created < 0.002
    assert line == {
        "level": "WARNING",
        "logger": "llama.test",
        "message": "7 blocks",
        "rank": 1,
        "request_id": "abc",
        "trace_id": "12",
    }
    assert of_request("") == {}


def test_a_message_of_several_lines_is_one_line() -> None:
    text = JsonFormatter().format(record("a\nb\u2028c\x1b[0m"))
    assert "\n" not in text and text.isascii() and json.loads(text)["message"] == "a\nb\u2028c\x1b[0m"


def test_the_place_of_an_error_does_not_repeat_its_message() -> None:
    try:
        raise ValueError("a " + "secret")
    except ValueError as error:
        text = where(error)
    assert text.endswith("ValueError") and "test_log_lines.py" in text and "a secret" not in text


def test_a_line_has_the_id_of_the_running_tasks_request_unless_it_names_another() -> None:
    token = log_subject.set(LogSubject("mine", "99"))
    try:
        own, other = record("x"), record("x", request_id="other")
        assert SubjectFilter().filter(own) and SubjectFilter().filter(other)
    finally:
        log_subject.reset(token)
    assert (own.__dict__["request_id"], own.__dict__["trace_id"]) == ("mine", "99")
    assert other.__dict__["request_id"] == "other" and "trace_id" not in other.__dict__
    without = record("x")
    assert SubjectFilter().filter(without) and "request_id" not in without.__dict__
