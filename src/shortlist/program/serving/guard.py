"""In front of every request: which host and page it is for, how often the client asks, and what browsers may do."""

import ipaddress
import json
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shortlist.program.serving.limits import RateLimit, RefusedError

LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

# Whatever a class name holds, the browser runs our script alone and asks no other server. Pictures are our own, or
# photos that the user has chosen (blob:).
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Answers what must not reach the application, and adds headers to every answer.

    Args:
        app: The application.
        allowed_hosts: Names by which people reach the server, beside those of this machine itself.
        rate: How often a client may ask.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str], rate: RateLimit) -> None:
        self._app, self._rate = app, rate
        self._allowed = LOCAL_NAMES | {name.lower().strip("[]") for name in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server's start and end
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            self._check(scope)
        except RefusedError as refusal:
            await send_refusal(refusal, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # A page of the internet can give its own name the address of this machine; the name then betrays it.
        if not self._is_allowed(_name_of(f"//{host}"), scope):
            raise RefusedError(
                400,
                "This server is not known by the name in the address. Use the address that it printed, or start it "
                "with --allow-host and this name.",
            )
        # Other pages may send photos here, although they could not read the answer.
        origin = headers.get("origin")
        is_foreign = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
        if scope["method"] not in ("GET", "HEAD") and (
            is_foreign or (origin is not None and urlsplit(origin).netloc.lower() != host.lower())
        ):
            raise RefusedError(403, "Pages of other sites may not send anything here.")
        if scope["path"].startswith("/api/"):
            self._rate.take((scope.get("client") or ("", 0))[0])

    def _is_allowed(self, name: str, scope: Scope) -> bool:
        if name in self._allowed:
            return True
        # An address, unlike a name, cannot be pointed elsewhere. It is ours if the connection came in there.
        return _is_address(name) and name == (scope.get("server") or ("", 0))[0]


def _name_of(url: str) -> str:
    """The host of a URL without its port; nothing if it is malformed."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def send_refusal(refusal: RefusedError, send: Send) -> None:
    """Answer with the sentence as JSON."""
    content = json.dumps(error_content(str(refusal))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(name.encode(), value.encode()) for name, value in retry_header(refusal).items()]
    # The rest of the request is not read, so nothing else can follow on this connection.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def error_content(sentence: str) -> dict[str, Any]:
    """What every answer that is no success holds."""
    return {"error": sentence}


def retry_header(refusal: RefusedError) -> dict[str, str]:
    return {} if refusal.retry_after is None else {"retry-after": str(refusal.retry_after)}
