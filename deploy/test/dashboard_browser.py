"""A visit to the dashboard with a headless Chromium: prints one JSON object about what was seen.

It runs in an environment of its own that has Playwright, and imports nothing of Starling.

    python dashboard_browser.py '{"url": ..., "token": ..., "axe": FILE, "shots": FOLDER, "steps": 10000}'
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, CDPSession, Page, sync_playwright

VIEWS = {
    "overview": ".tile", "curves": ".charts .chart path.line", "completions": ".sample", "weights": ".gantt",
    "waits": ".cause", "events": ".event", "settings": "table",
}  # fmt: skip
"""Each view, and what it has once it is drawn."""
KINDS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light", "viewport": {"width": 1360, "height": 900}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1360, "height": 900}},
    "phone": {"color_scheme": "light", "viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}
PATIENCE_MS = 120_000
POINTS = (
    "Math.max(...[...document.querySelectorAll('path.line')].map((one) => one.getAttribute('d').split('L').length))"
)
"""Most points of a curve."""
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
OBSERVE = """() => {
  window.slow = [];
  const note = (list) => { for (const one of list.getEntries()) window.slow.push([one.name, one.duration]); };
  new PerformanceObserver(note).observe({ type: "event", durationThreshold: 16, buffered: true });
  window.tasks = [];
  const task = (list) => { for (const one of list.getEntries()) window.tasks.push(one.duration); };
  new PerformanceObserver(task).observe({ type: "longtask" });
}"""


def visit(task: dict[str, Any]) -> dict[str, Any]:
    """Return what was seen."""
    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=task.get("chromium", "/usr/bin/chromium"), args=options)
        try:
            found: dict[str, Any] = {"version": browser.version, "views": [], "messages": []}
            for kind in KINDS:
                _all_views(browser, kind, task, found)
            found |= {"login": _login(browser, task), "speed": _speed(browser, task)}
            if task.get("control"):
                found["control"] = _control(browser, task)
            return found
        finally:
            browser.close()


def _open(browser: Browser, task: dict[str, Any], found: dict[str, Any], kind: str, **options: Any) -> Page:
    page = browser.new_context(**KINDS[kind], **options).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: found["messages"].append(f"{kind} {message.type}: {message.text}"))
    page.on("pageerror", lambda error: found["messages"].append(f"{kind}: {error}"))
    page.goto(f"{task['url']}/#token={task['token']}")
    page.wait_for_selector(VIEWS["overview"])
    return page


def _all_views(browser: Browser, kind: str, task: dict[str, Any], found: dict[str, Any]) -> None:
    page = _open(browser, task, found, kind)
    for view, drawn in VIEWS.items():
        page.goto(f"{task['url']}/#/{view}")
        page.wait_for_selector(drawn)
        time.sleep(1.0)
        page.screenshot(path=str(Path(task["shots"]) / f"{view}-{kind}.png"))
        overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        seen = {"view": view, "kind": kind, "overflow": overflow, "hurt": page.evaluate("window.hurt ?? null")}
        if view == "completions":
            # Tokens and images are fetched when they come into view.
            page.locator(".token").nth(4000).wait_for()
            page.get_by_text("<script>window.hurt=1</script>").first.wait_for()
            page.locator(".media button, .media img").first.scroll_into_view_if_needed()
            page.wait_for_selector(".media img")
            seen["tokens"] = page.locator(".token").count()
            page.wait_for_selector(".film img[src]")
            page.locator(".film input").first.focus()
            page.keyboard.press("End")
            page.wait_for_selector(".film img[alt='clip, frame 5 of 5']")
            page.get_by_role("button", name="Version").click()
            page.locator(".token.tint").nth(seen["tokens"] - 1).wait_for()
            seen["tinted"] = page.locator(".token.tint").count()
            seen["hostile"] = page.get_by_text("<script>window.hurt=1</script>").count()
            seen["images"] = page.locator(".media img").count()
        found["views"].append(seen)
    page.context.close()
    # The policy of the page keeps the test's own script out; a context without it runs axe.
    page = _open(browser, task, {"messages": []}, kind, bypass_csp=True)
    for seen in [one for one in found["views"] if one["kind"] == kind]:
        page.goto(f"{task['url']}/#/{seen['view']}")
        page.wait_for_selector(VIEWS[seen["view"]])
        time.sleep(1.0)
        page.evaluate(Path(task["axe"]).read_text())
        options = json.dumps({"runOnly": {"type": "tag", "values": RULES}})
        answer = page.evaluate(f"axe.run(document, {options})")
        seen["rules"] = len(answer["passes"])
        seen["violations"] = [
            f"{one['id']}: {node['html'][:160]} {node['failureSummary'][:200]}"
            for one in answer["violations"]
            for node in one["nodes"][:2]
        ]
    page.context.close()


def _login(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Open the page without the token, then enter it."""
    page = browser.new_context(**KINDS["light"]).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(task["url"])
    page.wait_for_selector("#token")
    shown = page.locator(".tile").count()
    page.fill("#token", task["token"])
    page.get_by_role("button", name="Open").click()
    page.wait_for_selector(".tile")
    kept = page.evaluate("location.href")
    page.context.close()
    return {"shown_before": shown, "token_in_address": task["token"] in kept}


