"""A page in Chromium, driven through the DevTools protocol over a pipe: as a desktop or a phone, light or dark."""

import fcntl
import json
import os
import subprocess


class Browser:
    """One tab. Use it as a context manager; profile: a folder for Chromium's files."""

    def __init__(self, profile):
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4: copies above both, so that neither overwrites the other
        high = [fcntl.fcntl(each, fcntl.F_DUPFD, 20) for each in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe",
             f"--user-data-dir={profile}", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(3, 4), preexec_fn=lambda: (os.dup2(high[0], 3), os.dup2(high[1], 4)))
        for each in (theirs_in, theirs_out, *high):
            os.close(each)
        self._number, self._received, self._events, self._session = 0, b"", [], {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._session = {}
        self._call("Browser.close")
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)

    def open(self, uri, *, width, is_phone=False, is_dark=False, is_printed=False):
        """Load a page and wait until it is drawn twice."""
        self._call("Emulation.setEmulatedMedia", media="print" if is_printed else "", features=[
            {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}])
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=is_phone)
        for each in ("about:blank", uri):
            self.forget()
            self._call("Page.navigate", url=each)
            self.await_load()
        self.value("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")

    def forget(self):
        """Forget what has happened so far."""
        self._events.clear()

    def await_load(self):
        """Wait for a page that is loaded after `forget`."""
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._read())

    def value(self, expression):
        """Value of a JavaScript expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move_pointer(self, x, y, *, wheel=None):
        """Move the pointer; wheel: turn its wheel by this many pixels instead."""
        more = {"type": "mouseMoved"} if wheel is None else {"type": "mouseWheel", "deltaX": 0, "deltaY": wheel}
        self._call("Input.dispatchMouseEvent", x=x, y=y, **more)

    def errors(self):
        """Errors that the page has thrown or logged since it was opened."""
        return [event for event in self._events
                if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")]

    def _call(self, method, **parameters):
        self._number += 1
        os.write(self._out, json.dumps({"id": self._number, "method": method, "params": parameters, **self._session}
                                       ).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._events.append(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self):
        while b"\0" not in self._received:
            received = os.read(self._in, 1 << 16)
            assert received, "Chromium has ended"
            self._received += received
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)
