"""A stand-in for the Hugging Face hub: its HTTP API for one user, as far as pushing and downloading models need it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_test"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()


@dataclass
class Hub:
    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)


@contextmanager
def hub_server() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def reply(self, status: int, content: Any = b"", **headers: str) -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if parts == [""]:
                return self.reply(200)
            name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2])
            repository = hub.repositories.get(name)
            knows = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if repository is None or (repository.private and not knows):
                return self.reply(401 if repository else 404, {"error": "no"}, X_Error_Code="RepoNotFound")
            if parts[0] == "api":
                if "tree" in parts:
                    files = repository.files.items()
                    tree = [
                        {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for path, content in files
                    ]
                    return self.reply(200, tree)
                siblings = [{"rfilename": path} for path in repository.files]
                about = {"id": name, "sha": repository.commit, "private": repository.private, "siblings": siblings}
                return self.reply(200, about)
            content = repository.files.get("/".join(parts[4:]))
            if content is None:
                return self.reply(404, {"error": "no"}, X_Error_Code="EntryNotFound")
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.reply(200, content, ETag=etag, X_Repo_Commit=repository.commit)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            parts = urlsplit(self.path).path.strip("/").split("/")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.reply(401, {"error": "Invalid username or password."})
            if parts[1] == "repos":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'me'}/{asked['name'].rpartition('/')[2]}"
                if name in hub.repositories:
                    return self.reply(409, {"error": "You already created this model repo", "url": name})
                hub.repositories[name] = Repository(private=asked.get("private", asked.get("visibility") == "private"))
                return self.reply(200, {"url": f"{hub.address}/{name}"})
            if parts[1] == "validate-yaml":
                return self.reply(200, {"errors": [], "warnings": []})
            repository = hub.repositories["/".join(parts[2:4])]
            if "preupload" in parts:
                files = json.loads(body)["files"]
                modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
                return self.reply(200, {"files": modes})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del repository.files[line["value"]["path"]]
            url = f"{hub.address}/{'/'.join(parts[2:4])}/commit/{repository.commit}"
            return self.reply(200, {"commitUrl": url, "commitOid": repository.commit, "success": True})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
