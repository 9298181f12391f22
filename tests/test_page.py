"""The page of `acclimate serve` in a real browser, against a stand-in for the server (`page_server`)."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import page_server
import pytest
from page_server import PageServer, alarm, png, prediction, status

api = pytest.importorskip("playwright.sync_api", reason="needs a browser's driver: pip install playwright")
expect = api.expect
expect.set_options(timeout=30_000)

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
PICTURE = {"name": "seven.png", "mimeType": "image/png", "buffer": png(7)}
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as driver:
        own = driver.chromium.executable_path
        path = next(filter(None, map(shutil.which, BROWSERS)), own if Path(own).exists() else None)
        if path is None:
            pytest.skip("needs Chromium: apt install chromium, or playwright install chromium")
        started = driver.chromium.launch(executable_path=path, args=[*FLAGS.split(), "--disable-sync"])
        yield started
        started.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    server = PageServer()
    server.history["status"] = [status(time=time.time() - 60 + second) for second in range(60)]
    yield server
    server.close()


@pytest.fixture
def visit(browser: Any, server: PageServer) -> Iterator[Callable[..., Any]]:
    """Opens the page. A message of the browser's console that the test does not expect fails the test."""
    contexts, complaints = [], []

    def visit(
        width: int = 1280,
        scheme: str = "light",
        expected: str = "$^",
        before: Callable[[Any], Any] = lambda page: None,
        **more: Any,
    ) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **more)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda line: re.search(expected, line.text) or complaints.append(f"{line.type}: {line.text}")
        )
        before(page)
        page.goto(server.url)
        expect(page.locator("#connection")).to_have_text("live")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


def test_history_and_live_events_appear(server: PageServer, visit: Callable[..., Any]) -> None:
    server.history["predictions"] = [prediction(1, label="first")]
    page = visit()
    expect(page.locator("#doing")).to_have_text("Learning")
    expect(page.get_by_role("heading", level=1)).to_have_text("digits-resnet")
    expect(page.locator("#number-images")).to_contain_text("12,480")
    expect(page.locator(".tile")).to_contain_text(["first"])

    server.send("predictions", [prediction(2, label="second", learned=None), prediction(3, confidence=0.41)])
    expect(page.locator(".tile")).to_have_count(3)
    assert page.locator(".tile .label").all_text_contents() == ["3", "second", "first"]  # the newest is first
    expect(page.locator(".tile").first).to_contain_text("41 %")
    server.send("predictions", [prediction(2, label="second", learned=False)])  # its batch is full now
    expect(page.locator(".tile").nth(1)).to_contain_text("not learned")
    expect(page.locator(".tile")).to_have_count(3)

    server.send("status", status(doing="paused", entropy=0.777, confidences=[0] * 10 + [5] * 10))
    expect(page.locator("#doing")).to_have_text("Paused")
    expect(page.locator("#announce")).to_contain_text("Paused")
    expect(page.locator("#entropy .value")).to_have_text("0.777")
    assert "0.777" in page.locator("#entropy svg").get_attribute("aria-label")
    bars = page.locator("#confidence .column").evaluate_all(
        "bars => bars.map(bar => Number(bar.getAttribute('height')))"
    )
    assert bars[:10] == [0] * 10
    assert min(bars[10:]) > 50
    assert page.title().startswith("Paused")


@pytest.mark.parametrize("what", ["source", "left", "blend", "skip", "something new"])
def test_every_state_has_words(server: PageServer, visit: Callable[..., Any], what: str) -> None:
    server.history["status"] = [status(doing=what)]
    page = visit()
    expect(page.locator("#doing")).not_to_have_text(re.compile("Connecting|Learning"))
    server.send("status", status(doing=what, frozen=True))
    expect(page.locator("#doing")).to_have_text("Frozen")


