# SPDX-License-Identifier: Apache-2.0
"""The `dmi_error` of a request names the option as the client writes it, its value, and what to give instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dmi_connector.request_options import _OPTIONS
from tests.probekit import save_probe
from tests.trackerkit import DIMS, ask, generate, make_tracker

BAD: list[tuple[str, Any, str, str]] = [
    ("key", "../x", "'../x'", "use 1 to 128 letters"),
    ("key", True, "True", "use 1 to 128 letters"),
    ("hooks", "nothing", "'nothing'", "known names: "),
    ("hooks", ["mlp_otu"], "'mlp_otu'", "did you mean 'mlp_out'?"),
    ("hooks", "q", "'q'", "it captures resid_pre, mlp_out"),
    ("hooks", "mlp_out@9", "'mlp_out@9'", "has layers 0 to 2"),
    ("hooks", "mlp_out@1-0", "'mlp_out@1-0'", "write the smaller layer first"),
    ("hooks", "mlp_out@x", "'mlp_out@x'", "write a layer (3)"),
    ("hooks", "probe.none", "'probe.none'", "known probes: probe.risk"),
    ("hooks", "-mlp_out", "'-mlp_out'", "name at least one hook or preset"),
    ("hooks", "resid_final@0", "'resid_final@0'", "write 'resid_final'"),
    ("hooks", "topk_ids", "'topk_ids'", "remove it from the selection"),
    ("hooks", "q!", "'q!'", "write a hook or preset name"),
    ("hooks", [3], "[3]", "give hook names"),
    ("hooks", True, "True", "give hook names"),
    ("layers", [9], "9", "it has layers 0 to 2"),
    ("layers", [True], "[True]", "give a list of layer numbers"),
    ("layers", 1, "1", "give a list of layer numbers"),
    ("tokens", [-1, 5], "-1", "give an integer from 0"),
    ("tokens", [True, 5], "True", "give an integer from 0"),
    ("tokens", [0, True], "True", "give an integer from 0"),
    ("tokens", 5, "5", "give [start, stop]"),
    ("enabled", 1, "1", "give true or false"),
    ("save_path", "x", "'x'", "give an absolute directory"),
    ("save_path", "/x", "'/x'", "leave it out"),
    ("loss_spans", [[0, 99]], "[0, 99]", "give spans within the prompt"),
    ("loss_spans", [[False, 5]], "[False, 5]", "give [start, stop]"),
    ("probes", {"none": {"inline": "max"}}, "'none'", "it has: risk"),
    ("probes", {"risk": {"inline": "most"}}, "'most'", "choose one of max"),
    ("probes", True, "True", 'give {name: {"inline": "max"}}'),
    ("summary", True, "True", "start it with probes"),
    ("summary", 1, "1", "give true or false"),
    ("keep_if", "risk > 1", "'risk > 1'", "give max(NAME) > 0.8"),
    ("keep_if", "max(none) > 1", "'none'", "it has: risk"),
    ("keep_if", True, "True", "give max(NAME) > 0.8"),
    ("stop_if", "none > 1", "'none'", "it has: risk"),
    ("stop_if", "max(risk) > 1", "'max(risk) > 1'", "give NAME > 0.95"),
    ("chunk", 1, "'chunk'", "known options: key, hooks"),
]
"""(option, bad value, how the message shows it, a part of what to give instead)"""


@pytest.mark.parametrize(("option", "value", "shown", "instead"), BAD)
def test_a_refusal_names_the_option_its_value_and_the_fix(
    tmp_path: Path, option: str, value: object, shown: str, instead: str
) -> None:
    risk = str(save_probe(tmp_path / "risk.safetensors", "mlp_out", (1,), DIMS.hidden, 1))
    tracker = make_tracker(tmp_path, "resid_pre,mlp_out,resid_final,probe.risk", probes={"risk": risk})
    request = ask({"dmi": {option: value}}, prompt=20)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    _, response = generate(tracker, request, 1)
    assert response is not None
    error = response["dmi_error"]
    assert error.startswith(f"dmi.{option}" if option in _OPTIONS else "dmi: "), error
    assert shown in error and instead in error, error


def test_each_option_has_a_bad_value_here() -> None:
    assert {option for option, *_ in BAD} >= _OPTIONS.keys()
