# SPDX-License-Identifier: Apache-2.0
"""`dmi demo`: captures a tiny model in vLLM, and compares the captures with transformers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dmi_connector.args import capture_args
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.cli.tables import format_bytes, format_table, store_size
from dmi_connector.cli.tiny_models import ENV, make_model
from dmi_connector.engine.offline.offline import Answer, EngineFailed
from dmi_connector.hooks import parse_selection
from dmi_connector.store.read.reader import CaptureIncomplete
from dmi_connector.store.read.verify import verify_store
from dmi_connector.store.read.waiting import CaptureFailed
from dmi_connector.wording import terminal_columns

TOLERANCE = 1e-5
"""Maximum absolute difference from transformers. For the demo's model, errors of float32 rounding are smaller."""

HOOKS = "vllm-full,q_rot,k_rot"
"""Default selection of hooks. Attention patterns can be computed from q_rot and k_rot."""
MARKER = ".dmi-demo"
"""File that marks a directory as made by the demo."""
PROMPTS = {
    "hello": "hello world, this is a small test",
    "france": "what is the capital of france?",
    "fox": "once upon a time there was a quick brown fox",
    "layers": "every layer adds something to the residual stream",
}
"""Key of the capture -> prompt."""
NEW_TOKENS = 12
"""Tokens to generate for each prompt."""


