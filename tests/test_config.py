"""Reading tribe.yaml: merging, variables, keys, problems with their lines, changes, templates."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from sparta_api import secrets
from sparta_api.config.diff import changed_keys, fingerprint
from sparta_api.config.file import LoadedTribe, dump_tribe, load_tribe, read_tribe, resolve_path
from sparta_api.config.keys import keys_at, schema
from sparta_api.config.scaffold import TEMPLATES, init
from sparta_api.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases" / "field-cases.jsonl"

BASE = """\
instructions: {path: data.jsonl}
defaults:
  base_url: http://localhost:8000/v1
  model: m
members:
  - name: a
  - name: b
  - name: c
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tribe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def load(tmp_path: Path, text: str, *overrides: str, env: Mapping[str, str] | None = None) -> LoadedTribe:
    return load_tribe(write(tmp_path, text), overrides, env or {})


def refused(tmp_path: Path, text: str, *overrides: str, env: Mapping[str, str] | None = None) -> list[str]:
    """The lines of the error, without the directory."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides, env=env)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def case(name: str) -> dict[str, str]:
    """The input of a field case."""
    if not CASES.exists():
        pytest.skip("the field cases are not here")
    rows = map(json.loads, CASES.read_text(encoding="utf-8").strip().split("\n"))
    found: dict[str, str] = next(row["input"] for row in rows if row["id"] == name)
    return found


# defaults


def test_defaults_are_merged_key_by_key_and_the_member_wins(tmp_path: Path) -> None:
    common = "  model: m\n"
    text = BASE.replace(common, common + "  sampling: {temperature: 0.2, max_tokens: 9}\n  headers: {A: '1'}\n")
    own = "name: b\n    sampling: {max_tokens: 7}\n    headers: {B: '2'}\n    model: other\n"
    text = text.replace("name: b\n", own)
    config = load(tmp_path, text).config
    a, b, _ = config.members
    assert (a.model, a.sampling.temperature, a.sampling.max_tokens, a.headers) == ("m", 0.2, 9, {"A": "1"})
    assert (b.model, b.sampling.temperature, b.sampling.max_tokens) == ("other", 0.2, 7)
    assert b.headers == {"A": "1", "B": "2"}
    assert config.defaults == {}


def test_a_members_own_endpoint_displaces_the_default_one(tmp_path: Path) -> None:
    text = BASE.replace("- name: b", "- {name: b, server: local}") + "servers: {local: {model: w}}\n"
    config = load(tmp_path, text).config
    assert config.member("b").server == "local"
    assert config.member("b").base_url is None
    assert config.member("a").base_url == "http://localhost:8000/v1"


def test_an_empty_section_is_an_absent_one(tmp_path: Path) -> None:
    assert load(tmp_path, BASE + "limits:\njudging:\n").config.judging.scale == (1, 10)


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    text = "instructions: {path: d.txt}\nmembers:\n  - &a {name: a, model: m, base_url: 'http://h/v1'}\n"
    text += "  - {<<: *a, name: b}\n  - {<<: [*a], name: c, model: n}\n"
    assert [(m.name, m.model) for m in load(tmp_path, text).config.members] == [("a", "m"), ("b", "m"), ("c", "n")]


# problems with their lines


def test_all_problems_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    common = "  model: m\n"
    text = BASE.replace(common, common + "  sampling: {temprature: 1}\n")
    text = text.replace("name: c", "name: c\n    roles: [fight, jduge]")
    text = "sed: 1\niterations: '2'\n" + text + "judging: [1]\n"
    assert refused(tmp_path, text) == [
        "tribe.yaml:1: unknown key sed; did you mean 'seed'?",
        "tribe.yaml:2: iterations is `2`; it should be a whole number",
        "tribe.yaml:7: unknown key defaults.sampling.temprature; did you mean 'temperature'?",
        "tribe.yaml:12: members[2].roles[1] is `jduge`; it should be 'fight' or 'judge'; did you mean 'judge'?",
        "tribe.yaml:13: judging is a list; it should be a map",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("name: no", 'tribe.yaml:9: name is `no`, which YAML reads as a boolean; quote it: "no"'),
        ("name: 2024", 'tribe.yaml:9: name is `2024`, which YAML reads as a number; quote it: "2024"'),
        ("iterations: true", "tribe.yaml:9: iterations is `true`; it should be a whole number"),
        ("iterations: 0", "tribe.yaml:9: iterations is `0`; it should be greater than 0"),
        ("iterations: ${N}", "iterations is `${N}`; it should be a whole number; ${VAR} stands in texts only"),
        ("judging: {temperature: yes}", "tribe.yaml:9: judging.temperature is `yes`; it should be a number"),
        ("judging: {scale: [1.5, 3]}", "tribe.yaml:9: judging.scale[0] is `1.5`; it should be a whole number"),
        ("judging: {scale: [1]}", "tribe.yaml:9: judging.scale lacks entry [1]"),
        ("judging: {rounds: 2}", "more than one round at temperature 0 repeats the same answer"),
        ("reputation: {freeze: 'yes'}", "tribe.yaml:9: reputation.freeze is `yes`; it should be a boolean"),
        ("reputation: {min_deviation: .nan}", "tribe.yaml:9: reputation.min_deviation is `.nan`; it should be"),
        ("trainers: {t: {lora: {r: 1}}}", "tribe.yaml:9: trainers.t lacks 'backend'"),
        ("trainers: {t: {backend: tlr}}", "trainers.t.backend is `tlr`; it should be one of trl, "),
        ("servers: {s: {backend: vllm}}", "tribe.yaml:9: servers.s: backend vllm needs a model"),
        ("training: {trainer: lcal}", "tribe.yaml:9: training.trainer: there is no trainer 'lcal'"),
        ("limits: {max_cost_usd: 2}", "limits.max_cost_usd needs the price of every member; 'a', 'b', 'c' lack one"),
        ("seed: 1\nseed: 2", "tribe.yaml:10: duplicate key seed; it stands in line 9 already"),
        ("1: x", "tribe.yaml:9: the key `1` of the file is read as a number; quote it"),
        ("name: !!python/object:os.x y", "name: the YAML tag tag:yaml.org,2002:python/object:os.x is not used"),
        ("name: ../x", "tribe.yaml:9: name: a name has no empty, '.' or '..' component"),
        ('name: "a\\u0007"', "tribe.yaml:9: name: a name has no control characters"),
        ("judging: {judges_per_duel: 2}", "judging.judges_per_duel is 2, but only 1 can judge 'a' against 'b'"),
        ("judging: {prompt: mine.j2}", "tribe.yaml:9: judging.prompt: there is no file"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    assert any(message in found for found in refused(tmp_path, BASE + line + "\n"))


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("{name: d, base_url: 'localhost:8000'}", "a base URL starts with http:// or https:// and names a host"),
        ("{name: d, base_url: 'http://'}", "a base URL starts with http:// or https:// and names a host"),
        ("{name: d, base_url: 'http://h:99999/v1'}", "this is no URL"),
        ("{name: d, base_url: 'http://h/v1?a=b'}", "a base URL ends before '?'"),
        ("{name: d, base_url: 'http://h/v1/chat/completions'}", "give the part before /chat/completions"),
        ("{name: d, base_url: ['http://h/v1', 'ftp://h']}", "members[3].base_url[1]: a base URL starts with"),
        ("{name: d, base_url: []}", "members[3].base_url"),
        ("{name: d, base_url: 'http://h/v1', server: s}", "member 'd' needs either server or base_url"),
        ("{name: d, server: s}", "members[3].server: there is no server 's'"),
        ("{name: d, trainer: trl}", "members[3].trainer: there is no trainer 'trl'"),
        ("{name: d, concurrency: 0}", "members[3].concurrency is `0`; it should be greater than 0 or 'auto'"),
        ("{name: d, model: }", "members[3].model is empty; it should be a string"),
        ("{name: d, extra_body: {stream: true}}", "stream is set by every request itself"),
        ("{name: d, extra_body: {x: .inf}}", "members[3].extra_body: the values have to be plain JSON"),
        ("{name: a}", "duplicate member 'a', it stands at tribe.yaml:6 already"),
        ("{name: d, adapter: ./gone}", "members[3].adapter: there is no"),
        ("{name: d, api_key_env: KEY-1}", "it should be the name of an environment variable"),
        ("just a text", "members[3] is `just a text`; it should be a map"),
    ],
)
def test_a_wrong_member_is_named_with_its_line(tmp_path: Path, member: str, message: str) -> None:
    found = refused(tmp_path, f"{BASE}  - {member}\n")
    assert any(line.startswith("tribe.yaml:9: ") and message in line for line in found), found


def test_a_default_in_error_is_reported_once_and_where_it_stands(tmp_path: Path) -> None:
    text = BASE.replace("  model: m\n", "  model: m\n  concurrency: many\n")
    assert refused(tmp_path, text) == [
        "tribe.yaml:5: defaults.concurrency is `many`; it should be a whole number or 'auto'"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tribe.yaml: the file is empty"),
        ("# nothing\n", "tribe.yaml: the file is empty"),
        ("- a\n", "tribe.yaml:1: the file holds a list, not a map of keys"),
        ("name: x\n\tseed: 1\n", "tribe.yaml:2: a tab stands where YAML wants spaces"),
        ("name: x\nseed: [1\n", "this is not YAML"),
        ("name: a: b\n", "tribe.yaml:1: this is not YAML (mapping values are not allowed here); quote a text"),
        ("name: x\nseed: \x07\n", "tribe.yaml:2: the control character"),
        ("a: &a [*a]\n", "tribe.yaml:1: this is nested too deeply"),
        ("[" * 3000, "tribe.yaml:1: this is nested too deeply"),
        ("seed: *none\n", "tribe.yaml:1: this is not YAML (found undefined alias 'none')"),
    ],
)
def test_what_is_no_configuration_at_all(tmp_path: Path, text: str, message: str) -> None:
    (found,) = refused(tmp_path, text)
    assert message in found


def test_a_file_that_is_missing_or_in_another_encoding(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: no such file or directory"):
        load_tribe(tmp_path / "nothing.yaml")
    (tmp_path / "latin.yaml").write_bytes("seed: 1\nname: Öl\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.yaml:2: this is not UTF-8"):
        load_tribe(tmp_path / "latin.yaml")
    (tmp_path / "bom.yaml").write_text(BASE, encoding="utf-8-sig")
    assert load_tribe(tmp_path / "bom.yaml").config.member("a").model == "m"


def test_aliases_of_aliases_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (found,) = refused(tmp_path, "\n".join(lines))
    assert "more than 200000 values" in found


def test_fighters_and_their_judges(tmp_path: Path) -> None:
    two = BASE.replace("  - name: c\n", "")
    (found,) = refused(tmp_path, two)
    assert found.startswith("tribe.yaml:5: no member may judge 'a' against 'b', for fighters never judge themselves;")
    outside = two + "  - {name: j, roles: [judge]}\n"
    assert [m.name for m in load(tmp_path, outside).config.fighters] == ["a", "b"]
    lonely = outside.replace("- name: a", "- {name: a, roles: [judge]}")
    assert "a tribe needs at least two fighters, it has 1" in refused(tmp_path, lonely)[0]
    (one,) = refused(tmp_path, "instructions: {path: d.txt}\nmembers: [{name: a, model: m, base_url: 'http://h'}]\n")
    assert one == "tribe.yaml:2: members needs at least 2 entries, it has 1"


# numbers, as people write them


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("5.0e-5", 5e-5), ("1E-6", 1e-6), ("1", 1.0), (".5", 0.5)])
def test_numbers_are_read_as_numbers(tmp_path: Path, text: str, value: float) -> None:
    config = load(tmp_path, BASE + f"trainers: {{t: {{backend: trl, learning_rate: {text}}}}}\n").config
    assert config.trainers["t"].learning_rate == value  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["2024-05-01", "12:30:45", "v1.2", "0123abc", "1.2.3"])
def test_dates_and_the_like_stay_text(tmp_path: Path, text: str) -> None:
    loaded = load(tmp_path, BASE.replace("model: m", f"model: {text}"))
    assert loaded.config.member("a").model == text


# variables and keys


def test_variables_are_expanded_for_use_and_kept_as_written(tmp_path: Path) -> None:
    text = BASE.replace("localhost:8000", "${HOST}:${PORT:-9000}")
    text += "    system_prompt: Costs $${HOST} ${EMPTY:-d} $5 {x}\n"
    loaded = load(tmp_path, text, env={"HOST": "example.org", "EMPTY": ""})
    assert loaded.config.member("a").base_url == "http://${HOST}:${PORT:-9000}/v1"
    assert loaded.resolved.member("a").base_url == "http://example.org:9000/v1"
    assert loaded.resolved.member("c").system_prompt == "Costs ${HOST} d $5 {x}"
    assert "example.org" not in dump_tribe(loaded.config)


def test_unset_and_malformed_variables_are_named(tmp_path: Path) -> None:
    text = BASE.replace("localhost", "${HOST}").replace("model: m", "model: ${MY-MODEL}")
    first, second = refused(tmp_path, text)
    assert first.startswith("tribe.yaml:3: defaults.base_url: the variable HOST is not set; export it")
    assert second.startswith("tribe.yaml:4: defaults.model: '${' starts no variable here")
    (found,) = refused(tmp_path, BASE.replace("model: m", "model: ${M}"), env={"M": ""})
    assert found == "tribe.yaml:4: defaults.model is ``; it should be not empty"
    (found,) = refused(tmp_path, BASE + "name: run-${USER}\n", env={"USER": "x"})
    assert "a name holds no variables" in found


def test_keys_are_read_stripped_and_masked(tmp_path: Path) -> None:
    text = BASE.replace("model: m", "model: m\n  api_key_env: MY_KEY")
    loaded = load(tmp_path, text, env={"MY_KEY": "plainkey-123456789\n"})
    assert loaded.keys == dict.fromkeys("abc", "plainkey-123456789")
    assert secrets.scrub("echo plainkey-123456789!") == "echo ***!"
    assert "plainkey" not in repr(loaded) + dump_tribe(loaded.config)


@pytest.mark.parametrize("value", ["zq7-first\nzq7-second", "zq7\x00-first", "zq7-fürst"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(tmp_path: Path, value: str) -> None:
    text = BASE.replace("model: m", "model: m\n  api_key_env: MY_KEY")
    (found,) = refused(tmp_path, text, env={"MY_KEY": value})
    assert "MY_KEY" in found
    assert "zq7" not in found


def test_an_unset_key_names_member_and_variable(tmp_path: Path) -> None:
    (found,) = refused(tmp_path, BASE + "    api_key_env: MY_KEY\n")
    assert found.startswith("tribe.yaml:9: members[2].api_key_env: the variable MY_KEY is not set; export the key")
    assert "'c'" in found
    (found,) = refused(tmp_path, BASE + "    api_key_env: MY_KEY\n", env={"MY_KEY": " \n"})
    assert "MY_KEY is empty" in found


def test_header_values_from_variables_are_secrets(tmp_path: Path) -> None:
    text = BASE + "    headers: {Authorization: 'Bearer ${TOKEN_C}', X-Team: blue}\n"
    loaded = load(tmp_path, text, env={"TOKEN_C": "headersecret-42\n"})
    assert loaded.resolved.member("c").headers == {"Authorization": "Bearer headersecret-42", "X-Team": "blue"}
    assert "headersecret" not in secrets.scrub("body: headersecret-42") + repr(loaded) + dump_tribe(loaded.config)
    (found,) = refused(tmp_path, text, env={"TOKEN_C": "zq8-a\nzq8-b"})
    assert "TOKEN_C" in found
    assert "zq8" not in found


@pytest.mark.parametrize(
    "line",
    [
        "    api_key: sk-test-123456789",
        "    headers: {Authorization: Bearer sk-test-123456789}",
        "    headers: {X-API-Key: zq9secretzq9}",
        "    extra_body: {token: zq9secretzq9}",
        "    system_prompt: My key is sk-test-1234567890123",
        "    api_key_env: sk-test-1234567890123",
        "    headers: {X: '${NAME:-sk-test-1234567890123}'}",
        "    base_url: http://user:zq9secretzq9@host/v1",
        "    base_url: http://zq9secretzq9@host/v1",
        "api_key: sk-test-123456789",
    ],
)
def test_a_literal_key_is_refused_and_never_shown(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        found = refused(tmp_path, f"{BASE}{line}\n")
    assert all(text.startswith("tribe.yaml:9: ") for text in found)
    assert not re.search("sk-test|zq9", "\n".join(found) + caplog.text)


def test_prose_about_bearers_and_tokens_is_no_key(tmp_path: Path) -> None:
    text = BASE + "    system_prompt: Ask the bearer whatever the token means.\n    extra_body: {eos_token: '</s>'}\n"
    assert load(tmp_path, text).config.member("c").extra_body == {"eos_token": "</s>"}


def test_who_only_looks_needs_no_environment(tmp_path: Path) -> None:
    text = BASE.replace("localhost:8000", "${HOST}:${PORT}").replace("name: a", "name: a\n    adapter: ./gone")
    path = write(tmp_path, text + "    api_key_env: MY_KEY\n")
    loaded = load_tribe(path, environ={"PORT": "1"}, keys=False)
    assert loaded.keys == {}
    assert loaded.resolved.member("a").base_url == "http://${HOST}:${PORT}/v1"
    assert loaded.resolved.instructions.path == str(tmp_path / "data.jsonl")
    assert read_tribe(path) == loaded.config
    with pytest.raises(ConfigError, match="no member may judge"):
        load_tribe(write(tmp_path, text.replace("  - name: c\n", "")), environ={}, keys=False)


# paths


def test_relative_paths_belong_to_the_file_or_to_base_dir(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "mine.j2").write_text("x")
    text = BASE + "heldout: {path: held.txt}\nservers: {s: {model: models/tiny}, t: {model: org/hub-id}}\n"
    text += "judging: {prompt: mine.j2}\ntrainers: {t: {backend: trl, base_model: models/tiny}}\n"
    text = text.replace("name: c", "name: c\n    server: s\n    adapter: org/lora")
    loaded = load(tmp_path, text)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / "tribe.yaml"
    copy.write_text(dump_tribe(loaded.config), encoding="utf-8")
    for resolved in (loaded.resolved, load_tribe(copy, base_dir=tmp_path).resolved):
        assert resolved.instructions.path == str(tmp_path / "data.jsonl")
        assert resolved.heldout is not None
        assert resolved.heldout.path == str(tmp_path / "held.txt")
        assert resolved.servers["s"].model == resolved.trainers["t"].base_model == str(tmp_path / "models" / "tiny")
        assert resolved.servers["t"].model == "org/hub-id"
        assert resolved.member("c").adapter == "org/lora"
        assert resolved.judging.prompt == str(tmp_path / "mine.j2")
    assert loaded.config.judging.prompt == "mine.j2"
    assert loaded.base_dir == tmp_path
    assert resolve_path("/x/y", tmp_path) == Path("/x/y")


def adapter_problem(tmp_path: Path, settings: object) -> list[str]:
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    text = BASE.replace("name: a", "name: a\n    adapter: lora") + "training: {trainer: t}\n"
    return refused(tmp_path, text + "trainers: {t: {backend: trl, lora: {r: 8}}}\n")


def test_an_adapter_of_another_rank_names_both_ranks_and_the_path(tmp_path: Path) -> None:
    (found,) = adapter_problem(tmp_path, {"r": 16})
    assert found.startswith("tribe.yaml:7: members[0].adapter: lora has rank 16, but trainers.t.lora.r is 8")


def test_an_adapter_with_modules_to_save_is_refused(tmp_path: Path) -> None:
    (found,) = adapter_problem(tmp_path, {"r": 8, "modules_to_save": ["embed_tokens", "lm_head"]})
    assert "modules_to_save (embed_tokens, lm_head)" in found


def test_a_broken_adapter_configuration_is_named(tmp_path: Path) -> None:
    (found,) = adapter_problem(tmp_path, [1])
    assert "adapter_config.json is no adapter configuration" in found


# accounts and warnings


def test_a_limit_holds_for_the_account_and_conflicts_are_errors(tmp_path: Path) -> None:
    text = BASE.replace("name: b", "name: b\n    concurrency: 4\n    requests_per_minute: 60")
    text += "    base_url: http://localhost:8001/v1\n"
    loaded = load(tmp_path, text.replace("model: m", "model: m\n  concurrency: 8"))
    for config in (loaded.config, loaded.resolved):
        assert [(m.concurrency, m.requests_per_minute) for m in config.members] == [(4, 60), (4, 60), (8, None)]
    conflict = text.replace("name: a", "name: a\n    concurrency: 5")
    assert refused(tmp_path, conflict) == [
        "tribe.yaml:9: members[1].concurrency is 4 for 'b', but 5 for 'a' (tribe.yaml:7);"
        " both share the account http://localhost:8000, give it one value"
    ]
    assert load(tmp_path, conflict, "members.a.concurrency=7").config.member("b").concurrency == 7


def test_keys_and_hosts_tell_accounts_apart(tmp_path: Path) -> None:
    text = BASE.replace("name: a", "name: a\n    concurrency: 5\n    api_key_env: ONE")
    text = text.replace("name: b", "name: b\n    concurrency: 6\n    api_key_env: TWO")
    text += "    concurrency: 7\n    api_key_env: ONE\n    base_url: ['HTTP://LOCALHOST:80/v1', 'http://h2/v1']\n"
    env = {"ONE": "first-key-1", "TWO": "second-key-2"}
    assert [m.concurrency for m in load(tmp_path, text, env=env).config.members] == [5, 6, 7]
    same = text.replace("HTTP://LOCALHOST:80/v1", "HTTP://LOCALHOST:8000/other")
    assert "members[2].concurrency is 7 for 'c', but 5 for 'a'" in refused(tmp_path, same, env=env)[0]


def test_same_models_are_a_warning_where_others_are_not_the_same(tmp_path: Path) -> None:
    assert load(tmp_path, BASE).warnings == []
    (found,) = load(tmp_path, BASE + "    model: n\n").warnings
    assert found == "'a', 'b' are the same model ('m'), so their judging may show self-preference"


def test_plain_http_with_a_key_and_idle_servers_are_warnings(tmp_path: Path) -> None:
    text = BASE + "    model: n\n    base_url: http://far.example/v1\n    api_key_env: K\nservers: {s: {model: x}}\n"
    found = load(tmp_path, text.replace("name: b", "name: b\n    model: o"), env={"K": "some-key-value"}).warnings
    assert [line.split(";")[0] for line in found] == [
        "member 'c' sends its key over http, unencrypted",
        "server 's' would start but no member uses it",
    ]


# --set


def test_overrides_reach_everything(tmp_path: Path) -> None:
    text = BASE.replace("name: b", "name: gpt.4/b") + "servers: {s: {model: x}}\n"
    loaded = load(
        tmp_path, text, "seed=7", "limits.max_requests=5", "members.gpt.4/b.sampling.temperature=0.1",
        "members[0].model=other", "members.c.headers={X-A: b}", "servers.s.gpus=[0, 1]", "members.c.server=s",
        "members.c.base_url=null", "defaults.timeout_s=9",
    )  # fmt: skip
    config = loaded.config
    assert (config.seed, config.limits.max_requests, config.servers["s"].gpus) == (7, 5, [0, 1])
    assert config.member("gpt.4/b").sampling.temperature == 0.1
    assert config.member("a").model == "other"
    assert config.member("c").headers == {"X-A": "b"}
    assert (config.member("c").server, config.member("c").timeout_s) == ("s", 9)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("limits.max_request=5", "--set limits.max_request: unknown key limits.max_request; did you mean 'max_req"),
        ("members.q.model=5", "--set members.q.model: members has no 'q'; there is a, b, c"),
        ("members[3].model=m", "--set members[3].model: members has 3 entries, the last is [2]"),
        ("name=no", '--set name: name is `no`, which YAML reads as a boolean; quote it: "no"'),
        ("name", "--set: write it as KEY.PATH=VALUE"),
        ("=5", "--set: write it as KEY.PATH=VALUE"),
        ("members..model=5", "--set members..model: members has no ''; there is a, b, c"),
        ("seed.x=5", "--set seed.x: seed is a map; it should be a whole number"),
        ("members.a.name.x=5", "--set members.a.name.x: members[0].name is no map, so it has no 'x'"),
        ("seed=[", "quote the value"),
        ("members.a.api_key=sk-test-123456789", "--set members.a.api_key: a key is never written"),
        ("defaults.model=n", "--set defaults.model: this changes no member"),
    ],
)
def test_a_wrong_override_is_named(tmp_path: Path, override: str, message: str) -> None:
    text = BASE.replace("  model: m\n", "").replace("name: a", "name: a\n    model: m")
    text = text.replace("name: b", "name: b\n    model: m").replace("name: c", "name: c\n    model: m")
    (found,) = refused(tmp_path, text, override)
    assert message in found
    assert "sk-test" not in found


# the copy in the run directory


def test_the_dump_is_complete_deterministic_and_read_again(tmp_path: Path) -> None:
    text = BASE.replace("model: m", 'model: "1e5"\n  system_prompt: "no\\n日本\\u2028 ${X:-y}"') + "trainers:\n"
    text += "  t: {backend: trl, learning_rate: 1e-6}\n  o: {backend: openai}\n  g: {backend: together}\n"
    text += "  k: {backend: tinker}\n  c: {backend: command, command: [x, '{preferences}']}\n"
    loaded = load(tmp_path, text)
    dumped = dump_tribe(loaded.config)
    again = load(tmp_path, dumped)
    assert again.config == loaded.config
    assert again.resolved == loaded.resolved
    assert dump_tribe(again.config) == dumped
    assert read_tribe(tmp_path / "tribe.yaml") == loaded.config
    plain = yaml.safe_load(dumped)
    assert plain["members"][1]["sampling"] == {"temperature": 0.7, "top_p": 0.95, "max_tokens": 512}
    assert plain["reputation"]["min_k"] == 5.0
    assert "defaults" not in plain


def test_an_explicit_default_is_the_same_configuration(tmp_path: Path) -> None:
    one = load(tmp_path, BASE).config
    two = load(tmp_path, BASE + "reputation: {initial: 100}\niterations: 1\n").config
    assert fingerprint(one) == fingerprint(two)
    assert changed_keys(one, two) == []
    assert fingerprint(one) != fingerprint(load(tmp_path, BASE + "seed: 1\n").config)


def test_changes_are_told_by_path_and_whether_they_are_allowed(tmp_path: Path) -> None:
    old = load(tmp_path, BASE + "servers: {s: {model: x}}\ntrainers: {t: {backend: trl}}\niterations: 2\n").config
    new = load(
        tmp_path, BASE + "servers: {s: {model: y}}\ntrainers: {t: {backend: trl, beta: 0.2}}\niterations: 3\n",
        "members.a.base_url=http://other/v1", "members.b.model=n", "members.c.price={input: 1, output: 2}",
        "limits.max_requests=9", "members.a.trainer=t", "judging.rounds=1", "judging.max_tokens=5",
    ).config  # fmt: skip
    changes = {change.path: change for change in changed_keys(old, new)}
    assert {path for path, change in changes.items() if change.allowed} == {
        "members.a.base_url", "members.c.price", "limits.max_requests", "servers.s.model", "iterations",
    }  # fmt: skip
    refused_paths = {path for path, change in changes.items() if not change.allowed}
    assert refused_paths == {"members.b.model", "members.a.trainer", "trainers.t.beta", "judging.max_tokens"}
    assert {path for path, change in changes.items() if change.of_trainers} == {"members.a.trainer", "trainers.t.beta"}
    assert (changes["members.b.model"].old, changes["members.b.model"].new) == ("m", "n")
    assert not next(change for change in changed_keys(new, old) if change.path == "iterations").allowed


def test_members_are_matched_by_name(tmp_path: Path) -> None:
    old = load(tmp_path, BASE).config
    other_order = BASE.replace("  - name: a\n  - name: b\n", "  - name: b\n  - name: a\n")
    (swapped,) = changed_keys(old, load(tmp_path, other_order).config)
    assert (swapped.path, swapped.allowed) == ("members", False)
    larger = load(tmp_path, BASE + "  - name: d.base_url\n").config
    paths = {change.path: change for change in changed_keys(old, larger)}
    assert list(paths) == ["members.d.base_url"]
    assert not paths["members.d.base_url"].allowed
    assert paths["members.d.base_url"].keys == ("members", "d.base_url")
    assert paths["members.d.base_url"].old is None


# field cases


def test_the_field_cases_of_configuration_files(tmp_path: Path) -> None:
    assert 'members[0].name is `no`, which YAML reads as a boolean; quote it: "no"' in "\n".join(
        refused(tmp_path, case("G01")["yaml"])
    )
    assert "sk-test" not in "\n".join(refused(tmp_path, case("G04")["yaml"]))
    assert any("duplicate member 'a'" in line for line in refused(tmp_path, case("G22")["yaml"]))


# schema and templates


def test_the_schema_is_current_and_accepts_the_templates() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    committed = json.loads((ROOT / "docs" / "tribe.schema.json").read_text(encoding="utf-8"))
    assert committed == schema(), "python -m sparta_api.config.keys > docs/tribe.schema.json"
    jsonschema.Draft202012Validator.check_schema(committed)
    validator = jsonschema.Draft202012Validator(committed)
    for name in TEMPLATES:
        data = yaml.safe_load((ROOT / "sparta_api" / "templates" / f"{name}.yaml").read_text(encoding="utf-8"))
        validator.validate(data)
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**data, "sed": 1})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**data, "defaults": {"modle": "m"}})


def test_keys_are_known_at_every_depth() -> None:
    assert "temperature" in keys_at(("members", 3, "sampling"))
    assert "temperature" in keys_at(("defaults", "sampling"))
    assert {"learning_rate", "learning_rate_multiplier"} <= set(keys_at(("trainers", "any")))
    assert keys_at(("members", 0, "extra_body", "x")) == []


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_every_template_is_a_valid_tribe(tmp_path: Path, name: str) -> None:
    made = init(tmp_path / "new" / "tribe", name)
    assert [path.name for path in made] == list(TEMPLATES[name])
    loaded = load_tribe(made[0], environ={"FIRST_API_KEY": "one-key-value", "SECOND_API_KEY": "two-key-value"})
    assert loaded.config.name == name
    assert loaded.warnings == []
    assert Path(loaded.resolved.instructions.path).is_file()


def test_init_never_overwrites(tmp_path: Path) -> None:
    (tmp_path / "instructions.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match=r"instructions\.jsonl: the file exists already and is not overwritten"):
        init(tmp_path, "quickstart")
    assert [path.name for path in tmp_path.iterdir()] == ["instructions.jsonl"]
    with pytest.raises(ConfigError, match="there is no template 'quikstart'; did you mean 'quickstart'"):
        init(tmp_path, "quikstart")
    with pytest.raises(ConfigError, match="choose another directory"):
        init(tmp_path / "instructions.jsonl" / "below", "vllm")


def test_the_quickstart_at_the_top_is_its_template() -> None:
    for name, source in TEMPLATES["quickstart"].items():
        assert (ROOT / name).read_bytes() == (ROOT / "sparta_api" / "templates" / source).read_bytes()
