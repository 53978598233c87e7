# SPDX-License-Identifier: Apache-2.0
"""Options of servers and requests: accepted values, refusals, and the pages that describe the options."""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dmi_connector import capture_args
from dmi_connector.engine.contract import SUPPORTED
from dmi_connector.engine.contract_names import NAMES
from dmi_connector.option_values import OptionError
from dmi_connector.request_options import CaptureParams
from dmi_connector.settings import ServerOptions
from tests.probekit import save_probe

DOCS = Path(__file__).parents[2] / "docs"


def test_server_options_left_out_have_their_defaults() -> None:
    options = ServerOptions.parse({"store_dir": "captures"})
    assert options == ServerOptions(store_dir=os.path.abspath("captures"))
    assert ServerOptions.parse({"store_dir": "~/captures"}).store_dir == os.path.expanduser("~/captures")
    assert ServerOptions.parse({"store_dir": "/x", "hooks": "q, k"}).hooks == ("q", "k")
    assert ServerOptions.parse({"store_dir": "/x", "hooks": ["q", "k@1"]}).hooks == ("q", "k@1")
    large = ServerOptions.parse({"store_dir": "/x", "chunk_tokens": 4096})
    assert large.segment_tokens == 4096, "segment_tokens must grow with a larger chunk_tokens"


@pytest.mark.parametrize(
    ("option", "value", "fix"),
    [
        ("store_dir", None, "give the directory"),
        ("store_dir", "", "give the directory"),
        ("store_dir", "a\0b", "give the directory"),
        ("store_dirs", "/x", "did you mean 'store_dir'"),
        ("codec", "gzip", "zstd"),
        ("codec", "zstdd", "did you mean 'zstd'"),
        ("codec", 3, "choose one of"),
        ("hooks", [], "give hook names"),
        ("hooks", {"q": 1}, "give hook names"),
        ("hooks", ["q", 1], "give hook names"),
        ("chunk_tokens", 0, "integer from 1"),
        ("chunk_tokens", True, "integer"),
        ("chunk_tokens", 1.5, "integer"),
        ("chunk_tokens", "128", "integer"),
        ("segment_tokens", 1000, "multiple of chunk_tokens (128)"),
        ("writers", -1, "integer from 0 to 256"),
        ("host_buffer_bytes", -1, "integer"),
        ("staging_bytes", 1 << 50, "integer"),
        ("owner", "target", "leave owner out"),
        ("owner", "pools", "did you mean 'pool'? choose one of pool"),
        ("policy", "wait", "block, drop"),
        ("sink", "tape", "disk, host, null"),
        ("fsync", 1, "true or false"),
        ("file_mode", "0600", "choose one of private, group, world"),
        ("allow_custom_save_path", True, "give the directories allowed"),
        ("save_path_roots", ["relative"], "absolute directories"),
        ("save_path_roots", ["/a/../b"], "without '.' and '..'"),
        ("max_request_bytes", -1, "integer from 0"),
        ("retain_seconds", 1.5, "integer from 0"),
    ],
)
def test_server_refusals_name_option_value_and_fix(option: str, value: object, fix: str) -> None:
    with pytest.raises(OptionError) as caught:
        ServerOptions.parse({"store_dir": "/x", option: value})
    message = str(caught.value)
    assert option in message and fix in message, message
    assert repr(value) in message or option == "store_dirs", message


