"""The report's page in a real browser, where one is installed (Debian: chromium-headless-shell). Its DevTools
protocol goes over two pipes, so nothing else is needed.

One invariant: what is checked is what the browser has laid out and said, and not the page's source.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from report_page import BROWSERS, save_page

FOUND = next((path for name in BROWSERS if (path := shutil.which(name))), None)
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
SAYS = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.requestWillBeSent")

HIDDEN = """
[...document.querySelectorAll('td, dt, dd, h1, h2, p, li, svg text')].filter(each => {
    if (each.closest(innerWidth > 700 ? '.narrow' : '.wide') || !each.textContent.trim()) return false;
    const box = each.getBoundingClientRect();
    return !box.width || !box.height || box.left < 0 || box.right > innerWidth + 0.5
        || each instanceof HTMLElement && each.scrollWidth > each.clientWidth + 1;
}).map(each => each.tagName + ': ' + each.textContent.slice(0, 40))
"""
"""What has no place within the window, or is cut off in its own."""

CONTRAST = """
[...document.querySelectorAll('td, dd, h1, p')].filter(each => {
    const light = color => color.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + +part, 0) / 3;
    const page = light(getComputedStyle(document.body).backgroundColor);
    return Math.abs(light(getComputedStyle(each).color) - page) < 60;
}).length
"""

SHOWN = """({
    figures: JSON.parse(document.getElementById('figures').textContent),
    tiles: Object.fromEntries([...document.querySelectorAll('data')].map(each => [each.id, each.value])),
    rows: Object.fromEntries([...document.querySelectorAll('tbody tr')].map(row =>
        [row.cells[0].innerText.trim(), [...row.cells].slice(1).map(cell => cell.innerText.trim())])),
    pictures: [...document.querySelectorAll('figure svg')]
        .filter(each => each.getBoundingClientRect().height > 50).length,
    background: getComputedStyle(document.body).backgroundColor,
    heading: document.querySelector('h1').innerText,
})"""


class Browser:
    """One page of a browser. said: what it wrote to the console, and what it asked the network for."""

    def __init__(self, writes: int, reads: int) -> None:
        self._writes, self._reads, self._ids = writes, os.fdopen(reads, "rb"), count(1)
        self._session: dict[str, Any] = {}
        self._rest = b""
        self.said: list[dict[str, Any]] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, url: str) -> None:
        self.ask("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._reads.fileno(), 1 << 16)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        if found.get("method") in SAYS:
            self.said.append(found)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """The browser reads its descriptor 3 and writes 4."""
    reads, writes = os.pipe()
    answers, answered = os.pipe()
    shell = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{answered}', "bash"]
    command = [*shell, str(FOUND), *OPTIONS, f"--user-data-dir={folder}"]
    with subprocess.Popen(command, pass_fds=(reads, answered), stderr=subprocess.DEVNULL) as process:
        os.close(reads)
        os.close(answered)
        try:
            yield Browser(writes, answers)
        finally:
            process.kill()
            os.close(writes)


@pytest.mark.slow
@pytest.mark.skipif(FOUND is None, reason=f"needs one of {', '.join(BROWSERS)}")
def test_a_browser_shows_all_of_a_page_with_the_reports_figures_and_complains_of_nothing(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra plot")
    report = save_page(tmp_path / "report.html")
    figures, last = json.loads(json.dumps(report.as_dict())), report.last_step
    backgrounds = set()
    with browser(tmp_path / "profile") as page:
        for width in (1400, 400):
            for scheme in ("light", "dark"):
                page.ask(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=1000,
                    deviceScaleFactor=1,
                    mobile=False,
                )
                page.ask(
                    "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
                )
                page.open((tmp_path / "report.html").as_uri())
                assert page.value(HIDDEN) == [], (width, scheme)
                assert page.value("document.documentElement.scrollWidth") <= width
                assert page.value(CONTRAST) == 0, (width, scheme)
                shown = page.value(SHOWN)
                backgrounds.add(shown["background"])
                assert shown["figures"] == figures
                assert shown["tiles"] == {name: str(last[name]) for name in shown["tiles"]}
                assert {*shown["tiles"]} == {"peak_bytes", "moved_bytes", "stall_ms", "host_bytes"}
                assert {*shown["rows"]} > {"moved to the host", "pinned host memory"}
                assert shown["pictures"] == 2
                assert shown["heading"].startswith("Did it work? ")
        page.value("document.querySelector('table').style.width = '3000px'")
        assert page.value(HIDDEN) != [], "what is not within the window is found"
    assert len(backgrounds) == 2, "light and dark"
    own = (tmp_path / "report.html").as_uri()
    asked = [one["params"]["request"]["url"] for one in page.said if one["method"] == SAYS[-1]]
    assert [url for url in asked if url != own and not url.startswith("data:")] == [], "it loads nothing"
    assert [one for one in page.said if one["method"] != SAYS[-1]] == []
