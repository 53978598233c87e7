# SPDX-License-Identifier: Apache-2.0
"""The `dmi` command on real stores, and the command line of vLLM that `dmi serve` makes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from dmi_connector.analysis.labels import token_labels
from dmi_connector.analysis.pictures import canvas
from dmi_connector.analysis.residual import residual_norms
from dmi_connector.captures.capture import open_capture
from dmi_connector.cli import demo, tables
from dmi_connector.cli.main import main, make_run_parser, make_serve_parser
from dmi_connector.cli.run import NOT_OURS
from dmi_connector.cli.serve import SERVER, server_command
from dmi_connector.cli.tiny_models import make_tokenizer
from dmi_connector.hooks import SelectionError
from dmi_connector.layout import ArraySpec
from dmi_connector.option_values import OptionError
from dmi_connector.settings import ServerOptions
from dmi_connector.store.read.index import CaptureInfo
from tests import storekit as kit
from tests.probekit import save_probe

TOKENS = 70
SPECS = (
    ArraySpec("resid_pre", "bfloat16", (0, 1, 2), 32),
    ArraySpec("resid_final", "bfloat16", (), 32),
    ArraySpec("logits", "bfloat16", (), 50),
)
ATTRS = {
    "num_layers": 3,
    "architecture": "TinyForCausalLM",
    "dtype": "bfloat16",
    "versions": {"vllm": "0.32.0"},
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three stores: "one" (key run-1), "two" without a key, and "short" without the residual stream."""
    root = tmp_path_factory.mktemp("stores")
    owner = kit.Store(1 << 22)
    try:
        for name, key, specs in (
            ("one", "run-1", SPECS),
            ("two", None, SPECS),
            ("short", None, (ArraySpec("q", "bfloat16", (0,), 16),)),
        ):
            names = {"key": key, "request_id": f"0_{name}-ab12"}
            owner.write(root / f"{name}.zarr", specs, TOKENS, 5, chunk=32, segment=64, attrs=ATTRS, **names)
    finally:
        assert owner.shutdown(kit.PATIENCE)
    return root


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    """Run a command. Returns its exit status, stdout and stderr."""
    status = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_ls_lists_captures_and_filters_by_key_and_request_id(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "ls", stores)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["one.zarr", "two.zarr", "short.zarr"]
    assert "run-1" in lines[2] and "complete" in lines[2] and f" {TOKENS} " in lines[2], lines[2]
    status, out, _ = run(capsys, "ls", stores, "--key", "run-1", "--json")
    (found,) = json.loads(out)
    assert found["store"] == str(stores / "one.zarr") and found["num_tokens"] == TOKENS
    status, out, _ = run(capsys, "ls", stores, "--request-id", "two", "--json")
    assert [Path(c["store"]).name for c in json.loads(out)] == ["two.zarr"], (
        "child numbers and suffixes of request ids must match"
    )
    status, out, err = run(capsys, "ls", stores, "--key", "nobody")
    assert (status, out) == (0, "") and "no captures" in err and "match" in err


