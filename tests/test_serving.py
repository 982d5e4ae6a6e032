"""Loading trained adapters into a running endpoint, against a loopback server with vLLM's routes and faults."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparta_api.errors import EndpointError, SpartaError, TrainingError
from sparta_api.serving.adapters import AdapterEndpoint, adapter_name, can_load, ensure, publish, retire
from tests.loopback import LoopbackProcess, start_loopback

BASE = "base-model"
SCENARIO: dict[str, Any] = {"models": {BASE: {}}, "lora": {"max_rank": 16}, "log_bodies": True}
LOAD = r"/load_lora_adapter$"
UNLOAD = r"/unload_lora_adapter$"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackProcess]:
    with start_loopback(SCENARIO, tmp_path_factory.mktemp("loopback")) as started:
        yield started


@pytest.fixture
def server(process: LoopbackProcess) -> LoopbackProcess:
    plain = {"rules": [], "api_keys": [], "flat_errors": False, "forget_adapters": True, "reset_stats": True}
    process.control(json={**SCENARIO, **plain})
    return process


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparta_api.serving.lora_host.BACKOFF_S", 0.02)


def adapter(directory: Path, content: str = "weights", **config: Any) -> str:
    """An adapter's directory with the files that servers read."""
    directory.mkdir(parents=True)
    known = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(known | config))
    (directory / "adapter_model.safetensors").write_text(content)
    return str(directory)


def endpoint(*servers: LoopbackProcess, **changes: Any) -> AdapterEndpoint:
    return AdapterEndpoint("plain", [server.base_url for server in servers], **changes)


def published(place: AdapterEndpoint, name: str, path: str) -> tuple[str, list[str]]:
    notices: list[str] = []
    return asyncio.run(publish(place, name, path, BASE, notices.append)), notices


def refusal(place: AdapterEndpoint, name: str, path: str) -> str:
    with pytest.raises(SpartaError) as caught:
        published(place, name, path)
    assert caught.value.exit_code == 3
    return str(caught.value)


def loaded(server: LoopbackProcess) -> dict[str, str]:
    adapters: dict[str, str] = server.stats()["adapters"]
    return adapters


def test_names_are_safe_and_belong_to_one_member_iteration_and_run() -> None:
    names = {
        adapter_name(member, iteration, run)
        for member in ("plain", "org/plain", "org-plain", "Ünï çødé", "../up", "a" * 200)
        for iteration in (0, 1, 10)
        for run in ("quickstart-1", "quickstart-2")
    }
    assert len(names) == 6 * 3 * 2
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{1,70}", name) for name in names)


def test_an_adapter_is_loaded_listed_and_asked_before_it_counts(server: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "one")
    assert published(endpoint(server), "plain-it1", path) == ("plain-it1", [])
    assert loaded(server) == {"plain-it1": path}
    asked = [r for r in server.requests("/chat/completions") if r["model"] == "plain-it1"]
    assert asked[0]["body"]["max_tokens"] == 1


def test_an_adapter_that_is_there_already_is_only_probed(server: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "one")
    published(endpoint(server), "plain-it1", path)
    before = len(server.requests("/load_lora_adapter"))
    assert published(endpoint(server), "plain-it1", path)[0] == "plain-it1"
    new = server.requests("/load_lora_adapter")[before:]
    assert [request["body"] for request in new] == [{}]


def test_a_name_that_stands_for_other_weights_is_left_alone(server: LoopbackProcess, tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "one"), adapter(tmp_path / "two", "others")
    published(endpoint(server), "plain-it1", first)
    assert published(endpoint(server), "plain-it1", second)[0] == "plain-it1-v2"
    assert loaded(server) == {"plain-it1": first, "plain-it1-v2": second}


def test_already_loaded_without_an_answer_takes_the_next_name(server: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "one")
    published(endpoint(server), "m1-r2", path)
    broken = {"kind": "reply", "status": 500, "body": {"error": {"message": "engine trouble"}}}
    server.control(json={"rules": [{"match": {"model": "m1-r2"}, "fault": broken}]})
    assert published(endpoint(server), "m1-r2", path)[0] == "m1-r2-v2"


