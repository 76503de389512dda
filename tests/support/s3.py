"""An S3 of our own: moto's, in a thread of this process, on a port of loopback.

    with S3() as s3:
        store = ParquetStore(s3.uri(), "orders")

    with S3() as s3, s3.proxy() as proxy:          # uploads can be cut in the middle
        store = ParquetStore(s3.uri(proxy.port), "orders")

pyarrow is a client of its own (in C++), so nothing here stands in for the code under test. It asks
again three times, which takes six seconds if nobody answers; `filesystem()` is one that does not.
"""

from __future__ import annotations

import logging
import secrets
import urllib.request
from typing import Self

import pyarrow.fs as fs

from tests.support.proxy import Proxy

HOST = "127.0.0.1"
ACCESS_KEY = "reader"
SECRET = "s3cret-of-the-bucket"
BUCKET = "history"


class S3:
    """A server with one empty bucket. Each `uri()` is another folder in it."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # half a second

        # It has a line for each request, and a traceback for each that was cut.
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = ThreadedMotoServer(HOST, 0, verbose=False)
        self._server.start()
        self.port: int = self._server.get_host_and_port()[1]
        # Without a client library, and without a signature: moto looks at none.
        bucket = f"http://{HOST}:{self.port}/{BUCKET}"
        with urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=10):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def uri(self, port: int | None = None, folder: str | None = None) -> str:
        """The address of a folder of its own, by way of a proxy if its port is given."""
        endpoint = f"{HOST}:{port or self.port}"
        return (
            f"s3://{ACCESS_KEY}:{SECRET}@{BUCKET}/{folder or secrets.token_hex(8)}"
            f"?endpoint_override={endpoint}&scheme=http&region=us-east-1"
        )

    def filesystem(self, port: int | None = None) -> fs.FileSystem:
        """A client that gives up at the first failure."""
        return fs.S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET,
            scheme="http",
            region="us-east-1",
            endpoint_override=f"{HOST}:{port or self.port}",
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )

    def proxy(self) -> Proxy:
        """Something to inject faults with. Close it."""
        return Proxy(HOST, self.port, plain=True)
