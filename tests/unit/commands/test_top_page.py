"""The page of ``sglang-hybrid top --web`` in a real browser, while a server's load changes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from browser import MISSING, Browser, find_browser
from fake_metrics_server import FakeServer

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)

# JavaScript: mean red, green and blue of the newest column of a heat map
NEWEST = """(() => { const canvas = document.querySelector("{map} canvas");
  const data = canvas.getContext("2d").getImageData(canvas.width - 1, 0, 1, canvas.height).data;
  return [0, 1, 2].map(part => { let sum = 0; for (let at = part; at < data.length; at += 4) sum += data[at];
    return sum / canvas.height; }); })()"""


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        server.engine.load = 0.1
        yield server


@pytest.fixture
def page(fake: FakeServer) -> Iterator[str]:
    """Yield the URL of the page that ``sglang-hybrid top --web`` serves."""
    command = [sys.executable, "-m", "sglang_hybrid.cli", "top", "--web", "--port", "0", "--interval", "0.1"]
    with subprocess.Popen([*command, "--url", fake.url], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"at (http://127\.0\.0\.1:\d+) ", line := process.stdout.readline())
            assert found, line
            yield found[1]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    with Browser(PROGRAM, tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """Yield the browser with an empty page, its default size and no records of the test before."""
    started.open("about:blank")
    started.resize(1280, 900)
    started.errors.clear()
    started.requested.clear()
    yield started


def ratio(browser: Browser) -> float:
    return float(browser.text("#cpu-ratio").removesuffix(" %"))


def test_the_ratio_on_the_page_follows_the_servers_load(fake: FakeServer, page: str, browser: Browser) -> None:
    browser.open(page)
    browser.wait_for(
        "document.querySelector('#running').innerText === '3' && document.querySelector('#ratio-map canvas')"
    )
    low, dark = ratio(browser), browser.evaluate(NEWEST.replace("{map}", "#ratio-map"))
    fake.engine.load = 1.0
    fake.engine.queued = 5
    fake.engine.advance(2)
    browser.wait_for("document.querySelector('#running').innerText === '32'")
    high, bright = ratio(browser), browser.evaluate(NEWEST.replace("{map}", "#ratio-map"))
    assert high > 5 * low > 0
    assert browser.text("#queued") == "5"
    assert sum(abs(one - other) for one, other in zip(dark, bright, strict=True)) > 60
    assert "GB/s" in browser.text("#bandwidth .legend")
    fake.engine.load = 0.0
    browser.wait_for("document.querySelector('#running').innerText === '0'")
    assert ratio(browser) == 0.0
    assert browser.errors == []


def test_every_panel_is_filled_and_nothing_comes_from_elsewhere(fake: FakeServer, page: str, browser: Browser) -> None:
    fake.engine.advance(2)
    browser.open(page)
    browser.wait_for("document.querySelector('#settings b') && document.querySelector('#misses td')")
    assert "not exported" not in browser.text("main")
    assert "budget_tokens" in browser.text("#settings") and "65536" in browser.text("#settings")
    assert "Qwen3-14B" in browser.text("#server") and "calibrated" in browser.text("#info")
    assert "84.0 GiB" in browser.text("#memory") and "up" in browser.text("#worker")
    assert "largest now: layer" in browser.text("#ratio-map .scale")
    assert browser.evaluate("[...document.querySelectorAll('.number b')].every(each => !each.hasAttribute('title'))")
    assert browser.evaluate("[...document.querySelectorAll('h2, .number')].every(each => each.title.length > 10)")
    assert browser.requested and all(url.startswith((page, "data:")) for url in browser.requested), browser.requested
    assert browser.errors == []


def test_what_the_engine_does_not_export_is_named_on_the_page(fake: FakeServer, page: str, browser: Browser) -> None:
    fake.engine.leave_out = ("sglang_hybrid_slots", "sglang_hybrid_worker_up")
    browser.open(page)
    browser.wait_for("document.querySelector('#running').innerText === '3'")
    browser.wait_for("document.querySelector('#memory').innerText.includes('GPU slots: not exported by this engine')")
    assert "not exported by this engine" in browser.text("#worker")
    assert browser.errors == []


def test_a_server_that_goes_away_is_waited_for(fake: FakeServer, page: str, browser: Browser) -> None:
    browser.open(page)
    browser.wait_for("document.querySelector('#status').innerText === 'serving'")
    fake.stop()
    shown = browser.wait_for("document.querySelector('#problem').innerText")
    assert re.search(r"No answer since \d\d:\d\d:\d\d .*; still asking", shown), shown
    assert browser.text("#running") == "3"  # the last known number stays
    fake.restart()
    browser.wait_for(
        "document.querySelector('#problem').hidden && document.querySelector('#status').innerText === 'serving'"
    )


def test_a_degraded_server_is_seen_at_once(fake: FakeServer, page: str, browser: Browser) -> None:
    fake.engine.worker_up = False
    fake.engine.advance(2)
    browser.open(page)
    browser.wait_for("document.querySelector('#status').innerText === 'degraded'")
    assert "down" in browser.text("#worker") and "device-no-worker" in browser.text("#misses")


def test_the_page_is_never_wider_than_the_window(page: str, browser: Browser) -> None:
    for width in (380, 800, 1280, 1920):
        browser.resize(width, 900)
        browser.open(page)
        browser.wait_for("document.querySelector('#ratio-map canvas') && document.querySelector('#settings b')")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_is_dark_for_those_who_prefer_it(page: str, browser: Browser) -> None:
    browser.open(page)
    colours = []
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.wait_for("document.querySelector('#ratio-map canvas')")
        colours.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", colour))) for colour in colours)
    assert light > 600 and dark < 120


def test_numbers_under_the_mouse_are_shown(fake: FakeServer, page: str, browser: Browser) -> None:
    browser.open(page)
    browser.wait_for("document.querySelector('#traffic svg path') && document.querySelector('#ratio-map canvas')")
    for part in ("#traffic svg", "#ratio-map canvas"):
        left, top, width, height = browser.evaluate(
            f"(() => {{ const box = document.querySelector('{part}').getBoundingClientRect(); "
            "return [box.left, box.top, box.width, box.height]; })()"
        )
        browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + width - 1, y=top + height / 2)
        browser.wait_for(f"/at \\d\\d:\\d\\d:\\d\\d/.test(document.querySelector('{part}').closest('.body').innerText)")
    assert browser.errors == []
