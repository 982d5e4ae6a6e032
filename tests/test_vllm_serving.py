"""The real vLLM with the real small model: started by the run, adapters loaded while it runs, all in one batch."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sparta_api.config.tribe import TribeConfig
from sparta_api.errors import EndpointError
from sparta_api.serving.adapters import AdapterEndpoint, can_load, ensure, publish, retire
from sparta_api.serving.servers import RunningServer, ServerManager

MODEL = Path(__file__).parents[1] / "models" / "smollm2-135m-instruct"
BASE = "smollm2"
QUESTIONS = ("Why is the sky blue?", "Name three fruits.", "What is a good breakfast?", "How do magnets work?")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason=f"{MODEL} is not there; see make test-vllm"),
]


class Served:
    """A manager on an event loop of its own, and what the tests ask of its server.

    float32 because greedy replies in bfloat16 depend on what else is in the batch.
    """

    def __init__(self, directory: Path) -> None:
        self.runner = asyncio.Runner()
        config = TribeConfig.model_validate(
            {
                "instructions": {"path": "x"},
                "servers": {"local": {"model": str(MODEL), "args": ["--dtype", "float32"]}},
                "members": [{"name": f"m{n}", "server": "local", "model": BASE} for n in range(2)],
                "trainers": {"here": {"backend": "trl", "lora": {"r": 8}}},
                "training": {"trainer": "here"},
            }
        )
        self.manager = ServerManager(config, directory / "logs")
        self.manager.preflight()
        self.server: RunningServer = self.runner.run(self.manager.start("local"))
        self.notices: list[str] = []

    @property
    def endpoint(self) -> AdapterEndpoint:
        return AdapterEndpoint("m0", [self.server.base_url], max_rank=self.server.lora_rank)

    def publish(self, name: str, path: Path) -> str:
        return self.runner.run(publish(self.endpoint, name, str(path), BASE, self.notices.append))

    def replies(self, *models: str) -> dict[str, list[str]]:
        """Greedy replies of all models to all questions, asked at the same time."""

        async def all_at_once() -> dict[str, list[str]]:
            async with httpx.AsyncClient(base_url=self.server.base_url, timeout=120, trust_env=False) as http:
                asked = {model: [chat(http, model, question) for question in QUESTIONS] for model in models}
                texts = await asyncio.gather(*(one for several in asked.values() for one in several))
            count = len(QUESTIONS)
            return {model: texts[n * count : (n + 1) * count] for n, model in enumerate(models)}

        return self.runner.run(all_at_once())

    def close(self) -> None:
        self.runner.run(self.manager.stop_all())
        self.runner.close()


async def chat(http: httpx.AsyncClient, model: str, question: str, **fields: Any) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 24, "temperature": 0}
    answer = await http.post("/chat/completions", json=body | fields)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    running = Served(tmp_path_factory.mktemp("vllm"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters with random weights ("a", "b", "wide" of a large rank), and "still", which changes nothing."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import peft
    import torch
    import transformers

    directory = tmp_path_factory.mktemp("adapters")
    made = {}
    for seed, (name, rank) in enumerate((("a", 8), ("b", 8), ("wide", 64), ("still", 8))):
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        torch.manual_seed(seed)
        config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        tuned = peft.get_peft_model(model, config)
        if name != "still":
            for parameter_name, parameter in tuned.named_parameters():
                if "lora_B" in parameter_name:
                    torch.nn.init.normal_(parameter, std=0.02)
        made[name] = directory / name
        tuned.save_pretrained(str(made[name]))
    return made


def test_adapters_answer_beside_the_base_model_in_one_batch(served: Served, adapters: dict[str, Path]) -> None:
    served.runner.run(can_load(served.endpoint))
    base = served.replies(BASE)[BASE]
    first, second = served.publish("m0-it1", adapters["a"]), served.publish("m1-it1", adapters["b"])
    alone = {name: served.replies(name)[name] for name in (first, second)}
    together = served.replies(BASE, first, second)
    assert alone[first] != base and alone[second] != base and alone[first] != alone[second]
    same = [a == b for name in together for a, b in zip(together[name], {BASE: base, **alone}[name], strict=True)]
    assert sum(same) >= len(same) - 1, "rounding may turn one reply, another adapter turns all"
    assert served.notices == []
    for name in (first, second):
        served.runner.run(retire(served.endpoint, name, served.notices.append))


def test_many_rounds_of_new_versions(served: Served, adapters: dict[str, Path]) -> None:
    base = served.replies(BASE)[BASE]
    before: dict[str, str] = {}
    for iteration in range(4):
        for member, path in (("m0", adapters["a"]), ("m1", adapters["b"])):
            name = served.publish(f"{member}-round{iteration}", path)
            if member in before:
                served.runner.run(retire(served.endpoint, before[member], served.notices.append))
            before[member] = name
        replies = served.replies(BASE, *before.values())
        assert all(replies[name] != replies[BASE] for name in before.values())
        assert sum(a == b for a, b in zip(replies[BASE], base, strict=True)) >= len(base) - 1
    assert served.notices == []


def test_what_cannot_be_served_is_said_in_our_words(served: Served, adapters: dict[str, Path], tmp_path: Path) -> None:
    for known in (8, None):
        place = AdapterEndpoint("m0", [served.server.base_url], max_rank=known)
        with pytest.raises(EndpointError, match=r"64.*8.*--max-lora-rank"):
            served.runner.run(publish(place, "m0-wide", str(adapters["wide"]), BASE, served.notices.append))
    elsewhere = AdapterEndpoint("m0", [served.server.base_url], path_map={str(adapters["a"]): "/not/on/this/disk"})
    with pytest.raises(EndpointError, match=r"/not/on/this/disk.*path_map"):
        served.runner.run(publish(elsewhere, "m0-far", str(adapters["a"]), BASE, served.notices.append))


def test_an_adapter_without_effect_is_noticed(served: Served, adapters: dict[str, Path]) -> None:
    name = served.publish("m0-still", adapters["still"])
    assert "adapter has no visible effect" in served.notices.pop()
    served.runner.run(retire(served.endpoint, name, served.notices.append))


def test_digits_get_probabilities_and_shared_prefixes_are_kept(served: Served, adapters: dict[str, Path]) -> None:
    name = served.publish("m0-digits", adapters["a"])
    prompt = "Rate the answer with one digit from 0 to 9. " * 20
    fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "logprobs": True, "top_logprobs": 20}
    with httpx.Client(base_url=served.server.base_url, timeout=120, trust_env=False) as http:
        for ending in ("Good.", "Bad."):
            body = {"model": name, "messages": [{"role": "user", "content": prompt + ending}], **fields}
            answer = http.post("/chat/completions", json=body).raise_for_status().json()
        assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
        metrics = http.get(served.server.base_url.removesuffix("/v1") + "/metrics").text
    hits = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} ([\d.e+]+)$", metrics, re.MULTILINE)
    assert sum(map(float, hits)) > 0


def test_a_restarted_server_is_told_again(served: Served, adapters: dict[str, Path]) -> None:
    name = served.publish("m0-kept", adapters["a"])
    tuned = served.replies(name)[name]
    served.server = served.runner.run(served.manager.restart("local"))
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        served.replies(name)
    served.runner.run(ensure(served.endpoint, name, str(adapters["a"])))
    again = served.replies(name)[name]
    assert sum(a == b for a, b in zip(again, tuned, strict=True)) >= len(tuned) - 1


def test_rows_get_their_own_slots_product_and_no_other() -> None:
    import torch

    from sparta_api.serving.vllm_lora import add_products, select

    torch.manual_seed(0)
    a, b = torch.randn(4, 1, 8, 32), torch.randn(4, 1, 48, 8)
    x, y = torch.randn(7, 32), torch.randn(7, 48)
    indices = torch.tensor([-1, 2, 0, 2, -1, 3, 0])
    expected = y.clone()
    for row, slot in enumerate(indices.tolist()):
        if slot >= 0:
            expected[row] += 0.5 * (x[row] @ a[slot, 0].T) @ b[slot, 0].T
    add_products(y, x, a, b, 0.5, select(indices))
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    untouched = y.clone()
    add_products(y, x, a, b, 0.5, select(torch.full((7,), -1)))
    assert torch.equal(y, untouched)