def test_alarm_is_announced_listed_and_marked(server: PageServer, visit: Callable[..., Any]) -> None:
    page = visit()
    server.send("alarm", alarm(stream=HOSTILE))
    server.send("status", status(doing="paused", probe={**status()["probe"], "evidence": 1.31, "disagreement": 0.2}))
    row = page.locator("#events li")
    expect(row).to_contain_text(["Alarm"])
    expect(row).to_contain_text([HOSTILE])
    expect(page.locator("#last-alarm")).to_be_visible()
    expect(page.locator("#announce")).to_contain_text("Alarm")  # though another announcement came at once
    expect(page.locator("#announce")).to_contain_text("Paused")
    expect(page.locator("#lanes g.mark.alarm")).to_have_count(1)
    expect(page.locator("#probe .mark.alarm")).to_have_count(1)
    expect(page.locator("#probe .alarm-text")).to_have_text("alarm at 1")
    expect(page.locator("#probe-share")).to_contain_text("11.0 %")
    line, top = (page.locator(f"#probe {name}").first.bounding_box() for name in (".alarm-line", ".line"))
    assert top["y"] < line["y"]  # evidence of 1.31 is above the line
    expect(page.locator("#lanes")).to_have_attribute("aria-label", re.compile("alarms: 1"))


def test_missing_numbers_and_nothing_yet(server: PageServer, visit: Callable[..., Any]) -> None:
    nothing = dict.fromkeys(("latency_ms", "kept_share", "entropy", "distance", "state_age", "probe"))
    server.hello = page_server.hello(guarded=False, control=False, input=None, classes=None)
    server.history["status"] = [status(images=0, batches=0, confidences=[0] * 20, **nothing)]
    page = visit()
    expect(page.locator("#predictions-empty .command")).to_have_text(f"curl -F file=@image.png {server.url}predict")
    expect(page.locator("#events-empty")).to_be_visible()
    expect(page.locator("#probe-none")).to_contain_text("--guard")
    assert "NaN" not in page.content()
    assert "null" not in page.inner_text("body")
    page.get_by_role("button", name="Freeze", exact=True).click(force=True)
    expect(page.locator("#control-message")).to_contain_text("off")
    assert server.calls == []


def test_classify(server: PageServer, visit: Callable[..., Any]) -> None:
    page = visit(expected="415")
    page.locator("#classify").get_by_label("Stream").fill("camera 2")
    page.get_by_label("Only predict").check()
    page.set_input_files("#files", [PICTURE, {**PICTURE, "name": "other.png"}])
    expect(page.locator("#classify-message")).to_contain_text("camera 2")
    expect(page.locator("#results > li")).to_have_count(2)
    first = page.locator("#results > li").first
    expect(first).to_contain_text("seven.png")
    expect(first).to_contain_text("not learned")
    expect(first.locator(".ranking li")).to_have_count(5)
    expect(first.locator(".ranking li").first).to_contain_text("91.2 %")
    wide = first.locator(".ranking .bar > span").evaluate_all("bars => bars.map(bar => bar.clientWidth)")
    assert wide == sorted(wide, reverse=True)
    assert wide[0] > 5 * wide[1]
    expect(page.locator("#results img").first).to_have_js_property("naturalWidth", 32)

    page.set_input_files("#files", [{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"hello"}])
    expect(page.locator("#classify-message")).to_contain_text("no image")
    expect(page.locator("#results > li")).to_have_count(0)


def test_drop_anywhere(server: PageServer, visit: Callable[..., Any]) -> None:
    page = visit()
    page.evaluate(
        """bytes => {
          const data = new DataTransfer();
          data.items.add(new File([new Uint8Array(bytes)], "dropped.png", {type: "image/png"}));
          for (const type of ["dragover", "drop"]) {
            const event = new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true});
            document.querySelector("main").dispatchEvent(event);
            if (!event.defaultPrevented) throw new Error(`the browser would open the image at ${type}`);
          }
        }""",
        list(png(7)),
    )
    expect(page.locator("#results > li")).to_contain_text(["dropped.png"])