def test_older_servers_that_say_already_loaded_but_list_nothing(server: LoopbackProcess, tmp_path: Path) -> None:
    message = "The lora adapter 'm7-r2' has already been loaded."
    body = {"object": "error", "message": message, "type": "InvalidUserInput", "code": 400}
    rule = {"match": {"path": LOAD, "model": "m7-r2"}, "fault": {"kind": "reply", "status": 400, "body": body}}
    server.control(json={"rules": [rule]})
    assert published(endpoint(server), "m7-r2", adapter(tmp_path / "one"))[0] == "m7-r2-v2"
    assert len([r for r in server.requests("/load_lora_adapter") if r["body"].get("lora_name") == "m7-r2"]) == 1


@pytest.mark.parametrize("flat", [False, True])
def test_a_path_that_the_server_does_not_see(server: LoopbackProcess, tmp_path: Path, flat: bool) -> None:
    path = adapter(tmp_path / "here" / "one")
    server.control(json={"flat_errors": flat})
    text = refusal(endpoint(server, path_map={str(tmp_path / "here"): "/elsewhere"}), "plain-it1", path)
    assert "/elsewhere/one" in text and "path_map" in text and server.base_url in text and "'plain'" in text
    assert Path(path).is_dir()
    assert loaded(server) == {}


def test_paths_are_mapped_by_whole_components_longest_first(server: LoopbackProcess, tmp_path: Path) -> None:
    there = tmp_path / "there"
    adapter(there / "one")
    here = adapter(tmp_path / "here" / "runs" / "one")
    maps = {str(tmp_path / "he"): "/wrong", str(tmp_path / "here"): "/also-wrong", str(Path(here).parent): str(there)}
    published(endpoint(server, path_map=maps), "plain-it1", here)
    assert loaded(server) == {"plain-it1": str(there / "one")}


@pytest.mark.parametrize("config", [{"r": 64}, {"r": 8, "rank_pattern": {"q_proj": 64}}])
def test_a_rank_above_the_servers(server: LoopbackProcess, tmp_path: Path, config: dict[str, Any]) -> None:
    path = adapter(tmp_path / "one", **config)
    for place in (endpoint(server), endpoint(server, max_rank=16)):
        text = refusal(place, "plain-it1", path)
        assert "64" in text and "16" in text and "--max-lora-rank" in text
    assert len(server.requests("/load_lora_adapter")) >= 2
    assert loaded(server) == {}


def test_whole_modules_are_refused_before_anything_is_sent(server: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "one", modules_to_save=["embed_tokens", "lm_head"])
    count = len(server.requests())
    with pytest.raises(TrainingError, match=r"modules_to_save.*embed_tokens.*lm_head"):
        published(endpoint(server), "plain-it1", path)
    assert len(server.requests()) == count


def test_a_directory_that_is_gone(server: LoopbackProcess, tmp_path: Path) -> None:
    assert str(tmp_path / "gone") in refusal(endpoint(server), "plain-it1", str(tmp_path / "gone"))


def test_a_hub_adapter_that_loads_but_cannot_answer_is_withdrawn(server: LoopbackProcess) -> None:
    broken = {"kind": "reply", "status": 500, "body": "Internal Server Error", "content_type": "text/plain"}
    rule = {"match": {"model": "plain-it1"}, "fault": broken}
    server.control(json={"lora": {"unknown_path": "accept"}, "rules": [rule]})
    text = refusal(endpoint(server), "plain-it1", "org/my-adapter")
    assert "org/my-adapter" in text and server.base_url in text and "cannot answer" in text
    assert loaded(server) == {}


def test_an_adapter_without_effect_is_noticed(server: LoopbackProcess, tmp_path: Path) -> None:
    same = {"kind": "edit", "message": {"content": "The very same words."}}
    server.control(json={"rules": [{"fault": same}]})
    model, notices = published(endpoint(server), "plain-it1", adapter(tmp_path / "one"))
    assert model == "plain-it1"
    (notice,) = notices
    assert "adapter has no visible effect" in notice and "'plain'" in notice and server.base_url in notice


def test_a_server_that_lists_another_path_is_not_believed(server: LoopbackProcess, tmp_path: Path) -> None:
    listing = {"data": [{"id": "plain-it1", "root": "/somewhere/else"}]}
    reply = {"match": {"path": "/models$", "nth": 2}, "fault": {"kind": "reply", "status": 200, "body": listing}}
    server.control(json={"rules": [reply]})
    text = refusal(endpoint(server), "plain-it1", adapter(tmp_path / "one"))
    assert "/somewhere/else" in text
    assert loaded(server) == {}


