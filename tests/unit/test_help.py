# SPDX-License-Identifier: Apache-2.0
"""The help of every command has a sentence and examples, and every example is a valid command line."""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import fields

import pytest

from dmi_connector.cli.help import COMMANDS
from dmi_connector.cli.main import main, make_parser, make_run_parser, make_serve_parser
from dmi_connector.cli.run import NOT_OURS
from dmi_connector.cli.serve import server_command
from dmi_connector.settings import ServerOptions

OWN = {"serve": make_serve_parser, "run": make_run_parser}
"""Commands whose parser is not a subparser of `dmi`, because they pass unknown flags on to vLLM."""


def commands() -> dict[str, argparse.ArgumentParser]:
    """{name: parser} of all commands."""
    (found,) = (a.choices for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {**found, **{name: make() for name, make in OWN.items()}}


def test_every_command_is_described() -> None:
    assert set(COMMANDS) == set(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_one_sentence_and_examples(name: str) -> None:
    parser, (sentence, examples) = commands()[name], COMMANDS[name]
    assert sentence[0].isupper() and sentence.count(". ") == 0 and sentence.endswith(".")
    text = parser.format_help()
    above, below = text.split("\noptions:" if "\noptions:" in text else "\nprompts:", 1)
    assert sentence in " ".join(above.split()), "the sentence must be above the options"
    assert examples and all(f"  {line}\n" in below for line in examples), (
        "examples must be below the options, and must not be wrapped"
    )
    assert name != "export" or "formats:\n  safetensors " in below


@pytest.mark.parametrize("name", OWN)
def test_server_options_say_what_they_do_and_their_default(name: str) -> None:
    helps = {action.dest: action.help or "" for action in OWN[name]()._actions}
    automatic = {"writers", "host_buffer_bytes", "staging_bytes", "pool_bytes"}
    left = {"owner", *(NOT_OURS if name == "run" else ())}
    for option in fields(ServerOptions):
        if option.name not in left:
            found = re.fullmatch(r"(.+) \(default: (.+)\)", helps[option.name])
            assert found is not None, option.name
            meaning, shown = found.groups()
            assert len(meaning.split()) > 2, option.name
            default = "captures" if option.name == "store_dir" else option.default
            default = ",".join(default) if isinstance(default, tuple) else str(default).lower()
            zero = "automatic" if option.name in automatic else "no removal" if "retain" in option.name else "no limit"
            assert shown == {"": "none", "0": f"0, {zero}"}.get(default, default), option.name


@pytest.mark.parametrize("name", OWN)
def test_options_of_probes_say_what_each_does(name: str) -> None:
    helps = {action.dest: action.help for action in OWN[name]()._actions}
    assert "captured as the hook" in (helps["probes"] or "")
    assert "are counted" in (helps["probe_alerts"] or "") and "captured" not in (helps["probe_alerts"] or "")


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, (_, lines) in COMMANDS.items() for line in lines])
def test_the_examples_are_valid(name: str, line: str) -> None:
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("dmi", name)
    if name == "serve":
        passed, options = server_command(arguments, make_serve_parser())
        assert options is not None and passed[-2:] == ["--port", "8000"]
    elif name == "run":
        assert make_run_parser().parse_known_args(arguments)[1] == []
    else:
        assert make_parser().parse_args([command, *arguments]).command == name


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert out == make_parser().format_help() and err == ""
    assert all(f"    {name} " in out for name in COMMANDS)
