# SPDX-License-Identifier: Apache-2.0
"""The test suite itself: its output at the end, and the order of tests."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest

from tests import s3kit
from tests.unit.view import test_browser as browser


def lines(config: pytest.Config, *reasons: str) -> list[str]:
    """The last lines of the output if tests were skipped for these reasons."""
    (suite,) = (p for p in config.pluginmanager.get_plugins() if hasattr(p, "NOT_LOOKED_AT"))
    written: list[str] = []
    skipped = [SimpleNamespace(longrepr=("test_x.py", 1, f"Skipped: {reason}")) for reason in reasons]
    reporter = SimpleNamespace(stats={"skipped": skipped}, write_line=lambda line, **_: written.append(line))
    summary = suite.pytest_terminal_summary(reporter)
    next(summary)
    assert not written, "the list of skipped tests must come first"
    assert next(summary, None) is None
    return written


def test_the_suite_says_at_its_end_what_was_missing(pytestconfig: pytest.Config) -> None:
    """The reasons are those of tests that are skipped without the S3 server and Chromium."""
    chromium = browser.pytestmark.kwargs["reason"]
    assert lines(pytestconfig, "no GPU", s3kit.NOT_THERE, chromium, s3kit.NOT_THERE) == [
        f"NOT TESTED: uploads and stores in S3, 2 tests skipped ({s3kit.NOT_THERE})",
        f"NOT TESTED: the page of dmi view in a browser, 1 tests skipped ({chromium})",
    ]
    assert lines(pytestconfig, "no GPU") == lines(pytestconfig) == []


def test_files_that_share_engines_exist_and_stay_in_one_process(pytestconfig: pytest.Config) -> None:
    (suite,) = (p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "SHARE_ENGINES"))
    assert [path for path in suite.FIRST if not (pytestconfig.rootpath / path).exists()] == []
    files = ("tests/engine/test_reduce.py", "tests/engine/test_attention.py", "tests/unit/test_reduce.py")
    assert [suite.scope_of(f"{file}::test_x[1]") for file in files] == ["compiled", "compiled", files[2]]


def test_long_files_come_first_and_engines_are_forked_before_a_model_is_compiled(pytestconfig: pytest.Config) -> None:
    """Processes of an engine are forked, unless a test of another scope has compiled a model in the test process."""
    (suite,) = (p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "FIRST"))
    files = ["tests/unit/test_a.py", "tests/engine/test_attention.py", "tests/engine/test_reduce.py"]
    items = [SimpleNamespace(nodeid=f"{file}::test_x[{i}]") for i in "ba" for file in (*files, suite.FIRST[0])]
    suite.pytest_collection_modifyitems(items)
    wanted = [suite.FIRST[0], files[2], files[1], files[0]]
    assert [item.nodeid for item in items] == [f"{file}::test_x[{i}]" for file in wanted for i in "ba"]
    engines = pytestconfig.rootpath.glob("tests/*/test_*.py")
    forked = {str(path.relative_to(pytestconfig.rootpath)) for path in engines if "fork=" in path.read_text()}
    forked.discard("tests/unit/test_suite.py")
    compiled = next(i for i, path in enumerate(suite.FIRST) if suite.scope_of(path) == "compiled")
    assert len(forked) > 3 and forked <= {*suite.FIRST[:compiled], "tests/engine/test_reduce.py"}
    assert suite.FIRST[compiled] == "tests/engine/test_reduce.py", "its ranks must be forked before it compiles a model"
    server = suite.FIRST.index("tests/serve/test_owners.py")
    killers = [suite.FIRST.index(f"tests/engine/test_{name}.py") for name in ("tp2", "faults")]
    assert max(killers) < server, "they must run before servers, because they kill the only worker below this process"


def test_several_test_processes_begin_files_in_the_same_order(pytestconfig: pytest.Config) -> None:
    """Otherwise engines that need patches of the test process are spawned without them, after a model was compiled."""
    (suite,) = (p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "SHARE_ENGINES"))
    option = SimpleNamespace(loadscopereorder=True)
    scheduler = suite.pytest_xdist_make_scheduler(SimpleNamespace(option=option, getvalue=lambda _: ["popen"]), None)
    process = Mock(shutting_down=False)
    scheduler.add_node(process)
    files = ["test_a.py", "test_b.py", "test_b.py", "test_c.py", "test_c.py", "test_c.py"]
    scheduler.add_node_collection(process, [f"tests/{file}::test_x[{i}]" for i, file in enumerate(files)])
    scheduler.schedule()
    assert process.send_runtest_some.call_args_list == [call([0]), call([1, 2])], "the first two files"


def test_ranks_of_reductions_are_forked_before_one_rank_compiles(request: pytest.FixtureRequest) -> None:
    """Otherwise they are spawned, and each of three processes imports vLLM."""
    items = request.session.items
    names = [item.name for item in items if item.nodeid.startswith("tests/engine/test_reduce.py") and "tp" in item.name]
    if not names:
        pytest.skip("tests/engine/test_reduce.py does not run")
    ranks = ["tp2" in name for name in names]
    assert ranks == sorted(ranks, reverse=True), names


def test_two_files_share_each_server(pytestconfig: pytest.Config) -> None:
    """pytest puts tests that share a session fixture next to each other. The order of FIRST must keep that."""
    (suite,) = (p for p in pytestconfig.pluginmanager.get_plugins() if hasattr(p, "SAME_SERVERS"))
    [(one, other)] = suite.SAME_SERVERS.items()
    order = [f"{file}::test_x[{server}]" for server in ("draft", "target") for file in (other, one)]
    items = [SimpleNamespace(nodeid=name) for name in order]
    suite.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == order
    assert suite.scope_of(one) == suite.scope_of(other), "both files must run in one test process"


def test_garbage_is_looked_for_while_tests_run() -> None:
    """It is off while tests are collected."""
    assert gc.isenabled()
