"""Client of a headless Chromium over its debugging pipe, in the DevTools protocol, with the standard library alone."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any, Self

ANSWER_SECONDS = 30.0  # a healthy browser answers in milliseconds
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--no-first-run",
)


class Chromium:
    """Headless Chromium with one page, as a context manager. Needs `chromium` on the PATH.

    events: requests, exceptions and console errors of the page since it was opened.

    Raises:
        RuntimeError: Chromium is missing or rejects a command, or a script on the page throws.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._next_id = 0
        self._received = b""

    def __enter__(self) -> Self:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise RuntimeError("no chromium on the PATH; install it")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write_fd = os.pipe()
        self._read_fd, from_browser = os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        command = f'exec 3<&{to_browser} 4>&{from_browser} && exec "$0" "$@"'
        arguments = [program, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, *arguments],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._command("Browser.close", session=False)
            self._process.wait(ANSWER_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._write_fd)
            os.close(self._read_fd)
            self._profile.cleanup()

    def _attach(self) -> None:
        targets = self._command("Target.getTargets", session=False)["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        answer = self._command("Target.attachToTarget", session=False, targetId=target, flatten=True)
        self._session = answer["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._command(f"{domain}.enable")

    def _command(self, method: str, *, session: bool = True, **params: Any) -> dict[str, Any]:
        self._next_id += 1
        message: dict[str, Any] = {"id": self._next_id, "method": method, "params": params}
        if session:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            answer = self._read(deadline)
            if answer.get("id") != self._next_id:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select([self._read_fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RuntimeError(f"chromium sent no response within {ANSWER_SECONDS:g} s")
            self._received += os.read(self._read_fd, 1 << 20)
        message, _, self._received = self._received.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete."""
        self._command("Page.navigate", url="about:blank")
        self.until(lambda: self.run("location.href") == "about:blank", "a blank page")
        self.events.clear()
        self._command("Page.navigate", url=url)
        self.until(lambda: self.run("location.href !== 'about:blank' && document.readyState") == "complete", "the page")

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression on the page; a promise is awaited."""
        answer = self._command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script[:80]}: {answer['exceptionDetails'].get('exception', {}).get('description')}")
        return answer["result"].get("value")

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 20.0) -> None:
        """Poll until `condition()` is true; raise AssertionError with `what` after `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
            time.sleep(0.02)

    def until_script(self, script: str, seconds: float = 20.0) -> None:
        self.until(lambda: self.run(script), script, seconds)

    def press(self, key: str, *, ctrl: bool = False, alt: bool = False, shift: bool = False) -> None:
        """Press and release a key by its DOM name, such as "Enter", "ArrowRight" or "e"."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "F2": 113, "Delete": 46}
        codes |= {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        is_letter = len(key) == 1 and key.isalpha()
        for kind in ("keyDown", "keyUp"):
            text: dict[str, Any] = {"text": "\r"} if key == "Enter" and kind == "keyDown" and not ctrl else {}
            self._command(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=f"Key{key.upper()}" if is_letter else key,
                windowsVirtualKeyCode=codes.get(key, ord(key[0].upper())),
                modifiers=1 * alt + 2 * ctrl + 8 * shift,
                **text,
            )

    def type(self, text: str) -> None:
        """Type a text into the focused element."""
        self._command("Input.insertText", text=text)

    def wheel(self, selector: str, pixels: float) -> None:
        """Turn the mouse wheel over an element; positive is down."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.run(f"(box => [box.x + 20, Math.max(box.y, 0) + Math.min(box.height, innerHeight) / 2])({box})")
        self._command("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=pixels)

    def point_at(self, selector: str) -> None:
        """Move the mouse over the middle of the first line of an element."""
        first_line = f"document.querySelector({json.dumps(selector)}).getClientRects()[0]"
        x, y = self.run(f"(line => [line.x + line.width / 2, line.y + line.height / 2])({first_line})")
        self._command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def set_screen(
        self, width: int, height: int, *, scale: float = 1.0, dark: bool = False, phone: bool = False
    ) -> None:
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._command("Page.captureScreenshot", format="png")["data"]))
