"""Visits to the page at ``/`` with a browser: opening it, saying something, seeing what it shows."""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from scripted_server import Script, scripted_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page


class Visit:
    """Opens the page; nothing may go wrong in it unnoticed."""

    def __init__(self, browser: Browser) -> None:
        self.complaints: list[str] = []
        self._browser = browser
        self._stack = ExitStack()

    def __call__(self, script: Script, **context: Any) -> Page:
        self._server = self._stack.enter_context(ExitStack())
        return self.open(self._server.enter_context(scripted_server(script)), **context)

    def open(self, address: str, **context: Any) -> Page:
        page = self._stack.enter_context(self._browser.new_context(**context)).new_page()
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda said: self.complaints.append(said.text) if said.type == "error" else None)
        page.on("dialog", lambda dialog: self.complaints.append(f"a dialog: {dialog.message}"))
        page.goto(address)
        return page

    def stop_server(self) -> None:
        self._server.close()

    def close(self) -> None:
        """Leave, and see that no page complained. Refused requests do not count: a browser reports each by itself."""
        self._stack.close()
        assert [text for text in self.complaints if "Failed to load resource" not in text] == []


def say(page: Page, message: str) -> None:
    page.get_by_label("Your message").fill(message)
    page.keyboard.press("Enter")


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def wait_for_end(page: Page) -> None:
    page.get_by_role("button", name="Send").wait_for()


def shows(page: Page, words: str | re.Pattern[str]) -> None:
    page.get_by_text(words).first.wait_for()


def overflows(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))
