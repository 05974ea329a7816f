"""The page at ``/``, in a browser: what a person does and sees."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from page_visit import Visit, answers, overflows, say, shows, wait_for_end
from scripted_server import PAGE, Script

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROUNDS = [
    [("Coun", "model"), ("ting", "suffix"), (" wörds", "target")],
    [(":\n", "recycling"), ("``", "target")],
    [("`py", "ngram"), ("thon\nlen", "model"), ("(x)", "target")],
    [("\n```\n", "lookup"), ("Done", "homemade"), (".", "target")],
]
TEXT = "Counting wörds:\n```python\nlen(x)\n```\nDone."


def test_page_needs_nothing_from_elsewhere() -> None:
    text = PAGE.read_text()
    assert not re.search(r"https?://(?!www.w3.org/2000/svg')|(?<!http:)//[a-z]+\.|\bsrc=|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", text)


def test_an_answer_streams_and_its_tokens_are_tinted_by_origin(visit: Visit) -> None:
    script = Script(ROUNDS, holds=1)
    page = visit(script)
    say(page, "count")
    answer = answers(page)
    answer.get_by_text("Coun", exact=True).wait_for()
    assert answer.get_attribute("aria-busy") == "true" and "Done" not in answer.inner_text()
    script.go.set()
    wait_for_end(page)
    classes = {span.text_content(): span.get_attribute("class") for span in answer.locator(".text span").all()}
    assert classes == {
        "Coun": "o o-model",
        "ting": "o o-suffix",
        " wörds": None,
        ":": "o o-recycling",
        "len": "o o-model",
        "(x)": None,
        "\n": "o o-lookup",
        "Done": "o o-other",
        ".": None,
    }
    assert answer.locator("pre").text_content() == "len(x)\n"
    assert answer.locator("pre").get_attribute("data-language") == "python"
    assert answer.get_attribute("aria-busy") == "false"


def test_figures_tell_what_the_answer_cost(visit: Visit) -> None:
    page = visit(Script(ROUNDS))
    shows(page, "Since the server started")
    shows(page, "31.5")
    shows(page, "1.00 GiB in use; 1.50 GiB planned (the mark), within a budget of 2.00 GiB.")
    assert page.locator("#memory i").evaluate("bar => bar.style.width") == "50%"
    assert page.locator("#positions").inner_text().split() == ["70", "1", "40", "2"]
    say(page, "count")
    wait_for_end(page)
    shows(page, "This answer")
    assert page.locator("#speed").inner_text() == "40.0" and page.locator("#mal").inner_text() == "2.75"
    assert page.locator("#positions i").evaluate_all("bars => bars.map(bar => bar.style.height)") == ["75%", "50%"]
    assert page.locator("#positions").inner_text().split() == ["75", "1", "50", "2"]
    assert page.locator("#times-key").inner_text().split("\n") == ["drafting 10 %", "verifying 80 %", "overhead 10 %"]
    legend = dict(
        re.split(r"\n.*\n", row)
        for row in page.locator("#legend li").evaluate_all("rows => rows.map(r => r.innerText)")
    )
    assert legend == {
        "target": "4", "suffix": "1", "ngram": "1", "recycling": "1", "lookup": "1", "model": "2", "head": "–",
        "deferred": "–", "grammar": "–", "homemade": "1",
    }  # fmt: skip
    page.get_by_label("Show it in the text").uncheck()
    tinted = answers(page).locator(".o-model").first
    assert tinted.evaluate("span => getComputedStyle(span).textDecorationLine") == "none"


def test_same_again_without_speculation_says_whether_the_text_is_the_same(visit: Visit) -> None:
    script = Script(ROUNDS)
    page = visit(script)
    say(page, "count")
    page.get_by_role("button", name="Same again without speculation").click()
    shows(page, "The same text, token for token (11 tokens).")
    shows(page, "2.00 times the speed with speculation.")
    first, second = script.requests
    assert (first.pop("speculation"), second.pop("speculation")) == ("auto", "off")
    assert first == second and isinstance(first["seed"], int)
    script.plain = [token for tokens in ROUNDS for token, _ in tokens]
    script.plain[5:] = ["another", " text"]
    page.get_by_role("button", name="Same again without speculation").click()
    shows(page, "The texts differ from token 6 on.")
    assert page.get_by_text("The same text").count() == 0


def test_the_switch_turns_speculation_off_and_on(visit: Visit) -> None:
    script = Script(ROUNDS)
    page = visit(script)
    switch = page.get_by_role("switch", name="Speculation")
    for expected in ("off", "auto"):
        switch.click()
        say(page, "count")
        wait_for_end(page)
        assert script.requests[-1]["speculation"] == expected
    page.get_by_role("button", name="Same again with speculation").first.click()
    shows(page, "The drafters had seen this answer before, which flatters them.")


def test_a_conversation_is_sent_with_what_was_said_before(visit: Visit) -> None:
    script = Script(ROUNDS)
    page = visit(script)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System message").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Most tokens").fill("77")
    page.get_by_label("Seed").fill("12")
    page.get_by_label("Who drafts").select_option("suffix")
    page.get_by_role("button", name="Save").click()
    for message in ("count", "and\nnow?"):
        say(page, message)
        wait_for_end(page)
    request = script.requests[-1]
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "count"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "and\nnow?"},
    ]
    assert {name: request[name] for name in ("temperature", "max_tokens", "seed", "speculation", "stream")} == {
        "temperature": 0.5, "max_tokens": 77, "seed": 12, "speculation": "suffix", "stream": True,
    }  # fmt: skip
    page.get_by_role("button", name="New chat").click()
    assert answers(page).count() == 0
    say(page, "again")
    wait_for_end(page)
    assert [message["role"] for message in script.requests[-1]["messages"]] == ["system", "user"]


@pytest.mark.parametrize("way", ["button", "escape", "new chat"])
def test_an_answer_can_be_stopped(visit: Visit, way: str) -> None:
    script = Script([[("on and", "suffix"), (" on ", "target")]], pause=0.05, endless=True)
    page = visit(script)
    say(page, "go on")
    shows(page, "on and")
    if way == "escape":
        page.keyboard.press("Escape")
    else:
        page.get_by_role("button", name="Stop" if way == "button" else "New chat").click()
    assert script.left.wait(10)  # the server is told
    wait_for_end(page)
    if way == "new chat":
        assert answers(page).count() == 0
        return
    shows(page, re.compile(r"\d+ tokens · .* · stopped"))
    script.endless = False
    say(page, "more")
    wait_for_end(page)
    assert script.requests[-1]["messages"][1]["content"].startswith("on and on ")


def test_text_of_a_model_is_never_markup(visit: Visit) -> None:
    hostile = "<img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt;"
    page = visit(Script([[(hostile, "model"), ("\n```<b>\n", "model"), (hostile, hostile)]]))
    say(page, hostile)
    wait_for_end(page)
    assert page.locator("#talk img, #talk script, #talk b").count() == 0
    assert answers(page).locator("p").first.text_content() == hostile
    assert answers(page).locator("pre").text_content() == hostile
    assert page.locator(".question").text_content() == hostile
    assert visit.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_screen_needs_no_horizontal_scrolling(visit: Visit, scheme: str) -> None:
    wide = [[("w" * 300, "model"), (" " + "ö" * 90, "target")], [("\n```\n" + "x = 1; " * 60, "suffix")]]
    page = visit(
        Script(wide, acceptance=(1.0,) * 20),
        viewport={"width": 360, "height": 640},
        has_touch=True,
        color_scheme=scheme,
    )
    say(page, "v" * 200)
    page.get_by_role("button", name="Same again").click()
    shows(page, "The same text")
    assert not overflows(page)
    assert page.locator("pre").first.evaluate("pre => pre.scrollWidth > pre.clientWidth")  # code scrolls by itself
    page.get_by_role("button", name="Figures").click()
    assert page.get_by_text("Memory against plan").is_visible() and not overflows(page)
    assert page.locator("#positions li").count() == 16
    assert page.locator("#figures").evaluate("node => node.scrollWidth <= node.clientWidth")
    page.keyboard.press("Escape")
    assert page.get_by_text("Memory against plan").is_hidden()
    page.get_by_role("button", name="Settings").click()
    assert not overflows(page)
    box = page.get_by_role("dialog").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_every_tint(visit: Visit, scheme: str) -> None:
    origins = ("suffix", "ngram", "recycling", "lookup", "model", "deferred", "grammar", "homemade", "target")
    page = visit(Script([[(f" {origin}", origin) for origin in origins]]), color_scheme=scheme)
    say(page, "count")
    wait_for_end(page)
    contrasts = page.evaluate(_CONTRASTS)
    assert len(contrasts) == len(origins) and min(text for text, _ in contrasts) >= 7
    assert min(line for _, line in contrasts if line) >= 3
    muted = page.locator(".measured").evaluate("node => getComputedStyle(node).color")
    assert page.evaluate("([a, b]) => contrast(a, b)", [muted, page.evaluate("ground")]) >= 4.5


_CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (...layers) => {
    for (const layer of layers) { canvas.fillStyle = layer; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => value / 255)
      .map((value) => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  window.contrast = (one, other) => ratio(luminance(one), luminance(other));
  window.ground = getComputedStyle(document.body).backgroundColor;
  return [...document.querySelectorAll(".text span")].map((span) => {
    const style = getComputedStyle(span);
    const behind = luminance(ground, style.backgroundColor);
    const line = style.textDecorationLine === "underline" ? ratio(luminance(style.textDecorationColor), behind) : null;
    return [ratio(luminance(style.color), behind), line];
  });
}"""


