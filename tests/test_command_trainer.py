"""The command back end, serving by command, and the examples that show them, with real processes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparta_api import cli
from sparta_api.config.tribe import CommandTrainer as Settings
from sparta_api.errors import ConfigError, TrainingError
from sparta_api.trainers import job_worker
from sparta_api.trainers.command import CommandTrainer
from sparta_api.trainers.factory import build_deployer
from sparta_api.trainers.protocol import JobState, TrainedModel
from tests.front_door import tribe
from tests.tiny_model import make_tiny_model
from tests.training_jobs import job_file, make_spec, whole_job

ROOT = Path(__file__).parents[1]
TRAIN = """
import json, os, pathlib, sys, time
root, output, parent = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
with (root / "starts").open("a") as file:
    file.write(os.environ["SPARTA_KEY"] + "\\n")
while (root / "wait").exists():
    time.sleep(0.01)
if (root / "fail").exists():
    sys.exit("no CUDA device")
(output / "adapter_config.json").write_text("{}")
print("trained on", parent or "the base model")
print(json.dumps({"kind": "adapter"}))
"""


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def trainer(bench: Path, **settings: Any) -> CommandTrainer:
    command = [sys.executable, "train.py", str(bench), "{output}", "{parent}", "{preferences}"]
    return CommandTrainer("own", Settings.model_validate({"backend": "command", "command": command} | settings), bench)


def starts(bench: Path) -> int:
    path = bench / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def reached(bench: Path, number: int) -> None:
    deadline = time.monotonic() + 20
    while starts(bench) < number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_command_gets_pairs_and_parent_and_leaves_an_adapter(bench: Path) -> None:
    spec = make_spec(bench)
    model = asyncio.run(whole_job(trainer(bench), spec))
    assert model == TrainedModel("adapter", str(spec.directory / "output"), str(spec.directory / "output"))
    record = job_file(spec)
    assert record["status"] == "succeeded" and (record["pairs"], record["dropped"]) == (12, {})
    (sent,) = spec.directory.glob("sparta-*.jsonl")
    first = json.loads(sent.read_text().splitlines()[0])
    assert first["prompt"][0] == {"role": "system", "content": "Be brief."}
    second = make_spec(bench, iteration=1, parent=model)
    asyncio.run(whole_job(trainer(bench), second))
    assert f"trained on {model.train}" in (second.directory / job_worker.LOG).read_text()


def test_the_other_format_is_the_providers(bench: Path) -> None:
    spec = make_spec(bench)
    asyncio.run(whole_job(trainer(bench, format="openai"), spec))
    (sent,) = spec.directory.glob("sparta-*.jsonl")
    assert list(json.loads(sent.read_text().splitlines()[0])) == ["input", "preferred_output", "non_preferred_output"]


def test_a_killed_run_finds_its_command_still_working(bench: Path) -> None:
    (bench / "wait").touch()
    spec = make_spec(bench)
    process = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(whole_job(trainer(bench), spec)))
    process.start()
    reached(bench, 1)
    process.kill()
    process.join()
    (bench / "wait").unlink()
    asyncio.run(whole_job(trainer(bench), spec))
    assert starts(bench) == 1


def test_a_finished_command_is_not_run_again(bench: Path) -> None:
    spec = make_spec(bench)
    first = asyncio.run(whole_job(trainer(bench), spec))
    assert asyncio.run(whole_job(trainer(bench), spec)) == first
    assert starts(bench) == 1


def test_a_command_whose_worker_was_killed_is_started_again_once_it_is_gone(bench: Path) -> None:
    (bench / "wait").touch()
    spec = make_spec(bench)

    async def story() -> JobState:
        own = trainer(bench)
        job = await own.submit(spec)
        await asyncio.to_thread(reached, bench, 1)
        pid = job_worker.read_pid(spec.directory)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        alive = (await own.poll(job)).state
        (bench / "wait").unlink()
        status = await own.poll(job)
        while not status.state.ended:
            await asyncio.sleep(0.01)
            status = await own.poll(job)
        await own.close()
        assert "was killed" in status.message
        return alive

    assert asyncio.run(story()) is JobState.RUNNING
    assert asyncio.run(whole_job(trainer(bench), spec)).kind == "adapter"
    assert starts(bench) == 2


def test_a_failed_command_says_its_last_line_and_is_run_again_on_resume(bench: Path) -> None:
    (bench / "fail").touch()
    spec = make_spec(bench)
    with pytest.raises(TrainingError, match=r"member 'plain'.*ended with code 1: no CUDA device \(log: .*command\.log"):
        asyncio.run(whole_job(trainer(bench), spec))
    (bench / "fail").unlink()
    asyncio.run(whole_job(trainer(bench), spec))
    assert starts(bench) == 2


def test_cancelling_stops_the_command(bench: Path) -> None:
    (bench / "wait").touch()
    spec = make_spec(bench)

    async def story() -> JobState:
        own = trainer(bench)
        job = await own.submit(spec)
        await asyncio.to_thread(reached, bench, 1)
        await own.cancel(job)
        status = await own.poll(job)
        await own.close()
        return status.state

    assert asyncio.run(story()).ended
    assert not job_worker.alive(spec.directory)


def test_no_more_commands_at_once_than_slots(bench: Path) -> None:
    (bench / "wait").touch()
    specs = [make_spec(bench, member=member) for member in ("a", "b")]

    async def story() -> int:
        own = trainer(bench, slots=1)
        jobs = [asyncio.create_task(whole_job(own, spec)) for spec in specs]
        await asyncio.to_thread(reached, bench, 1)
        await asyncio.sleep(0.2)
        at_once = starts(bench)
        (bench / "wait").unlink()
        await asyncio.gather(*jobs)
        return at_once

    assert asyncio.run(story()) == 1
    assert starts(bench) == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('done')", "must be a JSON object, but is: done"),
        ('print(\'{"kind": "adapter"}\')', "has no adapter_config.json"),
        ('print(\'{"kind": "hub"}\')', "must print an object with the texts"),
        ("import time; time.sleep(60)", "took longer than"),
    ],
)
def test_a_command_that_misbehaves_is_one_sentence(bench: Path, code: str, words: str) -> None:
    hours = 1 / 3600 if "sleep" in code else 1.0
    own = trainer(bench, command=[sys.executable, "-c", code, "{preferences}"], max_hours=hours)
    with pytest.raises(TrainingError, match=f"member 'plain'.*{words}"):
        asyncio.run(whole_job(own, make_spec(bench)))


def test_mistakes_in_the_command_are_found_before_anything_is_run(bench: Path) -> None:
    for command, words in (
        (["no-such-program", "{preferences}"], "the program no-such-program is not found"),
        ([sys.executable, "{preferences}", "{outptu}"], r"{outptu} is not known; the placeholders are"),
    ):
        with pytest.raises(ConfigError, match=words):
            asyncio.run(trainer(bench, command=command).preflight("m", None, "plain"))
    with pytest.raises(ValueError, match=r"command needs \{preferences\}"):
        trainer(bench, command=["true"])
    with pytest.raises(ValueError, match="cannot express learning_rate"):
        trainer(bench, learning_rate=1e-5)


def fake_program(place: Path, code: str) -> list[str]:
    place.write_text(code)
    return [sys.executable, str(place)]


def test_the_llama_factory_example_writes_a_whole_job(bench: Path) -> None:
    program = fake_program(
        bench / "factory.py",
        "import json, pathlib, sys\n"
        "job = json.load(open(sys.argv[2]))\n"
        "data = json.load(open(job['dataset_dir'] + '/dataset_info.json'))[job['dataset']]\n"
        "assert len(json.load(open(job['dataset_dir'] + '/' + data['file_name']))) == 12\n"
        "pathlib.Path(job['output_dir'], 'adapter_config.json').write_text('{}')\n",
    )
    script = str(ROOT / "examples" / "training" / "llamafactory_job.py")
    options = ["--pairs", "{preferences}", "--base", "{base_model}", "--parent", "{parent}", "--output", "{output}"]
    own = trainer(bench, command=[sys.executable, script, *options, "--program", *program])
    first = asyncio.run(whole_job(own, make_spec(bench)))
    spec = make_spec(bench, iteration=1, parent=first)
    own = trainer(bench, command=[sys.executable, script, *options, "--program", *program])
    assert asyncio.run(whole_job(own, spec)).kind == "adapter"
    job = json.loads((spec.directory / "llamafactory" / "job.json").read_text())
    assert job["adapter_name_or_path"] == job["ref_model_adapters"] == first.train
    assert (job["stage"], job["ref_model"]) == ("dpo", "org/base-model")
    pairs = json.loads((spec.directory / "llamafactory" / "pairs.json").read_text())
    assert pairs[0]["messages"][0]["role"] == "system" and pairs[0]["chosen"]["role"] == "assistant"


def finished_run(root: Path, base: Path, adapter: Path) -> Path:
    """As much of a run directory as `merge` reads: member plain was trained to that adapter."""
    path = tribe(root, "http://127.0.0.1:9/v1", [{"name": name, "model": "m"} for name in ("plain", "other", "third")])
    (root / "run.json").write_text(json.dumps({"base_dir": str(path.parent)}))
    plain = {"kind": "adapter", "train": str(adapter), "serve": str(adapter)}
    empty: dict[str, Any] = {"model": "m", "trained": None, "served": None, "history": []}
    history = [{"iteration": 0, "model": "plain-1", **plain}]
    members = {"plain": {**empty, "trained": plain, "history": history}, "other": empty, "third": empty}
    (root / "models.json").write_text(json.dumps({"trained_iterations": 1, "members": members}))
    job = root / "iteration_000" / "training" / "plain" / "job.json"
    job.parent.mkdir(parents=True)
    job.write_text(json.dumps({"base": str(base)}))
    return root


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs the local extra")
def test_an_adapter_is_merged_and_served_by_the_ollama_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = make_tiny_model(tmp_path / "base")
    torch.manual_seed(0)
    tuned: Any = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    tuned.save_pretrained(str(tmp_path / "adapter"))
    tokens = torch.tensor([[5, 6, 7]])
    expected = tuned.eval()(tokens).logits
    calls = fake_program(
        tmp_path / "ollama.py",
        f"import sys; open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:3]) + '\\n')",
    )
    monkeypatch.setenv("OLLAMA_PROGRAM", " ".join(calls))
    script = str(ROOT / "examples" / "training" / "serve_ollama.py")
    serve = {
        "command": [sys.executable, script, "up", "{merged}", "{name}"],
        "undeploy": [sys.executable, script, "down", "{model}"],
    }
    section = Settings.model_validate({"backend": "command", "command": ["x", "{preferences}"], "serve": serve})
    up = build_deployer("own", section, "run-1", tmp_path, tmp_path)
    assert up is not None
    model = TrainedModel("adapter", str(tmp_path / "adapter"), str(tmp_path / "adapter"))
    served = asyncio.run(up.deploy(model, str(base), "plain", 0))
    assert served.base_url == "http://127.0.0.1:11434/v1" and served.api_key_env is None
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter-merged")
    untuned: Any = AutoModelForCausalLM.from_pretrained(base)
    assert torch.allclose(merged.eval()(tokens).logits, expected, atol=1e-4)
    assert not torch.allclose(untuned.eval()(tokens).logits, expected, atol=1e-4)
    assert asyncio.run(up.cleanup()) == [f"member 'plain': {served.model} is down"]
    run = finished_run(tmp_path / "run", base, tmp_path / "adapter")
    for member, words in (("plian", "no member 'plian'; did you mean"), ("other", "was not trained in any")):
        failed = CliRunner().invoke(cli.app, ["merge", str(run), "--member", member, "--out", str(tmp_path / "x")])
        assert isinstance(failed.exception, ConfigError) and words in str(failed.exception)
    out = tmp_path / "by hand"
    done = CliRunner().invoke(cli.app, ["merge", str(run), "--member", "plain", "--out", str(out)])
    assert done.exit_code == 0 and done.stdout.strip() == str(out), done.exception
    by_hand: Any = AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(by_hand.eval()(tokens).logits, expected, atol=1e-4)
    assert (out / "tokenizer_config.json").is_file()
    assert (tmp_path / "calls").read_text().splitlines() == [f"create {served.model}", f"rm {served.model}"]
