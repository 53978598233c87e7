# SPDX-License-Identifier: Apache-2.0
"""The documentation builds, needs no network, and agrees with the code."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest

import dmi_connector
from dmi_connector.engine.model.architectures import ARCHITECTURES, Architecture
from dmi_connector.hooks import HOOKS, PRESETS
from dmi_connector.layout import ArraySpec
from dmi_connector.request_options import CaptureParams
from dmi_connector.settings import ServerOptions
from dmi_connector.store.format import schema
from dmi_connector.store.format.checksum import file_checksum
from dmi_connector.store.format.completeness import LABELS, Cause

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "dmi_connector"

# ---- the site -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly as by `make docs`."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(out)]
    # Material for MkDocs writes advice to standard error, which a strict build does not count.
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return out


class Loaded(HTMLParser):
    """Collects what a browser loads for a page: scripts, styles, pictures, frames, preconnects."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            self.urls.append(found.get("href") or "")
        if tag in ("script", "img", "iframe", "source", "video", "audio", "object", "embed", "image", "use"):
            self.urls += [found[name] or "" for name in ("src", "srcset", "data", "href") if found.get(name)]


def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    pages = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    built = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert pages <= built, sorted(pages - built)
    assert built - pages == {"404.html"}


def test_no_page_loads_anything_from_the_network(site: Path) -> None:
    for page in sorted(site.rglob("*.html")):
        parser = Loaded()
        parser.feed(page.read_text())
        foreign = [url for url in parser.urls if re.match(r"(?i)\s*(https?:)?//", url)]
        assert not foreign, f"{page.name} loads {foreign}"
        assert parser.urls, f"{page.name} must have a style"
        for url in parser.urls:
            local = page.parent / url.split("#")[0].split("?")[0]
            assert url.startswith("data:") or local.exists() or page.name == "404.html", f"{page.name} has no {url}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(?i)(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style.name
    for picture in site.rglob("*.svg"):
        assert not re.search(r"(?i)(href|src)=['\"](https?:)?//", picture.read_text()), picture.name


# ---- messages in the code -------------------------------------------------------------------------------------------

PROTOCOL = ("NotImplementedError", "AttributeError", "DataTypeValidationError")
"""Exceptions of protocols of Python and zarr: abstract methods, missing module attributes, data types for zarr."""

REASONS = ("engine/scheduler/", "store/write/arrays/", "store/write/finish/commit.py")
"""Modules whose exceptions become the `reason` of a store, or the `dmi_error` of a response."""

PROBLEMS = ("store/read/arrays/shard_reader.py", "store/read/chunk_checks.py", "store/read/residual_sums.py")
"""Modules whose exceptions and results become a problem that `dmi verify` prints."""

EXPLAINED = ("self.problem", "self.refused.add", "self.failed", "self._failed")
"""Calls whose text becomes a reason or a problem."""

OURS: dict[str, tuple[str, ...]] = {
    "cli/tiny_models.py": ("ValueError",),
    "engine/transfer/staging.py": ("ValueError",),
    "layout.py": ("ValueError",),
    "store/write/coordinator/capture_ends.py": ("ValueError",),
    "store/write/coordinator/captures.py": ("ValueError", "RuntimeError"),
    "store/write/finish/commit.py": ("ValueError",),
    "store/write/coordinator/coordinator.py": ("ValueError",),
    "store/write/ring.py": ("ValueError",),
    "store/write/arrays/shard_writer.py": ("ValueError",),
    "store/write/coordinator/writer_pool.py": ("ValueError",),
}
"""{module: exceptions that only check calls of our own code}. No option, request, file or machine causes them. The page
says that they are faults of the package.
"""

FRAMES = {"FAILED", "dmi", "see", "help", "in"}
"""Words that only frame another message, as in "dmi: {error}"."""

_FORMAT = re.compile(r"%[-+ #0]*[\d.]*[sdrgf]")
_WORD = re.compile(r"[A-Za-z_]{2,}")
_HOLE = re.compile(r"\{\w+\}")


@dataclass(frozen=True)
class Message:
    """A message in the code. template: its text, with "{}" for each value. explained: whether the page must have it."""

    template: str
    where: str
    explained: bool


