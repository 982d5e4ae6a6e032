"""Wrong files and wrong endpoints: one clear sentence, the right exit code, and nothing sent where nothing may be."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.front_door import sparta, tribe
from tests.loopback import start_loopback

URL = "http://127.0.0.1:9/v1"


def edited(file: Path, old: str, new: str) -> Path:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    return file


def instructions(file: Path, content: str) -> Path:
    (file.parent / "instructions.jsonl").write_text(content)
    return file


def members(*rows: dict[str, Any]) -> Callable[[Path], Path]:
    return lambda directory: tribe(directory, URL, list(rows))


BAD: dict[str, tuple[Callable[[Path], Path], list[str]]] = {
    "no tribe": (lambda d: d / "absent.yaml", ["absent.yaml"]),
    "no instructions file": (
        lambda d: edited(tribe(d, URL), "path: instructions.jsonl", "path: absent.jsonl"), ["absent.jsonl"]),
    "empty instructions": (lambda d: instructions(tribe(d, URL), "\n\n"), ["instructions.jsonl"]),
    "malformed line": (
        lambda d: instructions(tribe(d, URL), '{"prompt": "fine"}\n{"prompt": \n'), ["instructions.jsonl:2"]),
    "two fighters without a judge": (
        members({"name": "a", "model": "a"}, {"name": "b", "model": "b"}), ["tribe.yaml:", "'a'", "'b'", "judge"]),
    "duplicate names": (
        members(*({"name": name, "model": name} for name in "abca")),
        ["tribe.yaml:", "duplicate member 'a'"]),
    "unknown trainer": (
        lambda d: tribe(d, URL, members=3, training={"trainer": "locl"}), ["tribe.yaml:", "no trainer 'locl'"]),
    "unset key": (
        lambda d: tribe(d, URL, members=3, defaults={"api_key_env": "SPARTA_TEST_ABSENT_KEY"}),
        ["tribe.yaml:", "SPARTA_TEST_ABSENT_KEY", "not set"]),
    "unknown key": (lambda d: tribe(d, URL, members=3, jugding={}), ["tribe.yaml:", "jugding", "judging"]),
    "more than there are": (
        lambda d: edited(tribe(d, URL, members=3), "path: instructions.jsonl",
                         "path: instructions.jsonl\n  per_iteration: 50"), ["per_iteration is 50"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_exit_2(tmp_path: Path, name: str) -> None:
    write, parts = BAD[name]
    ended = sparta("run", "--tribe", write(tmp_path), "--run-dir", tmp_path / "run")
    assert ended.code == 2, ended.err
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("sparta-api: ")
    assert [part for part in parts if part not in lines[0]] == []
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_wrong_port_is_found_within_30_seconds(tmp_path: Path) -> None:
    """However patient the member is."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        file = tribe(tmp_path, url, members=3, instructions=6, defaults={"max_attempts": 50})
        begun = time.monotonic()
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        took = time.monotonic() - begun
    assert ended.code == 3
    assert took < 30
    assert f"cannot connect to {url} (Connection refused)" in ended.err.splitlines()[-1]
    assert "sparta-api resume" in ended.err
    assert "Traceback" not in ended.err


def test_a_host_that_does_not_exist(tmp_path: Path) -> None:
    defaults = {"max_attempts": 2}
    file = tribe(tmp_path, "http://no-such-host.invalid/v1", members=3, instructions=3, defaults=defaults)
    ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 3
    assert "cannot connect to http://no-such-host.invalid/v1" in ended.err.splitlines()[-1]


@pytest.mark.parametrize("flavour", ["vllm", "openai"])
def test_a_model_that_the_server_does_not_know(tmp_path: Path, flavour: str) -> None:
    scenario = {"models": {"model-0": {}, "model-2": {}}, "flavour": flavour}
    with start_loopback(scenario, tmp_path) as server:
        file = tribe(tmp_path, server.base_url, members=3, instructions=6)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
        refused = [r for r in server.requests("/chat/completions") if r["outcome"] == "404"]
    assert ended.code == 3
    sentence = ended.err.splitlines()[-1]
    assert "member 'm1'" in sentence
    assert server.base_url in sentence
    assert "model-1" in sentence
    assert "check model and base_url" in sentence
    assert len({r["messages"] for r in refused}) == len(refused) <= 8


def test_a_base_url_without_its_path(tmp_path: Path) -> None:
    with start_loopback({"any_model": True}, tmp_path) as server:
        file = tribe(tmp_path, server.origin, members=3, instructions=3)
        ended = sparta("run", "--tribe", file, "--run-dir", tmp_path / "run")
    assert ended.code == 3
    assert "Not Found (HTTP 404); check model and base_url" in ended.err.splitlines()[-1]


def test_check_says_what_fails_and_ends_with_3(tmp_path: Path) -> None:
    ended = sparta("check", "--tribe", tribe(tmp_path, "http://127.0.0.1:9/v1", members=3, instructions=2))
    assert ended.code == 3
    assert "member 'm0': member 'm0'" not in ended.out
    assert "cannot connect to http://127.0.0.1:9/v1 (Connection refused)" in ended.out
