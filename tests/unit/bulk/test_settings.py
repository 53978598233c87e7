# SPDX-License-Identifier: Apache-2.0
"""The options of `dmi run`, the saved settings of a run, its locks and its GPUs."""

from __future__ import annotations

import fcntl
import io
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dmi_connector.bulk import engines
from dmi_connector.bulk.engine_worker import EngineWorker
from dmi_connector.bulk.engines import device_shares, visible_devices
from dmi_connector.bulk.manifest import Manifest, Positions
from dmi_connector.bulk.progress import Counts, Progress, Speedometer, duration
from dmi_connector.bulk.prompts import BadRow, Columns, Prompt
from dmi_connector.bulk.settings import RunSettings, engine_gpus, joined, settle
from dmi_connector.cli.main import main, make_run_parser
from dmi_connector.cli.run import NOT_OURS, settings_of
from dmi_connector.option_values import OptionError
from dmi_connector.store.format.locks import LIFE_LOCK, lock_alone
from dmi_connector.store.read.run_manifest import read_manifest
from tests.bulkkit import Killed, Kills
from tests.probekit import save_probe

NEEDED = ["--model", "m", "--prompts", "p.jsonl", "--out", "o"]


def parsed(*more: str) -> RunSettings:
    return settings_of(*make_run_parser().parse_known_args([*NEEDED, *more]))


def test_flags_become_settings_and_others_go_to_vllm() -> None:
    settings = parsed(
        *("--hooks", "q,k", "--reduce", '{"q": "int8"}', "--codec", "lz4", "--owner", "target", "--max-tokens", "8"),
        *("--column", "prompt=text", "--shuffle", "7", "--limit", "9", "--shard", "1/4", "--chat"),
        *("--dtype", "bfloat16", "--tensor-parallel-size=2", "--sampling", '{"top_p": 0.5}'),
    )
    assert settings.capture == {"hooks": "q,k", "reduce": {"q": "int8"}, "codec": "lz4", "owner": "target"}
    assert settings.flags == ("--dtype", "bfloat16", "--tensor-parallel-size=2")
    assert (settings.max_tokens, settings.chat, settings.sampling) == (8, True, {"top_p": 0.5})
    order = settings.order
    assert (order.shuffle, order.limit, order.share, order.shares, order.suffix) == (7, 9, 1, 4, "-1-of-4")
    message = json.loads(json.dumps(settings.engine_message(Path("/o"))))
    assert message["store_dir"] == "/o" and message["flags"] == ["--dtype", "bfloat16", "--tensor-parallel-size=2"]


def test_a_flag_of_vllm_for_cuda_graphs_turns_off_our_choice() -> None:
    assert parsed("--compilation-config", "{}").capture == {"cuda_graphs": "vllm"}
    assert parsed("-cc.mode=none", "--cuda-graphs", "auto").capture == {"cuda_graphs": "auto"}


@pytest.mark.parametrize("name", NOT_OURS)
def test_server_options_that_a_run_sets_itself_are_not_its_options(name: str) -> None:
    known = {action.dest for action in make_run_parser()._actions}
    assert name not in known or name == "min_free_bytes", "it would go to vLLM, which refuses it"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--column", "text"], "write NAME=COLUMN"),
        (["--column", "prompts=text"], "did you mean 'prompt'"),
        (["--codec", "zip"], "invalid choice: 'zip'"),
        (["--policy", "drop", "--reduce", "int8"], "give one of full8, rp8, topk8, summary, compact, or JSON"),
        (["--chunk-tokens", "0"], "chunk_tokens: 0 is not valid"),
        (["--shard", "4/4"], "--shard '4/4' is not valid"),
        (["--limit", "0"], "'0' is not valid; give an integer of at least 1"),
        (["--max-tokens", "-1"], "an integer of at least 1"),
        (["--sampling", "[]"], "give a JSON object"),
        (["--sampling", "[" * 100_000], "give a JSON object"),
        (["--sampling", '{"n": 2}'], "--sampling n: .* leave it out"),
        (["--sampling", '{"max_tokens": 2}'], "give --max-tokens"),
        (["--speculative-config", "{}"], "speculative-config: dmi run writes this flag itself"),
        (["--max-bytes", "5X"], "followed by one of k, M, G, T"),
        (["--when-full", "stop"], "invalid choice"),
    ],
)
def test_bad_options_are_refused_in_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    try:
        status = main(["run", *NEEDED, *more])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and re.search(message, error) and error.count("\n") == 1, error


