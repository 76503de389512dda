"""A local S3 server: moto's, in a thread of this process.

    with S3() as s3:
        store = ParquetStore(s3.uri(), "orders")

    with S3() as s3, s3.proxy() as proxy:          # uploads can be cut in the middle
        store = ParquetStore(s3.uri(proxy.port), "orders")

pyarrow has its own S3 client, in C++, so moto replaces no code under test. That client retries
three times, which takes six seconds without a server; `filesystem()` does not retry.
"""

from __future__ import annotations

import logging
import os
import secrets
import urllib.request
from typing import Self

import pyarrow.fs as fs

from meteor_py.store.endpoints import ENDPOINTS_VARIABLE
from tests.support.proxy import Proxy

HOST = "127.0.0.1"
ACCESS_KEY = "reader"
SECRET = "s3cret-of-the-bucket"
BUCKET = "history"


class S3:
    """A server with one bucket, which is empty at first. By default, `uri()` names a new folder."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer  # importing moto takes half a second

        # The server logs a line for each request, and a traceback for each interrupted one.
        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
        self._server = ThreadedMotoServer(HOST, 0, verbose=False)
        self._server.start()
        self.port: int = self._server.get_host_and_port()[1]
        # moto checks no signatures, so no client library is needed.
        bucket = f"http://{HOST}:{self.port}/{BUCKET}"
        with urllib.request.urlopen(urllib.request.Request(bucket, method="PUT"), timeout=10):
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def uri(self, port: int | None = None, folder: str | None = None) -> str:
        """Return the URI of a folder (default: a new one), through a proxy if its port is given."""
        endpoint = f"{HOST}:{port or self.port}"
        os.environ[ENDPOINTS_VARIABLE] = endpoint  # allows readers to use this address
        return (
            f"s3://{ACCESS_KEY}:{SECRET}@{BUCKET}/{folder or secrets.token_hex(8)}"
            f"?endpoint_override={endpoint}&scheme=http&region=us-east-1"
        )

    def filesystem(self, port: int | None = None) -> fs.FileSystem:
        """Return a client that does not retry."""
        return fs.S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET,
            scheme="http",
            region="us-east-1",
            endpoint_override=f"{HOST}:{port or self.port}",
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),
        )

    def proxy(self) -> Proxy:
        """Return a fault proxy, which the caller closes."""
        return Proxy(HOST, self.port, plain=True)
