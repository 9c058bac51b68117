"""The view as a web page: an HTTP server with one page, its scripts and /api/state. The page loads nothing else."""

from __future__ import annotations

import ipaddress
import socket
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse

from sglang_hybrid.commands.arguments import Refused
from sglang_hybrid.commands.ports import check_port
from sglang_hybrid.commands.top.server import Server
from sglang_hybrid.commands.top.watch import Watch

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html"),
    "/top.css": ("top.css", "text/css"),
    "/top.js": ("top.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/heat_map.js": ("heat_map.js", "text/javascript"),
    "/format.js": ("format.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",  # another version of this program may answer at this port tomorrow
}


def serve_page(server: Server, interval: float, host: str, port: int, all_interfaces: bool) -> int:
    """Serve the page until Ctrl-C and return the exit status. Raise Refused for a forbidden or taken address."""
    check_address(host, all_interfaces)
    check_port(host, port)
    watch = Watch(server, interval)
    app = page_app(watch, host, any_host=all_interfaces)
    listener = socket.create_server((host, port), family=_family(host), reuse_port=False)
    stop = threading.Event()
    threading.Thread(target=watch.run, args=(stop,), daemon=True).start()
    shown = f"[{host}]" if ":" in host else host
    print(f"watching {server.url} at http://{shown}:{listener.getsockname()[1]} (Ctrl-C ends it)", flush=True)
    try:
        uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off")).run(sockets=[listener])
    finally:
        stop.set()
        listener.close()
    return 0


def check_address(host: str, all_interfaces: bool) -> None:
    """Raise Refused for a wildcard address without ``all_interfaces``. Warn if other machines can reach the page."""
    if not host:
        raise Refused("--host is empty: name an address, such as 127.0.0.1")
    try:
        found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(host, 0)}
    except (OSError, UnicodeError, ValueError) as error:
        raise Refused(f"--host {host}: no such address: {error}") from error
    wildcard = any(address.is_unspecified for address in found)
    if wildcard and not all_interfaces:
        raise Refused(
            f"--host {host} would show the page at every address of this machine, to everybody who "
            "reaches it: name one address, or add --all-interfaces"
        )
    if wildcard or not all(address.is_loopback for address in found):
        print(
            "warning: the page has no password; everybody who reaches this address sees the server's numbers and "
            "settings",
            file=sys.stderr,
        )


def page_app(watch: Watch, host: str, *, any_host: bool = False) -> FastAPI:
    """Return the app that serves the page. ``host`` is the address or name in the page's URL.

    Requests for other names are refused unless ``any_host``: a foreign page could give its name this machine's address.
    """
    app = FastAPI(title="sglang-hybrid top", docs_url=None, redoc_url=None, openapi_url=None)
    own_names = {host.lower(), "localhost", "127.0.0.1", "::1"}

    @app.middleware("http")
    async def check_name(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if not any_host and request.url.hostname not in own_names:
            return PlainTextResponse(f"Open this page at {host}.\n", status_code=403)
        response = await answer(request)
        response.headers.update(_HEADERS)
        return response

    @app.get("/api/state")
    def state(after: int = 0) -> Response:
        return Response(msgspec.json.encode(watch.state(after)), media_type="application/json")

    def file(request: Request) -> Response:
        name, kind = FILES[request.url.path]
        return Response((PAGE / name).read_bytes(), media_type=kind)

    for path in FILES:
        app.add_api_route(path, file, methods=["GET"])
    return app


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0)[0][0]