def test_control_with_wrong_and_right_token(server: PageServer, visit: Callable[..., Any]) -> None:
    page = visit(expected="401")
    act = page.get_by_role("group", name="Control")
    act.get_by_role("button", name="Freeze", exact=True).click()
    expect(page.locator("#token")).to_be_focused()
    for token in ("wrong", "naïve token"):
        page.fill("#token", token)
        page.keyboard.press("Enter")
        expect(page.locator("#control-message")).to_have_class(re.compile("wrong"))
    assert server.calls == []
    assert page.evaluate("[...Object.keys(sessionStorage), ...Object.keys(localStorage)]") == []

    page.fill("#token", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#snapshots-empty")).to_contain_text("No snapshots yet")
    act.get_by_role("button", name="Take a snapshot").click()
    expect(page.locator("#snapshots li")).to_have_count(1)
    expect(page.locator("#events li")).to_contain_text(["Snapshot"])  # as the server tells everyone
    page.get_by_role("button", name="Restore default-0000").click()
    expect(page.locator("#control-message")).to_contain_text("Rolled back")
    expect(page.get_by_role("button", name="Restore default-0000")).to_be_focused()
    one = {"stream": "default"}  # the only one
    assert server.calls == [("snapshot", one), ("rollback", {"snapshot": "default-0000", **one})]

    page.reload()  # the token stays in the tab
    expect(page.locator("#snapshots li")).to_have_count(1)
    server.calls.clear()
    server.send("status", status(streams=2))
    expect(page.locator("#control-stream")).not_to_have_attribute("placeholder", "default")
    act.get_by_role("button", name="Roll back").click()
    expect(page.locator("#control-stream")).to_be_focused()  # which one?
    page.keyboard.type("camera 2")
    for answer in ("Keep what is learned", "Reset"):
        act.get_by_role("button", name="Reset").click()
        page.get_by_role("dialog").get_by_role("button", name=answer, exact=True).click()
    expect(page.locator("#control-message")).to_contain_text("Reset to the source")
    act.get_by_role("button", name="Reset").click()
    page.keyboard.press("Escape")
    act.get_by_role("button", name="Freeze", exact=True).click()
    expect(page.locator("#control-message")).to_contain_text("Frozen")
    server.send("status", status(frozen=True))
    act.get_by_role("button", name="Unfreeze").click()
    expect(page.locator("#control-message")).to_contain_text("Unfrozen")
    assert server.calls == [("reset", {"stream": "camera 2"}), ("freeze", {}), ("unfreeze", {})]
    page.fill("#token", "")
    page.get_by_role("button", name="Use token").click()
    expect(page.locator("#snapshots li")).to_have_count(0)
    assert page.evaluate("sessionStorage.length") == 0


def test_text_of_the_server_stays_text(server: PageServer, visit: Callable[..., Any]) -> None:
    server.hello = page_server.hello(name=HOSTILE, method=HOSTILE, network=HOSTILE, version=HOSTILE)
    server.history["predictions"] = [prediction(1, label=HOSTILE, stream=HOSTILE, thumbnail="javascript:alert(1)")]
    server.snapshots = [{"name": HOSTILE, "stream": HOSTILE, "time": time.time(), "bytes": 1}]
    page = visit()
    server.send("control", {"time": time.time(), "stream": HOSTILE, "action": HOSTILE, "by": HOSTILE})
    server.send("status", status(stream=HOSTILE, streams=2, doing=HOSTILE))
    page.fill("#token", "secret")
    page.keyboard.press("Enter")
    for place in (".tile .label", "#name", "#doing", "#events li", "#snapshots .name", "#doing-since"):
        expect(page.locator(place).first).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.title() != "owned"


def test_policy_holds_without_exceptions(server: PageServer) -> None:
    source = (page_server.PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", source)
    scripts = "".join(path.read_text() for path in page_server.PAGE.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", scripts)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source + scripts)


def test_reconnects(server: PageServer, visit: Callable[..., Any]) -> None:
    server.history["predictions"] = [prediction(1)]
    page = visit(expected="503|ERR_")
    server.refuse = True  # a browser gives up on a 503
    server.drop()
    expect(page.locator("#connection")).to_have_text("connection lost")
    expect(page.locator("#lost")).to_be_visible()
    expect(page.locator("#announce")).to_contain_text("retrying")
    expect(page.locator("#now-title")).to_contain_text("was doing")
    time.sleep(1.4)
    server.history["predictions"] = [prediction(1, label="again")]  # a new server starts to count again
    server.refuse = False
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#lost")).to_be_hidden()
    expect(page.locator(".tile .label")).to_have_text("again")
    assert server.opened == 2
    expect(page.locator("#announce")).to_contain_text("back")
    assert len(server.listeners) == 1


def test_a_silent_connection_is_given_up(server: PageServer, visit: Callable[..., Any]) -> None:
    page = visit(before=lambda page: page.clock.install())
    page.clock.fast_forward(6_000)
    server.send("status", status(entropy=0.123))
    expect(page.locator("#entropy .value")).to_have_text("0.123")
    page.clock.fast_forward(6_000)  # six seconds after the last event
    expect(page.locator("#connection")).to_have_text("live")
    page.clock.fast_forward(7_000)
    expect(page.locator("#connection")).to_have_text("connection lost")
    page.clock.fast_forward(3_000)
    expect(page.locator("#connection")).to_have_text("live")


def test_stays_small(server: PageServer, visit: Callable[..., Any]) -> None:
    page = visit()
    start = time.time()
    for step in range(900):
        server.send("status", status(time=start + step, stream=f"camera {step}"))
        server.send("predictions", [prediction(step, thumbnail=None)])
        server.send("alarm", alarm(time=start + step))
    server.send("status", status(time=start + 1000, entropy=0.123, doing="paused"))
    expect(page.locator("#entropy .value")).to_have_text("0.123")
    expect(page.locator("#tiles .label").first).to_have_text("9")
    assert page.locator("#tiles li").count() == 48
    assert page.locator("#events li").count() == 100
    assert page.locator("#streams option").count() <= 100
    assert page.locator("#announce > *").count() <= 3
    assert page.locator("*").count() < 2500
    kept = page.evaluate(
        """async () => {
          const recent = new (await import("/page/recent.js")).Recent();
          for (let time = 0; time < 20_000; time++) recent.add({time, stream: `${time % 3}`}, "learning");
          return recent.rings.map(({points}) => [points.length, points.at(-1).time - points[0].time]);
        }"""
    )
    assert all(length <= 4000 and span >= wanted for (length, span), wanted in zip(kept, (300, 3600), strict=True))


def test_hold_still(server: PageServer, visit: Callable[..., Any]) -> None:
    server.history["predictions"] = [prediction(1)]
    page = visit()
    expect(page.locator(".tile")).to_have_count(1)
    hold = page.get_by_role("button", name="Hold still")
    hold.click()
    server.send("predictions", [prediction(2)])
    server.send("status", status(entropy=0.123))
    expect(page.locator("#entropy .value")).to_have_text("0.123")
    time.sleep(0.7)
    expect(page.locator(".tile")).to_have_count(1)
    hold.click()
    expect(page.locator(".tile")).to_have_count(2)


def test_longer_range(server: PageServer, visit: Callable[..., Any]) -> None:
    old = time.time() - 2000
    server.history["status"] = [status(time=old, entropy=2.5), status()]
    page = visit()
    expect(page.locator("#entropy svg")).to_have_attribute("aria-label", re.compile("5 minutes.*highest 0.61"))
    page.get_by_role("radio", name="5 min").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#entropy svg")).to_have_attribute("aria-label", re.compile("60 minutes.*highest 2.5"))


def test_charts_of_one_stream(server: PageServer, visit: Callable[..., Any]) -> None:
    values = {"left": 0.3, "right": 0.9}
    server.history["status"] = [
        status(time=time.time() - 20 + step, stream=name, streams=2, entropy=values[name])
        for step, name in enumerate(["left", "right"] * 10)
    ]
    page = visit()
    chart = page.locator("#entropy svg")
    expect(chart).to_have_attribute("aria-label", re.compile("lowest 0.3.*highest 0.9"))
    page.get_by_label("Stream shown in the charts").select_option("left")
    expect(chart).to_have_attribute("aria-label", re.compile("now 0.3.*highest 0.3"))
    expect(page.locator("#entropy .value")).to_have_text("0.300")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(server: PageServer, visit: Callable[..., Any], width: int) -> None:
    long = "NoSpaceInHere" * 10
    server.hello = page_server.hello(name=long, network="other " + long)
    server.history["predictions"] = [prediction(number, label=long, stream=long) for number in range(30)]
    server.history["alarms"] = [alarm(stream=long, action=long, signal=long)]
    server.history["control"] = [{"time": time.time(), "stream": long, "action": "snapshot", "by": long}]
    server.snapshots = [{"name": long, "stream": long, "time": time.time(), "bytes": 10**9}]
    page = visit(width=width)
    server.send("status", status(stream=long, streams=12, doing=long, images=10**12, queue=10**6))
    expect(page.locator("#doing")).to_have_text(long)
    page.fill("#token", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#snapshots li")).to_have_count(1)
    page.set_input_files("#files", [{**PICTURE, "name": long + ".png"}])
    expect(page.locator("#results > li")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_every_control_is_reached_by_keyboard(server: PageServer, visit: Callable[..., Any]) -> None:
    server.history["predictions"] = [prediction(1)]
    server.history["alarms"] = [alarm()]
    page = visit()
    page.evaluate(
        "document.querySelectorAll('a, button, input, select, ol').forEach((each, index) => each.dataset.key = index)"
    )
    wanted = page.evaluate(
        """[...document.querySelectorAll('a[href], button, input, select, [tabindex="0"]')]
        .filter(each => !each.closest('dialog, [hidden]') && !(each.type === 'radio' && !each.checked))
        .map(each => each.dataset.key)"""
    )
    seen = []
    for _ in range(len(wanted)):
        page.keyboard.press("Tab")
        key, ring = page.evaluate(
            """() => {
              const at = document.activeElement, near = at.closest('.button') ?? at;
              const shown = at.type === 'radio' ? at.nextElementSibling : near;
              return [at.dataset.key, getComputedStyle(shown).outlineStyle];
            }"""
        )
        assert ring != "none", f"no focus style on {key}"
        seen.append(key)
    assert seen == wanted  # each once, in the order of the page


def test_accessible_names_landmarks_and_headings(server: PageServer, visit: Callable[..., Any]) -> None:
    server.history["predictions"] = [prediction(1)]
    page = visit()
    expect(page.locator(".tile")).to_have_count(1)
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in tree if not node["ignored"]}
    assert {"banner", "main", "navigation", "complementary", "contentinfo", "region"} <= roles
    named = ("button", "textbox", "combobox", "checkbox", "radio", "link", "image", "img", "region", "list", "group")
    for node in tree:
        if not node["ignored"] and node["role"]["value"] in named and node["role"]["value"] != "list":
            assert node["name"]["value"].strip(), node
    charts = page.get_by_role("img").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
    assert len(charts) == 6
    assert not [label for label in charts if "no data" in label]
    levels = page.locator("h1, h2, h3").evaluate_all("all => all.map(each => Number(each.tagName[1]))")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    live = page.locator("[aria-live], [role=status], [role=alert]").evaluate_all("all => all.map(each => each.id)")
    assert live == ["announce", "classify-message", "control-message"]


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (each) => {
    for (; each; each = each.parentElement) {
      const rgb = parse(getComputedStyle(each).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    throw new Error("no ground");
  };
  const low = [];
  for (const each of document.querySelectorAll("body *")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !each.checkVisibility() || each.closest(".skip, .hidden")) continue;
    const ink = getComputedStyle(each)[each instanceof SVGElement ? "fill" : "color"];
    const [a, b] = [light(parse(ink)) + 0.05, light(ground(each)) + 0.05];
    const ratio = Math.max(a / b, b / a);
    if (ratio < 4.5) low.push(`${each.tagName} ${each.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(server: PageServer, visit: Callable[..., Any], scheme: str) -> None:
    page_server.invent(server)
    page = visit(scheme=scheme, expected="503|401", reduced_motion="reduce")
    expect(page.locator(".tile")).to_have_count(48)
    page.get_by_role("button", name="Hold still").click()
    page.get_by_role("button", name="Freeze", exact=True).click()
    for doing in ("learning", "paused", "source", "frozen"):
        server.send("status", status(doing=doing))
        expect(page.locator("#now")).to_have_attribute("data-doing", doing)
        assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.getAnimations().length") == 0
    server.refuse = True
    server.drop()
    expect(page.locator("#lost")).to_be_visible()
    assert page.evaluate(CONTRAST) == []
