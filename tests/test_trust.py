"""Keys stay secret, names stay in their place, TLS stays on."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.front_door import Ended, rows, sparta, tribe
from tests.loopback import start_loopback

KEY = "synthetic-Key+for/tests==0123456789abcdef"
NAMED = "another synthetic one, for a header: 98765"
ENV = {"SPARTA_TEST_KEY": KEY, "SPARTA_TEST_HEADER": NAMED}
FORMS = [form for key in (KEY, NAMED) for form in (key, quote(key, safe=""), base64.b64encode(key.encode()).decode())]


def leaks(directory: Path, *printed: Ended) -> list[str]:
    """Where any form of a key can be found, in any file or anything that was printed."""
    texts = {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    texts |= {f"output {n}": (ended.out + ended.err).encode() for n, ended in enumerate(printed)}
    return [name for name, content in texts.items() if any(form.encode() in content for form in FORMS)]


def echo(status: int, text: str) -> dict[str, Any]:
    return {"kind": "reply", "status": status, "body": {"error": {"message": f"bad request: {text}", "code": status}}}


ECHOES: dict[str, Any] = {
    "401 header": {"preset": "echo_authorization", "status": 401},
    "500 header": {"preset": "echo_authorization", "status": 500},
    "400 encoded": echo(400, quote(KEY, safe="")),
    "403 base64": echo(403, base64.b64encode(KEY.encode()).decode()),
    "404 named header": echo(404, NAMED),
    "429 page": {"kind": "reply", "status": 429, "body": f"<p>{KEY}</p>", "content_type": "text/html"},
    "200 answer": {"kind": "edit", "message": {"content": f"Your key is {KEY}, and {NAMED}."}},
    "200 error": {"kind": "reply", "status": 200, "body": {"error": f"refused {KEY}"}},
    "307": {"kind": "reply", "status": 307, "headers": {"location": f"http://127.0.0.1:9/{KEY}"}, "body": ""},
}


@pytest.mark.parametrize("name", ECHOES)
def test_a_key_that_a_server_echoes_goes_nowhere(tmp_path: Path, name: str) -> None:
    rules = [{"fault": ECHOES[name]}]
    with start_loopback({"any_model": True, "rules": rules}, tmp_path / "server") as server:
        defaults = {
            "api_key_env": "SPARTA_TEST_KEY", "headers": {"x-team": "${SPARTA_TEST_HEADER}"},
            "max_attempts": 2, "max_wait_s": 1,
        }  # fmt: skip
        file = tribe(tmp_path / "tribe", server.base_url, members=3, instructions=3, defaults=defaults)
        run = tmp_path / "tribe" / "run"
        printed = [sparta("run", "--tribe", file, "--run-dir", run, env=ENV)]
        if name == "401 header":
            printed += [sparta("check", "--tribe", file, env=ENV), sparta("status", run, "--json")]
        keys = {r["key"] for r in server.requests("/chat/completions")}
    assert printed[0].code == (0 if name == "200 answer" else 3), printed[0].err
    assert len(keys) == 1
    assert keys != {None}
    assert leaks(tmp_path / "tribe", *printed) == []
    if name == "200 answer":
        assert {row["content"] for row in rows(run / "iteration_000" / "responses.jsonl")} == {
            "Your key is ***, and ***."
        }


@pytest.mark.parametrize(
    ("key", "says"),
    [(KEY + "\n", None), (f"  {KEY}\r\n", None), (f"{KEY}\nX-Evil: 1", "control"), (KEY + "\u00e9", "non-ASCII")],
)
def test_a_key_variable_with_stray_characters(tmp_path: Path, key: str, says: str | None) -> None:
    """White space around it is dropped; what can be no header is refused without being shown."""
    with start_loopback({"any_model": True, "api_keys": [KEY]}, tmp_path / "server") as server:
        defaults = {"api_key_env": "SPARTA_TEST_KEY"}
        file = tribe(tmp_path / "tribe", server.base_url, members=3, instructions=2, defaults=defaults)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "tribe" / "run", env={"SPARTA_TEST_KEY": key})
        sent = len(server.requests())
    assert ended.code == (0 if says is None else 2), ended.err
    assert (sent > 0) == (says is None)
    assert says is None or (says in ended.err and "SPARTA_TEST_KEY" in ended.err)
    assert leaks(tmp_path / "tribe", ended) == []


@pytest.mark.parametrize(
    "change",
    [
        f"defaults.base_url=http://user:{KEY}@127.0.0.1:9/v1",
        f"defaults.base_url=http://{KEY}@127.0.0.1:9/v1",
        f"defaults.headers.Authorization=Bearer {KEY}",
        f"defaults.headers.x-api-key={KEY}",
        f"defaults.extra_body.api_key={KEY}",
    ],
)
def test_a_literal_key_is_refused_and_not_repeated(tmp_path: Path, change: str) -> None:
    file = tribe(tmp_path, "http://127.0.0.1:9/v1", members=3, instructions=2)
    ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run", "--set", change)
    assert ended.code == 2, ended.err
    assert KEY not in ended.err + ended.out
    assert leaks(tmp_path, ended) == []


def test_a_redirect_is_not_followed(tmp_path: Path) -> None:
    """Neither the key nor the prompt goes to a place that is not in the configuration."""
    with start_loopback({"any_model": True}, tmp_path / "target") as target:
        location = {"location": f"{target.base_url}/chat/completions"}
        rules = [{"fault": {"kind": "reply", "status": 307, "headers": location, "body": ""}}]
        with start_loopback({"any_model": True, "rules": rules}, tmp_path / "server") as server:
            defaults = {"api_key_env": "SPARTA_TEST_KEY"}
            file = tribe(tmp_path, server.base_url, members=3, instructions=2, defaults=defaults)
            ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run", env=ENV)
        assert target.requests() == []
    assert ended.code == 3
    assert "not followed" in ended.err.splitlines()[-1]
    assert target.base_url in ended.err.splitlines()[-1]


# Names


def test_names_cannot_leave_the_run_directory(tmp_path: Path) -> None:
    """Names, models and ids that look like paths, options or markup are only ever text."""
    names = ["org/model:a", "a b$(touch x)", "CON", "-rf", "[bold]x[/bold]", "名前", "A", "a"]
    models = ["../../v1/models?x=", "/etc/passwd", "m\\..\\n", "#", "%2e%2e", "m?x=1", "A", "a"]
    members = [{"name": name, "model": model} for name, model in zip(names, models, strict=True)]
    with start_loopback({"any_model": True}, tmp_path / "server") as server:
        file = tribe(tmp_path / "tribe", server.base_url, members, instructions=0)
        ids = ["../../up", "/abs", "a/b", "..", "", "nul\u0001"]
        lines = [{"id": name or "x", "prompt": f"Question {n}?"} for n, name in enumerate(ids)]
        (file.parent / "instructions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        before = {path for path in tmp_path.rglob("*") if "server" not in path.parts}
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run", cwd=None)
        paths = {r["path"] for r in server.requests()}
    assert ended.code == 0, ended.err
    assert paths == {"/v1/chat/completions"}
    new = {path for path in tmp_path.rglob("*") if "server" not in path.parts} - before
    assert all(path.is_relative_to(tmp_path / "run") for path in new)


@pytest.mark.parametrize("name", ["..", "../x", "a/../b", "/./x", "a\nb", "a\u0007", ""])
def test_names_that_are_no_names_are_refused(tmp_path: Path, name: str) -> None:
    members = [{"name": n, "model": "m"} for n in (name, "b", "c")]
    ended = sparta("run", "--tribe", tribe(tmp_path, "http://127.0.0.1:9/v1", members), "--run-dir", tmp_path / "run")
    assert ended.code == 2, ended.err
    assert not (tmp_path / "run").exists() or not (tmp_path / "run" / "run.json").exists()


# TLS


@contextmanager
def self_signed(directory: Path) -> Iterator[tuple[int, list[bytes]]]:
    """A TLS server with a certificate that nobody vouches for; yields its port and what clients sent."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs openssl to make a certificate")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    received: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain:
                try:
                    with context.wrap_socket(plain, server_side=True) as secure:
                        received.append(secure.recv(65536))
                        body = b'{"choices":[{"message":{"content":"{\\"score\\": 7} hello"}}]}'
                        secure.sendall(
                            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
                        )
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], received
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_a_certificate_that_nobody_vouches_for_stops_the_run(tmp_path: Path) -> None:
    """Before the key is sent. Naming its authority is the only way around."""
    with self_signed(tmp_path) as (port, received):
        url = f"https://127.0.0.1:{port}/v1"
        file = tribe(tmp_path, url, members=3, instructions=1, defaults={"api_key_env": "SPARTA_TEST_KEY"})
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run", env=ENV)
        assert received == []
        assert ended.code == 3, ended.err
        sentence = ended.err.splitlines()[-1]
        assert f"the TLS certificate of {url} is not trusted" in sentence
        assert "SSL_CERT_FILE" in sentence
        trusted = sparta("resume", tmp_path / "run", env={**ENV, "SSL_CERT_FILE": str(tmp_path / "cert.pem")})
        assert trusted.code == 0, trusted.err
        assert any(KEY.encode() in request for request in received)


@pytest.mark.parametrize("key", ["verify", "verify_ssl", "ssl", "tls", "insecure"])
def test_no_key_of_the_configuration_turns_tls_verification_off(tmp_path: Path, key: str) -> None:
    file = tribe(tmp_path, "https://127.0.0.1:9/v1", members=3, instructions=1, defaults={key: False})
    ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 2
    assert key in ended.err
