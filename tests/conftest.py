# SPDX-License-Identifier: Apache-2.0
"""What all tests share: the environment vLLM starts in, tiny models and their oracles."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from dmi_connector.cli.tiny_models import ENV
from tests import runner, vision

if TYPE_CHECKING:
    from dmi_connector.analysis.oracle.transformers_oracle import Oracle

# Modules and tests are made of a million objects that stay. While they are made, Python would look through them for
# garbage again and again, a fifth of the time that importing vLLM takes: see `pytest_collection_finish`.
gc.disable()
# vLLM reads these when it is first imported, so they are set before any test module is.
for _name, _value in ENV.items():
    os.environ.setdefault(_name, _value)
# Several engines run at once, and tiny models gain nothing from threads, which spin while they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM looks for n-grams with numba, which sets its own number of threads for OpenMP, and torch, until the process ends.
os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
# Inductor would try the compiler's vector instructions in every process anew, which takes eight seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
runner.choose()
vision.use_standin()
# As long as a busy machine takes for examples, and the same ones in each run; in `make soak` others each time.
_patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("random", **_patient)
settings.register_profile("suite", **_patient, derandomize=True)
settings.load_profile("suite")


_PROGRAMS = "engine/test_bulk serve/test_faults serve/test_owners serve/test_serve soak/test_bulk_kills"
_PROGRAMS += " unit/engine/test_plugin engine/test_examples unit/test_notebooks"
_ALONE = "engine/test_tp2 engine/test_stages engine/test_faults"
"""They kill the only worker below the test process, and so come before servers that live on to the end."""
_FORKED = "engine/test_hybrids_tp2 engine/test_lives engine/test_modes engine/test_tokens_and_steps soak/test_soak"
_COMPILED = "reduce attention bf16 compile_hash coverage hooks_vs_transformers lora"
_COMPILED_TOO = "compiled_tokens speculative"
"""In a process of their own: one with all of them would be the last to end."""
SHARE_ENGINES = {
    **{f"tests/{name}.py": "programs" for name in _PROGRAMS.split()},
    **{f"tests/engine/test_{name}.py": "compiled" for name in _COMPILED.split()},
    **{f"tests/engine/test_{name}.py": "compiled too" for name in _COMPILED_TOO.split()},
}
"""Files that stay in one test process, and what they share: servers of a fixture and the process that programs are
forked from (programs.py), or what the first compiled engine of a process prepares for all, such as the compiler's
imports.
"""
_LONG = [f"tests/unit/{name}.py" for name in ("view/test_browser", "view/test_panels")]
_PROCESSES = [f"tests/{name}.py" for name in f"{_ALONE} {_PROGRAMS} {_FORKED}".split()]
FIRST = tuple(dict.fromkeys((*_PROCESSES, *SHARE_ENGINES, *_LONG)))
"""Files that come before all others: what takes longest, so that no test process is idle at the end. Engines in forked
processes come before those that are compiled in this one, which may not be forked any more then.
"""
SAME_SERVERS = {"tests/serve/test_serve.py": "tests/serve/test_owners.py"}
"""A file, and the one whose place in FIRST it shares: pytest has put tests of both that have the same server side by
side, so that each server starts once.
"""


def _rank(item: pytest.Item) -> int:
    file = item.nodeid.split("::")[0]
    path = SAME_SERVERS.get(file, file)
    return FIRST.index(path) if path in FIRST else len(FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of FIRST come first, the others as they were."""
    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    """Look for garbage from now on, among what tests make alone."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # libraries that count their objects at the end find none left


def scope_of(nodeid: str) -> str:
    """What stays in one test process with this test."""
    path = nodeid.split("::")[0]
    return SHARE_ENGINES.get(path, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes (-n), a file stays in one of them, and so do files that share engines."""
    from xdist.scheduler import LoadScopeScheduling

    class ByEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return ByEngine(config, log)


NOT_LOOKED_AT = {
    "no S3 server": "uploads and stores in S3",
    "no Chromium": "the page of dmi view in a browser",
    "Ray is not installed": "dmi run --ray",
}
"""How the reason of a skipped test begins -> what no test looked at then."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None]:
    """Say at the end which programs were missing: without them faults pass that the suite knows to find."""
    yield  # the list of skipped tests comes first
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    for missing, what in NOT_LOOKED_AT.items():
        same = [reason for reason in reasons if reason.startswith(missing)]
        if same:
            text = f"NOT TESTED: {what}, {len(same)} tests skipped ({same[0]})"
            terminalreporter.write_line(text, yellow=True, bold=True)


@pytest.fixture(scope="session", autouse=True)
def vllm_cache_root(pytestconfig: pytest.Config) -> Iterator[Path]:
    """One directory of compiled graphs for the whole session: every engine of the tests shares it.

    What vLLM notes of model classes is kept between sessions: the notes carry the hash of the class's source, and are
    written atomically.
    """
    root = Path(tempfile.mkdtemp(prefix="dmi-test-cache-"))
    (root / "modelinfos").symlink_to(pytestconfig.cache.mkdir("modelinfos"))
    old = os.environ.get("VLLM_CACHE_ROOT")
    os.environ["VLLM_CACHE_ROOT"] = str(root)
    yield root
    if old is None:
        del os.environ["VLLM_CACHE_ROOT"]
    else:
        os.environ["VLLM_CACHE_ROOT"] = old
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def engine_log() -> Iterator[list[str]]:
    """Messages of the package's logger inside vLLM, each once: with `caplog` their number depends on whether vLLM has
    configured its logger yet."""
    messages: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.dmi_connector")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield messages
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def known_models(vllm_cache_root: Path, pytestconfig: pytest.Config) -> None:
    """vLLM's notes of model classes are there (see modelinfos.py): the first test process makes them, others wait."""
    done = pytestconfig.cache.mkdir("modelinfos") / "done"
    with FileLock(done.with_suffix(".lock")):
        if not done.exists():
            subprocess.run([sys.executable, "-m", "tests.modelinfos"], cwd=Path(__file__).parents[1], check=True)
            done.touch()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, known_models: None) -> Callable[..., Path]:
    """tiny_model(arch, dtype="float32"): directory of a tiny model, made once a session."""
    from dmi_connector.cli.tiny_models import make_model

    made: dict[tuple[str, str], Path] = {}

    def get(arch: str, dtype: str = "float32") -> Path:
        if (arch, dtype) not in made:
            made[arch, dtype] = make_model(arch, tmp_path_factory.mktemp(f"{arch}-{dtype}"), dtype=dtype)
        return made[arch, dtype]

    return get


@pytest.fixture(scope="session")
def oracle(tiny_model: Callable[..., Path]) -> Callable[..., Oracle]:
    """oracle(arch, dtype="float32"): the transformers twin of `tiny_model(arch, dtype)`."""
    import torch

    from dmi_connector.analysis.oracle.transformers_oracle import Oracle

    made: dict[tuple[str, str], Oracle] = {}

    def get(arch: str, dtype: str = "float32") -> Oracle:
        if (arch, dtype) not in made:
            made[arch, dtype] = Oracle(tiny_model(arch, dtype), dtype=getattr(torch, dtype))
        return made[arch, dtype]

    return get
