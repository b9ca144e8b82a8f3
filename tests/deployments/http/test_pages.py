"""The chat page and the API reference: self-contained, locked down, and used by a real browser where one is installed."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deployments.engine.interface import Readiness, SamplingDefaults
from llama_core.errors import NonFiniteLogits
from tests.deployments.http.browser import CHROMIUM, ask, chromium, until, watch
from tests.support import http
from tests.support.scripted_engine import MODEL_ID, FakeEngine, Served, canary, eventually, serve


@pytest.fixture
def served() -> Iterator[Served]:
    with serve(FakeEngine("A fox <b>and</b> a duck 🦆 met.", step_s=0.001)) as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_a_page_refers_to_no_other_host(served: Served, path: str) -> None:
    answer = http.get(served.url + path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"""(?:src|href|url|from|import|fetch)\s*[=(]?\s*["']?(?:https?:)?//""", answer.text)
    # A path from the root would lack the prefix below which Serve may mount the application.
    assert not re.findall(r"""(?:src|href|url|from|import|fetch)\s*[=(]\s*["']/""", answer.text)
    assert "innerHTML" not in answer.text
    assert "insertAdjacentHTML" not in answer.text
    assert len(answer.content) < 64_000


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_only_the_pages_own_script_and_style_may_run(served: Served, path: str) -> None:
    answer = http.get(served.url + path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    assert not re.search(r"\s(?:on\w+|style)=", answer.text.partition("<script>")[0].partition("</style>")[2])


def ask_and_wait(page: Any, text: str) -> None:
    num_turns = page.locator(".turn").count()
    ask(page, text)
    settled(page, num_turns + 2)


def settled(page: Any, num_turns: int) -> None:
    until(page, f"document.querySelectorAll('.turn').length === {num_turns} && !document.querySelector('.busy')")


@contextmanager
def settings(page: Any) -> Iterator[None]:
    """The open dialog."""
    page.click("#open-settings")
    yield
    page.press("#system", "Escape")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page in a browser. The teardown checks that nothing was logged as an error or blocked by the policy."""
    opened = browser.new_page()
    opened.set_default_timeout(30_000)
    seen = watch(opened, served.url)
    opened.goto(served.url)
    yield opened
    opened.close()
    assert seen.errors(expected="status of") == []  # an answer that is not 2xx, on purpose
    served.engine.fail_at = None
    served.engine.step_s = 0
    canary(served)


def test_a_chat_streams_into_the_page_as_text_never_as_markup(page: Any, served: Served) -> None:
    served.engine.step_s = 0.02
    until(page, f"document.getElementById('model').textContent === '{MODEL_ID}'")
    ask_and_wait(page, "Tell me <i>a story</i>")
    assert page.text_content(".user .text") == "Tell me <i>a story</i>"
    assert page.text_content(".assistant .text") == served.engine.answer
    assert page.query_selector("#log b, #log i") is None
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s", page.text_content(".meta"))
    assert re.fullmatch(r"\d+ / 256 tokens", page.text_content("#used"))
    assert page.evaluate("document.activeElement.id") == "input"


def test_escape_and_the_stop_button_stop_the_answer_and_its_sequence(page: Any, served: Served) -> None:
    served.engine.step_s = 0.5  # the stop comes before the answer ends
    for stop in (lambda: page.press("body", "Escape"), lambda: page.click("#stop")):
        ask(page, "Go on")
        until(page, "document.querySelector('.busy .text')?.textContent.length > 2")
        stop()
        page.wait_for_selector("text=stopped")
        eventually(lambda: served.engine.num_open == 0)
        assert served.engine.streams[-1].cancelled
        page.click("#clear")


def test_regenerate_asks_the_same_again_and_clear_begins_anew(page: Any, served: Served) -> None:
    ask(page, "Who are you?")
    page.click(".again")
    settled(page, 2)
    first, second = served.engine.streams
    assert first.prompt == second.prompt and first.params.seed != second.params.seed
    ask_and_wait(page, "And you?")
    page.click("#clear")
    assert page.locator(".turn").count() == 0 and page.is_visible("#empty")


def test_settings_reach_the_server_and_outlive_a_reload(page: Any, served: Served) -> None:
    with settings(page):
        for name, value in (("system", "Be brief."), ("temperature", "0"), ("top_p", "0.5"), ("max_tokens", "5")):
            page.fill(f"#{name}", value)
    page.reload()
    ask(page, "hi")
    page.wait_for_selector("text=cut off at the token limit")
    params = served.engine.streams[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0, 0.5, 5)
    assert "Be brief." in served.engine.tokenizer.decode(served.engine.streams[-1].prompt)


def test_the_servers_defaults_are_shown_and_only_what_was_moved_is_sent(page: Any, served: Served) -> None:
    served.engine.sampling_defaults = SamplingDefaults(temperature=0.27, top_p=0.75, repetition_penalty=1.1)
    page.reload()
    until(page, "document.getElementById('temperature').labels[0].textContent.includes('0.27')")
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    ask_and_wait(page, "hi")
    params = served.engine.streams[-1].params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.27, 0.75, 1.1)
    assert bodies[-1].keys() == {"messages", "stream", "stream_options"}
    with settings(page):
        page.fill("#top_p", "0.5")
    ask_and_wait(page, "hi")
    params, body = served.engine.streams[-1].params, bodies[-1]
    assert (params.temperature, params.top_p, body["top_p"]) == (0.27, 0.5, 0.5) and "temperature" not in body
    with settings(page):
        page.click("#reset")
    page.reload()
    ask_and_wait(page, "again")
    assert served.engine.streams[-1].params.top_p == 0.75 and "top_p" not in bodies[-1]


class TwoModels(FakeEngine):
    """An engine beside another one, whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.other = FakeEngine("The other one.")
        self.other.model_id, self.other.max_seq_len = "tuned <b>", 512

    @property
    def models(self) -> dict[str, Any]:
        return {self.model_id: self, self.other.model_id: self.other}


def test_a_model_can_be_chosen_and_stays_chosen(browser: Any) -> None:
    engine = TwoModels()
    with serve(engine) as two:
        page = browser.new_page()
        page.goto(two.url)
        page.select_option("#models", "tuned <b>")
        until(page, "document.getElementById('used').textContent === '0 / 512 tokens'")
        page.reload()
        ask_and_wait(page, "hi")
        assert page.text_content(".assistant .text") == "The other one." and not page.is_visible("#model")
        assert page.locator("#models option").all_text_contents() == [engine.model_id, "tuned <b>"]
        with settings(page):
            assert "the model's" in page.text_content("label:has(#temperature)")  # /props describes the first one
        page.select_option("#models", engine.model_id)
        page.click("#clear")
        ask_and_wait(page, "hi")
        assert page.text_content(".assistant .text") == engine.answer
        page.close()


DEEP_MARKUP = {
    "quotes": ">" * 3000 + " deep",
    "quotes apart": "> " * 3000 + "deep",
    "lists": "\n".join(" " * level + "- deep" for level in range(1500)),
    "lists in quotes": "\n".join("> " * 20 + " " * level + "1. deep" for level in range(1500)),
    "emphasis": "*_" * 1500 + "deep" + "_*" * 1500,
}


@pytest.mark.parametrize("text", DEEP_MARKUP.values(), ids=DEEP_MARKUP.keys())
def test_markup_that_is_nested_deep_is_drawn_as_text(page: Any, text: str) -> None:
    page.evaluate("text => { const turn = { role: 'assistant', content: text }; addTurn(turn); }", text)
    depth = "node => node.classList.contains('assistant') ? 0 : 1 + depth(node.parentElement)"
    all_depths = f"const depth = {depth}; return [...document.querySelectorAll('.assistant .text *')].map(depth)"
    deepest = f"() => Math.max(...(() => {{ {all_depths} }})())"
    assert 5 < page.evaluate(deepest) < 200
    assert "deep" in page.inner_text(".assistant .text")
    page.evaluate("dropTurns(0)")


def test_errors_are_shown_and_can_be_tried_again(page: Any, served: Served) -> None:
    served.engine.fail_at = (0, NonFiniteLogits("the model computed NaN for this request"))
    ask(page, "hi")
    page.wait_for_selector("text=the model computed NaN")
    served.engine.fail_at = (3, NonFiniteLogits("NaN in the middle"))
    page.click("text=Try again")
    page.wait_for_selector("text=NaN in the middle")
    served.engine.fail_at = None
    page.click("text=Regenerate")
    until(page, "!document.querySelector('.error')")
    settled(page, 2)
    assert page.text_content(".assistant .text") == served.engine.answer


MARKDOWN = """## Two *foxes*

A **bold** `fox` <script>alert(1)</script> met:

1. a duck
   - small
2. [a link](https://example.org)

> quoted

| a | b |
|---|---|
| 1 | <img src=x onerror=alert(2)> |

```python
print("a < b")
```
"""


def test_markdown_is_shown_and_cannot_carry_markup(page: Any, served: Served) -> None:
    served.engine.answer = MARKDOWN
    ask_and_wait(page, "Tell me")
    shown = page.locator(".assistant .text")
    assert shown.locator("h2 em").text_content() == "foxes"
    assert shown.locator("strong").text_content() == "bold"
    assert shown.locator("ol > li > ul > li").text_content() == "small"
    assert shown.locator("blockquote").text_content() == "quoted"
    assert shown.locator("td").all_text_contents() == ["1", "<img src=x onerror=alert(2)>"]
    assert shown.locator(".code pre").text_content() == 'print("a < b")'
    assert "<script>alert(1)</script>" in shown.text_content()
    assert page.query_selector("#log script, #log img, #log a") is None
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    shown.locator(".code button").click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == 'print("a < b")'


def test_json_is_indented_and_what_is_no_json_stays(page: Any, served: Served) -> None:
    served.engine.answer = '{"a": [1, {"b": "<i>"}]}'
    ask_and_wait(page, "JSON")
    assert page.text_content(".assistant pre") == '{\n  "a": [\n    1,\n    {\n      "b": "<i>"\n    }\n  ]\n}'
    served.engine.answer = "[not json"
    page.click(".again")
    until(page, "document.querySelector('.assistant .text').textContent === '[not json'")
    settled(page, 2)


def test_conversations_outlive_a_reload_and_can_be_renamed_and_deleted(page: Any, served: Served) -> None:
    ask_and_wait(page, "first question")
    page.press("body", "Control+k")
    ask_and_wait(page, "second question")
    page.reload()
    titles = page.locator("#conversations .open")
    assert titles.all_text_contents() == ["second question", "first question"]
    assert page.locator(".turn").count() == 2 and page.text_content(".user .text") == "second question"
    titles.nth(1).click()
    assert page.text_content(".user .text") == "first question"
    ask_and_wait(page, "and more")
    rename = page.locator("[aria-label='Rename first question']")
    page.mouse.move(600, 300)
    assert not rename.is_visible()  # the title has its room
    titles.nth(1).hover()
    page.once("dialog", lambda dialog: dialog.accept("renamed <b>"))
    rename.click()
    assert titles.all_text_contents() == ["second question", "renamed <b>"]
    page.click("[aria-label='Delete renamed <b>']")
    assert titles.all_text_contents() == ["second question"] and page.is_visible("#empty")
    with page.expect_download() as download:
        page.click("#export")
    assert [each["title"] for each in json.loads(download.value.path().read_text())] == ["second question"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#forget")
    page.reload()
    assert titles.count() == 0


def test_an_edited_message_is_sent_again_and_what_followed_is_gone(page: Any, served: Served) -> None:
    ask_and_wait(page, "one")
    ask_and_wait(page, "two")
    page.locator(".user-row").first.hover()
    page.locator(".edit").first.click()
    page.fill(".user-row textarea", "nothing")
    page.press(".user-row textarea", "Escape")
    assert page.locator(".user .text").all_text_contents() == ["one", "two"]
    page.locator(".edit").first.click()
    page.fill(".user-row textarea", "other")
    page.press(".user-row textarea", "Enter")
    settled(page, 2)
    assert page.text_content(".user .text") == "other"
    prompt = served.engine.tokenizer.decode(served.engine.streams[-1].prompt)
    assert "other" in prompt and "one" not in prompt and "two" not in prompt


def test_probabilities_colour_tokens_and_show_alternatives(page: Any, served: Served) -> None:
    with settings(page):
        page.check("#probabilities")
    ask_and_wait(page, "hi")
    tokens = page.locator(".token")
    assert "".join(tokens.all_text_contents()).strip() == served.engine.answer.strip()
    assert served.engine.streams[-1].params.logprobs == 5
    tokens.nth(2).hover()
    page.wait_for_selector("#alternatives:popover-open")
    assert re.search(r"[\d.]+ %", page.text_content("#alternatives"))
    page.mouse.move(0, 0)
    page.wait_for_selector("#alternatives:popover-open", state="hidden")
    with settings(page):
        page.uncheck("#probabilities")
    assert tokens.count() == 0 and page.text_content(".assistant .text") == served.engine.answer


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def test_calls_of_tools_are_shown_and_their_results_sent(page: Any, served: Served) -> None:
    served.engine.tool_format = "llama3_json"
    served.engine.max_seq_len = served.engine.max_request_tokens = 4096
    served.engine.answer = '{"name": "weather", "parameters": {"city": "Oslo"}}'
    with settings(page):
        page.fill("#tools", json.dumps(TOOLS))
    ask_and_wait(page, "How is the weather?")
    assert page.text_content(".calls summary") == "Calls weather"
    assert json.loads(page.text_content(".calls pre")) == {"city": "Oslo"}
    served.engine.answer = "It is cold."
    page.fill(".calls textarea", '{"degrees": -4}')
    page.click("text=Send the result")
    page.wait_for_selector("text=It is cold.")
    until(page, "!document.querySelector('.busy')")
    assert page.text_content(".tool .body") == '{\n  "degrees": -4\n}'
    assert '{"degrees": -4}' in served.engine.tokenizer.decode(served.engine.streams[-1].prompt)


def test_the_status_view_plots_metrics_and_names_the_ranks(page: Any, served: Served) -> None:
    page.click("#open-status")
    page.wait_for_selector(".plot polyline", state="attached")
    assert page.locator(".plot h3").all_text_contents() == [
        "Sequences running", "Sequences waiting", "Cache in use", "Tokens a second", "Restarts of the ranks",
    ]  # fmt: skip
    for points in page.locator(".plot polyline").evaluate_all(
        "lines => lines.map(line => line.getAttribute('points'))"
    ):
        assert re.match("0,", points) and re.search(" 119,[^ ]+$", points), (
            "a line over the whole width, from the start"
        )
    until(page, "document.querySelector('.plot polyline').getAttribute('points').split(' ').length >= 3")
    facts = page.text_content("#facts")
    assert MODEL_ID in facts and "max seq len" in facts and "requests running" not in facts
    page.press("#status-view", "Escape")
    assert not page.is_visible("#plots")


def test_the_status_view_shows_one_of_several_replicas(page: Any, served: Served) -> None:
    asked = []

    def answer(route: Any) -> None:
        """Two replicas in turn."""
        asked.append(route.request.url)
        found = route.fetch()
        one = {"replica": "one", "running": "3.0", "model": "model-of-one"}
        other = {"replica": "other", "running": "7.0", "model": "model-of-other"}
        told = one if len(asked) % 4 in (1, 2) else other
        text = re.sub(r"(llama_num_requests_running\S* ).*", rf"\g<1>{told['running']}", found.text())
        route.fulfill(
            body=text.replace(MODEL_ID, told["model"]), headers={**found.headers, "x-replica": told["replica"]}
        )

    page.route(re.compile("/(metrics|props)$"), answer)
    page.click("#open-status")
    page.wait_for_selector(".plot polyline", state="attached")
    until(page, "document.querySelector('.plot polyline').getAttribute('points').split(' ').length >= 3")
    assert len(asked) >= 8  # of each replica, twice
    heights = page.locator(".plot polyline").first.get_attribute("points").split()
    assert {point.partition(",")[2] for point in heights} == {"1"}
    # A busy machine may be silent for 10 s, after which the page shows the other one.
    shown, hidden = ("one", "other") if page.locator(".plot output").first.text_content() == "3" else ("other", "one")
    facts = page.text_content("#facts")
    assert f"model-of-{shown}" in facts and f"model-of-{hidden}" not in facts


def test_the_page_shows_that_the_server_loads(browser: Any, served: Served) -> None:
    served.engine.state = Readiness(False, "loading", "the ranks have been starting for 3 s")
    page = browser.new_page()
    page.goto(served.url)
    page.wait_for_selector("text=loading… the ranks have been starting for 3 s")
    page.close()


def test_the_page_fits_a_phone_and_every_control_has_a_name(browser: Any, served: Served) -> None:
    page = browser.new_page(viewport={"width": 340, "height": 600})
    page.goto(served.url)
    ask(page, "a" * 200)
    page.wait_for_selector(".again")
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    named = "[...document.querySelectorAll('button, input, textarea, select')].every("
    assert page.evaluate(named + "control => control.ariaLabel || control.labels?.length || control.textContent)")
    page.close()


def test_the_api_reference_shows_every_route_and_its_fields(browser: Any, served: Served) -> None:
    page = browser.new_page()
    seen = watch(page, served.url)
    page.goto(served.url + "/docs")
    page.wait_for_selector("details")
    document = http.get(served.url + "/openapi.json").json()
    operations = [path for path, methods in document["paths"].items() for _ in methods]
    assert page.locator("summary code").all_text_contents() == operations
    fields = page.locator("td code").all_text_contents()
    assert {"prompt", "messages", "temperature", "include_usage", "role", "tokens"} <= set(fields)
    page.set_viewport_size({"width": 340, "height": 600})
    page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= 340
    page.close()
    assert seen.errors() == []