def test_each_server_option_is_read(tmp_path: Path) -> None:
    """Every value differs from its default."""
    probe = str(save_probe(tmp_path / "p.safetensors", "q", (1,), 8, 1))
    given = {
        "store_dir": "/x",
        "hooks": ["q"],
        "owner": "pool",
        "pool_bytes": 12,
        "codec": "lz4",
        "always_compress": True,
        "chunk_tokens": 64,
        "segment_tokens": 128,
        "writers": 3,
        "host_buffer_bytes": 4,
        "staging_bytes": 5,
        "policy": "drop",
        "sink": "disk",
        "fsync": True,
        "file_mode": "world",
        "allow_custom_save_path": True,
        "save_path_roots": ["/a/b/", "/c"],
        "max_request_bytes": 6,
        "max_total_bytes": 7,
        "min_free_bytes": 8,
        "retain_seconds": 9,
        "retain_bytes": 10,
        "shutdown_seconds": 11,
        "reduce": {"q": "int8", "resid_*": "rp(8)"},
        "probes": {"p": probe},
        "probe_alerts": {"p": 0.5},
        "check": "poison",
        "cuda_graphs": "vllm",
        "upload": "s3://bucket/a/",
        "upload_remove_local": True,
        "upload_backlog_bytes": 12,
        "upload_retry_seconds": 13,
        "upload_only_complete": True,
    }
    assert set(given) == {f.name for f in fields(ServerOptions)}
    read = {
        **given,
        "hooks": ("q",),
        "save_path_roots": ("/a/b", "/c"),
        "reduce": (("q", "int8"), ("resid_*", "rp(8)")),
        "probes": (("p", probe),),
        "probe_alerts": (("p", 0.5),),
        "upload": "s3://bucket/a",
    }
    assert vars(ServerOptions.parse(given)) == read
    defaults = vars(ServerOptions("/x"))
    same = ("store_dir", "sink")  # another sink uploads nothing
    assert all(read[name] != value for name, value in defaults.items() if name not in same)
    assert ServerOptions.parse({"store_dir": "/x", "sink": "null"}).sink == "null"
    rp8 = ServerOptions.parse({"store_dir": "/x", "reduce": "rp8"})
    assert rp8.reduce == (("pattern*", "attn(8)"), ("*", "rp8"))
    assert ServerOptions.parse({"store_dir": "/x", "reduce": dict(rp8.reduce)}) == rp8
    with pytest.raises(
        OptionError, match=r"the mode 'rp9' is unknown; use one of full8, rp8, topk8, summary, compact, or give"
    ):
        ServerOptions.parse({"store_dir": "/x", "reduce": "rp9"})
    assert vars(ServerOptions.parse({"store_dir": "/x"})) == defaults
    assert ServerOptions.parse({"store_dir": "/x", "save_path_roots": " /a , /b/c "}).save_path_roots == ("/a", "/b/c")


@pytest.mark.parametrize(
    "value, says",
    [
        (0.5, "probe_alerts: 0.5 is not valid; give {name: score}"),
        ({"q": 0.5}, "probe_alerts: 'q' is not a probe; probes: p, wide"),
        ({"p": True}, "probe_alerts: {'p': True} is not valid; give a number"),
        ({"p": float("nan")}, "probe_alerts: {'p': nan} is not valid; give a number"),
        ({"p": 10**400}, "probe_alerts: {'p': 1000"),
        (
            {"wide": 0.5},
            "probe_alerts: 'wide' does not have one score per row; name a probe of one output in one layer",
        ),
    ],
)
def test_a_bad_alert_names_the_fix(tmp_path: Path, value: object, says: str) -> None:
    sizes = {"p": 1, "wide": 2}
    probes = {name: str(save_probe(tmp_path / f"{name}.safetensors", "q", (1,), 8, n)) for name, n in sizes.items()}
    with pytest.raises(OptionError) as caught:
        ServerOptions.parse({"store_dir": "/x", "probes": probes, "probe_alerts": value})
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
@pytest.mark.parametrize("option", ["probes", "reduce"])
def test_a_path_that_no_file_can_have_is_refused(option: str, path: str) -> None:
    with pytest.raises(OptionError, match=rf"^{option}: .* is not valid .*; give the path of a file$"):
        ServerOptions.parse({"store_dir": "/x", option: {"q": path if option == "probes" else f"pq({path})"}})


def test_a_url_as_store_dir_is_refused_and_not_shown() -> None:
    """The URL may contain a secret."""
    with pytest.raises(ValueError, match=r"^store_dir: the value is a URL; .* the URL as the option upload$"):
        ServerOptions.parse({"store_dir": "s3://a:hush@bucket/x"})


def test_local_copies_go_only_after_an_upload() -> None:
    with pytest.raises(OptionError, match=r"^upload_remove_local: True needs an upload, .* give upload, as in s3://"):
        ServerOptions.parse({"store_dir": "/x", "upload_remove_local": True})


