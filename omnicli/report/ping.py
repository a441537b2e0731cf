"""Tells a watcher of cron jobs (healthchecks.io and its like) that a run started and ended.

The address is a secret: it stands in no message. Whatever happens here changes nothing of the run.
"""

import http.client
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass, field

from omnicli.errors import UserError

TIMEOUT_S, TRIES, PAUSE_S = 10.0, 3, 1.0
BODY_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Ping:
    """One run's pings."""

    url: str = field(repr=False)
    run: str = field(default_factory=lambda: str(uuid.uuid4()))
    pause_s: float = PAUSE_S

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise UserError("the ping address is none", hint="http:// or https://")

    def start(self) -> str:
        """The run starts; an empty text, or what went wrong."""
        return self._send("start", b"")

    def end(self, exit_code: int, told: str) -> str:
        """The run ended, with its last words; an empty text, or what went wrong."""
        return self._send(str(exit_code), told.encode("utf-8", "backslashreplace")[-BODY_BYTES:])

    def _send(self, what: str, body: bytes) -> str:
        scheme, host, path, query, _ = urllib.parse.urlsplit(self.url)
        query = "&".join(filter(None, (query, f"rid={self.run}")))
        address = urllib.parse.urlunsplit((scheme, host, f"{path.rstrip('/')}/{what}", query, ""))
        told = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self.pause_s)
            try:
                request = urllib.request.Request(address, data=body, method="POST")
                with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                    return ""
            except urllib.error.HTTPError as error:
                told = f"status {error.code}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                told = type(error).__name__  # its words may hold the address
        return f"the ping did not arrive ({told})"


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its words hold the address
        return False
