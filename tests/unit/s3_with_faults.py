"""A small S3-compatible server on loopback that misbehaves on request, for tests of the object-store layer."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

ACCESS_KEY, SECRET_KEY = "AKIATESTONLY", "tops3cret"

#: The connection is closed instead of an answer: before or after the request was carried out.
DROP_BEFORE, DROP_AFTER = -1, -2

#: Called with a request's kind (:meth:`_Handler._kind`), path and whether it is conditional. Returns a status or drop, None to behave.
Fault = Callable[[str, str, bool], int | None]


class FaultyS3(ThreadingHTTPServer):
    """PUT, GET and HEAD of whole objects, uploads in parts, listing and deletion; a fault decides first.

    Requests without `ACCESS_KEY` are refused.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        #: Parts of uploads that were begun and neither completed nor aborted, by the upload's id.
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self.honours_conditions = True
        self.fault: Fault = lambda method, path, conditional: None
        self.requests: list[str] = []

    def fail_once(self, method: str, *faults: int) -> None:
        """Let the next requests of a method fail, with one fault each."""
        remaining = list(faults)
        self.fault = lambda kind, path, conditional: remaining.pop(0) if kind == method and remaining else None

    def options(self, **more: str) -> dict[str, str]:
        """Return the storage options of this server."""
        return {
            "endpoint": f"http://127.0.0.1:{self.server_port}",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": "us-east-1",
            "allow_http": "true",
            **more,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: tests check the client's messages."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path, conditional = urlsplit(self.path).path, self.headers.get("if-none-match") == "*"
        with self.server.lock:
            self.server.requests.append(self._kind())
            status = self.server.fault(self._kind(), path, conditional)
            if f"Credential={ACCESS_KEY}/" not in self.headers.get("authorization", ""):
                status = 403
            answer = b""
            if status in (None, DROP_AFTER):
                done, answer = self._carry_out(path, body, conditional)
                status = done if status is None else status
        if status in (DROP_BEFORE, DROP_AFTER):
            self.close_connection = True
            return
        if status >= 300:
            # As S3 does, it repeats the access key.
            answer = f"<Error><Code>Code{status}</Code><AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>".encode()
        self.send_response(status)
        self.send_header("etag", '"tag"')
        self.send_header("last-modified", "Sat, 21 Nov 2026 08:00:00 GMT")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            with suppress(ConnectionError):  # a client that has given up
                self.wfile.write(answer)

    def _kind(self) -> str:
        """Return the request's method; for multipart uploads BEGIN, PART, COMPLETE or ABORT."""
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "uploads" in query:
            return "BEGIN"
        of_upload = {"PUT": "PART", "POST": "COMPLETE", "DELETE": "ABORT"}
        return of_upload[self.command] if "uploadId" in query else self.command

    def _carry_out_in_parts(self, kind: str, path: str, body: bytes) -> tuple[int, bytes]:
        query = parse_qs(urlsplit(self.path).query)
        if kind == "BEGIN":
            upload = uuid.uuid4().hex
            self.server.uploads[upload] = {}
            content = f"<UploadId>{upload}</UploadId>"
            return 200, f"<InitiateMultipartUploadResult>{content}</InitiateMultipartUploadResult>".encode()
        parts = self.server.uploads.get(query["uploadId"][0])
        if parts is None:
            return 404, b""
        if kind == "PART":
            parts[int(query["partNumber"][0])] = body
            return 200, b""
        del self.server.uploads[query["uploadId"][0]]
        if kind == "ABORT":
            return 204, b""
        part_numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
        self.server.objects[path] = b"".join(parts[number] for number in part_numbers)
        content = '<ETag>"tag"</ETag>'
        return 200, f"<CompleteMultipartUploadResult>{content}</CompleteMultipartUploadResult>".encode()

    def _carry_out(self, path: str, body: bytes, conditional: bool) -> tuple[int, bytes]:
        objects = self.server.objects
        if self._kind() in ("BEGIN", "PART", "COMPLETE", "ABORT"):
            return self._carry_out_in_parts(self._kind(), path, body)
        if self.command == "PUT":
            if conditional and self.server.honours_conditions and path in objects:
                return 412, b""
            objects[path] = body
            return 200, b""
        if self.command == "POST":  # deletes the named keys
            keys = re.findall(r"<Key>([^<]+)</Key>", body.decode())
            for key in keys:
                objects.pop(f"{path}/{key}", None)
            deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return 200, f"<DeleteResult>{deleted}</DeleteResult>".encode()
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return 200, self._listing(path, query.get("prefix", [""])[0])
        return (200, objects[path]) if path in objects else (404, b"")

    def _listing(self, bucket: str, prefix: str) -> bytes:
        keys = {path.removeprefix(f"{bucket}/"): body for path, body in self.server.objects.items()}
        contents = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(body)}</Size><LastModified>2026-11-21T08:00:00.000Z</LastModified></Contents>"
            for key, body in sorted(keys.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>".encode()

    do_PUT = do_GET = do_HEAD = do_POST = do_DELETE = _serve


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    """Start a server, and stop it at the end."""
    server = FaultyS3()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