def test_missing_input_and_locks_stop_a_run_before_an_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out"
    command = ["run", "--model", "m", "--prompts", str(prompts), "--out", str(out)]
    assert main(command) == 2 and "does not exist; give a file of JSON lines" in capsys.readouterr().err
    prompts.write_text('{"prompt": "a"}\n')
    out.mkdir()
    with lock_alone(out / ".run.lock") as alone:
        assert alone and main(command) == 2
    assert "another dmi run works on it" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main([*command, "--data-parallel", "2"]) == 2 and "there are 1 GPUs (0)" in capsys.readouterr().err


FILES = [{"name": "p.jsonl", "bytes": 3, "ends_sha256": "00"}]
OTHER = {"name": "q.jsonl", "bytes": 5, "ends_sha256": "02"}


def settled(out: Path, *more: str, files: list[dict[str, Any]] | None = None) -> str:
    """Start a run with these options. Returns its name, which an earlier start may have chosen."""
    with settle(out, parsed(*more).fingerprint(files or FILES)) as run:
        return run


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (["--max-tokens", "8"], ["--max-tokens", "9"], ["max_tokens 8", "not 9"]),
        (["--hooks", "q"], ["--hooks", "k"], ["hooks 'q'"]),
        (["--codec", "lz4"], [], ["codec 'lz4'"]),
        ([], ["--codec", "lz4"], ["codec 'zstd', not 'lz4'"]),
        (["--shuffle", "1"], ["--shuffle", "2"], ["shuffle 1"]),
        (["--shard", "0/2"], ["--shard", "0/3"], ["shards 2"]),
        (["--dtype", "half"], ["--dtype=float32"], ["--dtype=half"]),
        (["--chat"], [], ["chat True"]),
        (["--column", "prompt=a"], [], ["columns"]),
    ],
)
def test_other_settings_are_refused(before: list[str], after: list[str], names: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{settled(tmp_path, *before)}-000000004--a.zarr.partial").mkdir()
    with pytest.raises(ValueError, match="was begun with") as error:
        settled(tmp_path, *after)
    assert all(name in str(error.value) for name in names), error.value


def test_settings_that_do_not_affect_stores_may_change(tmp_path: Path) -> None:
    run = settled(tmp_path, "--shard", "0/4", "--dtype", "half")
    (tmp_path / "manifest-0-of-4.jsonl").write_text(json.dumps({"key": f"{run}-000000000"}) + "\n")
    other = ["--shard", "3/4", "--dtype=half", "--limit", "5", "--data-parallel", "2", "--writers", "3"]
    more = ["--gpu-memory-utilization", "0.5", "--max_num_seqs=9", "-tp", "2", "--max-bytes", "3G"]
    assert settled(tmp_path, *other, *more) == run
    for optimized in (["-O3"], ["-O", "2"], ["--optimization-level", "1"]):
        assert settled(tmp_path, *other, *optimized) == run
    with pytest.raises(ValueError, match=r"p\.jsonl has 4 bytes, not 3"):
        settled(tmp_path, "--shard", "0/4", "--dtype", "half", files=[{**FILES[0], "bytes": 4}])
    names = [".settings.lock", "manifest-0-of-4.jsonl", "run.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


DEFAULTS = ["--codec", "zstd", "--hooks", "hidden-states", "--chunk-tokens", "128", "--segment-tokens", "1024"]
DEFAULTS += ["--check", "none", "--owner", "draft", "--reduce", "{}", "--column", "prompt=prompt", "--shard", "0/1"]
DEFAULTS += ["--sampling", '{"temperature": 0, "n": 1}']


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], DEFAULTS),
        (DEFAULTS, []),
        (["--hooks", "q,k"], ["--hooks", "q, k"]),
        (["--chunk-tokens", "2048"], ["--chunk-tokens", "2048", "--segment-tokens", "2048"]),
    ],
)
def test_a_given_default_equals_a_missing_option(before: list[str], after: list[str], tmp_path: Path) -> None:
    run = settled(tmp_path, *before)
    assert settled(tmp_path, *after) == run


