"""Reading data files: every format, encodings, faults with their lines, ids, duplicates."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparta_api.data.instructions import InstructionSet, read_instructions
from sparta_api.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT.parent / "shared" / "cases" / "field-cases.jsonl"


def read(tmp_path: Path, name: str, content: str | bytes, field: str = "prompt") -> InstructionSet:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    (tmp_path / name).write_bytes(data)
    return read_instructions(name, field, tmp_path)


def texts(found: InstructionSet) -> list[str]:
    return [item.prompt[-1]["content"] for item in found.items]


def refused(tmp_path: Path, name: str, content: str | bytes, field: str = "prompt") -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, name, content, field)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{tmp_path}/", "")


def case(name: str) -> dict[str, Any]:
    """The input of a field case."""
    if not CASES.exists():
        pytest.skip("the field cases are not here")
    rows = map(json.loads, CASES.read_text(encoding="utf-8").strip().split("\n"))
    found: dict[str, Any] = next(row["input"] for row in rows if row["id"] == name)
    return found


# formats


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.jsonl", '{"id": 1, "prompt": "one"}\n{"id": 2, "prompt": "two"}\n'),
        ("d.JSONL", '{"id": 1, "prompt": "one"}\r\n\r\n{"id": 2, "prompt": "two"}'),
        ("d.json", '[{"id": 1, "prompt": "one"},\n {"id": 2, "prompt": "two"}]'),
        ("d.csv", 'id,prompt\r\n1,one\r\n2,"two"\r\n'),
        ("d.tsv", "id\tprompt\n1\tone\n\n2\ttwo"),
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_formats_with_and_without_byte_order_mark(tmp_path: Path, name: str, content: str, mark: bytes) -> None:
    found = read(tmp_path, name, mark + content.encode())
    assert texts(found) == ["one", "two"]
    assert [item.id for item in found.items] == ["1", "2"]


def test_text_files_hold_one_instruction_a_line(tmp_path: Path) -> None:
    found = read(tmp_path, "d.txt", "\ufeffone \r\n\n  two \u2028 more\n", field="whatever")
    assert texts(found) == ["one", "two \u2028 more"]


def test_parquet_with_chat_messages(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [[{"role": "system", "content": "s"}, {"role": "user", "content": f"q{i}"}] for i in range(3)]
    parquet.write_table(arrow.table({"messages": messages, "answer": [1, None, 3]}), tmp_path / "d.parquet")
    found = read_instructions("d.parquet", "prompt", tmp_path)
    assert found.items[2].prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "q2"}]
    assert [item.answer for item in found.items] == ["1", None, "3"]
    assert "this is no readable Parquet file" in refused(tmp_path, "broken.parquet", b"PAR1 nothing")
    with pytest.raises(ConfigError, match="no such file"):
        read_instructions("gone.parquet", "prompt", tmp_path)


def test_a_data_set_by_its_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "org" / "set").mkdir(parents=True)
    (tmp_path / "org" / "set" / "test.jsonl").write_text('{"question": "one"}\n{"question": "two"}\n')
    script = (
        "import sys; from pathlib import Path; from sparta_api.data.instructions import read_instructions\n"
        "found = read_instructions(sys.argv[1], 'prompt', Path())\n"
        "print([item.prompt[0]['content'] for item in found.items])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", script]
    done = subprocess.run([*command, "hf:org/set:test"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "['one', 'two']", done.stderr
    gone = subprocess.run([*command, "hf:org/none"], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "ConfigError: hf:org/none: the data set cannot be loaded" in gone.stderr


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    assert "files of the kind '.xlsx' cannot be read; use .jsonl" in refused(tmp_path, "d.xlsx", "x")
    with pytest.raises(ConfigError, match=r"gone\.jsonl: no such file or directory; paths are relative"):
        read_instructions("gone.jsonl", "prompt", tmp_path)
    (tmp_path / "dir.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"dir\.jsonl: is a directory"):
        read_instructions("dir.jsonl", "prompt", tmp_path)


# fields


def test_the_usual_field_is_taken_only_where_it_is_clear(tmp_path: Path) -> None:
    assert texts(read(tmp_path, "d.jsonl", '{"question": "q"}')) == ["q"]
    found = refused(tmp_path, "d.jsonl", '{"question": "q", "text": "t"}')
    assert found == "d.jsonl:1: no field 'prompt'; the fields are: question, text; set instructions.field"
    found = refused(tmp_path, "d.jsonl", '{"instruction": "q"}', field="instuction")
    assert found.endswith("no field 'instuction'; the fields are: instruction; did you mean 'instruction'?")
    found = refused(tmp_path, "d.jsonl", '{"instruction": "q"}\n\n{"output": "q"}')
    assert found.startswith("d.jsonl:3: no field 'instruction'; the fields are: output")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('""', "'prompt' is empty"),
        ('" \\n"', "'prompt' is empty"),
        ("null", "'prompt' is neither a text nor a list of chat messages"),
        ("[]", "'prompt' is neither a text nor a list"),
        ('[{"role": "human", "content": "x"}]', "a message [0] without a role out of system, user, assistant"),
        ('["x"]', "a message [0] without a role"),
        ('[{"role": "user", "content": [1]}]', "a message [0] without a text as its content"),
        ('[{"role": "user", "content": " "}]', "a message [0] without a text"),
        (
            '[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]',
            "'prompt' ends with the assistant; the last message has to be the user's",
        ),
        (
            '[{"role": "user", "content": "x"}, {"role": "system", "content": "y"}, {"role": "user", "content": "z"}]',
            "a system message at [1]; only the first may be one",
        ),
    ],
)
def test_prompts_that_nobody_could_answer(tmp_path: Path, value: str, message: str) -> None:
    found = refused(tmp_path, "d.jsonl", f'{{"prompt": "fine"}}\n{{"prompt": {value}}}\n')
    assert found.startswith("d.jsonl:2: ")
    assert message in found


# ids, duplicates, answers


def test_ids_duplicates_and_answers(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one", "answer": "A"},
        {"prompt": [{"role": "user", "content": "one"}]},
        {"id": "x", "prompt": "two", "answer": 4},
        {"id": "x", "prompt": "two"},
        {"id": None, "prompt": "three", "answer": ["a", "ä"]},
        {"id": 7, "prompt": "one "},
    ]
    found = read(tmp_path, "d.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert texts(found) == ["one", "two", "three", "one "]
    assert found.duplicates == 2
    assert [item.answer for item in found.items] == ["A", "4", '["a", "ä"]', None]
    ids = [item.id for item in found.items]
    assert ids[1] == "x"
    assert ids[3] == "7"
    assert len(ids[0]) == len(ids[2]) == 16
    again = read(tmp_path, "e.txt", "three\none\n")
    assert [item.id for item in again.items] == [ids[2], ids[0]]


def test_one_id_for_two_instructions_names_both_lines(tmp_path: Path) -> None:
    found = refused(tmp_path, "d.jsonl", '{"id": 1, "prompt": "a"}\n\n{"id": "1", "prompt": "b"}')
    assert found == "d.jsonl:3: the id '1' belongs to another instruction (d.jsonl:1)"


# encodings and malformed files


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.txt"])
def test_other_encodings_are_refused_with_the_line(tmp_path: Path, name: str) -> None:
    lines = {"d.jsonl": '{"prompt": "one"}\n{"prompt": "Öl"}', "d.json": '[{"prompt":\n "Öl"}]'}
    text = lines.get(name, "prompt\nÖl\n")
    assert refused(tmp_path, name, text.encode("latin-1")).startswith(f"{name}:2: byte 0xd6 is not UTF-8")
    assert "save it as UTF-8" in refused(tmp_path, name, text.encode("utf-16"))


def test_utf_16_without_a_mark_is_not_read_as_text(tmp_path: Path) -> None:
    assert refused(tmp_path, "d.txt", "one\n".encode("utf-16-le")).startswith("d.txt:1: the file holds NUL characters")


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.csv", "d.txt"])
@pytest.mark.parametrize("content", ["", "\ufeff", "\n  \n"])
def test_empty_files_are_refused(tmp_path: Path, name: str, content: str) -> None:
    assert refused(tmp_path, name, content) == f"{name}: there is no instruction in it"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"prompt": "a"}\n{"prompt": "b"\n', "d.jsonl:2: this is not JSON"),
        ("d.jsonl", '{"prompt": "a"}\n"b"\n', "d.jsonl:2: this is no JSON object"),
        ("d.jsonl", '{"prompt": "a"} {"prompt": "b"}', "d.jsonl:1: this is not JSON (extra data at column 17)"),
        ("d.jsonl", '{"prompt": ' + "[" * 100_000, "d.jsonl:1: this is nested too deeply"),
        ("d.json", '{"prompt": "a"}\n{"prompt": "b"}\n', "d.json:2: this is not JSON (extra data at column 1); a file"),
        ("d.json", '{"prompt": "a"}', "d.json:1: the file has to hold a list of objects"),
        ("d.json", '[{"prompt": "a"}, "b"]', "d.json, item 2: this is no JSON object"),
        ("d.json", '[{"prompt": "a"},\n\n {"prompt": }]', "d.json:3: this is not JSON"),
        ("d.csv", "prompt,prompt\na,b\n", "d.csv:1: the column 'prompt' is named twice"),
        ("d.csv", "id,prompt\n1,Hello, you\n", "d.csv:2: this record has 3 fields, the header 2; quote"),
        ("d.csv", 'id,prompt\n1,"a\nb"\n2\n', "d.csv:4: this record has 1 fields, the header 2"),
        ("d.csv", 'id,prompt\n1,"a ""b"" c"\n2,"open\n3,"x"\n4,z\n', "d.csv:3: the quote that opens here"),
        ("d.csv", 'id,prompt\r\n1,"a\r\nb"\r\n2,"open\r\n3,x\r\n', "d.csv:4: the quote that opens here"),
        ("d.tsv", 'id\tprompt\n1\t"open\n2\tx\n', "d.tsv:2: the quote that opens here"),
    ],
)
def test_malformed_files_are_refused_with_the_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    assert refused(tmp_path, name, content).startswith(message)


def test_csv_keeps_newlines_and_braces(tmp_path: Path) -> None:
    rows = ["a\nb", 'say "hi", {x}', "c\r\nd", " spaced "]
    with (tmp_path / "d.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["prompt"], *([row] for row in rows)])
    assert texts(read_instructions("d.csv", "prompt", tmp_path)) == rows


def test_surrogates_become_replacement_characters_and_pairs_stay(tmp_path: Path) -> None:
    found = read(tmp_path, "d.jsonl", '{"id": "\\ud800", "prompt": "x \\udcb2 y \\ud83d\\ude00"}')
    assert texts(found) == ["x \ufffd y \U0001f600"]
    assert found.items[0].id == "\ufffd"


def test_a_hundred_thousand_rows(tmp_path: Path) -> None:
    content = "".join(f'{{"prompt": "Explain the number {i}"}}\n' for i in range(100_000))
    found = read(tmp_path, "d.jsonl", content + content.split("\n")[5])
    assert (len(found.items), found.duplicates) == (100_000, 1)
    assert len({item.id for item in found.items}) == 100_000
    assert not hasattr(found.items[0], "__dict__")


# field cases


@pytest.mark.parametrize(
    ("name", "expected"),
    [("G11", ["Hi"]), ("G12", ["one", "two"]), ("G13", ["Hi"]), ("G14", ["one", "two"]), ("G17", ["x \ufffd y"])],
)
def test_field_cases(tmp_path: Path, name: str, expected: list[str]) -> None:
    given = case(name)
    for field in ("instruction", "prompt"):
        assert texts(read(tmp_path, given["file"], given["text"], field)) == expected


def test_field_case_of_line_separators(tmp_path: Path) -> None:
    given = case("G16")
    (text,) = texts(read(tmp_path, given["file"], given["text"]))
    assert text == json.loads(given["text"])["instruction"]
    assert "\u2028" in text


def test_field_case_of_a_long_csv_field(tmp_path: Path) -> None:
    (text,) = texts(read(tmp_path, "prompts.csv", 'instruction\n"' + "a" * 200_000 + '"\n'))
    assert len(text) == 200_000


def test_field_case_of_an_unbalanced_quote(tmp_path: Path) -> None:
    given = case("G20")
    assert refused(tmp_path, given["file"], given["text"]).startswith("prompts.csv:2: the quote that opens here")


def test_field_case_of_the_locale(tmp_path: Path) -> None:
    text = "Erkläre “Öl” auf 日本語"
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"instruction": text}, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "tribe.yaml").write_text(
        "name: Öl\ninstructions: {path: prompts.jsonl}\ndefaults: {model: m, base_url: 'http://h/v1'}\n"
        "members: [{name: ä}, {name: ö}, {name: ü}]\n",
        encoding="utf-8",
    )
    script = (
        "from pathlib import Path; from sparta_api.config.file import dump_tribe, load_tribe\n"
        "from sparta_api.data.instructions import read_instructions\n"
        "loaded = load_tribe(Path('tribe.yaml'))\n"
        "assert 'name: Öl' in dump_tribe(loaded.config)\n"
        "(item,) = read_instructions(loaded.config.instructions.path, 'prompt', loaded.base_dir).items\n"
        "Path('out').write_bytes(item.prompt[0]['content'].encode())"
    )
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    env = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "out").read_text(encoding="utf-8") == text
