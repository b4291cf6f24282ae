"""The chat page in a browser: asks, shows the answer as it comes, and remembers the chat."""

import time

from tests.browser import PHONE, needs_chromium, open_browser
from tests.serve.test_http import engine, listen, port  # noqa: F401 fixtures

ASK = """
(async () => {
  document.getElementById("tokens").value = 8;
  document.getElementById("text").value = "Hello <b>you</b>";
  await send();
  return [...document.querySelectorAll(".turn")].map(turn => [turn.className, turn.textContent]);
})()
"""


@needs_chromium
def test_the_page_shows_the_answer(port, engine, tmp_path):  # noqa: F811
    with open_browser(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{port}/", PHONE)
        first = browser.evaluate(ASK)
        assert first[0] == ["turn user", "Hello <b>you</b>"]
        assert first[1][0] == "turn assistant" and first[1][1]
        assert len(browser.evaluate(ASK)) == 4 and browser.evaluate("messages.length") == 4
        assert browser.overflow() <= 0
        assert not [text for text in browser.complaints if "favicon" not in text]
        assert {address.split("/")[2] for address in browser.asked_for} == {f"127.0.0.1:{port}"}


@needs_chromium
def test_the_page_asks_for_the_key_and_says_what_is_wrong(engine, tmp_path):  # noqa: F811
    server, port = listen(engine, api_key="secret")  # noqa: F811
    with open_browser(tmp_path) as browser:
        browser.open(f"http://127.0.0.1:{port}/")
        assert browser.evaluate("!document.getElementById('keyLabel').hidden")
        assert "API key" in browser.evaluate(ASK)[-1][1]
        browser.evaluate("document.getElementById('key').value = 'secret'")
        assert browser.evaluate(ASK)[-1][0] == "turn assistant"
    server.should_exit = True
    while engine.running:
        time.sleep(0.01)
    assert engine.pool.used == 0
