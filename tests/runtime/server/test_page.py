"""The page in a headless Chromium: a real conversation with SmolLM2, and the engine as it works."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, Page, find_chromium, open_browser
from support.serving import RunningServer

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH")

ENTER = ("Enter", 13, "\r")
IS_READY = "document.querySelector('#health').dataset.state === 'ready'"
ANSWER = "[...document.querySelectorAll('.assistant p')].at(-1).textContent"
HAS_ENDED = "[...document.querySelectorAll('.assistant')].at(-1).querySelector('footer')"
POOL = "document.querySelector('#map').getAttribute('aria-label')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    with open_browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def smollm2_server(smollm2: Path) -> Iterator[RunningServer]:
    """With a pool of a size that a picture shows."""
    with RunningServer(smollm2, "--kv-bytes", str(96 << 20)) as running:
        yield running


@pytest.fixture
def page(browser: Browser, smollm2_server: RunningServer) -> Iterator[Page]:
    """The page, ready. It may have asked nobody else, and complained of nothing."""
    page = browser.open(f"{smollm2_server.url}/")
    page.wait_for(IS_READY)
    yield page
    assert page.errors == []
    assert {url.split("/")[2] for url in page.urls} == {smollm2_server.url.split("/")[2]}


def set_fields(page: Page, **values: object) -> None:
    page.evaluate("document.querySelector('.settings').open = true")
    for name, value in values.items():
        selector = f"#{name.replace('_', '-')}"
        page.evaluate(f"document.querySelector('{selector}').value = ''")
        page.type(selector, str(value))


def ask(page: Page, words: str) -> None:
    page.type("#prompt", words)
    page.press(*ENTER)


def test_a_conversation_is_that_of_the_api(page: Page, smollm2_server: RunningServer, tmp_path: Path) -> None:
    """Two turns with a seed: the same text as the API gives for the same messages."""
    sampling = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 24, "seed": 7}
    set_fields(page, **sampling, system="You are a geographer.")
    messages: list[dict[str, str]] = [{"role": "system", "content": "You are a geographer."}]
    for turn, words in enumerate(("Name three rivers.\nOne per line.", "And <b>mountains</b>?"), 1):
        ask(page, words)
        page.wait_for(f"document.querySelectorAll('.assistant').length === {turn} && {HAS_ENDED}")
        messages.append({"role": "user", "content": words})
        answer = smollm2_server.post("/v1/chat/completions", {"messages": messages, **sampling})
        message = answer["choices"][0]["message"]
        assert page.evaluate(ANSWER) == message["content"]
        messages.append({"role": "assistant", "content": message["content"]})
    assert "tokens" in page.evaluate(f"{HAS_ENDED}.textContent")
    asked = page.evaluate("[...document.querySelectorAll('.user p')].map((p) => p.textContent)")
    assert asked == [m["content"] for m in messages if m["role"] == "user"]
    assert page.evaluate("document.querySelector('#model').textContent") == smollm2_server.ready["model"]
    page.screenshot(tmp_path / "conversation.png")
    page.evaluate("document.querySelector('#reset').click()")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0


def test_the_map_shows_a_request_until_it_is_stopped(
    page: Page, smollm2_server: RunningServer, tmp_path: Path
) -> None:
    set_fields(page, temperature=0, max_tokens=2000)
    assert page.wait_for(POOL).startswith("Block pool: ")
    ask(page, "Tell me a very long story about a river, with every detail.")
    page.wait_for(f"/[1-9]\\d* used/.test({POOL}) && {ANSWER}.length > 20")
    page.wait_for("document.querySelectorAll('#requests tr').length === 1")
    (running,) = smollm2_server.get("/stats")["running"]
    button = "document.querySelector('#requests button')"
    assert page.evaluate(f"{button}.title").endswith(running["id"])
    lit, unlit = f"{button}.click(), ({pixels('used')})", pixels("used")
    assert page.evaluate(lit) > 0
    assert page.evaluate(f"{button}.getAttribute('aria-pressed')") == "true"
    page.screenshot(tmp_path / "running.png")
    page.evaluate("document.querySelector('#stop').click()")
    page.wait_for(f"{HAS_ENDED}.textContent === 'stopped'")
    page.wait_for(f"/ 0 used/.test({POOL}) && document.querySelectorAll('#requests tr').length === 0")
    assert page.evaluate(unlit) == 0
    assert page.evaluate(pixels("cached")) > 0
    assert smollm2_server.get("/stats")["running"] == []


def pixels(state: str) -> str:
    """How many pixels of the map have a state's colour."""
    return f"""(() => {{
      const map = document.querySelector('#map'), style = getComputedStyle(map).getPropertyValue('--{state}');
      const wanted = [1, 3, 5].map((i) => parseInt(style.trim().slice(i, i + 2), 16));
      const data = map.getContext('2d').getImageData(0, 0, map.width, map.height).data;
      let count = 0;
      for (let i = 0; i < data.length; i += 4)
        count += data[i + 3] === 255 && wanted.every((value, j) => data[i + j] === value);
      return count;
    }})()"""