def _speed(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Measure first paint, first curves, and what inputs cost: time to the next frame, long tasks, and CPU, in ms."""
    messages: dict[str, Any] = {"messages": []}
    page = _open(browser, task, messages, "light")
    page.goto("about:blank")
    page.goto(f"{task['url']}/#/curves")
    page.wait_for_selector(VIEWS["curves"])
    found = {
        "first_curves_ms": page.evaluate("performance.now()"),
        "first_paint_ms": page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime"),
    }
    time.sleep(1.0)
    page.evaluate(OBSERVE)
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable")
    before, begun = _costs(client), time.monotonic()
    hover = _inputs(page)
    after = _costs(client)
    slow, tasks = page.evaluate("window.slow"), page.evaluate("window.tasks")
    durations = [duration for _, duration in slow]
    found |= {
        "seconds": round(time.monotonic() - begun, 1),
        "slowest_input_ms": max(durations, default=16.0),
        "inputs_over_16_ms": len(durations),
        "longest_task_ms": max(tasks, default=0.0),
        "tasks_over_50_ms": len(tasks),
        "hover": hover,
        "elements": page.evaluate("document.querySelectorAll('*').length"),
        "points": page.evaluate(POINTS),
        "redrawn": _redrawn(page),
        **{name: round(1e3 * (after[name] - before[name])) for name in before},
    }
    page.context.close()
    return found


def _redrawn(page: Page) -> int:
    """Return how often plots are drawn within some seconds while only another run changes."""
    for box in page.locator(".chip input").all():
        if box.get_attribute("aria-label") == "Show live in curves":
            box.uncheck()
    time.sleep(4.0)
    drawn = "[...document.querySelectorAll('.chart')].reduce((sum, one) => sum + Number(one.dataset.draws ?? 0), 0)"
    before = int(page.evaluate(drawn))
    time.sleep(8.0)
    return int(page.evaluate(drawn)) - before


def _costs(client: CDPSession) -> dict[str, float]:
    """Return the seconds that the page has taken so far, by what for."""
    names = {"TaskDuration": "cpu_ms", "ScriptDuration": "script_ms", "LayoutDuration": "layout_ms",
             "RecalcStyleDuration": "style_ms"}  # fmt: skip
    metrics = client.send("Performance.getMetrics")["metrics"]
    return {names[one["name"]]: one["value"] for one in metrics if one["name"] in names}


def _inputs(page: Page) -> int:
    """Use the plots as a visitor does. Returns how many boxes with values were there."""
    box = page.locator(".charts .plot").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    for at in range(60):
        page.mouse.move(box["x"] + 60 + at * (box["width"] - 90) / 60, middle)
    page.wait_for_selector(".tip:visible")
    hover = page.locator(".tip:visible").count()
    page.mouse.move(box["x"] + box["width"] * 0.4, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=5)
    page.mouse.up()
    page.get_by_role("button", name="Show all").wait_for()
    page.locator(".charts .plot").first.focus()
    for _ in range(10):
        page.keyboard.press("ArrowLeft")
    page.locator("#window").focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Time").click()
    page.get_by_role("button", name="Show all").wait_for(state="hidden")
    for _ in range(10):
        page.mouse.wheel(0, 240)
        time.sleep(0.1)
    time.sleep(3.0)
    return hover


def _control(browser: Browser, task: dict[str, Any]) -> dict[str, Any]:
    """Evaluate, change a setting, save, scale, drain and stop, with the buttons."""
    messages: dict[str, Any] = {"messages": []}
    page = _open(browser, task, messages, "light")
    page.locator(".pick", has_text=task["control"]).click()
    page.wait_for_selector(".node")
    seen: dict[str, Any] = {"replicas": page.locator(".node b").all_text_contents()}
    page.goto(f"{task['url']}/#/waits")
    page.wait_for_selector(".who")
    seen["waits"] = page.locator(".who").all_text_contents()
    page.goto(f"{task['url']}/#/settings")
    page.get_by_role("button", name="Evaluate").click()
    seen["evaluate"] = _reply(page)
    page.select_option("#set-key", "rl.max_staleness")
    page.fill("#set-value", "3")
    page.get_by_role("button", name="Set", exact=True).click()
    page.wait_for_selector(".note:has-text('max_staleness')")
    seen["set"] = _reply(page)
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    for action, done in (
        ("Save a state", "state of version"),
        ("Scale", "2 rollouts desired"),
        ("Drain", "is being drained"),
    ):
        if action == "Scale":
            page.fill("#scale-num", "2")
        if action == "Drain":
            page.goto(f"{task['url']}/#/overview")
            page.wait_for_selector(".node:has-text('rollout-1')")
            page.goto(f"{task['url']}/#/settings")
            page.fill("#drain-name", "rollout-1")
        page.get_by_role("button", name=action, exact=True).click()
        page.wait_for_selector(f".note:has-text('{done}')")
        seen[action] = _reply(page)
    seen["asked"] = asked
    page.get_by_role("button", name="Stop the run").click()
    page.wait_for_selector(".note:has-text('stopping')")
    seen["stop"] = _reply(page)
    page.context.close()
    return seen


def _reply(page: Page) -> dict[str, str]:
    note = page.locator("main .note:visible").last
    note.wait_for()
    return {"text": note.inner_text(), "class": note.get_attribute("class") or ""}


if __name__ == "__main__":
    print(json.dumps(visit(json.loads(sys.argv[1]))))