def test_a_run_is_tied_to_the_content_of_its_probes(tmp_path: Path) -> None:
    def flags(path: Path | str) -> tuple[str, ...]:
        return ("--hooks", "q,probe.p", "--probes", json.dumps({"p": str(path)}))

    (tmp_path / "out").mkdir()
    one = save_probe(tmp_path / "one.safetensors", "q", (1,), 8, 1)
    run = settled(tmp_path / "out", *flags(one))
    (tmp_path / "out" / f"{run}-000000004--a.zarr").mkdir()
    copy = shutil.copy(one, tmp_path / "copy.safetensors")
    assert settled(tmp_path / "out", *flags(copy)) == run
    other = save_probe(tmp_path / "other.safetensors", "q", (2,), 8, 1)
    with pytest.raises(ValueError, match="was begun with probes"):
        settled(tmp_path / "out", *flags(other))
    (tmp_path / "norms").mkdir()
    run = settled(tmp_path / "norms", *flags("norm(q)"))
    (tmp_path / "norms" / f"{run}-000000004--a.zarr").mkdir()
    with pytest.raises(ValueError, match="was begun with probes"):
        settled(tmp_path / "norms", *flags("norm(k)"))
    assert "probes" not in parsed("--hooks", "q").fingerprint(FILES)


def test_a_run_of_an_earlier_version_continues() -> None:
    """Settings are compared by these names."""
    names = {*("model", "owner", "hooks", "reduce", "codec", "chunk_tokens", "segment_tokens", "check", "flags")}
    names |= {"sampling", "max_tokens", "chat", "columns", "shuffle", "shards", "prompts"}
    found = parsed("--hooks", "q").fingerprint(FILES)
    assert names <= found.keys() and found["model"] == parsed("--hooks", "q").model, sorted(found)


def test_a_run_saved_without_defaults_continues(tmp_path: Path) -> None:
    """Earlier versions saved only the options that were given."""
    settings = parsed("--hooks", "q , k").fingerprint(FILES)
    for name in ("reduce", "codec", "chunk_tokens", "segment_tokens", "check"):
        del settings[name]
    noted = {"format": 1, "run": "0123abcd", "settings": {**settings, "hooks": "q , k", "sampling": {}}}
    (tmp_path / "run.json").write_text(json.dumps(noted))
    (tmp_path / "0123abcd-000000004--a.zarr").mkdir()
    assert settled(tmp_path, "--hooks", "q,k", "--codec", "zstd") == "0123abcd"
    with pytest.raises(ValueError, match="was begun with codec 'zstd', not 'lz4'"):
        settled(tmp_path, "--hooks", "q,k", "--codec", "lz4")


@pytest.mark.parametrize(
    ("files", "change"),
    [
        ([{**FILES[0], "bytes": 4}, OTHER], "p.jsonl has 4 bytes, not 3"),
        ([{**FILES[0], "ends_sha256": "01"}, OTHER], "p.jsonl has other content"),
        ([*FILES, {**OTHER, "name": "r.jsonl"}], "q.jsonl is gone, r.jsonl is new"),
        (FILES, "q.jsonl is gone"),
        ([*FILES, OTHER, {**OTHER, "name": "r.jsonl"}], "r.jsonl is new"),
        ([OTHER, *FILES], "its files are in another order"),
    ],
)
def test_changed_prompts_are_described(files: list[dict[str, Any]], change: str, tmp_path: Path) -> None:
    run = settled(tmp_path, files=[*FILES, OTHER])
    (tmp_path / f"{run}-000000004--a.zarr").mkdir()
    with pytest.raises(ValueError) as error:
        settled(tmp_path, files=files)
    fix = "give the same files, or another --out"
    assert str(error.value) == f"--out {tmp_path}: the prompts have changed since its run began: {change}; {fix}"