@pytest.mark.parametrize(
    "value, fix",
    [
        (5, "5 is not a URL; give a URL as in s3://bucket/prefix"),
        ("captures", "'captures' is not a URL; give a URL as in s3://bucket/prefix"),
        ("https://bucket/x", "has the scheme 'https', which is not supported; give a URL as in s3://bucket/prefix"),
        ("s3://a:hush@bucket/x", "the URL holds a user name or a query (not shown); give a URL"),
    ],
)
def test_a_bad_upload_names_the_fix(value: object, fix: str) -> None:
    with pytest.raises(OptionError, match=r"^upload: ") as caught:
        ServerOptions.parse({"store_dir": "/x", "upload": value})
    assert fix in str(caught.value) and "hush" not in str(caught.value)


def test_an_upload_needs_stores() -> None:
    with pytest.raises(OptionError, match=r"^upload: 's3://b12/x' needs stores to upload, and sink 'host' writes none"):
        ServerOptions.parse({"store_dir": "/x", "upload": "s3://b12/x", "sink": "host"})


LARGEST = {
    "chunk_tokens": (1, 1 << 16),
    "segment_tokens": (128, 1 << 20),
    "writers": (0, 256),
    "host_buffer_bytes": (0, 1 << 44),
    "staging_bytes": (0, 1 << 44),
    "max_request_bytes": (0, 1 << 60),
    "max_total_bytes": (0, 1 << 60),
    "min_free_bytes": (0, 1 << 60),
    "retain_seconds": (0, 1 << 60),
    "retain_bytes": (0, 1 << 60),
    "shutdown_seconds": (1, 86400),
    "upload_backlog_bytes": (1, 1 << 60),
    "upload_retry_seconds": (0, 86400),
}