def test_dark_mode_is_dark(visit: Visit) -> None:
    def ground(page: Page) -> list[int]:
        color = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return [int(part) for part in re.findall(r"\d+", color)]

    assert max(ground(visit(Script(ROUNDS), color_scheme="dark"))) < 50
    assert min(ground(visit(Script(ROUNDS), color_scheme="light"))) > 200


def test_everything_can_be_done_with_the_keyboard(visit: Visit) -> None:
    script = Script(ROUNDS)
    page = visit(script)

    def focused() -> str:
        return str(
            page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText")
        )

    def reach(name: str, back: bool = False) -> None:
        for _ in range(30):
            page.keyboard.press("Shift+Tab" if back else "Tab")
            if focused() == name:
                return
        pytest.fail(f"{name} cannot be reached")

    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert script.requests[-1]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    page.get_by_role("button", name="Same again").wait_for()
    reach("Same again without speculation", back=True)
    page.keyboard.press("Enter")
    shows(page, "The same text")
    reach("Speculation")
    page.keyboard.press("Space")
    assert page.get_by_role("switch").get_attribute("aria-checked") == "false"
    reach("Settings", back=True)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0 and focused() == "Settings"


def test_screen_readers_hear_an_answer_once(visit: Visit) -> None:
    page = visit(Script(ROUNDS, pause=0.05))
    page.evaluate(
        """() => { window.heard = []; const said = document.getElementById("said");
        new MutationObserver(() => heard.push(said.textContent)).observe(said, { childList: true }); }"""
    )
    say(page, "count")
    wait_for_end(page)
    assert page.evaluate("heard") == ["Answering.", TEXT]
    assert page.locator("#talk [aria-live], #talk[aria-live], #figures [aria-live]").count() == 0


