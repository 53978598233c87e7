# SPDX-License-Identifier: Apache-2.0
"""Any value of an option is parsed, or refused with an OptionError that names the option. The engine continues."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dmi_connector.hooks import HOOKS, PRESETS, SelectionError, parse_selection
from dmi_connector.option_values import OptionError
from dmi_connector.request_options import _OPTIONS, CaptureParams
from dmi_connector.settings import ServerOptions
from tests.trackerkit import DIMS, ask, generate, make_tracker

SERVER = [f.name for f in fields(ServerOptions)]
REQUEST = list(_OPTIONS)
RELATED = {"chunk_tokens": "segment_tokens"}  # a value may be valid by itself, but not together with another option

# Any code point, including lone surrogates, which clients can send in JSON.
text = st.text(st.characters(), max_size=30) | st.sampled_from(["../x", "/", "a\0b", "\ud800", "x" * 1000, "q@0:0"])
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 128, 2**31, 2**63, 2**64, -(10**400)])
    | st.floats()
    | st.binary(max_size=5)
    | text
)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text | st.integers(), inner, max_size=4)
)


def deep(levels: int = 50_000) -> list[Any]:
    nested: list[Any] = []
    for _ in range(levels):
        nested = [nested]
    return nested


def check_message(error: Exception, names: set[str]) -> None:
    """Check that the message begins with one of `names`, is short, and can be sent in a response."""
    message = str(error)
    assert message.split(":")[0].split(" ")[0] in names, message
    assert len(message) < 1500
    message.encode()


@given(st.sampled_from(SERVER), junk)
def test_any_value_of_a_server_option_is_parsed_or_refused(name: str, value: object) -> None:
    try:
        options = ServerOptions.parse({"store_dir": "/x", name: value})
    except OptionError as error:
        check_message(error, {name, RELATED.get(name, name)})
        return
    again = {
        name: dict(v) if name in ("reduce", "probes", "probe_alerts") else v for name, v in asdict(options).items()
    }
    assert ServerOptions.parse(again) == options, "parsed options must be valid"
    assert again.keys() == set(SERVER) and json.dumps(again)


@given(junk | st.dictionaries(st.sampled_from(SERVER) | text | st.integers(), junk, max_size=6))
def test_any_set_of_server_options_is_parsed_or_refused(extra: Any) -> None:
    try:
        assert isinstance(ServerOptions.parse(extra), ServerOptions)
    except OptionError as error:
        check_message(error, {*SERVER, "kv_connector_extra_config"})


@given(st.sampled_from(REQUEST), junk)
def test_any_value_of_a_request_option_is_parsed_or_refused(name: str, value: object) -> None:
    try:
        params = CaptureParams.parse({"dmi": {name: value}})
    except OptionError as error:
        check_message(error, {f"dmi.{name}"})
        return
    assert isinstance(params.enabled, bool) and params.start >= 0
    assert params.stop is None or params.stop > params.start
    assert params.key is None or (params.key.isascii() and len(params.key) <= 128 and "/" not in params.key)
    assert params.save_path is None or (params.save_path.startswith("/") and "/../" not in params.save_path + "/")


@given(junk | st.fixed_dictionaries({}, optional={"include_output_tokens": junk, "dmi": junk, "do_remote": junk}))
def test_any_set_of_request_options_is_parsed_or_refused(params: object) -> None:
    try:
        assert isinstance(CaptureParams.parse(params), CaptureParams)
    except OptionError as error:
        check_message(error, {"kv_transfer_params", "include_output_tokens", "dmi", *(f"dmi.{n}" for n in REQUEST)})


@pytest.mark.parametrize("value", [deep(), 10**5000, "x" * 10**7, {"a" * 10**6: 1}], ids=["deep", "int", "str", "dict"])
def test_huge_or_nested_values_are_refused_with_a_short_message(value: object) -> None:
    for parse, name in ((ServerOptions.parse, "writers"), (CaptureParams.parse, "dmi")):
        given_: Mapping[str, Any] = {"store_dir": "/x", name: value}
        with pytest.raises(OptionError) as caught:
            parse(given_)
        check_message(caught.value, {name})


numbers = st.sampled_from(["0", "2", "-1", "3", "-4", "00", "9" * 5000, "٣", ""])  # 3 and -4 are outside
ranges = st.builds(
    "{}{}{}{}{}".format, numbers, st.sampled_from(["", "-"]), numbers, st.sampled_from(["", ":"]), numbers
)
items = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["", "-", "--"]),
    st.sampled_from([*HOOKS, *PRESETS, "*_rot", "?" * 40, "*a" * 40, "mlp_in", "nothing", "9"]),
    st.sampled_from(["", "@"]),
    st.lists(ranges, max_size=3).map("+".join),
)


@given(st.lists(items | text | st.integers(), max_size=5) | text)
def test_any_selection_is_parsed_or_refused(spec: Any) -> None:
    served = parse_selection("q,resid_pre,logits", DIMS)
    for only in (None, served):
        try:
            selection = parse_selection(spec, DIMS, only)
        except SelectionError as error:
            assert str(error).startswith("hooks: ")
            continue
        assert selection.hooks
        for name, layers in selection.hooks.items():
            assert layers and set(layers) <= set((only.hooks[name]) if only else DIMS.layers_of(HOOKS[name]))


requests = junk | st.fixed_dictionaries(
    {},
    optional={
        "include_output_tokens": st.booleans() | junk,
        "dmi": junk
        | st.fixed_dictionaries(
            {},
            optional=dict.fromkeys(REQUEST, junk)
            | {
                "key": st.just("ok") | junk,
                "hooks": st.lists(items, max_size=3) | junk,
                "layers": st.lists(st.integers(-3, 2), max_size=3) | junk,
                "tokens": st.tuples(st.integers(0, 60), st.none() | st.integers(0, 60)) | junk,
                "enabled": st.booleans() | junk,
                "save_path": st.just("/nowhere/else") | junk,
            },
        ),
    },
)


@given(requests, text)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300, deadline=None)
def test_a_request_with_any_options_runs_to_its_end(tmp_path: Path, kv: object, request_id: str) -> None:
    """Its response can be sent, and its store would be in store_dir."""
    tracker = make_tracker(tmp_path, max_request_bytes=80_000)
    request = ask(kv, request_id=request_id)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    _, response = generate(tracker, request, 3)
    assert not tracker.tracked and not tracker.refused
    if response is None:
        assert CaptureParams.parse(kv).enabled is False
        return
    assert ("dmi_error" in response) != ("dmi_store" in response)
    if "dmi_error" in response:
        options = {"kv_transfer_params", "include_output_tokens", "dmi", *(f"dmi.{name}" for name in REQUEST)}
        assert response["dmi_error"].split(":")[0].split(" ")[0] in {*options, "max_request_bytes"}, response
        assert len(response["dmi_error"]) <= 8000 and "could not be handled" not in response["dmi_error"]
        response["dmi_error"].encode()
    else:
        assert Path(response["dmi_store"]).parent == tmp_path


def test_a_fault_in_our_code_refuses_the_capture_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_log: list[str]
) -> None:
    tracker = make_tracker(tmp_path)
    monkeypatch.setattr("dmi_connector.engine.scheduler.tracker.narrow", lambda *_: 1 / 0)
    request = ask({})
    tracker.on_new_request(request)  # type: ignore[arg-type]
    _, response = generate(tracker, request, 1)
    assert response is not None and "ZeroDivisionError" in response["dmi_error"]
    assert "could not be handled" in "\n".join(engine_log)
