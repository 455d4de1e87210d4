"""A stand-in for the Hugging Face hub that knows what an upload needs; it keeps repositories in memory."""

import base64
import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class LocalHub:
    """Repositories by id, each {"private", "files": {path: bytes}, "commits": [message]}; heads of cards."""

    def __init__(self):
        self.repos: dict[str, dict] = {}
        self.address = ""
        self.validated: list[str] = []
        self.refuses_commits = False

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        path = path.partition("?")[0]
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "me", "orgs": [{"name": "lab"}]}
        if path == "/api/repos/create":
            document = json.loads(body)
            repo = f"{document.get('organization') or 'me'}/{document['name']}"
            if repo in self.repos:
                return 409, {"error": "exists", "url": f"{self.address}/{repo}"}
            private = document.get("private") or document.get("visibility") == "private"
            self.repos[repo] = {"private": private, "files": {}, "commits": []}
            return 200, {"url": f"{self.address}/{repo}", "name": repo}
        if path == "/api/validate-yaml":
            self.validated.append(json.loads(body)["content"])
            return 200, {"errors": [], "warnings": []}
        if not path.startswith("/api/models/"):
            return 404, {"error": f"{method} {path} is not known here"}
        _, _, _, org, name, *rest = path.split("/")
        repo = self.repos.get(f"{org}/{name}")
        if repo is None:
            return 404, {"error": "Repository not found"}
        if rest[:1] == ["preupload"]:
            files = [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for each in
                     json.loads(body)["files"]]  # fmt: skip
            return 200, {"files": files}
        if rest[:1] == ["commit"]:
            return (403, {"error": "quota"}) if self.refuses_commits else (200, self._commit(f"{org}/{name}", body))
        if rest[:1] == ["tree"]:
            return 200, [
                {"type": "file", "path": file, "size": len(entry), "oid": "0"} for file, entry in repo["files"].items()
            ]
        return 404, {"error": f"{method} {path} is not known here"}

    def _commit(self, name: str, body: bytes) -> dict:
        repo = self.repos[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                repo["commits"].append(value["summary"])
            elif line["key"] == "file":
                repo["files"][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del repo["files"][value["path"]]
        return {"commitUrl": f"{self.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40, "success": True}


@contextmanager
def local_hub(monkeypatch):
    """A hub on this machine, to which huggingface_hub talks in the block."""
    from huggingface_hub import constants

    hub = LocalHub()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self):
            length = int(self.headers.get("Content-Length") or 0)
            status, content = hub.answer(self.command, self.path, self.rfile.read(length))
            message = json.dumps(content).encode()
            self.send_response(status)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(message)))
            self.end_headers()
            self.wfile.write(message)

        do_GET = do_POST = do_HEAD = _handle

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
