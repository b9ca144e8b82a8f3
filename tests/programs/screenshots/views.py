"""The views of the pages: for each a function that brings a window to it through the page's own controls."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Final

import httpx

from tests.support.browser import ask, until

Json = dict[str, Any]

KEY: Final = "a-key-for-the-pictures"
PLOTTED: Final = 8  # samples of each plot, one a second, before its picture
MARKDOWN: Final = """## How rest works

Sleep is *not* idle time. It has **three parts**:

1. light sleep, in which `heart_rate` falls
2. deep sleep
   - the body mends
   - growth is fast
3. dreams

> The best bridge between despair and hope is a good night's sleep.

| part | share | minutes of a night |
|---|---|---|
| light | 55 % | 264 |
| deep | 20 % | 96 |
| dreams | 25 % | 120 |

```python
def minutes(share: float, hours: float = 8.0) -> float:
    return 60 * hours * share  # a line that is longer than the screen of a phone, so that its block scrolls
```

So go to bed early."""
OBJECT: Final = {"name": "Lily", "age": 7, "friends": [{"name": "Tom", "pets": ["duck", "fox"]}], "is_happy": True}
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"enum": ["celsius"]}},
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        },
    }
]
LONG: Final = {"ignore_eos": True, "max_tokens": 3000}


@contextmanager
def loading(url: str) -> Iterator[None]:
    """Four clients, each with one request after another."""
    stopping = Event()

    def ask_on() -> None:
        with httpx.Client(
            base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False
        ) as client:
            while not stopping.is_set():
                client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 80}).raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask_on) for _ in range(4)]
        try:
            yield
        finally:
            stopping.set()
    for each in clients:
        each.result()


@dataclass(slots=True)
class Visit:
    """One window on the pages. fields: what the route adds to the page's requests."""

    page: Any
    url: str
    window: str
    fields: Json = field(default_factory=dict)

    @property
    def is_phone(self) -> bool:
        return self.window.startswith("phone")

    def begin(self, text: str, **fields: Any) -> None:
        """Ask in a conversation of its own."""
        self.page.press("body", "Control+k")
        self.fields = fields
        ask(self.page, text)

    def wait_answered(self) -> None:
        until(self.page, "!document.querySelector('.busy') && !!document.querySelector('.again')")

    def set(self, name: str, value: str) -> None:
        """Change one of the page's settings in its dialog."""
        self.page.click("#open-settings")
        self.page.fill(f"#{name}", value)
        self.page.click("#settings .primary")


def show_empty(visit: Visit) -> None:
    visit.page.press("body", "Control+k")
    until(visit.page, "!!document.getElementById('used').textContent && !document.getElementById('status').textContent")


def show_streaming(visit: Visit) -> None:
    visit.begin("Tell me a story.", **LONG)
    until(visit.page, "document.querySelector('.busy .text')?.textContent.length > 200")


def show_stopped(visit: Visit) -> None:
    show_streaming(visit)
    if visit.is_phone:
        visit.page.click("#stop")
    else:
        visit.page.press("body", "Escape")
    visit.page.wait_for_selector("text=stopped")


def show_conversation(visit: Visit) -> None:
    visit.begin("Who are you?", max_tokens=60)
    visit.wait_answered()
    visit.fields = {"structured_outputs": {"choice": [MARKDOWN]}, "max_tokens": 1500}
    ask(
        visit.page,
        "How do people rest? Please write a few words about each part of the night, with a table and some code.",
    )
    until(visit.page, "document.querySelectorAll('.turn').length === 4 && !document.querySelector('.busy')")
    assert visit.page.locator(".code pre").count() == 1


def show_probabilities(visit: Visit) -> None:
    visit.page.click("#open-settings")
    visit.page.check("#probabilities")
    visit.page.click("#settings .primary")
    visit.begin("Tell me a story.", temperature=1.2, max_tokens=120, seed=7)
    visit.wait_answered()
    unlikely = visit.page.locator(".p0, .p1").nth(2)
    if visit.is_phone:
        unlikely.focus()
    else:
        unlikely.hover()
    visit.page.wait_for_selector("#alternatives:popover-open")


