"""A browser without a driver: Chromium's DevTools protocol over two pipes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
"""Path of a browser; None where none is installed."""


class Page:
    """One page in a headless browser, 1200 x 900 pixels."""

    def __init__(self, url: str, profile: Path, *, dark: bool = False) -> None:
        assert BROWSER is not None
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4; moved up first, so that neither overwrites.
        high = [os.dup2(commands, 30), os.dup2(answers, 31)]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--disable-dev-shm-usage"]
        flags += ["--window-size=1200,900", f"--user-data-dir={profile}"]
        script = 'exec 3<&30 4>&31; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "browser", BROWSER, *flags, "about:blank"],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for descriptor in (commands, answers, *high):
            os.close(descriptor)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[Any] = []
        """Exceptions of the page's scripts, and requests that it sent."""
        target = self.call("Target.getTargets")["targetInfos"][0]["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!document.getElementById('range').textContent")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(answer["params"])
            if answer.get("method") == "Network.requestWillBeSent":
                address = answer["params"]["request"]["url"]
                self.errors += [] if address.startswith("file:") else [address]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true, at most some seconds."""
        script = f"""new Promise((done, failed) => {{
            const end = Date.now() + 20000;
            (function look() {{
                let met = false;
                try {{ met = {condition}; }} catch (error) {{ }}
                if (met) done(true); else if (Date.now() > end) failed("waited too long"); else setTimeout(look, 20);
            }})();
        }})"""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert answer["result"].get("value") is True, f"{condition} did not come true"

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press, release or turn the wheel, in pixels of the page."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._answers, 1 << 20)
            assert piece, "the browser has gone"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
