"""The process that serves: its address, its start and its end."""

import errno
import ipaddress
import socket
import warnings
from collections.abc import Callable

import uvicorn
from PIL import Image
from starlette.types import ASGIApp

from shortlist.errors import ShortlistError

_WAITING_CONNECTIONS = 128
_SECONDS_TO_FINISH = 5  # for requests that are being answered when the server ends


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections at this address; port 0 is any free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ShortlistError(f"--host must be an address of this machine, got {host!r}: {error}") from None
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(_WAITING_CONNECTIONS)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "choose another with --port, or any free one with --port 0"
            raise ShortlistError(f"port {port} of {host} is in use: {remedy}") from None
        if error.errno == errno.EACCES:
            raise ShortlistError(f"port {port} may not be used: choose one from 1024 with --port") from None
        raise ShortlistError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    return listening


def address_of(listening: socket.socket, host: str) -> str:
    """The URL to open in a browser on this machine."""
    bound, port = listening.getsockname()[:2]
    if ipaddress.ip_address(bound).is_unspecified:
        host = "127.0.0.1" if listening.family == socket.AF_INET else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: ASGIApp, listening: socket.socket, when_ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. Requests are not logged: nothing of the users is kept."""
    # Sizes are checked against our own limit; Pillow would print a warning at another.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # a client could choose who it seems to be
        timeout_graceful_shutdown=_SECONDS_TO_FINISH,
    )
    when_ready()
    uvicorn.Server(config).run(sockets=[listening])
