"""Local web server of one folder, for opening an exported web page in a browser."""

import functools
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from jaxstack.errors import ConfigError


class _Handler(SimpleHTTPRequestHandler):
    """Serves files with HTTP headers for cross-origin isolation, which browsers demand for high-resolution timers."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line of each HTTP request."""


_Handler.extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}


def make_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a web server of a folder at 127.0.0.1; port 0 takes any free port.

    Raises:
      ConfigError: the port is taken, or not permitted.
    """
    try:
        return ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, directory=str(folder)))
    except OSError as error:
        raise ConfigError(f"--serve: cannot listen on port {port} ({error.strerror}); give another one.") from None


def serve_until_interrupted(folder: Path, port: int) -> None:
    """Serve a folder over HTTP on this machine until Ctrl-C."""
    with make_server(folder, port) as server:
        print(f"open http://127.0.0.1:{server.server_address[1]} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