def plain(text: str) -> str:
    """A template with single spaces."""
    return " ".join(text.split())


def says_something(template: str) -> bool:
    """Whether a template has words of its own."""
    return bool(set(_WORD.findall(template.replace("{}", " "))) - FRAMES)


class Source:
    """The messages of one module.

    A message is the text of a raised exception, of a logged warning or error, of output to standard error, of a
    `Cause`, of a problem that verify finds, of a note in a repair's outcome, or of a `dmi_error` or `reason` in a dict.
    The page must have reasons, problems and notes, because they say what happened, and not what to do.

    Texts are literals. Values in them become "{}". If a value is a choice between literals, each choice gives a
    message.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(PACKAGE).as_posix()
        self.tree = ast.parse(path.read_text())
        nodes = list(ast.walk(self.tree))
        self.functions = {n.name: n for n in nodes if isinstance(n, ast.FunctionDef)}
        if any(isinstance(n, ast.ImportFrom) and n.module == "dmi_connector.option_values" for n in nodes):
            shared = ast.parse((PACKAGE / "option_values.py").read_text())
            self.functions = {n.name: n for n in shared.body if isinstance(n, ast.FunctionDef)} | self.functions
        self.owner: dict[ast.AST, ast.AST] = {}  # the innermost function that contains a node
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                self.owner.update(dict.fromkeys(set(ast.walk(node)) - {node}, node))

    def messages(self) -> Iterator[Message]:
        """Yield every message with words of its own."""
        for node in ast.walk(self.tree):
            for text in self._texts_at(node):
                if says_something(text):
                    yield Message(plain(text), f"{self.name}:{getattr(node, 'lineno', 0)}", self._explained(node))

    def _explained(self, node: ast.AST) -> bool:
        """Whether the text at a node is a reason, a problem or a note."""
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            return function.endswith(".notes.append") or function in EXPLAINED
        return not isinstance(node, ast.Raise | ast.ClassDef) or self.name.startswith((*REASONS, *PROBLEMS))

    # ---- nodes with messages ----------------------------------------------------------------------------------------

    def _texts_at(self, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            return self._raised(node.exc)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Error") for base in node.bases):
            inits = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "super().__init__"]
            return [text for call in inits for text in self._first(call.args)]
        if isinstance(node, ast.Dict):
            wanted = ("dmi_error", "reason")
            pairs = zip(node.keys, node.values, strict=True)
            return [t for k, v in pairs if isinstance(k, ast.Constant) and k.value in wanted for t in self.texts(v)]
        if isinstance(node, ast.Return) and node.value is not None:
            mine = self.owner.get(node)
            return self.texts(node.value) if isinstance(mine, ast.FunctionDef) and mine.name == "why_empty" else []
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) in (2, 3):
            return self.texts(node.value.elts[1])
        return self._called(node) if isinstance(node, ast.Call) else []

    def _raised(self, call: ast.Call) -> list[str]:
        name = ast.unparse(call.func).split(".")[-1]
        if name in PROTOCOL or name in OURS.get(self.name, ()):
            return []
        helper = self.functions.get(name)
        return self._first(call.args) if helper is None else self._made_by(helper, call)

    def _made_by(self, helper: ast.FunctionDef, call: ast.Call) -> list[str]:
        """The messages of the exception that a helper returns. The texts of the call replace its parameters."""
        given = dict(zip([a.arg for a in helper.args.args], call.args, strict=False))
        made = [n.value for n in ast.walk(helper) if isinstance(n, ast.Return) and isinstance(n.value, ast.Call)]
        return [text for one in made for arg in one.args[:1] for text in self.texts(arg, given)]

    def _called(self, call: ast.Call) -> list[str]:
        function = ast.unparse(call.func)
        args = call.args
        if re.fullmatch(r"logger\.(warning|error|exception)", function):
            mine = self.owner.get(call)
            if isinstance(mine, ast.FunctionDef) and mine.name == "_note":
                return []  # its callers have the text
            return [_FORMAT.sub("{}", text) for text in self.texts(args[0])]
        if function == "self._note" and args:
            return [f"dmi: {text}" for text in self.texts(args[0])]
        if function == "print" and any(k.arg == "file" and ast.unparse(k.value) == "sys.stderr" for k in call.keywords):
            return self.texts(args[0])
        if function in ("self.problem", "self.refused.add", "self.exit") and len(args) == 2:
            return self.texts(args[1])
        if function.endswith(".notes.append"):
            return self.texts(args[0])
        if function in ("self.failed", "self._failed"):  # reasons for lost rows or failed uploads
            return self._first([inner for arg in args for inner in (arg.args if isinstance(arg, ast.Call) else [arg])])
        return []

    # ---- texts of messages ------------------------------------------------------------------------------------------

    def _first(self, args: Sequence[ast.expr]) -> list[str]:
        """The first argument that is a text. The first argument of `OSError` may be a number."""
        return next((found for arg in args if (found := self.texts(arg))), [])

    def texts(self, node: ast.expr, given: dict[str, ast.expr] | None = None) -> list[str]:
        """The templates of an expression; [] if it is not a string. given: {parameter name: expression}."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            parts = [
                self._hole(p.value, given) if isinstance(p, ast.FormattedValue) else self.texts(p) for p in node.values
            ]
            return ["".join(choice) for choice in itertools.product(*parts)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.texts(node.left, given), self.texts(node.right, given)
            pairs = itertools.product(left or ["{}"], right or ["{}"]) if left or right else []
            return ["".join(pair) for pair in pairs]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, given), *self.texts(node.orelse, given)]
        return self._assigned(node)

    def _hole(self, node: ast.expr, given: dict[str, ast.expr] | None) -> list[str]:
        """The replacement of a value in a template: the choices if all are literals, otherwise "{}"."""
        if isinstance(node, ast.Name) and given and node.id in given:
            return self.texts(given[node.id]) or ["{}"]
        if isinstance(node, ast.IfExp):
            both = [self.texts(node.body), self.texts(node.orelse)]
            return [*both[0], *both[1]] if all(both) else ["{}"]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            helper = self.functions[node.func.id]
            returned = [n.value for n in ast.walk(helper) if isinstance(n, ast.Return) and n.value is not None]
            found = [self.texts(value) for value in returned]
            return list(dict.fromkeys(itertools.chain(*found))) if found and all(found) else ["{}"]
        return ["{}"]

    def _assigned(self, node: ast.expr) -> list[str]:
        """The text of a name or attribute that is assigned once in its function."""
        mine = self.owner.get(node)
        if mine is None or not isinstance(node, ast.Name | ast.Attribute):
            return []
        name = ast.unparse(node)
        assigns = [n for n in ast.walk(mine) if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
        return self.texts(assigns[0].value) if len(assigns) == 1 else []


def causes() -> list[Message]:
    """The sentences in a store's `reason`."""
    sentences = [(cause.name, plain(_HOLE.sub("{}", cause.value[1]))) for cause in Cause]
    return [Message(text, f"Cause.{name}", True) for name, text in sentences if says_something(text)]


@cache
def messages() -> tuple[Message, ...]:
    """All messages that users may see."""
    found = [m for path in sorted(PACKAGE.rglob("*.py")) for m in Source(path).messages()]
    return (*found, *causes())


@cache
def entries() -> tuple[str, ...]:
    """The templates of the page. Each entry is "- `message`<br>What it means and what to do." """
    lines = (DOCS / "TROUBLESHOOTING.md").read_text().splitlines()
    found = [re.fullmatch(r"- (`+)(.+?)\1<br>(.+)", line) for line in lines if line.startswith("- `")]
    assert all(found), [line for line, match in zip(lines, found, strict=False) if match is None]
    return tuple(plain(_HOLE.sub("{}", match[2])) for match in found if match)


def test_troubleshooting_has_every_reason_problem_and_note() -> None:
    wanted = [m for m in messages() if m.explained]
    assert len(wanted) > 80 and len(messages()) > 200, "the search must find raised, logged and printed messages"
    known = set(entries())
    lacking = [f"{m.where}: {m.template}" for m in wanted if m.template not in known]
    assert not lacking, "not in docs/TROUBLESHOOTING.md:\n" + "\n".join(lacking)


def test_troubleshooting_has_no_message_that_no_code_says() -> None:
    said = {m.template for m in messages()}
    stale = [entry for entry in entries() if entry not in said]
    assert not stale, "not in the code:\n" + "\n".join(stale)


def test_troubleshooting_has_each_message_once() -> None:
    twice = {entry for entry in entries() if entries().count(entry) > 1}
    assert not twice


# ---- facts of the other pages ---------------------------------------------------------------------------------------


def rows(page: str, title: str = "") -> dict[str, list[str]]:
    """The rows of a page's tables that begin with code: {name: the other cells}. A row may have several names.

    title: only search this section.
    """
    found: dict[str, list[str]] = {}
    section = ""
    for line in (DOCS / page).read_text().splitlines():
        section = line.lstrip("#").strip() if line.startswith("#") else section
        if line.startswith("| `") and title in ("", section):
            first, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            found |= dict.fromkeys(re.findall(r"`([^`]+)`", first), cells)
    return found


def test_capturing_has_every_server_option_with_its_default() -> None:
    table = rows("CAPTURING.md", "Server options")
    parsed = ServerOptions.parse({"store_dir": "s"})
    assert (parsed.hooks, parsed.reduce, parsed.probes) == (("hidden-states",), (), ())
    shown = {"store_dir": "required", "hooks": '`"hidden-states"`'}
    shown |= dict.fromkeys(("reduce", "probes", "probe_alerts"), "`{}`")
    for option in fields(ServerOptions):
        assert option.name in table, f"docs/CAPTURING.md has no row for {option.name}"
        default = shown.get(option.name) or f"`{json.dumps(getattr(parsed, option.name))}`"
        assert table[option.name][0] == default, f"docs/CAPTURING.md: {option.name}"
    assert len(table) == len(fields(ServerOptions))


def test_capturing_has_every_request_option_with_its_default() -> None:
    table = rows("CAPTURING.md", "Request options")
    fresh = CaptureParams()
    names = {f.name for f in fields(CaptureParams)} - {"start", "stop"}
    expected = {("" if name == "include_output_tokens" else "dmi.") + name: getattr(fresh, name) for name in names}
    expected["dmi.tokens"] = [fresh.start, fresh.stop]
    for name, default in expected.items():
        assert name in table, f"docs/CAPTURING.md has no row for {name}"
        assert table[name][0] == f"`{json.dumps(default)}`", f"docs/CAPTURING.md: {name}"
    assert set(table) == set(expected)


def test_hooks_has_every_hook_preset_and_architecture() -> None:
    named = set(rows("HOOKS.md", "Hooks"))
    assert set(HOOKS) <= named, set(HOOKS) - named
    drawn = set(re.findall(r">([a-z_0-9]+)</text>", (DOCS / "img" / "layer.svg").read_text()))
    wanted = {name for name, hook in HOOKS.items() if hook.only not in ("mixer", "gated_mixer")}
    assert wanted <= drawn, f"docs/img/layer.svg lacks {wanted - drawn}"
    presets = rows("HOOKS.md", "Presets")
    assert set(presets) == set(PRESETS)
    for name, hooks in PRESETS.items():
        shown = set(re.findall(r"`(\w+)`", presets[name][0]))
        assert shown == (set(HOOKS) - set(hooks) if presets[name][0].startswith("all but") else set(hooks)), name
    page = (DOCS / "HOOKS.md").read_text()
    table = page[page.index("## Models") : page.index("## Adding an architecture")]
    architecture = r"`(\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration|ChatModel)|NemotronH_\w+)`"
    assert set(re.findall(architecture, table)) == set(ARCHITECTURES)


def test_hooks_has_every_field_of_an_architecture_with_its_default() -> None:
    table = rows("HOOKS.md", "Adding an architecture")
    said = {f.name: "none" for f in fields(Architecture) if f.default == ""} | {"positions": "the layers"}
    for field in fields(Architecture):
        if field.default is not MISSING:
            assert table[field.name][0] == said.get(field.name, f"`{field.default}`"), field.name


def test_operations_has_every_metric_and_reason() -> None:
    from dmi_connector.engine.metrics import ALERTS, BACKLOG, COUNTERS, SCORE

    table = rows("OPERATIONS.md")
    named = {re.sub(r"\{.*|_total.*", "", name) for name in table if name.startswith("vllm:dmi_")}
    assert named == {f"vllm:dmi_{name}" for name, _ in COUNTERS.values()} | {
        f"vllm:dmi_{name}" for name in (ALERTS, BACKLOG, SCORE)
    }
    assert set(LABELS) <= set(table), set(LABELS) - set(table)


def test_operations_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "OPERATIONS.md").read_text()))
    code = "".join(path.read_text() for path in (ROOT / "tests" / "unit").rglob("test_*.py"))
    lacking = {name for name in named if f"def {name}(" not in code}
    assert len(named) > 25 and not lacking, f"docs/OPERATIONS.md names {sorted(lacking)}"


