"""The page in front of the real server, with a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from page_visit import Visit, answers, overflows, say, shows, wait_for_end

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest.importorskip("fastapi", reason="THE PAGE IS NOT TESTED with the real server: the extra [serve] is missing")

PROGRAM = "import sys; from edge_spec.cli import main; sys.exit(main())"
# So slow that an answer is still coming when it is stopped.
SLOW_PROGRAM = (
    "import time; from edge_spec.runtime.output import Output; push = Output.push\n"
    "Output.push = lambda *tokens: (time.sleep(0.02), push(*tokens))[1]\n" + PROGRAM
)


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        """Wait until it says where it is."""
        self.process = process
        while (found := re.search(r"http://\S+", log.read_text())) is None:
            assert process.poll() is None, f"the server said {log.read_text()!r}"
            time.sleep(0.05)
        self.address = found[0]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.address}{path}", timeout=20) as response:
            return json.load(response)

    def post(self, path: str, value: Any) -> Any:
        body = json.dumps(value).encode()
        request = urllib.request.Request(f"{self.address}{path}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)


@contextmanager
def serving(bundle: Path, log: Path, program: str = PROGRAM, **environment: str) -> Iterator[Served]:
    command = [sys.executable, "-c", program, "serve", str(bundle), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **environment})
    with process:
        try:
            yield Served(process, log)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(chat_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(chat_pair, tmp_path_factory.mktemp("served") / "log") as server:
        yield server


@pytest.fixture
def serve(chat_pair: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(chat_pair, tmp_path / "log", **options))


def settle(page: Page, **settings: str) -> None:
    """Fill in settings by their labels."""
    page.get_by_role("button", name="Settings").click()
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " ")).fill(value)
    page.get_by_role("button", name="Save").click()


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_page_shows_what_the_engine_says_with_and_without_speculation(
    visit: Visit, served: Served, temperature: str
) -> None:
    page = visit.open(served.address)
    settle(page, Temperature=temperature, Most_tokens="60", Seed="5", System_message="Be brief.")
    say(page, "one two one two one two")
    wait_for_end(page)
    request = {
        "model": served.get("status")["model"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one two one two one two"},
        ],
        "max_tokens": 60,
        "temperature": float(temperature),
        "seed": 5,
    }
    reference = served.post("v1/chat/completions", request)["choices"][0]["message"]["content"]
    # A random model says anything; blank lines at the beginning are not shown.
    assert page.evaluate("turns[0].text") == reference
    assert answers(page).locator(".text").text_content() == reference.lstrip()
    shows(page, re.compile(r"60 tokens · [\d.]+ tokens/s · MAL [\d.]+ · first after"))
    page.get_by_role("button", name="Same again without speculation").click()
    if served.get("status")["exactness"] == "bitwise":
        shows(page, "The same text, token for token (60 tokens).")
    else:
        page.locator(".verdict").wait_for()
    page.get_by_role("switch").click()
    say(page, "and more")
    wait_for_end(page)
    assert set(page.evaluate("shown.tally")) == {"target"}
    assert page.evaluate("shown.statistics.mean_accepted_length") == 1


def test_tokens_on_the_page_are_counted_as_the_engine_counts_them(visit: Visit, served: Served) -> None:
    page = visit.open(served.address)
    settle(page, Most_tokens="60")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Who drafts").select_option("suffix")
    page.get_by_role("button", name="Save").click()
    say(page, "one two one two one two")
    wait_for_end(page)
    statistics, tally = page.evaluate("[shown.statistics, shown.tally]")
    assert sum(tally.values()) == statistics["new_tokens"] == 60
    assert tally.pop("target") == statistics["new_tokens"] - statistics["accepted"]
    assert tally == statistics["accepted_by_drafter"]


def test_stopping_frees_the_engine(visit: Visit, serve: Callable[..., Served]) -> None:
    server = serve(program=SLOW_PROGRAM)
    page = visit.open(server.address)
    settle(page, Most_tokens="450")
    say(page, "hello")
    page.locator(".answer .text").first.get_by_text(re.compile(".")).first.wait_for()
    page.keyboard.press("Escape")
    wait_for_end(page)
    shows(page, "· stopped")
    until = time.monotonic() + 20
    while server.get("status")["queue"]["running"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    settle(page, Most_tokens="3")
    say(page, "more")
    shows(page, re.compile(r"^3 tokens"))


def test_memory_and_model_are_shown(visit: Visit, served: Served) -> None:
    page = visit.open(served.address, viewport={"width": 360, "height": 640}, color_scheme="dark")
    shows(page, served.get("status")["model"])
    page.get_by_role("button", name="Figures").click()
    shows(page, re.compile(r"^\d+ MiB in use; \d+ MiB planned"))
    page.get_by_text("What is planned").click()
    shows(page, "target weights")
    assert not overflows(page)


def test_a_prompt_that_does_not_fit_is_refused_in_words(visit: Visit, served: Served) -> None:
    page = visit.open(served.address)
    say(page, "x" * 3000)
    page.get_by_role("alert").get_by_text(re.compile("30\\d\\d tokens|context")).wait_for()


def test_a_server_with_a_key_asks_for_it(visit: Visit, serve: Callable[..., Served]) -> None:
    page = visit.open(serve(EDGE_SPEC_API_KEY="open sesame").address)
    field = page.get_by_label("This server asks for an API key")
    field.fill("wrong")
    field.press("Enter")
    page.get_by_label("The server does not accept this API key").fill("open sesame")
    page.keyboard.press("Enter")
    page.locator("#about").get_by_text("tiny").wait_for()
    settle(page, Most_tokens="3")
    say(page, "hello")
    shows(page, re.compile(r"^3 tokens"))


def test_a_server_that_is_stopped_in_mid_answer_is_noticed(visit: Visit, serve: Callable[..., Served]) -> None:
    server = serve(program=SLOW_PROGRAM)
    page = visit.open(server.address)
    settle(page, Most_tokens="450")
    say(page, "hello")
    page.locator(".answer .text").first.get_by_text(re.compile(".")).first.wait_for()
    server.process.kill()
    page.get_by_role("alert").wait_for()
    shows(page, "offline")
    assert page.get_by_role("button", name="Try again").is_visible()