def prepare_dir(directory: Path, keep: bool) -> Path:
    """Create the directory of the demo. Stores of earlier demos in it are removed, unless `keep`.

    Raises ValueError if `directory` is a file, or a directory with files that no demo made. No such file is removed.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"dir: {str(directory)!r} is a file; give a directory")
    directory.mkdir(parents=True, exist_ok=True)
    marker = directory / MARKER
    if not marker.exists() and any(directory.iterdir()):
        raise ValueError(f"dir: {str(directory)!r} is not empty, and no demo made it; give a new directory")
    marker.touch()
    if not keep and (directory / "captures").exists():
        shutil.rmtree(directory / "captures")
    return directory


class Progress:
    """A progress bar over the steps of the demo. On a terminal, a thread updates the elapsed time during a step."""

    def __init__(self, steps: int) -> None:
        from tqdm import tqdm

        # A duplicate of standard error, because `output_to` redirects the original.
        self.file = os.fdopen(os.dup(2), "w", buffering=1)
        layout = "{desc:<32} {percentage:3.0f}% |{bar:16}| step {n_fmt} of {total_fmt} [{elapsed}]"
        self.bar: Any = tqdm(total=steps, bar_format=layout, file=self.file, ncols=terminal_columns(self.file) - 1)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show `what` while the block runs, then advance the bar."""
        self.bar.set_description_str(what)
        done = threading.Event()
        thread = threading.Thread(target=self._tick, args=(done,), daemon=True)
        if self.file.isatty():  # in a log file, one line per step is enough
            thread.start()
        try:
            yield
        finally:
            done.set()
        if thread.ident is not None:
            thread.join()
        self.bar.update()

    def _tick(self, done: threading.Event) -> None:
        while not done.wait(1.0):
            self.bar.refresh()

    def close(self) -> None:
        self.bar.close()
        self.file.close()


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Redirect the output of this process and its children to the file `log`."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    with open(log, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def run_demo(directory: str | os.PathLike[str] = "demo", hooks: str = HOOKS, keep: bool = False) -> int:
    """Run the demo in `directory`. Returns the exit status.

    The status is 0 if every store is complete, undamaged and agrees with transformers, otherwise 1. hooks: selection of
    hooks. keep: keep the stores of earlier demos. Raises ValueError if vllm, transformers or tqdm is missing, as
    `prepare_dir` does, and for a selection that is not valid.
    """
    for package in ("vllm", "transformers", "tqdm"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"demo: {package} is not installed; install dmi_connector[vllm]")
    for name, value in ENV.items():
        os.environ.setdefault(name, value)
    began = time.monotonic()
    root = prepare_dir(Path(directory).absolute(), keep)
    engine = capture_args(hooks=hooks, store_dir=root / "captures")
    progress = Progress(6)
    try:
        with output_to(root / "engine.log"):
            with progress.step("writing a tiny random Qwen3"):
                model = make_model("qwen3", root / "model")
                check_hooks(hooks, model)
            answers = ask(model, engine, progress)
            with progress.step("opening and verifying the stores"):
                captures = [open_capture(answer.store, timeout=60.0) for answer in answers]
                problems = [problem for capture in captures for problem in verify_store(capture.path)]
            with progress.step("comparing with transformers"):
                errors = compare_all(captures, model)
            with progress.step("drawing residual norms"):
                picture = _draw(captures, root / "residual_norms.png")
    except (EngineFailed, CaptureFailed, CaptureIncomplete, TimeoutError) as error:
        print(f"FAILED: {error}; the output of the engine is in {root / 'engine.log'}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    print(report(answers, captures, errors))
    print(f"stores   {root / 'captures'}: dmi ls, dmi info, dmi verify")
    print(f"picture  {picture or 'none: it needs matplotlib and the residual stream'}")
    print(f"time     {time.monotonic() - began:.0f} s")
    return judge(problems, errors)


def judge(problems: Sequence[object], errors: dict[str, float]) -> int:
    """Print the result. Returns the exit status: 0 if there is no problem and each error is within TOLERANCE, else 1.

    problems: results of `verify_store`. errors: hook -> largest absolute difference from transformers.
    """
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    wrong = {hook: error for hook, error in errors.items() if not error <= TOLERANCE}
    for hook, error in wrong.items():
        print(f"FAILED: {hook} is {error:.1e} away from transformers, limit {TOLERANCE:g}", file=sys.stderr)
    if problems or wrong:
        return 1
    worst = max(errors, key=lambda hook: errors[hook])
    print(f"All {len(errors)} hooks agree with transformers: max error {errors[worst]:.1e} ({worst}).")
    return 0


def check_hooks(hooks: str, model: Path) -> None:
    """Check a selection of hooks before the engine starts. Raises SelectionError. model: directory of the model."""
    from transformers import AutoConfig

    from dmi_connector.engine.model.architectures import ARCHITECTURES

    parse_selection(hooks, ARCHITECTURES["Qwen3ForCausalLM"].dims(AutoConfig.from_pretrained(model)))


def ask(model: Path, engine: dict[str, dict[str, Any]], progress: Progress) -> list[Answer]:
    """Start an engine with capture, generate answers to PROMPTS, and stop the engine. Raises EngineFailed.

    engine: result of `capture_args`.
    """
    with progress.step("starting vLLM"):
        from dmi_connector.engine.offline.offline import OfflineEngine

        running = OfflineEngine(model, engine)
    with progress.step(f"answering {len(PROMPTS)} prompts"):
        try:
            return running.answer(PROMPTS, NEW_TOKENS)
        finally:
            running.shutdown()


def compare_all(captures: list[Capture], model: Path) -> dict[str, float]:
    """{hook: largest absolute difference from transformers over all captures}."""
    from dmi_connector.analysis.oracle.transformers_oracle import Oracle, compare, largest

    oracle = Oracle(model)
    return largest(compare(capture, oracle) for capture in captures)


def _draw(captures: list[Capture], out: Path) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None or "resid_post" not in captures[0]:
        return None
    from dmi_connector.analysis.pictures.plot import draw_residual_norms

    return draw_residual_norms(captures, out)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() and c != "\N{REPLACEMENT CHARACTER}" else "▯" for c in text)


def report(answers: list[Answer], captures: list[Capture], errors: dict[str, float]) -> str:
    """The answers, a table of the stores and a table of the hooks, as text. errors: as in `judge`."""
    said = [f"  {PROMPTS[a.key]} -> {_printable(a.text)}" for a in answers]
    stores = []
    for capture in captures:
        size = store_size(capture)
        count = len(capture.token_ids)
        tokens = f"{capture.prompt_len} + {count - capture.prompt_len}"
        taps = sum(max(1, len(hook["layers"])) for hook in capture.attrs["hooks"].values())
        stores.append((capture.path.name, tokens, taps, format_bytes(size.raw), format_bytes(size.stored), size.ratio))
    kinds = []
    for hook, entry in captures[0].attrs["hooks"].items():
        kinds.append((hook, len(entry["layers"]) or "-", entry["width"], f"{errors[hook]:.1e}"))
    return "\n".join(
        [
            "\nA random model answers at random:",
            *said,
            "",
            format_table(("store", "prompt + generated", "hooks", "raw", "stored", "ratio"), stores),
            "",
            format_table(("hook", "layers", "width", "max error"), kinds),
            "",
        ]
    )