def test_settings_of_a_run_without_captures_are_replaced(tmp_path: Path) -> None:
    run = settled(tmp_path, "--hooks", "resid_pre@99")
    (tmp_path / "manifest.jsonl").touch()
    (tmp_path / "0123abcd-000000004--a.zarr").mkdir()  # a store of another run
    new = settled(tmp_path, "--hooks", "resid_pre")
    assert new != run, "stores of the first one could not be told from those of the second"
    assert settled(tmp_path, "--hooks", "resid_pre") == new
    assert json.loads((tmp_path / "run.json").read_text())["run"] == new


@pytest.mark.parametrize("left", ["line", "store", "partial", "upload", "writer"])
def test_settings_of_a_run_with_captures_or_writers_are_kept(left: str, tmp_path: Path) -> None:
    run = settled(tmp_path, "--hooks", "q", "--shard", "1/2")
    name = f"{run}-000000003--3-94cb0165-c5fbbdb7da6e.zarr"
    with ExitStack() as stack:
        if left == "line":
            (tmp_path / "manifest-1-of-2.jsonl").write_text(json.dumps({"key": f"{run}-000000003"}) + "\n")
        elif left == "upload":
            line = {"event": "upload", "store": name, "upload": "done", "url": f"s3://b/{name}"}
            (tmp_path / "index.jsonl").write_text(json.dumps(line, separators=(",", ":")) + "\n")
        elif left == "writer":
            stack.enter_context(lock_alone(tmp_path / ".life.lock-1-of-2"))
        else:
            (tmp_path / (name + ".partial" * (left == "partial"))).mkdir()
        with pytest.raises(ValueError, match="was begun with hooks 'q'"):
            settled(tmp_path, "--hooks", "k", "--shard", "1/2")
    assert settled(tmp_path, "--hooks", "q", "--shard", "0/2") == run


def test_settings_of_an_active_run_are_kept(tmp_path: Path) -> None:
    """Two runs have the same --out, and neither has captured anything yet."""
    with settle(tmp_path, parsed("--hooks", "q", "--shard", "0/2").fingerprint(FILES)) as run:
        with pytest.raises(ValueError, match="was begun with hooks 'q'"):
            settled(tmp_path, "--hooks", "k", "--shard", "1/2")
        assert settled(tmp_path, "--hooks", "q", "--shard", "1/2") == run
    assert settled(tmp_path, "--hooks", "k", "--shard", "1/2") != run


def test_settings_that_do_not_read_back_as_written_are_refused(tmp_path: Path) -> None:
    """Otherwise the settings would be written again in an endless loop."""
    unresolved = {**parsed("--hooks", "q,k").fingerprint(FILES), "hooks": "q , k"}
    with pytest.raises(ValueError, match="was begun with hooks 'q,k'"), settle(tmp_path, unresolved):
        pass


def settle_together(out: Path, hooks: list[str]) -> list[str | None]:
    """Start runs at the same time, which stay active for a while. Returns their names, None for refused ones."""
    fingerprints = [parsed("--hooks", name).fingerprint(FILES) for name in hooks]
    begin, held = threading.Barrier(len(hooks)), threading.Barrier(len(hooks))

    def start(number: int) -> str | None:
        begin.wait()
        with ExitStack() as stack:
            name = None
            with suppress(ValueError):
                name = stack.enter_context(settle(out, fingerprints[number]))
            held.wait()
            noted = json.loads((out / "run.json").read_text())
            assert name is None or (noted["run"], noted["settings"]["hooks"]) == (name, hooks[number])
            held.wait()
            return name

    with ThreadPoolExecutor(len(hooks)) as threads:
        return list(threads.map(start, range(len(hooks))))


def test_one_of_several_runs_that_replace_settings_at_once_wins(tmp_path: Path) -> None:
    settled(tmp_path, "--hooks", "q@99")
    names = settle_together(tmp_path, [f"q@{i}" for i in range(8)])
    assert sum(name is not None for name in names) == 1


def test_shares_that_replace_settings_at_the_same_time_agree(tmp_path: Path) -> None:
    before = settled(tmp_path, "--hooks", "q@99")
    names = settle_together(tmp_path, ["q"] * 8)
    assert len(set(names)) == 1 and not {before, None} & set(names)