def test_an_endpoint_without_these_routes_is_known_before_the_run(server: LoopbackProcess) -> None:
    asyncio.run(can_load(endpoint(server)))
    server.control(json={"lora": None})
    with pytest.raises(EndpointError, match=r"'plain'.*loads no adapters.*VLLM_ALLOW_RUNTIME_LORA_UPDATING.*servers"):
        asyncio.run(can_load(endpoint(server)))


def test_a_refused_key_never_reaches_the_message(server: LoopbackProcess, tmp_path: Path) -> None:
    server.control(
        json={"api_keys": ["the-right-one"], "rules": [{"match": {"path": LOAD}, "fault": "echo_authorization"}]}
    )
    with pytest.raises(EndpointError) as caught:
        asyncio.run(can_load(endpoint(server, key="sk-wrong-0123456789abcdef")))
    assert "api_key_env" in str(caught.value) and "sk-wrong" not in str(caught.value)
    server.control(json={"rules": []})
    asyncio.run(can_load(endpoint(server, key="the-right-one")))


def test_nobody_listens() -> None:
    place = AdapterEndpoint("plain", ["http://127.0.0.1:9/v1"])
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:9.*cannot be reached"):
        asyncio.run(can_load(place))


def test_overload_and_full_slots_pass(server: LoopbackProcess, tmp_path: Path) -> None:
    busy = {"kind": "reply", "status": 503, "body": {"error": {"message": "loading"}}}
    slots = {"kind": "reply", "status": 500, "body": {"error": {"message": "No free lora slots"}}}
    rules = [
        {"match": {"path": LOAD, "model": "plain-it1"}, "fault": busy, "times": 1},
        {"match": {"model": "plain-it1"}, "fault": slots, "times": 1},
    ]
    server.control(json={"rules": rules})
    assert published(endpoint(server), "plain-it1", adapter(tmp_path / "one"))[0] == "plain-it1"


def test_slots_that_stay_full(server: LoopbackProcess, tmp_path: Path) -> None:
    slots = {"kind": "reply", "status": 500, "body": {"error": {"message": "No free lora slots"}}}
    server.control(json={"rules": [{"match": {"model": "plain-it1"}, "fault": slots}]})
    assert "--max-loras" in refusal(endpoint(server), "plain-it1", adapter(tmp_path / "one"))


def test_every_replica_gets_the_adapter_under_one_name(
    server: LoopbackProcess, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first, second = adapter(tmp_path / "one"), adapter(tmp_path / "two", "others")
    with start_loopback(SCENARIO, tmp_path_factory.mktemp("replica")) as replica:
        published(endpoint(replica), "plain-it1", first)
        assert published(endpoint(server, replica), "plain-it1", second)[0] == "plain-it1-v2"
        assert loaded(server) == {"plain-it1-v2": second}
        assert loaded(replica) == {"plain-it1": first, "plain-it1-v2": second}


def test_a_server_that_forgot_is_told_again(server: LoopbackProcess, tmp_path: Path) -> None:
    path = adapter(tmp_path / "one")
    published(endpoint(server), "plain-it1", path)
    server.control(json={"forget_adapters": True})

    async def by_many() -> None:
        await asyncio.gather(*(ensure(endpoint(server), "plain-it1", path) for _ in range(8)))

    asyncio.run(by_many())
    assert loaded(server) == {"plain-it1": path}


def test_another_adapter_under_a_members_name_is_never_used(server: LoopbackProcess, tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "one"), adapter(tmp_path / "two", "others")
    published(endpoint(server), "plain-it1", first)
    with pytest.raises(EndpointError, match="something else as plain-it1"):
        asyncio.run(ensure(endpoint(server), "plain-it1", second))
    assert loaded(server) == {"plain-it1": first}


def test_old_adapters_are_unloaded_and_trouble_with_it_is_only_noticed(
    server: LoopbackProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    published(endpoint(server), "plain-it1", adapter(tmp_path / "one"))
    asyncio.run(retire(endpoint(server), "plain-it1", notices.append))
    asyncio.run(retire(endpoint(server), "plain-it1", notices.append))
    assert (loaded(server), notices) == ({}, [])

    published(endpoint(server), "plain-it2", adapter(tmp_path / "two"))
    monkeypatch.setattr("sparta_api.serving.lora_host.UNLOAD_S", 0.3)
    server.control(json={"rules": [{"match": {"path": UNLOAD}, "fault": "hang"}]})
    asyncio.run(retire(endpoint(server), "plain-it2", notices.append))
    (notice,) = notices
    assert "plain-it2" in notice and "could not be unloaded" in notice and server.base_url in notice