def show_json(visit: Visit) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "child", "schema": {"const": OBJECT}, "strict": True}}
    visit.begin("Describe Lily as JSON.", response_format=form)
    visit.wait_answered()
    assert json.loads(visit.page.text_content(".assistant pre")) == OBJECT


def show_call(visit: Visit) -> None:
    visit.set("tools", json.dumps(TOOLS))
    visit.begin("How is the weather in Oslo?", tool_choice="required", parallel_tool_calls=False)
    visit.wait_answered()
    assert visit.page.text_content(".calls summary") == "Calls get_weather"


def show_result(visit: Visit) -> None:
    show_call(visit)
    visit.fields = {"tool_choice": "none", "max_tokens": 60}
    visit.page.fill(".calls textarea", '{"degrees": -4, "sky": "clear"}')
    visit.page.click("text=Send the result")
    until(visit.page, "!document.querySelector('.busy') && document.querySelectorAll('.turn').length === 4")
    visit.page.click(".tool summary")
    visit.page.locator("#scroller").evaluate("shown => shown.scrollTo(0, shown.scrollHeight)")


def show_conversations(visit: Visit) -> None:
    for text in (
        "Who are you?",
        "What is 7 plus 5, and why does a title this long have to end somewhere?",
        "Tell me more.",
    ):
        visit.begin(text, max_tokens=20)
        visit.wait_answered()
    if visit.is_phone:
        visit.page.click("#menu")
    visit.page.locator("#conversations .open").nth(1).hover()
    visit.page.wait_for_timeout(300)  # the list slides in


def show_editing(visit: Visit) -> None:
    visit.begin("Tell me about a duck.", max_tokens=60)
    visit.wait_answered()
    visit.page.locator(".user-row").hover()
    visit.page.click(".edit")
    visit.page.fill(".user-row textarea", "Tell me about a duck that meets a fox by the river.")


def show_error(visit: Visit) -> None:
    visit.begin("This answer may have more tokens than the context.", max_tokens=10**6)
    visit.page.wait_for_selector(".error")


def show_settings(visit: Visit) -> None:
    visit.set("system", "You are brief.")
    visit.set("max_tokens", "200")
    visit.page.click("#open-settings")


def show_status(visit: Visit) -> None:
    """While other clients load the server."""
    with loading(visit.url):
        visit.page.click("#open-status")
        until(visit.page, "document.querySelectorAll('.plot polyline').length >= 6")
        until(
            visit.page,
            f"document.querySelector('.plot polyline').getAttribute('points').split(' ').length >= {PLOTTED}",
        )


def show_facts(visit: Visit) -> None:
    visit.page.click("#open-status")
    visit.page.wait_for_selector("#facts tr")
    assert visit.page.locator("#ranks tr").count() == 3  # a head and two ranks
    visit.page.locator("#status-view").evaluate("view => view.scrollTo(0, view.querySelector('#ranks').offsetTop - 16)")


def show_reference(visit: Visit) -> None:
    visit.page.goto(visit.url + "/docs")
    visit.page.wait_for_selector("details")
    visit.page.locator("summary", has_text="/v1/chat/completions").first.click()
    visit.page.locator("details[open]").first.evaluate("opened => opened.scrollIntoView()")


VIEWS: Final[dict[str, Callable[[Visit], None]]] = {
    "empty": show_empty,
    "streaming": show_streaming,
    "stopped": show_stopped,
    "conversation": show_conversation,
    "probabilities": show_probabilities,
    "json": show_json,
    "tool-call": show_call,
    "tool-result": show_result,
    "conversations": show_conversations,
    "editing": show_editing,
    "error": show_error,
    "settings": show_settings,
    "status": show_status,
    "facts": show_facts,
    "reference": show_reference,
}
# What must still hold after the picture.
STILL: Final = {"streaming": "!!document.querySelector('.busy')"}
# What Chromium logs for an answer that is not 2xx, in the views that ask for one.
EXPECTED: Final = {"error": "the server responded with a status of 400"}
