"""ApiHandler: HTTP requests to ApiStandIn, and its answers and refusals as a real API server writes them."""

import contextlib
import json
import urllib.parse
from http.server import BaseHTTPRequestHandler

from tests.support.kubernetes.field_stand_in import parsed
from tests.support.kubernetes.job_stand_in import HttpError


class ApiHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 5  # an idle connection is closed
    api = None  # the ApiStandIn that answers

    def setup(self):
        super().setup()
        self.connection.setsockopt(6, 1, 1)  # TCP_NODELAY

    def _serve(self):
        api = self.api
        if api.is_down:
            self.close_connection = True
            return
        if not api.speaks.is_set():
            api.speaks.wait(30)
            self.close_connection = True
            return
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[-1] for key, values in urllib.parse.parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = parsed(self.rfile.read(length)) if length else None
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        try:
            answer = api.answer(self.command, url.path, query, body, token, self.headers.get("Content-Type") or "")
            with api.lock:
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            status = 201 if self.command == "POST" else 200
        except HttpError as error:
            status = error.status
            words = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": error.reason}
            content = json.dumps(words | {"code": status, "message": str(error)}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if status == 200 and content[:1] != b"{" else "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def log_message(self, *_):
        pass