def test_compatibility_has_each_refused_option_and_names_tests_that_exist() -> None:
    page = (DOCS / "COMPATIBILITY.md").read_text()
    said = Source(PACKAGE / "engine" / "refusals.py").messages()
    refused = {found[1] for m in said if (found := re.match(r"(\w+): ", m.template))}
    shown = set(re.findall(r"`(\w+)", page[page.index("## Refused") :]))
    assert len(refused) > 10 and refused <= shown, f"docs/COMPATIBILITY.md lacks {sorted(refused - shown)}"
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py|test_\w+\.py)`", page))
    code = {
        str(path.relative_to(ROOT)): path for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"))
    }
    lacking = {name for name in named if not any(path.endswith(name) for path in code)}
    assert len(named) > 8 and not lacking, f"docs/COMPATIBILITY.md names {sorted(lacking)}"
    tests = "".join(code[path].read_text() for path in code if any(path.endswith(name) for name in named))
    untested = {name for name in refused if name not in tests}
    assert not untested, f"no test that the page names has {sorted(untested)}"


def test_the_worked_example_of_the_format_is_what_a_writer_writes() -> None:
    """The document of its array, with its size and checksum."""
    array, root = map(json.loads, re.findall(r"```json\n(.*?)```", (DOCS / "FORMAT.md").read_text(), re.DOTALL))
    attrs = root["attributes"]["dmi"]
    grid = schema.effective_grid(attrs["num_tokens"], 128, 1024)
    spec = ArraySpec("q", "bfloat16", (0, 1), 128)
    document = schema.hook_document(spec, attrs["num_tokens"], grid, attrs["codec"])
    assert array == document
    assert attrs["hooks"]["q"] == schema.hooks_attribute([spec])["q"]
    assert (attrs["chunk_tokens"], attrs["segment_tokens"]) == (grid.chunk, grid.segment)
    written = schema.dump(document)
    assert attrs["files"]["q/zarr.json"] == [len(written), file_checksum("q/zarr.json", written)]


def test_the_api_reference_has_every_public_name() -> None:
    shown = {line.split(".")[-1] for line in (DOCS / "API.md").read_text().splitlines() if line.startswith("::: ")}
    public = set(dmi_connector.__all__) - {"__version__"}
    assert public <= shown, public - shown
    assert {"OptionError", "SelectionError", "ReduceError", "CaptureIncomplete"} <= shown
    assert {"ServerOptions", "CaptureParams", "register_architecture", "parse_selection", "parse"} <= shown


def test_each_name_of_the_api_reference_is_in_the_module_that_its_heading_names() -> None:
    module = ""
    for line in (DOCS / "API.md").read_text().splitlines():
        if line.startswith("### "):
            module = line.removeprefix("### ")
        elif line.startswith("::: ") and module != "dmi_connector.captures.activation_cache":  # needs transformer_lens
            name = line.split(".")[-1]
            assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_results_that_pages_cite_exist() -> None:
    """A page cites a file, or a run of a summary. docs/ENGINEERING.md may cite files of the git history."""
    folder = ROOT / "benchmarks" / "results"
    there = {path.name for path in folder.iterdir()} - {"last.json"}  # the default output of programs
    runs = {run for path in folder.glob("*.json") for run in json.loads(path.read_text()).get("runs", ()) if "-" in run}
    about = (ROOT / "benchmarks" / "README.md").read_text()
    tables, listed = about.split("## Results")[1:]
    backed = [re.findall(r"`([\w-]+\.json)`", line.split(" | ")[0]) for line in tables.splitlines()]
    assert there == {name for names in backed for name in names}, "each file must belong to a table"
    gone = {f"{name}.json" for name in re.findall(r"`([\w.-]+)`", listed)}
    for page in DOCS.glob("*.md"):
        text = page.read_text()
        cited = set(re.findall(r"\b((?:h100|h200|cpu|gpu)-[\w.-]+\.jsonl?)\b", text))
        cited |= set(re.findall(r"benchmarks/results/([\w.-]+\.jsonl?)\b", text))
        lacking = cited - there - (gone | {f"{run}.json" for run in runs} if page.name == "ENGINEERING.md" else set())
        lacking |= set(re.findall(r"`((?:h100|h200|cpu)-[\w.-]+)`", text)) - cited - runs
        assert not lacking, f"{page.name} cites {sorted(lacking)}"
    assert not gone & there


def test_pages_that_the_code_names_exist() -> None:
    there = {path.name for path in DOCS.glob("*.md")}
    lacking = []
    for folder in ("dmi_connector", "benchmarks", "configs", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            text = path.read_text() if path.suffix in (".py", ".sh", ".yaml") else ""
            for number, line in enumerate(text.splitlines()):
                named = set(re.findall(r"docs/([A-Z]+\.md)", line)) - there
                lacking += [f"{path.relative_to(ROOT)}:{number + 1} names docs/{name}" for name in named]
    assert not lacking, "\n".join(lacking)


def test_files_that_pages_and_drawings_name_exist() -> None:
    """Paths may be full or shortened, such as `taps/routing.py`. If a file moves, its mentions must change."""
    git = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    there = [f"/{name}" for name in git.stdout.split()]
    assert len(there) > 100
    elsewhere = re.compile(r"vllm/|my_package/")  # files of vLLM, and of a fictitious package
    lacking = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), *(DOCS / "img").glob("*.svg")):
        named = set(re.findall(r"[`> ]((?:\w+/)*\w+\.py)\b", page.read_text()))
        missing = {
            name for name in named if not elsewhere.match(name) and not any(t.endswith(f"/{name}") for t in there)
        }
        lacking += [f"{page.name} names {name}" for name in sorted(missing)]
    assert not lacking, "\n".join(lacking)