def script_answer(page: Page, chunks: list[bytes]) -> None:
    """The next request is answered by these bytes, piece by piece."""
    pieces = json.dumps([list(chunk) for chunk in chunks])
    page.evaluate(
        f"""window.fetch = ((before) => () => {{
          window.fetch = before;
          return Promise.resolve(new Response(new ReadableStream({{
            start(stream) {{
              for (const piece of {pieces}) stream.enqueue(new Uint8Array(piece));
              stream.close();
            }}
          }})));
        }})(window.fetch)"""
    )


def event(content: str) -> bytes:
    data = json.dumps({"choices": [{"delta": {"content": content}}]}, ensure_ascii=False)
    return f"data: {data}\n\n".encode()


def test_what_a_model_writes_is_never_html(page: Page) -> None:
    """And events may be cut anywhere, within a character too."""
    text = '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>\n  Grüße 🦊'
    stream = event(text[:40]) + event(text[40:]) + b"data: [DONE]\n\n"
    script_answer(page, [stream[i : i + 7] for i in range(0, len(stream), 7)])
    ask(page, text)
    page.wait_for(f"{ANSWER}.endsWith('🦊')")
    assert page.evaluate(ANSWER) == text
    assert page.evaluate("document.querySelectorAll('.messages img, .messages script').length") == 0
    assert page.evaluate("window.broken") is None


def test_errors_are_said(page: Page) -> None:
    """Of the server, and within a stream; what was asked can be asked again."""
    script_answer(page, [event("Hm"), b'data: {"error": {"message": "the engine has ended"}}\n\n'])
    ask(page, "Hello?")
    page.wait_for(f"{HAS_ENDED}.textContent === 'the engine has ended'")
    assert page.evaluate(ANSWER) == "Hm"
    set_fields(page, seed=2**64)
    ask(page, "Hello?")
    page.wait_for(
        f"document.querySelectorAll('.assistant').length === 2 && {HAS_ENDED}.className === 'error'"
    )
    assert "seed" in page.evaluate(f"{HAS_ENDED}.textContent")
    page.errors.clear()  # the browser reports each status of 400
    set_fields(page, top_p=7)
    ask(page, "Hello?")
    assert page.evaluate("document.activeElement.id") in ("top-p", "prompt")
    assert page.evaluate("document.querySelectorAll('.user').length") == 2


@pytest.mark.parametrize("width", [340, 700, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_every_window(
    browser: Browser, smollm2_server: RunningServer, width: int, dark: bool
) -> None:
    page = browser.open(f"{smollm2_server.url}/", width=width, dark=dark)
    page.wait_for(IS_READY)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(value) for value in background[4:-1].split(",")) < 3 * 128) == dark
    assert page.errors == []


def test_all_can_be_named_and_reached(page: Page) -> None:
    """Fields have labels, buttons words, pictures descriptions; Tab reaches all of them."""
    set_fields(page)
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, textarea, button, canvas, section')].filter((e) =>
          !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label'))).map((e) => e.id)"""
    )
    assert unnamed == []
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(20):
        page.press("Tab", 9)
        reached.append(page.evaluate("document.activeElement.id"))
    assert {"messages", "prompt", "send", "reset", "temperature", "top-p", "max-tokens", "seed"} <= set(
        reached
    )


def test_a_large_pool_stays_a_small_picture(page: Page) -> None:
    """Of 100,000 blocks a cell stands for several, and shows the busiest."""
    found: dict[str, Any] = page.evaluate(
        """import('/map.js').then(({BlockMap}) => {
          const canvas = document.createElement('canvas');
          canvas.style.width = '360px';
          document.querySelector('.panel').append(canvas);
          const map = new BlockMap(canvas);
          map.update('.'.repeat(50000) + 's' + 'c'.repeat(49999));
          const at = (x, y) => map.blocksAt({offsetX: x, offsetY: y});
          const [first, last] = at(0, 0);
          const share = last - first + 1, begin = Math.floor(50000 / share) * share;
          return {height: canvas.clientHeight, share, busiest: map.stateOf(begin, begin + share - 1),
                  behind: at(0, 5000), end: map.stateOf(99000, 99999)};
        })"""
    )
    assert found["height"] <= 220
    assert found["share"] > 1
    assert (found["busiest"], found["end"], found["behind"]) == ("shared", "cached", None)


def test_a_key_is_asked_for(browser: Browser, artifact: Path) -> None:
    with RunningServer(artifact, "--api-key", "secret") as server:
        page = browser.open(f"{server.url}/")
        page.wait_for("!document.querySelector('#key-form').hidden")
        page.type("#key", "wrong")
        page.press(*ENTER)
        page.wait_for("document.querySelector('#health').textContent === 'needs a key'")
        page.wait_for("!document.querySelector('#key-form').hidden")
        page.type("#key", "secret")
        page.press(*ENTER)
        page.wait_for(IS_READY)
        assert page.evaluate("document.querySelector('#key-form').hidden")
        set_fields(page, max_tokens=4)
        ask(page, "Hi")
        page.wait_for(f"{HAS_ENDED}.className === 'note'")
    page.wait_for("document.querySelector('#health').dataset.state !== 'ready'")
