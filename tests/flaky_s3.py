"""An S3 endpoint on loopback that fails and dawdles now and then: ``python flaky_s3.py PORT_FILE``."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class Flaky:
    """Answers every 97th request with 500 and every 61st after a third of a second."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application, self._numbers = application, itertools.count(1)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        number = next(self._numbers)
        if number % 61 == 0:
            time.sleep(0.3)
        if number % 97 == 0:
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"]
        return self._application(environ, start_response)


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, Flaky(DomainDispatcherApplication(create_backend_app)), threaded=True)
    Path(sys.argv[1]).write_text(str(server.port))
    server.serve_forever()