def test_a_key_is_asked_for_when_the_server_wants_one(visit: Visit) -> None:
    script = Script(ROUNDS, key="open sesame")
    page = visit(script)
    field = page.get_by_label("This server asks for an API key")
    say(page, "count")
    shows(page, "An API key is needed.")
    field.fill("wrong")
    field.press("Enter")
    refused = page.get_by_label("The server does not accept this API key")
    refused.fill("open sesame")
    page.get_by_role("button", name="Use key").click()
    shows(page, "Done")
    assert field.count() == 0 and page.locator(".problem").count() == 0 and len(script.requests) == 1
    page.reload()
    shows(page, "scripted")
    say(page, "count")
    shows(page, "Done")  # the key was kept
    assert page.evaluate("localStorage.length") == 0


def test_a_full_server_is_asked_again_only_after_the_time_it_names(visit: Visit) -> None:
    script = Script(ROUNDS, refusals=[(429, {"Retry-After": "1"}, "The queue is full.")])
    page = visit(script)
    say(page, "count")
    shows(page, "The queue is full.")
    retry = page.get_by_role("button", name="Try again in 1 s")
    assert retry.is_disabled()
    page.get_by_role("button", name="Try again", exact=True).click()
    shows(page, "Done")
    assert page.get_by_text("The queue is full.").count() == 0


def test_a_request_that_is_refused_is_no_part_of_the_conversation(visit: Visit) -> None:
    script = Script(ROUNDS, refusals=[(400, {}, "The prompt has 9000 tokens, <b>too many</b>.")])
    page = visit(script)
    say(page, "much")
    shows(page, "The prompt has 9000 tokens, <b>too many</b>.")
    say(page, "count")
    wait_for_end(page)
    assert script.requests[-1]["messages"] == [{"role": "user", "content": "count"}]


def test_an_answer_that_breaks_off_says_so_and_can_be_had_again(visit: Visit) -> None:
    script = Script(ROUNDS, breaks=True)
    page = visit(script)
    say(page, "count")
    shows(page, "The connection to the server broke before the answer was complete.")
    assert answers(page).locator(".text").inner_text() == "Counting wörds"
    script.breaks = False
    page.get_by_role("button", name="Try again").click()
    shows(page, "Done")
    assert answers(page).count() == 1


def test_a_server_that_went_away_is_noticed(visit: Visit) -> None:
    page = visit(Script(ROUNDS))
    shows(page, "scripted")
    visit.stop_server()
    say(page, "count")
    shows(page, "The server cannot be reached.")
    shows(page, "offline")


def test_nothing_moves_for_those_who_asked_for_that(visit: Visit) -> None:
    script = Script(ROUNDS, holds=0)
    page = visit(script, reduced_motion="reduce")
    say(page, "count")
    waiting = page.get_by_text("Reading …")
    assert waiting.evaluate("node => getComputedStyle(node).animationName") == "none"
    script.go.set()