@pytest.mark.parametrize("step", (1, 2))
def test_a_kill_during_the_replacement_leaves_old_or_new_settings(step: int, tmp_path: Path) -> None:
    before = settled(tmp_path, "--hooks", "q@99")
    with pytest.raises(Killed), Kills(step).watching():
        settled(tmp_path, "--hooks", "q")
    noted = json.loads((tmp_path / "run.json").read_text())
    assert (noted["run"] == before) == (noted["settings"]["hooks"] == "q@99")
    assert settled(tmp_path, "--hooks", "q") != before


def test_flags_with_several_values_and_negative_numbers() -> None:
    given = ["--a", "1", "-2", "--b=3", "-tp", "4", "--c", "x", "y", "--d"]
    assert joined(given) == ["--a=1,-2", "--b=3", "-tp=4", "--c=x,y", "--d"]


# ---- processes ------------------------------------------------------------------------------------------------------


def test_gpus_are_divided_among_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_shares(2, ["0", "1", "2", "3"]) == [["0", "1"], ["2", "3"]]
    assert device_shares(3, ["0", "1", "2", "3"]) == [["0"], ["1"], ["2"]]
    assert device_shares(1, ["0", "1"]) == [[]], "one engine sees what the run sees"
    assert device_shares(2, []) == [[], []], "on a CPU"
    with pytest.raises(ValueError, match=r"--data-parallel 3: there are 2 GPUs \(4, 5\)"):
        device_shares(3, ["4", "5"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,")
    assert visible_devices() == ["4", "5"]
    for hidden in ("-1", "NoDevFiles", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert visible_devices() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,-1,2")
    assert visible_devices() == ["3"], "CUDA ignores what follows an invalid device"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(engines.os, "listdir", lambda _path: ["nvidia10", "nvidia2", "nvidiactl", "null"])
    assert visible_devices() == ["2", "10"]


@pytest.mark.parametrize("name", ["life", "run-12:30"])
def test_a_process_holds_the_life_lock_until_it_exits(name: str, tmp_path: Path) -> None:
    lock = tmp_path / name
    code = "from dmi_connector.store.format.locks import hold_life_lock as h; h(); print('held', flush=True); input()"
    with lock_alone(lock) as alone:
        assert alone
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, LIFE_LOCK: str(lock)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdout.readline() == b"held\n"
    with lock_alone(lock) as alone:
        assert not alone
    child.kill()
    child.communicate()
    with lock_alone(lock) as alone:
        assert alone


def test_a_worker_that_gets_no_calls_kills_its_engine(tmp_path: Path) -> None:
    """A worker whose node has another directory at the path starts no engine."""
    life = tmp_path / "life"
    life.touch()
    worker = EngineWorker(str(tmp_path / "log"), [str(life)], {}, silence_s=0)
    assert next(end for _ in range(20) if (end := worker.events()[1]) is not None) == ("signal 9", -9)
    with lock_alone(life) as alone:
        assert alone
    messages, end = EngineWorker(str(tmp_path / "log"), [str(tmp_path / "other/life")], {}).events()
    assert "has another directory there; give a shared one" in messages[0]["failed"] and end is not None


def test_a_process_is_killed_with_its_parent() -> None:
    """The parent starts a child that never exits, and is killed. The pipe that both hold open must then be closed."""
    child = (
        "import os; from dmi_connector.engine.offline.lifetime import end_with_parent as e; e(int(os.environ['P'])); "
    )
    child += "print('tied', flush=True); import time; time.sleep(10**6)"
    parent = "import os, subprocess, sys, time; os.environ['P'] = str(os.getpid()); "
    parent += f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(10**6)"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"tied\n"
    process.kill()
    assert process.stdout.read() == b"", "the child has ended too"
    process.wait()
    process.stdout.close()


def test_forked_processes_are_killed_with_the_run_too() -> None:
    """vLLM forks the engine process, which forks the worker. Neither loads the plugin."""
    code = "import multiprocessing, time; from dmi_connector.engine.offline.lifetime import end_forks_with_this as e; "
    code += "e(); c = multiprocessing.get_context('fork'); from tests.unit.bulk.test_settings import forks as f; "
    code += "c.Process(target=f, args=(1,)).start(); time.sleep(10**6)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert parent.stdout is not None and parent.stdout.readline() == b"runs\n"
    parent.kill()
    assert parent.stdout.read() == b"", "both have ended"
    parent.wait()
    parent.stdout.close()


def forks(more: int) -> None:
    """Fork `more` processes, each from the previous one. The last one prints that it runs."""
    if more:
        multiprocessing.get_context("fork").Process(target=forks, args=(more - 1,)).start()
    else:
        print("runs", flush=True)
    time.sleep(10**6)


def test_a_process_whose_parent_has_exited_exits_at_once() -> None:
    code = "from dmi_connector.engine.offline.lifetime import end_with_parent; end_with_parent(1); print('lives')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stdout) == (1, b"")


def test_a_file_system_without_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="cannot be locked, so a run is not safe there"), lock_alone(tmp_path / "l"):
        pass


# ---- small parts ----------------------------------------------------------------------------------------------------


def test_positions_are_a_set() -> None:
    positions, want = Positions(), {0, 7, 8, 63, 1000, 5}
    assert all(positions.add(p) for p in want) and not positions.add(8)
    assert set(positions) == want and len(positions) == 6 and 9 not in positions and 10**9 not in positions
    assert [positions.below(n) for n in (0, 1, 7, 8, 9, 63, 64, 1000, 1001, 10**9)] == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]
    assert positions.below(None) == 6
    positions.discard(8)
    positions.discard(9)
    assert set(positions) == want - {8} and len(positions) == 5


def test_a_manifest_with_a_single_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(b'{"key": "' + b"x" * 200_000)
    manifest = Manifest(path)
    manifest.add({"key": "a"})
    manifest.flush()
    manifest.close()
    assert path.read_bytes() == b'{"key":"a"}\n'
    path.write_bytes(b'not json\n[]\n{"key": "b"}\n{"key": 3}\n')
    assert list(read_manifest(path)) == [{"key": "b"}]
    assert list(read_manifest(tmp_path / "none")) == []


def test_a_torn_line_is_cut_after_the_last_whole_one(tmp_path: Path) -> None:
    """The line may be of any length. The end of the file is read in blocks, and a line may begin at the start of a
    block.
    """
    path = tmp_path / "m"
    for torn in (0, 1, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 3 << 16):
        path.write_bytes(b'{"key":"a"}\n{"key":"b"}\n' + b"x" * torn)
        Manifest(path).close()
        assert path.read_bytes() == b'{"key":"a"}\n{"key":"b"}\n', torn


def test_lines_are_flushed_in_batches_or_after_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are flushed at 256 lines, or more than a second after the first line."""
    now, path = [100.0], tmp_path / "m"
    monkeypatch.setattr("dmi_connector.bulk.manifest.time.monotonic", lambda: now[0])
    manifest = Manifest(path)
    manifest.add({"key": "a"})
    manifest.flush(now=False)
    now[0] += 0.5
    manifest.add({"key": "b"})
    now[0] += 0.5
    manifest.flush(now=False)
    assert path.read_bytes() == b"", "just a second after the first one"
    now[0] += 0.01
    manifest.flush(now=False)
    assert path.read_bytes() == b'{"key":"a"}\n{"key":"b"}\n'
    for i in range(255):
        manifest.add({"key": str(i)})
    manifest.flush(now=False)
    assert len(list(read_manifest(path))) == 2
    manifest.add({"key": "255"})
    manifest.flush(now=False)
    assert len(list(read_manifest(path))) == 258
    manifest.add({"key": "c"})
    manifest.flush()
    manifest.flush()
    assert len(list(read_manifest(path))) == 259
    manifest.close()


def test_the_error_names_a_manifest_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were not written are kept for the next flush. A write may be short."""
    manifest, write = Manifest(tmp_path / "m"), os.write
    manifest.add({"key": "a"})

    def full(_fd: int, _data: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError) as error:
            manifest.flush()
    assert str(error.value) == (
        f"--out {tmp_path}: m cannot be written (No space left on device); make room there, or change its mode, and"
        " start the same command again"
    )
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:4])))
        manifest.flush()
    assert (tmp_path / "m").read_bytes() == b'{"key":"a"}\n'
    manifest.close()


