"""An S3 server on loopback: moto's, with one bucket."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import boto3
from moto.server import ThreadedMotoServer

from tests.support.fake_hub import Files, listed


@contextmanager
def fake_s3(bucket: str, files: Files) -> Iterator[dict[str, str]]:
    """The variables by which s3fs finds it. An instance of s3fs reads them once, and fsspec keeps instances."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # no line for each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url, key = f"http://{host}:{port}", "testing"
        urlopen(Request(f"{url}/moto-api/reset", method="POST")).close()  # servers of a process share their buckets
        client = boto3.client("s3", "us-east-1", endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=key)
        client.create_bucket(Bucket=bucket)
        for name, content in listed(files).items():
            if isinstance(content, Path):
                client.upload_file(str(content), bucket, name)
            else:
                client.put_object(Bucket=bucket, Key=name, Body=content)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()