def test_ls_lists_stores_without_an_index(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user may have copied stores without their index."""
    for store in stores.glob("*.zarr"):
        shutil.copytree(store, tmp_path / store.name)
    for more in ((), ("--stats",), ("--key", "run-1"), ("--json",)):
        whole, copied = run(capsys, "ls", stores, *more), run(capsys, "ls", tmp_path, *more)
        assert whole[0] == copied[0] == 0 and copied[1] == whole[1].replace(str(stores), str(tmp_path))


def test_info_gives_true_sizes(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", stores / "one.zarr", "--json")
    facts = json.loads(out)
    sizes = {a["name"]: a for a in facts["arrays"]}
    assert sizes["resid_pre"]["shape"] == [3, TOKENS, 32] and sizes["resid_pre"]["dtype"] == "bfloat16"
    assert sizes["resid_pre"]["raw"] == 3 * TOKENS * 32 * 2
    on_disk = sum(p.stat().st_size for p in (stores / "one.zarr" / "resid_pre").rglob("*") if p.is_file())
    assert sizes["resid_pre"]["stored"] == on_disk
    assert list(sizes)[:3] == ["resid_pre", "resid_final", "logits"], "hooks must come first"
    status, out, err = run(capsys, "info", stores / "one.zarr")
    assert (status, err) == (0, "")
    assert "3x70x32" in out and "0-2" in out and "TinyForCausalLM" in out and "\ntotal" in out


def test_verify_finds_a_flipped_bit(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "verify", stores)
    assert status == 0 and out.splitlines()[-1] == "3 checked, 0 damaged"
    subprocess.run(["cp", "-r", stores / "one.zarr", stores / "two.zarr", tmp_path], check=True)
    shard = tmp_path / "one.zarr/resid_pre/c/0/1/0"
    data = bytearray(shard.read_bytes())
    data[3] ^= 1
    shard.write_bytes(data)
    status, out, _ = run(capsys, "verify", tmp_path)
    assert status == 1 and out.splitlines()[-1] == "2 checked, 1 damaged"
    assert "resid_pre layer 0 tokens 64 to 69" in out, out
    status, out, _ = run(capsys, "verify", tmp_path / "two.zarr")
    assert (status, out) == (0, f"{tmp_path / 'two.zarr'}: sound\n1 checked, 0 damaged\n")
    status, out, _ = run(capsys, "verify", tmp_path / "two.zarr", tmp_path / "one.zarr", stores)
    assert status == 1 and out.splitlines()[-1] == "5 checked, 1 damaged"
    assert out.startswith(f"{tmp_path / 'two.zarr'}: sound\n{tmp_path / 'one.zarr'}: resid_pre layer 0"), out


def test_verify_tells_values_that_are_not_finite_from_damage(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 3, or 1 if another store is damaged."""
    owner, spec = kit.Store(1 << 20), ArraySpec("q", "float32", (0,), 8)
    values = kit.random_bits(spec, 20)
    values.view("f4")[0, 3, 3] = np.nan
    owner.write(tmp_path / "nan.zarr", [spec], 20, values={"q": values})
    assert owner.shutdown()
    status, out, _ = run(capsys, "verify", tmp_path, stores / "one.zarr")
    assert status == 3 and out.splitlines() == [
        f"{tmp_path / 'nan.zarr'}: q layer 0 tokens 0 to 19: 1 values are not finite (the model computed them)",
        f"{tmp_path / 'nan.zarr'}: no damage, but values are not finite",
        f"{stores / 'one.zarr'}: sound",
        "2 checked, 0 damaged, 1 not finite",
    ]
    subprocess.run(["cp", "-r", tmp_path / "nan.zarr", tmp_path / "cut.zarr"], check=True)
    (tmp_path / "cut.zarr/q/c/0/0/0").unlink()
    status, out, _ = run(capsys, "verify", tmp_path)
    assert status == 1 and out.splitlines()[-1] == "2 checked, 1 damaged, 1 not finite"


def test_sizes_of_prune_and_ls_differ_by_the_root_document(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, listed, _ = run(capsys, "ls", stores, "--json")
    _, pruned, _ = run(capsys, "prune", stores, "--keep-bytes", "0", "--dry-run", "--json")
    sizes = {c["store"]: c["bytes"] + Path(c["store"], "zarr.json").stat().st_size for c in json.loads(listed)}
    assert {c["store"]: c["bytes"] for c in json.loads(pruned)} == sizes


def test_export_writes_what_the_store_holds(
    stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    status, out, _ = run(capsys, "export", stores / "one.zarr", "--to", "safetensors", "-o", tmp_path / "x.st")
    assert status == 0 and "layer ids 0, 1, 2, 3" in out
    hidden = load_file(tmp_path / "x.st")["hidden_states"]
    capture = open_capture(stores / "one.zarr")
    assert tuple(hidden.shape) == (TOKENS, 4, 32)
    assert np.array_equal(hidden[:, 1].float().numpy(), capture.numpy("resid_pre", layer=1))
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "export", stores / "two.zarr", "--to", "safetensors")[0] == 0
    assert Path("two.safetensors").is_file(), "the default name must be that of the store, in the current directory"


def test_plot_draws_a_png(stores: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from matplotlib.image import imread

    out = tmp_path / "norms.png"
    assert run(capsys, "plot", stores / "one.zarr", "-o", out) == (0, f"{out}\n", "")
    one = imread(out)
    assert one.shape[0] > 200 and one.shape[1] > 600 and one[..., :3].std() > 0.1, "the picture must not be blank"
    assert run(capsys, "plot", stores / "one.zarr", stores / "two.zarr", "-o", out)[0] == 0
    assert imread(out).shape[1] > one.shape[1], "two stores must be next to each other"


def test_plots_have_true_norms_and_token_labels(stores: Path, tmp_path: Path) -> None:
    capture = open_capture(stores / "one.zarr")
    values, layers = residual_norms(capture)
    assert layers == ["0", "1", "2", "final"] and values.shape == (4, TOKENS)
    assert np.allclose(values[1], np.sqrt((capture.numpy("resid_pre", layer=1) ** 2).sum(-1)), rtol=1e-6)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert token_labels(capture) == [str(i) for i in capture.token_ids], "without a tokenizer, labels must be ids"
    labels = token_labels(capture, tmp_path)
    assert len(labels) == TOKENS and labels[0] == "<|pad|>"
    letter = next(i for i, t in enumerate(capture.token_ids) if tokenizer.decode([t]) == "a")
    assert labels[letter] == "a"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["info", "nowhere"], ["nowhere does not exist"]),
        (["info", "{stores}/one.zarr/resid_pre"], ["not a capture"]),
        (["ls", "nowhere"], ["nowhere", "store directory"]),
        (["ls", "{stores}/index.jsonl"], ["is a file"]),
        (["ls", "{stores}/one.zarr"], ["one.zarr is a store; give its directory"]),
        (["verify", "{stores}/one.zarr/resid_pre/c"], ["no finished store"]),
        (["export", "{stores}/short.zarr", "--to", "safetensors"], ["resid_pre"]),
        (["plot", "{stores}/short.zarr", "-o", "x.png"], ["no residual stream", "q"]),
        (["plot", "{stores}/one.zarr", "-o", "/nowhere/x.png"], ["the directory /nowhere does not exist;"]),
        (["plot", "{stores}/one.zarr", "-o", "nodir/x.png"], ["nodir/x.png", "the directory nodir does not exist;"]),
        (["plot", "{stores}/one.zarr", "-o", "/proc/x.png"], ["/proc/x.png cannot be written (", "give another"]),
        (["export", "{stores}", "--to", "zip", "-o", "/proc/x"], ["/proc/x cannot be created (", "give another -o"]),
        (["plot", "{stores}/one.zarr", "-o", "x.png", "--tokenizer", "nowhere"], ["tokenizer", "nowhere"]),
        (["info", "{stores}"], ["is a directory of stores; give one of them, as", "/one.zarr"]),
        (["plot", "{stores}", "-o", "x.png"], ["is a directory of stores; give one of them, as", "/one.zarr"]),
        (["demo", "--dir", "{stores}"], ["dir", "no demo made it"]),
        (["serve"], ["model", "none is given"]),
        (["serve", "m", "--codec", "gzip"], ["--codec", "zstd"]),
        (["serve", "m", "--chunk-tokens", "many"], ["--chunk-tokens", "many"]),
        (["serve", "m", "--segment-tokens", "100"], ["segment_tokens", "multiple of"]),
        (["serve", "m", "--config", "nowhere.yaml"], ["config", "nowhere.yaml"]),
        (["serve", "m", "--kv-transfer-config", "{}"], ["kv-transfer-config", "--hooks"]),
        (["nonsense"], ["nonsense", "verify"]),
        (["verify", "{stores}", "--quiet", "--verbose"], ["--verbose: not allowed with", "--quiet"]),
    ],
)
def test_a_mistake_of_the_user_is_answered_in_one_line(
    stores: Path,
    tmp_path: Path,
    argv: list[str],
    words: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main([a.replace("{stores}", str(stores)) for a in argv])
    except SystemExit as end:  # raised by argparse
        status = end.code
    out, err = capfd.readouterr()
    assert status == 2, err
    assert out == "" and len(err.splitlines()) == 1, err
    assert err.startswith("dmi") and all(w in err for w in words), err


def test_a_mistake_ends_the_process_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dmi_connector.cli", "info", "none.zarr"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done


def test_plot_without_matplotlib_says_what_to_install(
    stores: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canvas.importlib.util, "find_spec", lambda name: None)
    status, _, err = run(capsys, "plot", stores / "one.zarr", "-o", "x.png")
    assert status == 2 and "dmi_connector[plot]" in err


def test_reading_needs_neither_torch_nor_vllm(stores: Path) -> None:
    script = f"""
import sys
from dmi_connector.cli.main import main
store = {str(stores / "one.zarr")!r}
for argv in (["ls", {str(stores)!r}], ["info", store], ["verify", store],
             ["export", store, "--to", "safetensors", "-o", "x.safetensors"],
             ["export", store, "--to", "speculators", "-o", "hs"]):
    assert main(argv) == 0, argv
heavy = {{"torch", "vllm", "transformers", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=stores, capture_output=True)


def test_a_pipe_that_closes_early_is_not_an_error(stores: Path) -> None:
    command = f"{sys.executable} -m dmi_connector.cli info {stores / 'one.zarr'} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{stores / 'one.zarr'}\n"


@pytest.mark.parametrize(("verb", "status"), [("ls", 0), ("verify", 1)])
def test_a_pipe_that_closes_before_the_output_is_written_is_not_an_error(verb: str, status: int, stores: Path) -> None:
    ends = os.pipe()
    os.close(ends[0])
    done = buffered(f"{verb} {stores}", ends[1])
    os.close(ends[1])
    assert done == (status, "")


@pytest.mark.parametrize("what", ["ls {}", "info {}/one.zarr --json"])
def test_a_full_disk_has_a_message(what: str, stores: Path) -> None:
    with open("/dev/full", "w") as full:
        assert buffered(what.format(stores), full.fileno()) == (2, "dmi: [Errno 28] No space left on device\n")


def buffered(command: str, output: int) -> tuple[int, str]:
    """(exit status, standard error) of a command whose output goes to a file descriptor and is not line-buffered."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = f"{sys.executable} -m dmi_connector.cli {command}"
    done = subprocess.run(command.split(), stdout=output, stderr=subprocess.PIPE, text=True, env=environment)
    return done.returncode, done.stderr


# ---- dmi serve ------------------------------------------------------------------------------------------


def serve(*argv: str) -> list[str]:
    return server_command(argv, make_serve_parser())[0]


def test_serve_builds_both_flags_and_passes_the_rest_on(tmp_path: Path) -> None:
    command = serve("m", "--hooks", "q,k@3", "--store-dir", str(tmp_path), "--codec=lz4", "--port", "8001", "-tp", "2")
    assert command[:4] == [sys.executable, "-P", "-m", SERVER]
    assert command[4:6] == ["--model", "m"] and command[-4:] == ["--port", "8001", "-tp", "2"]
    flags = dict(zip(command[6:-4:2], command[7:-4:2], strict=True))
    extra = json.loads(flags["--kv_transfer_config"])["kv_connector_extra_config"]
    assert extra == {"hooks": "q,k@3", "store_dir": str(tmp_path), "codec": "lz4"}
    assert json.loads(flags["--speculative_config"])["method"] == "extract_hidden_states"
    assert "--speculative_config" not in serve("m", "--owner", "target")


def test_serve_takes_its_flags_with_underscores_too(tmp_path: Path) -> None:
    hyphens = serve("m", "--store-dir", str(tmp_path), "--chunk-tokens=64", "--max-model-len", "9", "--owner", "target")
    mixed = serve("m", "--store_dir", str(tmp_path), "--chunk_tokens=64", "--max-model-len", "9", "--owner", "target")
    assert mixed == hyphens
    assert "--max_model_len" in serve("m", "--max_model_len", "9"), "flags of vLLM must not change"


def test_serve_refuses_a_hook_that_no_model_has() -> None:
    with pytest.raises(SelectionError, match="'resid_pree' is unknown: did you mean 'resid_pre'"):
        serve("m", "--hooks", "resid_pree")


def test_serve_takes_sizes_and_times_with_units(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--host-buffer-bytes", "16G", "--retain-seconds", "7d", "--max-total-bytes=2T", "--min-free-bytes", "9"]
    command = serve("m", *given)
    extra = json.loads(command[command.index("--kv_transfer_config") + 1])["kv_connector_extra_config"]
    assert (extra["host_buffer_bytes"], extra["retain_seconds"]) == (16 * 10**9, 7 * 86400)
    assert (extra["max_total_bytes"], extra["min_free_bytes"]) == (2 * 10**12, 9)
    with pytest.raises(SystemExit):
        serve("m", "--staging-bytes", "1GiB")
    assert (
        "--staging-bytes: '1GiB' is not valid; give an integer, alone or followed by one of k, M, G, T"
        in capsys.readouterr().err
    )


def test_serve_looks_at_directories_before_it_starts_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, _command: started.append(program))
    assert main(["serve", "m", "--store-dir", str(tmp_path / "file" / "stores")]) == 2
    assert "store_dir: " in (error := capsys.readouterr().err) and "cannot be created" in error
    roots = ["--allow-custom-save-path", "--save-path-roots", str(tmp_path / "none")]
    assert main(["serve", "m", "--store-dir", str(tmp_path / "stores"), *roots]) == 2
    assert "is not a directory; create it or leave it out" in capsys.readouterr().err
    assert not started


@pytest.mark.parametrize(
    "flags", [["-cc", "{}"], ["-cc.mode=3"], ["--compilation-config={}"], ["--compilation_config", "3"]]
)
def test_serve_leaves_cuda_graphs_to_whoever_configures_them(flags: list[str]) -> None:
    def chosen(*argv: str) -> str:
        command = serve("m", *argv)
        extra = json.loads(command[command.index("--kv_transfer_config") + 1])["kv_connector_extra_config"]
        return str(extra.get("cuda_graphs"))

    assert chosen() == "None" and chosen(*flags) == "vllm" and chosen("--cuda-graphs", "auto", *flags) == "auto"


def test_serve_has_a_flag_for_every_server_option() -> None:
    known = make_serve_parser().format_help()
    missing = [f.name for f in fields(ServerOptions) if "--" + f.name.replace("_", "-") not in known]
    assert not missing, missing
    command = serve("m", "--fsync", "--writers", "2", "--policy", "drop")
    extra = json.loads(command[command.index("--kv_transfer_config") + 1])["kv_connector_extra_config"]
    assert (extra["fsync"], extra["writers"], extra["policy"]) == (True, 2, "drop")


def test_serve_takes_a_mode_or_rules_for_reduce(capsys: pytest.CaptureFixture[str]) -> None:
    for text, wanted in (("summary", "summary"), ('{"resid_*": "rp8"}', {"resid_*": "rp8"})):
        command = serve("m", "--reduce", text)
        extra = json.loads(command[command.index("--kv_transfer_config") + 1])["kv_connector_extra_config"]
        assert extra["reduce"] == wanted
    with pytest.raises(SystemExit):
        serve("m", "--reduce", "rp9")
    assert (
        "'rp9' is not valid; give one of full8, rp8, topk8, summary, compact, or JSON, as in" in capsys.readouterr().err
    )


def test_serve_takes_probes_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = json.dumps({"risk": str(save_probe(tmp_path / "risk.safetensors", "q", (1,), 8, 1))})
    command = serve("m", "--hooks", "probe.risk", "--probes", given)
    extra = json.loads(command[command.index("--kv_transfer_config") + 1])["kv_connector_extra_config"]
    assert extra["probes"] == json.loads(given)
    with pytest.raises(SystemExit):
        serve("m", "--hooks", "probe.risk", "--probes", "risk.safetensors")
    assert """give JSON, as in {"risk": "risk.safetensors"}""" in capsys.readouterr().err


SWITCHES = [option.name for option in fields(ServerOptions) if option.type == "bool"]


@pytest.mark.parametrize("name", SWITCHES)
def test_serve_and_run_take_true_and_false(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Earlier, any word switched the option on, and was passed on to vLLM."""
    flag = "--" + name.replace("_", "-")
    given: list[tuple[list[str], bool | None]] = [([], None), ([flag], True), ([flag, "true"], True)]
    given += [([flag, "false"], False), ([f"{flag}=False"], False)]
    run = ["--model", "m", "--prompts", "p.jsonl", "--out", "o"]
    for argv, value in given:
        for parser, needed in ((make_serve_parser(), []), (make_run_parser(), run)):
            if parser.prog == "dmi run" and name in NOT_OURS:
                continue
            options, passed = parser.parse_known_args([*needed, *argv, "--port", "1"])
            assert (getattr(options, name), passed) == (value, ["--port", "1"]), argv
    with pytest.raises(SystemExit):
        make_serve_parser().parse_known_args([flag, "off"])
    assert f"{flag}: 'off' is not valid; give true or false" in capsys.readouterr().err


def test_a_switch_that_is_off_reaches_the_engine() -> None:
    command = serve("m", "--fsync", "false", "--port", "1")
    extra = json.loads(command[command.index("--kv_transfer_config") + 1])["kv_connector_extra_config"]
    assert extra["fsync"] is False and "false" not in command and command[-2:] == ["--port", "1"]


@pytest.mark.parametrize(
    "flag", ["--kv_transfer_config={}", "--kv-transfer-config.kv_role=x", "--speculative-config", "-sc"]
)
def test_serve_refuses_a_second_configuration(flag: str) -> None:
    with pytest.raises(OptionError, match="dmi serve writes this flag itself"):
        serve("m", flag, "{}")


def test_serve_does_not_replace_the_capture_options_of_a_config_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("kv_transfer_config:\n  kv_connector: DMIConnector\n")
    assert serve("m", "--config", str(file))[4:] == ["--model", "m", "--config", str(file)]
    with pytest.raises(OptionError, match="--hooks would replace"):
        serve("m", f"--config={file}", "--hooks", "q")
    file.write_text("port: 8001\n")
    assert "--kv_transfer_config" in serve("m", "--config", str(file)), "a file with other flags must not matter"
    assert "--model" not in serve("--config", str(file)), "the file may have the model"


# ---- pieces ---------------------------------------------------------------------------------------------


def test_totals_count_a_store_that_does_not_say_when_it_ended(tmp_path: Path) -> None:
    """Another program may have written it. A store that no longer exists is only counted."""
    (tmp_path / "a.zarr").mkdir()
    found = [CaptureInfo(tmp_path / f"{n}.zarr", None, None, "complete", None, "", None, 9, 5) for n in "ab"]
    totals = tables.stats(found)
    assert [totals[name] for name in ("captures", "absent", "bytes", "tokens", "oldest")] == [2, 1, 9, 5, None]


def test_tables_format_layers_bytes_and_columns() -> None:
    assert tables.format_layers([0, 1, 2, 5, 7, 8]) == "0-2+5+7-8" and tables.format_layers([]) == "-"
    assert [tables.format_bytes(n) for n in (None, 0, 999, 1000, 2_560_000)] == [
        "-",
        "0 B",
        "999 B",
        "1.0 kB",
        "2.6 MB",
    ]
    assert tables.format_table(("a", "raw"), [("x", 1), ("long", 20)]) == "a     raw\n----  ---\nx       1\nlong   20"


def test_the_demo_removes_only_what_it_made(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "captures").mkdir(parents=True)
    with pytest.raises(ValueError, match="not empty, and no demo made it"):
        demo.prepare_dir(foreign, keep=False)
    assert (foreign / "captures").is_dir()
    own = demo.prepare_dir(tmp_path / "own", keep=False)
    (own / "captures").mkdir()
    assert (demo.prepare_dir(own, keep=True) / "captures").is_dir()
    assert not (demo.prepare_dir(own, keep=False) / "captures").exists()


def test_the_demo_fails_on_wrong_values_and_damaged_stores(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.judge([], {"q": 9e-6, "k": 0.0}) == 0
    assert "9.0e-06 (q)" in capsys.readouterr().out
    assert demo.judge([], {"q": 2e-5}) == 1 and "q is 2.0e-05 away" in capsys.readouterr().err
    assert demo.judge([], {"q": float("nan")}) == 1, "NaN must not count as equal"
    assert demo.judge(["x is damaged"], {"q": 0.0}) == 1


def test_an_export_to_a_url_is_refused(stores: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(stores / "one.zarr"), "--to", "zip", "-o", "s3://bucket/zips"]) == 2
    assert "-o s3://bucket/zips: a URL" in capsys.readouterr().err


def test_a_run_whose_reader_is_gone_does_not_say_that_all_is_done(stores: Path) -> None:
    code = (
        "import sys, dmi_connector.cli.run as r, dmi_connector.cli.main as m\n"
        "def gone(*_): raise BrokenPipeError\n"
        "r.run = gone\n"
        "sys.exit(m.main(['run', '--model', 'm', '--prompts', 'p', '--out', 'o']))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=stores, stdout=subprocess.DEVNULL).returncode == 1