@pytest.mark.parametrize(("as_json", "terminal", "every"), [(True, False, 1), (False, True, 1), (False, False, 30)])
def test_counts_are_shown_once_a_second_and_in_logs_twice_a_minute(
    as_json: bool, terminal: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, shown = [100.0], list[float]()
    monkeypatch.setattr("dmi_connector.bulk.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    progress = Progress(as_json, out)
    monkeypatch.setattr(progress, "_show_bar", lambda counts, _speed: print(counts.done, file=out))
    for tenths in range(0, 10 * every + 2):
        now[0] = 100 + tenths / 10
        before = out.tell()
        progress.show(Counts(total=9, done=4))
        shown += [now[0] - 100] if out.tell() > before else []
    assert shown == [0, every]
    progress.show(Counts(total=9, done=4), force=True)
    assert len(out.getvalue().splitlines()) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], "the row is not an object"),
        ({}, "its columns: none"),
        ({"prompt": ""}, "the text is empty"),
        ({"prompt": 1.5}, "prompt: 1.5 is not a string"),
        ({"prompt": "a", "id": [1]}, "id: .* is not a string or an integer"),
        ({"prompt": "a", "id": True}, "id: True is not"),
        ({"prompt_token_ids": []}, "the list is empty"),
        ({"prompt_token_ids": "abc"}, "is not a list of token ids"),
        ({"prompt_token_ids": [1, -1]}, "-1 is not a token id"),
        ({"prompt_token_ids": [1, True]}, "True is not a token id"),
        ({"prompt_token_ids": [2**31]}, "is not a token id"),
        ({"messages": []}, "is not a list of messages"),
        ({"messages": {"role": "user"}}, "is not a list of messages"),
        ({"messages": ["hello"]}, "is not a message with a role"),
        ({"messages": [{"role": "user", "content": None}]}, "the content of .* is not a string"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, "the content of .* is not a"),
        ({"messages": [{"content": "x"}]}, "is not a message with a role"),
        ({"prompt_token_ids": [1, 2], "loss_mask": [1]}, "loss_mask: 1 values for 2 token ids"),
        ({"prompt_token_ids": [1, 2], "loss_mask": [1, 2]}, r"loss_mask: \[1, 2\] is not a list of 0 and 1"),
        ({"prompt_token_ids": [1, 2], "loss_mask": "01"}, "loss_mask: '01' is not a list"),
        ({"prompt_token_ids": [1] * 8194, "loss_mask": [0, 1] * 4097}, "4097 runs of ones; the maximum is 4096"),
        ({"prompt": "a", "loss_mask": [1]}, "a mask needs token ids; give prompt_token_ids too"),
    ],
)
def test_rows_that_are_not_prompts_are_refused(row: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message):
        Prompt.of(row, Columns())


