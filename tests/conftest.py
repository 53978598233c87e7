# SPDX-License-Identifier: Apache-2.0
"""Configuration shared by all tests: the environment of vLLM, tiny models and their transformers oracles."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from dmi_connector.cli.tiny_models import ENV
from tests import modelinfos, runner, vision

if TYPE_CHECKING:
    from dmi_connector.analysis.oracle.transformers_oracle import Oracle

# Importing modules and collecting tests allocates about a million long-lived objects. Scanning them repeatedly would
# take a fifth of the time of importing vLLM, so garbage collection is off until `pytest_collection_finish`.
gc.disable()
# vLLM reads these variables when it is first imported, so set them before any test module is imported.
for _name, _value in ENV.items():
    os.environ.setdefault(_name, _value)
# Several engines run at once. Tiny models gain nothing from threads, and idle OpenMP threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# vLLM's n-gram lookup uses numba, which sets the thread count of OpenMP, and so of torch, for the rest of the process.
os.environ.setdefault("NUMBA_NUM_THREADS", os.environ["OMP_NUM_THREADS"])
# Otherwise Inductor tests the compiler's vector instructions in every process, which takes eight seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
runner.choose()
vision.use_standin()
# No deadline, because the machine may be busy. Examples are the same in each run; `make soak` draws new ones.
_patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("random", **_patient)
settings.register_profile("suite", **_patient, derandomize=True)
settings.load_profile("suite")


_PROGRAMS = "engine/test_bulk serve/test_faults serve/test_owners serve/test_serve soak/test_bulk_kills"
_PROGRAMS += " unit/engine/test_plugin engine/test_examples unit/test_notebooks"
_ALONE = "engine/test_tp2 engine/test_stages engine/test_faults"
"""These tests kill the only worker process below the test process, so they run before servers that stay up."""
_FORKED = "engine/test_hybrids_tp2 engine/test_lives engine/test_modes engine/test_tokens_and_steps soak/test_soak"
_COMPILED = "reduce attention bf16 compile_hash coverage hooks_vs_transformers lora"
_COMPILED_TOO = "compiled_tokens speculative"
"""Files that run in a process of their own, because a process with all compiled engines would end last. In `make test`,
only hooks_vs_transformers and compiled_tokens compile a model.
"""
SHARE_ENGINES = {
    **{f"tests/{name}.py": "programs" for name in _PROGRAMS.split()},
    **{f"tests/engine/test_{name}.py": "compiled" for name in _COMPILED.split()},
    **{f"tests/engine/test_{name}.py": "compiled too" for name in _COMPILED_TOO.split()},
}
"""{file: group}. The files of a group run in one test process, because they share something: servers of a fixture, the
process from which programs are forked (programs.py), or preparations of the first compiled engine of a process, such as
the imports of the compiler.
"""
_LONG = [f"tests/unit/{name}.py" for name in ("view/test_browser", "view/test_panels")]
_PROCESSES = [f"tests/{name}.py" for name in f"{_ALONE} {_PROGRAMS} {_FORKED}".split()]
FIRST = tuple(dict.fromkeys((*_PROCESSES, *SHARE_ENGINES, *_LONG)))
"""Files that run before all others, because they take longest. Otherwise most test processes are idle at the end. Files
that fork engines come before files that compile a model in the test process, which may not fork afterwards.
"""
SAME_SERVERS = {"tests/serve/test_serve.py": "tests/serve/test_owners.py"}
"""{file: the file whose rank in FIRST it shares}. pytest puts tests of both files that use the same server next to each
other, so that each server starts once.
"""


def _rank(item: pytest.Item) -> int:
    file = item.nodeid.split("::")[0]
    path = SAME_SERVERS.get(file, file)
    return FIRST.index(path) if path in FIRST else len(FIRST)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of FIRST first, and the others in their original order."""
    items.sort(key=_rank)


def pytest_collection_finish() -> None:
    """Turn garbage collection on again, only for objects that tests create."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # libraries that count their objects at exit must not find frozen ones


def scope_of(nodeid: str) -> str:
    """The group of tests that run in one process with this test."""
    path = nodeid.split("::")[0]
    return SHARE_ENGINES.get(path, path)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several test processes (-n), keep the tests of a file in one process, and files that share engines too.

    Files begin in the order of FIRST. xdist would begin with the files that have most tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    config.option.loadscopereorder = False
    return ByEngine(config, log)


NOT_LOOKED_AT = {
    "no S3 server": "uploads and stores in S3",
    "no Chromium": "the page of dmi view in a browser",
    "Ray is not installed": "dmi run --ray",
}
"""{start of the reason of a skipped test: what was not tested}."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Generator[None]:
    """List missing programs at the end of the report, because the tests that need them were skipped."""
    yield  # print the list of skipped tests first
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", [])]
    for missing, what in NOT_LOOKED_AT.items():
        same = [reason for reason in reasons if reason.startswith(missing)]
        if same:
            text = f"NOT TESTED: {what}, {len(same)} tests skipped ({same[0]})"
            terminalreporter.write_line(text, yellow=True, bold=True)


@pytest.fixture(scope="session", autouse=True)
def vllm_cache_root(pytestconfig: pytest.Config) -> Iterator[Path]:
    """One cache directory of compiled graphs, which all engines of the session share.

    vLLM's cached information about model classes is kept between sessions. Its files carry the hash of the class's
    source, and vLLM writes them atomically.
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
    """Messages of the package's logger inside vLLM, each once. With `caplog` a message may appear twice, depending on
    whether vLLM has configured its logger.
    """
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
    """Fill vLLM's cache of model information (see modelinfos.py). The first test process does so, others wait."""
    done = pytestconfig.cache.mkdir("modelinfos") / "done"
    with FileLock(done.with_suffix(".lock")):
        if not done.exists():
            modelinfos.fill()
            done.touch()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, known_models: None) -> Callable[..., Path]:
    """tiny_model(arch, dtype="float32"): the directory of a tiny model, made once per session."""
    from dmi_connector.cli.tiny_models import make_model

    made: dict[tuple[str, str], Path] = {}

    def get(arch: str, dtype: str = "float32") -> Path:
        if (arch, dtype) not in made:
            made[arch, dtype] = make_model(arch, tmp_path_factory.mktemp(f"{arch}-{dtype}"), dtype=dtype)
        return made[arch, dtype]

    return get


@pytest.fixture(scope="session")
def oracle(tiny_model: Callable[..., Path]) -> Callable[..., Oracle]:
    """oracle(arch, dtype="float32"): the transformers oracle of `tiny_model(arch, dtype)`."""
    import torch

    from dmi_connector.analysis.oracle.transformers_oracle import Oracle

    made: dict[tuple[str, str], Oracle] = {}

    def get(arch: str, dtype: str = "float32") -> Oracle:
        if (arch, dtype) not in made:
            made[arch, dtype] = Oracle(tiny_model(arch, dtype), dtype=getattr(torch, dtype))
        return made[arch, dtype]

    return get