@pytest.mark.parametrize("name", LARGEST)
def test_numbers_are_taken_up_to_their_bounds(name: str) -> None:
    low, high = LARGEST[name]
    for value in (low, high):
        assert getattr(ServerOptions.parse({"store_dir": "/x", name: value}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(OptionError, match=f"^{name}: {value} "):
            ServerOptions.parse({"store_dir": "/x", name: value})


def test_keys_paths_and_positions_of_requests_are_taken_up_to_their_bounds() -> None:
    most = 1 << 40
    assert CaptureParams.parse({"dmi": {"tokens": [most - 1, most]}}).stop == most
    assert CaptureParams.parse({"dmi": {"tokens": (most, None)}}).start == most
    for tokens in ([0, most + 1], [most + 1, None], [0, 0], [1, 1], "01", [0, 1, 2]):
        with pytest.raises(OptionError, match=r"^dmi\.tokens"):
            CaptureParams.parse({"dmi": {"tokens": tokens}})
    assert CaptureParams.parse({"dmi": {"key": "a" * 128}}).key == "a" * 128
    name, deep = "/" + "x" * 255, "/x" * 512
    for path in (name, deep, "/"):
        assert CaptureParams.parse({"dmi": {"save_path": path}}).save_path == path
    assert CaptureParams.parse({"dmi": {"save_path": "/a//b/"}}).save_path == "/a/b"
    for bad in (name + "x", deep + "x", "/" + "\u00e9" * 128, "/a/./b", "/a/..", "a", "", "/a\nb", 3):
        with pytest.raises(OptionError, match=r"^dmi\.save_path"):
            CaptureParams.parse({"dmi": {"save_path": bad}})


def test_request_options_are_read_and_foreign_ones_are_ignored() -> None:
    assert CaptureParams.parse(None) == CaptureParams.parse({}) == CaptureParams()
    assert CaptureParams.parse({"include_output_tokens": True}).include_output_tokens
    assert CaptureParams.parse({"do_remote_decode": False, "other": 1}) == CaptureParams()
    given = {"key": "run-1.a_b", "hooks": "q,k", "layers": [0, -1], "tokens": [4, None], "enabled": False}
    params = CaptureParams.parse({"dmi": given})
    assert params == CaptureParams(False, "run-1.a_b", ("q", "k"), (0, -1), 4, None, False)
    assert CaptureParams.parse({"dmi": {"tokens": [0, 9]}}).stop == 9
    assert params.store_attributes == {"include_output_tokens": False}
    kept = CaptureParams.parse({"include_output_tokens": True, "dmi": {"loss_spans": [[2, 4]]}}).store_attributes
    assert kept == {"include_output_tokens": True, "loss_spans": ((2, 4),)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], ["kv_transfer_params", "JSON object"]),
        ({"include_output_tokens": "yes"}, ["include_output_tokens", "'yes'", "true or false"]),
        ({"dmi": "q"}, ["dmi", "'q'", "JSON object"]),
        ({"dmi": {"hook": "q"}}, ["'hook'", "did you mean 'hooks'"]),
        ({"dmi": {"key": "../x"}}, ["dmi.key", "'../x'", "letters"]),
        ({"dmi": {"key": ""}}, ["dmi.key", "letters"]),
        ({"dmi": {"key": "a" * 129}}, ["dmi.key", "1 to 128"]),
        ({"dmi": {"key": 7}}, ["dmi.key", "7"]),
        ({"dmi": {"key": "a\n"}}, ["dmi.key"]),
        ({"dmi": {"hooks": 3}}, ["dmi.hooks", "3"]),
        ({"dmi": {"layers": []}}, ["dmi.layers", "list of layer numbers"]),
        ({"dmi": {"layers": [True]}}, ["dmi.layers"]),
        ({"dmi": {"layers": 3}}, ["dmi.layers", "3"]),
        ({"dmi": {"tokens": [1]}}, ["dmi.tokens", "[start, stop]"]),
        ({"dmi": {"tokens": [5, 5]}}, ["dmi.tokens", "empty"]),
        ({"dmi": {"tokens": [-1, 5]}}, ["dmi.tokens start", "-1"]),
        ({"dmi": {"tokens": [0, 1 << 60]}}, ["dmi.tokens stop", "integer"]),
        ({"dmi": {"enabled": None}}, ["dmi.enabled", "None"]),
        ({"dmi": {"probes": ["risk"]}}, ["dmi.probes: ['risk']", '{"inline": "max"}']),
        ({"dmi": {"probes": {"risk": "max"}}}, ["dmi.probes: {'risk': 'max'}", '{"inline": "max"}']),
        (
            {"dmi": {"probes": {"risk": {"inline": "max"}, "probe.risk": {"inline": "min"}}}},
            ["dmi.probes: 'probe.risk' is named twice", "name it once"],
        ),
        ({"dmi": {"probes": {"risk": {}}}}, ["dmi.probes inline: None", "choose one of max, min, mean, last"]),
        ({"dmi": {"probes": {"risk": {"inline": ["maxx"]}}}}, ["dmi.probes inline: 'maxx'", "mean 'max'"]),
        ({"dmi": {"probes": {"risk": {"inlin": "max"}}}}, ["dmi.probes: option 'inlin'", "mean 'inline'"]),
        ({"dmi": {"summary": "norms"}}, ["dmi.summary: 'norms'", "true or false"]),
        ({"dmi": {"keep_if": 5}}, ["dmi.keep_if: 5 is not valid; give max(NAME) > 0.8 (or min, mean"]),
        ({"dmi": {"keep_if": "max(risk) >= 0.8"}}, ["dmi.keep_if: 'max(risk) >= 0.8' is not valid; give max(NAME)"]),
        ({"dmi": {"keep_if": "sum(risk) > 0.8"}}, ["dmi.keep_if: 'sum(risk) > 0.8' is not valid"]),
        ({"dmi": {"keep_if": "risk > 0.8"}}, ["dmi.keep_if: 'risk > 0.8' is not valid"]),
        ({"dmi": {"keep_if": "max(risk) > 1.2.3"}}, ["dmi.keep_if: 'max(risk) > 1.2.3' is not valid"]),
        ({"dmi": {"keep_if": "max(risk) > 1e999"}}, ["dmi.keep_if: 'max(risk) > 1e999' is not valid"]),
        ({"dmi": {"stop_if": "risk < -1e999"}}, ["dmi.stop_if: 'risk < -1e999' is not valid"]),
        ({"dmi": {"keep_if": "count(risk) > 3"}}, ["dmi.keep_if: 'count(risk) > 3' is not valid"]),
        ({"dmi": {"stop_if": "max(risk) > 0.8"}}, ["dmi.stop_if: 'max(risk) > 0.8' is not valid; give NAME > 0.95"]),
        ({"dmi": {"loss_spans": "1:5"}}, ["dmi.loss_spans", "'1:5'", "as in [[12, 80], [95, 130]]"]),
        ({"dmi": {"loss_spans": [[0, 1]] * 4097}}, ["dmi.loss_spans", "at most 4096"]),
        ({"dmi": {"loss_spans": [3, 5]}}, ["dmi.loss_spans: 3", "start below stop"]),
        ({"dmi": {"loss_spans": [[5, 5]]}}, ["dmi.loss_spans: [5, 5]", "start below stop"]),
        ({"dmi": {"loss_spans": [[0, 5], [4, 9]]}}, ["dmi.loss_spans: [4, 9]", "after the one before"]),
        ({"dmi": {"loss_spans": [[True, 5]]}}, ["dmi.loss_spans: [True, 5]"]),
        ({"dmi": {"loss_spans": [[-1, 5]]}}, ["dmi.loss_spans: [-1, 5]"]),
    ],
)
def test_request_refusals_name_option_value_and_fix(given: Any, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        CaptureParams.parse(given)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_capture_args_gives_the_flags_of_each_owner() -> None:
    draft = capture_args(hooks="vllm-full", store_dir="somewhere", codec="lz4")
    assert set(draft) == {"speculative_config", "kv_transfer_config"}
    extra = draft["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra == {"hooks": "vllm-full", "store_dir": os.path.abspath("somewhere"), "codec": "lz4"}
    target = capture_args(hooks=("q", "k"), store_dir=Path("somewhere"), owner="target")
    assert set(target) == {"kv_transfer_config"}
    assert json.loads(json.dumps([draft, target])) == [draft, target], "the flags need plain JSON"


def test_capture_args_refuses_unknown_owners_and_options() -> None:
    with pytest.raises(OptionError, match=r"owner: 'me' is unknown; choose one of draft, target"):
        capture_args(owner="me")
    with pytest.raises(OptionError, match="did you mean 'codec'"):
        capture_args(codecs="lz4")
    with pytest.raises(OptionError, match="hooks: 5 is not valid; give hook names"):
        capture_args(5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=re.escape("hooks: {'q': 'int8'} is not valid; give hook names")):
        capture_args({"q": "int8"})


def test_capture_args_reads_store_dir_as_the_server_does() -> None:
    """`dmi serve` and `dmi run` call `capture_args` too."""

    def directory(store_dir: Any) -> str:
        config: dict[str, Any] = capture_args(store_dir=store_dir)["kv_transfer_config"]["kv_connector_extra_config"]
        return config["store_dir"]

    assert directory("~/captures") == directory(Path("~/captures")) == os.path.expanduser("~/captures")
    for bad in ("", None, 5, ["captures"], "s3://bucket/captures"):
        with pytest.raises(OptionError, match="store_dir: "):
            directory(bad)


def test_the_docs_name_all_of_the_contract() -> None:
    text = (DOCS / "CONTRACT.md").read_text()
    assert SUPPORTED in text
    names = [(item, name) for group in NAMES.values() for item, name in group.items()]
    places = [place.split(":")[1] for _, name in names for place in name.places.split()]
    assert not [place for place in places if place not in text], "names that docs/CONTRACT.md does not explain"
    described = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert described == [item for item, _ in names], (
        "the table must have exactly one row per item of NAMES, in their order"
    )


def test_proposals_name_what_they_remove_once() -> None:
    text = (DOCS / "UPSTREAM.md").read_text()
    lists = [re.findall(r"`(\w+)`", part) for part in re.findall(r"\*\*Removes:\*\*(.*?)\n\n", text, re.DOTALL)]
    removed, items = [one for names in lists for one in names], {item for names in NAMES.values() for item in names}
    assert len(removed) == len(set(removed)) and set(removed) <= items
    assert [int(n) for n in re.findall(r"\) \| (\d+) \|$", text, re.MULTILINE)] == [len(names) for names in lists]
    assert f"relies on {len(items)} names" in text


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"key": "a"}, 'key: \'a\' is in the wrong place; write it in dmi, as in {"dmi": {"key": ...}}'),
        ({"tokens": [0, 4], "dmi": {}}, "tokens: [0, 4] is in the wrong place"),
        ({"include_output_token": True}, "kv_transfer_params: 'include_output_token' is unknown; did you mean"),
        ({"include_output_tokens\n": True}, r"kv_transfer_params: 'include_output_tokens\n' is unknown"),
        ({"dmi.enabled": False}, 'kv_transfer_params: \'dmi.enabled\' is unknown; write {"dmi": {"enabled": ...}}'),
        ({"dmi": {}, "DMI-key": "x"}, 'kv_transfer_params: \'DMI-key\' is unknown; write {"dmi": {"key": ...}}'),
        ({"dmi_key": "x"}, 'kv_transfer_params: \'dmi_key\' is unknown; write {"dmi": {"key": ...}}'),
        (
            {"dmi.include_output_tokens": True},
            "kv_transfer_params: 'dmi.include_output_tokens' is unknown; write {\"incl",
        ),
        ({"dmi_x": 1}, "kv_transfer_params: 'dmi_x' is unknown; write {\"dmi\": ...}, with any of key, hooks, layers,"),
        ({"DMI": {"enabled": False}}, "kv_transfer_params: 'DMI' is unknown; write {\"dmi\": ...}, with any of key"),
        ({"dmi": {"include_output_tokens": True}}, "dmi.include_output_tokens: True is in the wrong place"),
    ],
)
def test_a_request_option_in_the_wrong_place_is_refused(params: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        CaptureParams.parse(params)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("name", ["Dmi", " dmi", "dim", "mdi", "dm", "DI", "mi", "dmu", "ddmi", "dmis", "dmi_"])
def test_a_name_like_dmi_is_refused(name: str) -> None:
    """Otherwise a request that asks for no capture would be captured."""
    with pytest.raises(OptionError, match=r'is unknown; write {"dmi": \.\.\.}'):
        CaptureParams.parse({name: {"enabled": False}})


@pytest.mark.parametrize("name", ["", "d", "mid", "imd", "dmixx", "remote_dmi", "tp_size", "dp", "admin", "dmitri_x"])
def test_names_unlike_dmi_are_left_to_other_connectors(name: str) -> None:
    assert CaptureParams.parse({name: {"enabled": False}}) == CaptureParams()


def test_keys_of_a_response_are_accepted_in_the_next_request() -> None:
    """Proxies of disaggregated serving pass it on."""
    answered = {"dmi_store": "s.zarr", "dmi_request_id": "r", "dmi_key": "k", "dmi_missing": [[0, 1]], "dmi_reason": ""}
    assert CaptureParams.parse({**answered, "dmi_warning": "what"}) == CaptureParams()
    assert CaptureParams.parse({"dmi_error": "why"}) == CaptureParams()


def test_few_of_many_names_are_compared_and_all_of_ours_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr("dmi_connector.request_options.get_close_matches", lambda name, *_, **__: compared.append(name))
    many = {f"include_other_{number:07d}": 0 for number in range(100_000)}
    CaptureParams.parse(many)
    assert 0 < len(compared) < 100
    with pytest.raises(OptionError, match="key: 'a' is in the wrong place"):
        CaptureParams.parse({**many, "key": "a"})


def test_options_of_other_connectors_are_left_alone() -> None:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [1],
        "remote_engine_id": "e",
        "remote_host": "h",
        "remote_port": 1,
        "transfer_id": "t",
        "hidden_states_path": "p",
        "output_tokens": 3,
        5: 6,
        "include_output_tokens": True,
    }
    assert CaptureParams.parse(params) == CaptureParams(include_output_tokens=True)