def test_prompt_columns_have_an_order_of_precedence() -> None:
    row = {"prompt": "a", "messages": [{"role": "user", "content": "b"}], "prompt_token_ids": [1], "id": 3}
    assert Prompt.of(row, Columns()) == Prompt(token_ids=(1,), id="3")
    row["prompt_token_ids"] = None
    assert Prompt.of(row, Columns()).to_json() == {"messages": ({"role": "user", "content": "b"},)}
    del row["messages"]
    assert Prompt.of(row, Columns()).to_json() == {"text": "a"}
    assert Prompt.of(row, Columns(), chat=True).to_json() == {"messages": ({"role": "user", "content": "a"},)}


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        ([0, 1, 1, 0, 1], ((1, 3), (4, 5))),
        ([True, True, False, False, True], ((0, 2), (4, 5))),
        ([1] * 5, ((0, 5),)),
        ([0] * 5, ()),
        (None, None),
    ],
)
def test_a_loss_mask_becomes_spans(mask: Any, spans: Any) -> None:
    row = {"prompt_token_ids": [1, 2, 3, 4, 5], "loss_mask": mask}
    found = Prompt.of(row, Columns())
    assert found == Prompt(token_ids=(1, 2, 3, 4, 5), loss_spans=spans)
    assert found.to_json().get("options") == (None if spans is None else {"loss_spans": spans})