# ---- README, CHANGELOG, CONTRIBUTING --------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files_and_headings(name: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / name).read_text()):
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(ROOT / path), f"{name} links to {target}"


def test_contributing_says_what_each_room_holds() -> None:
    _, table = (ROOT / "CONTRIBUTING.md").read_text().split("| room in `dmi_connector/` |")
    named = set(re.findall(r"^\| `([\w/]+/)` \|", table.split("\n\n")[0], re.MULTILINE))
    rooms = {f"{init.parent.relative_to(PACKAGE).as_posix()}/" for init in PACKAGE.glob("*/**/__init__.py")}
    assert len(rooms) > 20 and named == rooms, sorted(named ^ rooms)


def test_rows_of_a_table_have_its_columns() -> None:
    wrong = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        columns, code = 0, False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            code ^= line.lstrip().startswith("```")
            row = re.sub(r"`[^`]*`|\\[|]", "", line.strip())
            cells = 0 if code or not row.startswith("|") else row.count("|") - 1
            if cells and columns and cells != columns:
                wrong.append(f"{page.name}:{number} has {cells} cells of {columns}")
            columns = columns or cells if cells else 0
    assert not wrong, "\n".join(wrong)


def test_the_readme_has_fewer_than_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120


def test_no_page_has_the_marks_of_an_unfinished_merge() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    marks = re.compile(r"^(<<<<<<<|=======$|>>>>>>>)", re.MULTILINE)
    assert [page.name for page in pages if marks.search(page.read_text())] == []


def test_a_release_in_the_changelog_is_a_list_with_a_line_for_each_change() -> None:
    kinds = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert releases
    for title, *lines in (release.splitlines() for release in releases):
        groups = [line.removeprefix("### ") for line in lines if line.startswith("#")]
        assert groups and groups == [kind for kind in kinds if kind in groups], f"{title}: {groups}"
        bullets = [line for line in lines if line and not line.startswith("#")]
        long = [line for line in bullets if not line.startswith("- ") or len(line) > 120]
        assert not long, f"{title}: not a line of at most 120 characters: {long}"
        assert len(groups) <= len(bullets) <= 40, f"{title}: {len(bullets)} changes"
