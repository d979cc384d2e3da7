"""The generate command's prompts, texts and options: what goes to stdout and what to stderr, and exit codes."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import sys
from pathlib import Path

import pytest

from generate_helpers import run, speaker
from novalm_jax.generate import main
from timeline_helpers import rows_of
from tiny_checkpoints import BOS, EOS, TOKENS, USER, encode, tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return speaker(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("random") / "model", scale=0.08))


def give(monkeypatch: pytest.MonkeyPatch, text: str | bytes) -> None:
    """Makes `text` what stdin holds."""
    stored = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stored), encoding="ascii"))


# --- output ----------------------------------------------------------------------------------------------------------


def test_the_text_goes_to_stdout_and_figures_to_stderr(model, capsys):
    assert run(["--model", model, "--prompt", "H"]) == 0
    out, err = capsys.readouterr()
    assert out == "elo wé日!\n"
    assert re.fullmatch(r"12 tokens, the first after \d+\.\d\d s, [\d.]+ tokens/s after it\n", err)


def test_what_ended_for_its_length_is_said(model, capsys):
    assert run(["--model", model, "--prompt", "H", "--max-tokens", "1"]) == 0
    assert re.fullmatch(r"1 token, the first after \d+\.\d\d s; cut at its length\n", capsys.readouterr().err)
    assert run(["--model", model, "--prompt", "H", "--prompt", "Hel", "--max-tokens", "10"]) == 0
    assert capsys.readouterr().err.endswith("; 1 of 2 cut at their length\n")


def test_several_prompts_come_in_order_with_an_empty_line_between(model, capsys, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text("H", encoding="utf-8")
    give(monkeypatch, "a")
    options = ["--prompt", "-", "--prompt", "Hel", "--prompt-file", str(file), "--max-tokens", "2"]
    assert run(["--model", model, *options]) == 0
    assert capsys.readouterr().out == "bc\n\no \n\nel\n"


def test_a_prompt_file_can_be_stdin(model, capsys, monkeypatch):
    give(monkeypatch, "a")
    assert run(["--model", model, "--prompt-file", "-"]) == 0
    assert capsys.readouterr().out == "bc\n"


def test_a_chat_uses_the_template_and_answers(model, capsys):
    chat = ["--model", model, "--prompt", "hi", "--max-tokens", "1", "--json"]
    assert run([*chat, "--chat", "--system", "be brief"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    ids = json.loads(line)["prompt_token_ids"]
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert ids[-1] == encode("<|assistant|>")[0]
    position = ids.index(USER)
    assert ids[2:position] == encode("be brief") and ids[position + 1 : -1] == encode("hi")


def test_an_interactive_chat_is_one_conversation(model, capsys, monkeypatch):
    seen: list[list[dict[str, str]]] = []
    from novalm_jax.text.tokenizer import Tokenizer

    encode_chat = Tokenizer.encode_chat

    def spy(self, messages, **options):
        seen.append([dict(message) for message in messages])
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", spy)
    give(monkeypatch, "first\n\n  \nsecond\n")
    assert run(["--model", model, "--interactive", "--chat", "--system", "S", "--max-tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert out == "k\nk\n"
    assert seen[1] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "k"},
        {"role": "user", "content": "second"},
    ]


def test_interactive_completions_stand_alone(model, capsys, monkeypatch):
    give(monkeypatch, "H\na\n")
    assert run(["--model", model, "--interactive"]) == 0
    assert capsys.readouterr().out == "elo wé日!\nbc\n"


def test_json_is_one_object_a_line_and_nothing_else(model, capsys):
    assert run(["--model", model, "--json", "--prompt", "H", "--prompt", "a", "--n", "2", "--logprobs", "1"]) == 0
    out, err = capsys.readouterr()
    records = [json.loads(line) for line in out.splitlines()]
    assert [(record["prompt"], record["index"], record["choice"]) for record in records] == [
        ("H", 0, 0),
        ("H", 0, 1),
        ("a", 1, 0),
        ("a", 1, 1),
    ]
    assert records[0]["text"] == "elo wé日!" and "日" in out
    assert records[0]["token_ids"] == [*encode("elo wé日!"), EOS]
    assert records[0]["finish_reason"] == "stop"
    assert next(iter(records[0]["logprobs"][0])) == str(encode("e")[0])
    assert "tokens" in err


def test_report_comes_last_on_stderr(model, capsys):
    assert run(["--model", model, "--prompt", "H", "--report"]) == 0
    out, err = capsys.readouterr()
    assert out == "elo wé日!\n"
    assert re.search(r"^generated tokens +12$", err, re.MULTILINE)
    assert err.index("tokens/s") < err.index("device budget")


def test_the_report_is_a_table(model, capsys):
    assert run(["--model", model, "--prompt", "H", "--report"]) == 0
    _, *rows = capsys.readouterr().err.splitlines()
    columns = [re.fullmatch(r"(\S+(?: \S+)*  +)(\S+(?: \S+)*)", row) for row in rows]
    assert len(rows) > 30 and all(columns)
    assert len({len(column[1]) for column in columns if column}) == 1


def test_a_timeline_goes_to_its_file_and_its_place_to_stderr(model, capsys, tmp_path):
    trace = tmp_path / "trace.json"
    assert run(["--model", model, "--prompt", "H", "--report", "--timeline", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert out == "elo wé日!\n"
    assert err.splitlines()[-1] == f"timeline: {trace}"
    launches = re.search(r"^launches +(\d+)$", err, re.MULTILINE)
    assert launches and len(rows_of(trace.read_bytes())["compute"]) == int(launches[1])


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("out of luck"), 1), (KeyboardInterrupt(), 130)])
def test_a_run_that_is_broken_off_leaves_its_timeline(model, capsys, monkeypatch, tmp_path, error, code):
    from novalm_jax.engine.executor import Executor

    decode, calls = Executor.decode, []

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise error
        return decode(*arguments, **options)

    monkeypatch.setattr(Executor, "decode", fail)
    trace = tmp_path / "trace.json"
    assert run(["--model", model, "--prompt", "H", "--timeline", str(trace)]) == code
    err = capsys.readouterr().err
    assert f"timeline: {trace}\n" in err and "Traceback" not in err
    names = [span["name"] for span in rows_of(trace.read_bytes())["compute"]]
    assert names == ["embed", "attend", "head", "decode", "decode"]


def test_a_seed_repeats_the_text(random_model, capsys):
    texts = []
    for seed in ("3", "3", "4"):
        arguments = ["--model", random_model, "--prompt", "x", "--seed", seed, "--max-tokens", "12", "--json"]
        assert run([*arguments, "--ignore-eos"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["token_ids"])
    assert texts[0] == texts[1] != texts[2]


def test_sampling_and_engine_options_reach_the_model(model, capsys):
    options = ["--max-tokens", "9", "--stop", "67", "--temperature", "0", "--context-length", "64", "--max-batch", "1"]
    assert run(["--model", model, "--prompt", "0", "--dtype", "float32", "--report", *options]) == 0
    out, err = capsys.readouterr()
    assert out == "12345\n"
    assert re.search(r"^context length +64$", err, re.MULTILINE)


def test_an_interactive_prompt_that_cannot_be_served_is_not_the_end(model, capsys, monkeypatch):
    give(monkeypatch, f"{'a' * 5000}\nH\n")
    options = ["--interactive", "--max-tokens", "3", "--context-length", "256"]
    assert main(["--model", str(model), *options]) == 0
    out, err = capsys.readouterr()
    assert out == "elo\n"
    assert "5000 tokens" in err


def test_stops_may_be_given_one_by_one(model, capsys):
    assert main(["--model", str(model), "--prompt", "H", "--stop", "l", "--stop", "zz"]) == 0
    assert capsys.readouterr().out == "e\n"


def test_nothing_is_logged_where_nothing_is_wrong(model, caplog, capsys):
    with caplog.at_level(logging.WARNING, "novalm_jax"):
        assert run(["--model", model, "--prompt", "a", "--context-length", "128"]) == 0
    assert caplog.records == []


# --- prompts as bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_newline_that_ends_a_file_is_not_part_of_the_prompt(model, tmp_path, capsys, ending):
    path = tmp_path / "prompt.txt"
    path.write_bytes(f"a{ending}".encode())
    assert main(["--model", str(model), "--prompt-file", str(path), "--json", "--max-tokens", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "a"


def test_stdin_is_utf_8_whatever_the_locale_says(model, capsys, monkeypatch):
    give(monkeypatch, "ü日")
    assert main(["--model", str(model), "--prompt", "-", "--json", "--max-tokens", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "ü日"


def test_bytes_that_are_not_utf_8_are_refused(model, capsys, monkeypatch):
    give(monkeypatch, b"a\xff")
    assert main(["--model", str(model), "--prompt", "-"]) == 2
    assert "--prompt - is not text in UTF-8" in capsys.readouterr().err


# --- mistakes --------------------------------------------------------------------------------------------------------


def _corrupt(folder: Path, model: str) -> Path:
    shutil.copytree(model, folder)
    (folder / "config.json").write_text('{"model_type": "llama", ', encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "MODEL"], "nothing to go on from"),
        (["--model", "MODEL", "--prompt", "H", "--interactive"], "leave out --prompt"),
        (["--model", "MODEL", "--prompt", "H", "--system", "S"], "add --chat"),
        (["--model", "MODEL", "--prompt-file", "nowhere.txt"], r"--prompt-file nowhere\.txt cannot be read"),
        (["--model", "nowhere", "--prompt", "H"], "There is no folder nowhere"),
        (["--model", "CORRUPT", "--prompt", "H"], r"config\.json"),
        (["--model", "MODEL", "--prompt", "H", "--device-memory", "1kB"], r"at least, and device_memory allows 1000 "),
        (["--model", "MODEL", "--prompt", "H", "--device-memory", "lots"], "device_memory: 'lots' is not a size"),
        (["--model", "MODEL", "--prompt", "H", "--max-batch", "0"], "max_batch"),
        (["--model", "MODEL", "--prompt", "H", "--temperature", "-1"], "temperature: expected a number"),
        (["--model", "MODEL", "--prompt", ""], "prompt 0 is empty"),
        (["--model", "MODEL", "--prompt", "H", "--logit-bias", str(TOKENS), "1"], "is no token"),
        (["--model", "MODEL", "--prompt", "H", "--context-length", "1000000"], "made for 100000 tokens"),
        (["--model", "MODEL", "--prompt", "H", "--timeline", "nowhere/trace.json"], "timeline: there is no folder "),
        (["--model", "MODEL", "--prompt", "H", "--timeline", "."], "timeline: .* is there and no file"),
    ],
)
def test_a_mistake_is_one_paragraph_and_exit_code_2(arguments, says, model, tmp_path, capsys):
    corrupt = str(_corrupt(tmp_path / "corrupt", model))
    assert run([{"MODEL": model, "CORRUPT": corrupt}.get(word, word) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    paragraph = " ".join(err.split())
    assert re.search(says, paragraph) and paragraph.startswith("python -m novalm_jax.generate: ")
    assert "\n\n" not in err.strip() and "Traceback" not in err


@pytest.mark.parametrize(
    "arguments", [["--modle", "x"], ["--max-tokens", "many"], ["--dtype", "int8"], ["extra"], ["--prompt"]]
)
def test_an_option_that_does_not_exist_or_parse_is_exit_code_2(arguments, capsys):
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err != "" and "Traceback" not in err


def test_debug_shows_where_a_mistake_was_found(capsys):
    assert run(["--model", "nowhere", "--prompt", "H", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "python -m novalm_jax.generate: There is no folder nowhere" in err


def test_a_failure_while_running_is_exit_code_1(model, capsys, monkeypatch):
    from novalm_jax.engine.executor import Executor

    decode, calls = Executor.decode, []

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("out of luck")
        return decode(*arguments, **options)

    monkeypatch.setattr(Executor, "decode", fail)
    assert run(["--model", model, "--prompt", "H"]) == 1
    out, err = capsys.readouterr()
    assert out.rstrip("\n") == "elo"
    assert "out of luck" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--interactive", "--json"], "--json"),
        (["--interactive", "--n", "2"], "--n"),
        (["--prompt", "a", "--logprobs", "1"], "--json"),
        (["--prompt", "a", "--min-tokens", "3", "--max-tokens", "2"], "min_tokens"),
    ],
)
def test_options_without_an_effect_are_refused(model, capsys, options, said):
    assert main(["--model", str(model), *options]) == 2
    assert said in capsys.readouterr().err