def test_speeds_are_means_over_the_last_seconds() -> None:
    now = [0.0]
    meter = Speedometer(lambda: now[0])
    meter.look(Counts(total=100, done=10, before=10))
    now[0] = 10
    speed = meter.look(Counts(total=100, done=30, before=10, tokens=400, bytes=8000, rejected=5))
    assert (speed.tokens_per_s, speed.bytes_per_s) == (40, 800)
    assert speed.seconds_left == pytest.approx((100 - 35) / 2.5)
    now[0] = 100
    meter.look(Counts(total=100, done=30, before=10, tokens=400, bytes=8000, rejected=5))
    now[0] = 105
    assert meter.look(Counts(total=100, done=30, before=10, tokens=450, rejected=5)).tokens_per_s == 10
    assert Speedometer().look(Counts()).seconds_left is None
    assert (duration(59.6), duration(3725), duration(0)) == ("1:00", "1:02:05", "0:00")


def test_progress_is_shown_as_json_as_a_bar_or_as_lines() -> None:
    counts = Counts(total=10, done=5, tokens=20, backlog=2, rejected=1, failed=1, waiting="the disk budget is used up")
    out = io.StringIO()
    progress = Progress(True, out)
    progress.show(counts)
    progress.show(counts)  # less than a second has passed
    progress.say({"event": "x"}, "for people")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["progress", "x"]
    assert (lines[0]["done"], lines[0]["backlog"], lines[0]["seconds_left"]) == (5, 2, None)
    out = io.StringIO()
    Progress(False, out).show(counts)
    assert out.getvalue().startswith(
        "5/10 stored, 0 tokens/s, 0 B/s, backlog 2, ? left, 1 bad rows, 1 failed, waiting:"
    )
    for more, text in (
        ({"estimated": True}, "5/about 10 stored, 0 tokens/s"),
        ({"starting": ("/o/a.log",), "done": 0}, "starting the engine (its log: /o/a.log)\n"),
        ({"starting": ("/o/a.log", "/o/b.log")}, "5/10 stored, starting 2 engines (first log: /o/a.log)\n"),
    ):
        out = io.StringIO()
        Progress(False, out).show(replace(counts, **more))
        assert out.getvalue().startswith(text), out.getvalue()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    progress = Progress(False, terminal)
    progress.show(counts, force=True)
    progress.say({}, "told")
    progress.close()
    assert "70%" in terminal.getvalue() and "5/10 stored" in terminal.getvalue() and "told\n" in terminal.getvalue()


def test_sampling_fields_that_the_run_sets_are_refused() -> None:
    with pytest.raises(OptionError, match="--sampling extra_args"):
        parsed("--sampling", '{"extra_args": {}}')
    assert parsed("--sampling", '{"n": 1}').sampling == {"n": 1}


@pytest.mark.parametrize(
    ("flags", "gpus"),
    [
        ([], 1),
        (["--dtype", "float32"], 1),
        (["--tensor-parallel-size", "2"], 2),
        (["-tp", "4"], 4),
        (["--tensor_parallel_size=8", "--dtype", "float32"], 8),
        (["-tp=2", "--tensor-parallel-size=1"], 1),
        (["--pipeline-parallel-size", "2"], 2),
        (["-pp", "2", "--tensor-parallel-size=4"], 8),
    ],
)
def test_an_engine_gets_as_many_gpus_as_its_flags_need(flags: list[str], gpus: int) -> None:
    assert engine_gpus(flags) == gpus


@pytest.mark.parametrize("value", ["0", "-1", "two", "", "²", "9" * 5000])
@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_an_invalid_number_of_gpus_is_refused(flag: str, value: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{flag} {value!r} is not valid; give an integer")):
        engine_gpus([f"{flag}={value}"])


def test_a_manifest_is_not_executable(tmp_path: Path) -> None:
    Manifest(tmp_path / "m").close()
    assert (tmp_path / "m").stat().st_mode & 0o111 == 0
