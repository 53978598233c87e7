# SPDX-License-Identifier: Apache-2.0
"""`dmi demo`: a real vLLM engine serves a tiny random model, and its captures are compared with transformers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmi_connector.args import capture_args
from dmi_connector.store.reader import Capture, CaptureIncomplete, open_capture
from dmi_connector.store.verify import verify_store
from dmi_connector.tables import format_bytes, format_table, store_size
from dmi_connector.tiny import ENV, make_model

TOLERANCE = 1e-5
"""Largest difference from transformers that float32 rounding explains here."""

HOOKS = "vllm-full"
MARKER = ".dmi-demo"
PROMPTS = {
    "hello": "hello world, this is a small test",
    "france": "what is the capital of france?",
    "fox": "once upon a time there was a quick brown fox",
    "layers": "every layer adds something to the residual stream",
}
NEW_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    """What the engine said to one prompt, and where the capture of it goes."""

    key: str
    text: str
    store: str


def prepare_dir(directory: Path, keep: bool) -> Path:
    """Make the directory of the demo, without the stores of earlier demos unless `keep`.

    Raises ValueError for a directory with files in it that no demo made: nothing of those is ever removed.
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
    """A bar over the steps of the demo, whose clock goes on while a step blocks."""

    def __init__(self, steps: int) -> None:
        from tqdm import tqdm

        layout = "{l_bar}{bar:24}| step {n_fmt} of {total_fmt} [{elapsed}]"
        self.bar: Any = tqdm(total=steps, bar_format=layout, file=sys.stderr, dynamic_ncols=True)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Name a step while it runs."""
        self.bar.set_description_str(f"{what:<34}")
        done = threading.Event()
        thread = threading.Thread(target=self._tick, args=(done,), daemon=True)
        if sys.stderr.isatty():  # a log file needs one line a step, not one a second
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


def run_demo(directory: str | os.PathLike[str] = "demo", hooks: str = HOOKS, keep: bool = False) -> int:
    """Run the demo in `directory`; 0 when every store is whole, sound and agrees with transformers, else 1.

    Raises ValueError where vllm or transformers is missing, for a directory that is not the demo's own, and for a bad
    selection of hooks.
    """
    for package in ("vllm", "transformers", "tqdm"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"demo: {package} is not installed; install dmi_connector[vllm]")
    for name, value in ENV.items():
        os.environ.setdefault(name, value)
    began = time.monotonic()
    engine = capture_args(hooks=hooks, store_dir="captures")  # refuses bad options before anything is written
    root = prepare_dir(Path(directory), keep)
    engine = capture_args(hooks=hooks, store_dir=root / "captures")
    progress = Progress(6)
    try:
        with progress.step("writing a tiny random Qwen3"):
            model = make_model("qwen3", root / "model")
        answers = ask(model, engine, progress)
        with progress.step("opening and verifying the stores"):
            captures = [open_capture(answer.store, timeout=60) for answer in answers]
            problems = [problem for capture in captures for problem in verify_store(capture.path)]
        with progress.step("comparing with transformers"):
            errors = compare_all(captures, model)
        with progress.step("drawing residual norms"):
            picture = _draw(captures, root / "residual_norms.png")
    except (CaptureIncomplete, TimeoutError) as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    print(report(answers, captures, errors))
    worst = max(errors, key=lambda hook: errors[hook])
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    if errors[worst] > TOLERANCE:
        print(
            f"FAILED: {worst} is {errors[worst]:.1e} away from transformers, more than {TOLERANCE:g}",
            file=sys.stderr,
        )
    failed = bool(problems) or errors[worst] > TOLERANCE
    if not failed:
        print(f"All {len(errors)} hooks agree with transformers: max error {errors[worst]:.1e} ({worst}).")
    print(f"picture  {picture}" if picture else "picture  none: it needs matplotlib and the residual stream")
    print(f"look at  dmi info {captures[0].path}\ntime     {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


def ask(model: Path, engine: dict[str, dict[str, Any]], progress: Progress) -> list[Answer]:
    """Start an engine with capture, answer PROMPTS, stop it. The stores are written when it has stopped."""
    with progress.step("starting vLLM"):
        from vllm import LLM, SamplingParams

        llm = LLM(str(model), **engine, dtype="float32", enforce_eager=True, max_model_len=512)  # type: ignore[arg-type]
    try:
        with progress.step(f"answering {len(PROMPTS)} prompts"):
            sampling = [
                SamplingParams(
                    max_tokens=NEW_TOKENS,
                    temperature=0,
                    ignore_eos=True,
                    extra_args={"kv_transfer_params": {"include_output_tokens": True, "dmi": {"key": key}}},
                )
                for key in PROMPTS
            ]
            outputs = llm.generate(list(PROMPTS.values()), sampling, use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
    answers = []
    for key, output in zip(PROMPTS, outputs, strict=True):
        params: dict[str, Any] = output.kv_transfer_params or {}
        if "dmi_store" not in params:
            raise ValueError(
                f"demo: no capture of prompt {key!r}: {params.get('dmi_error', 'the engine gave no reason')}"
            )
        answers.append(Answer(key, output.outputs[0].text, params["dmi_store"]))
    return answers


def compare_all(captures: list[Capture], model: Path) -> dict[str, float]:
    """Largest absolute difference from transformers of every hook, over all captures."""
    from transformers.utils import logging

    from dmi_connector.oracle import Oracle, compare

    logging.disable_progress_bar()
    oracle = Oracle(model)
    errors: dict[str, float] = {}
    for capture in captures:
        for hook, error in compare(capture, oracle).items():
            errors[hook] = max(error, errors.get(hook, 0.0))
    return errors


def _draw(captures: list[Capture], out: Path) -> Path | None:
    if importlib.util.find_spec("matplotlib") is None or "resid_post" not in captures[0]:
        return None
    from dmi_connector.plot import draw_residual_norms

    return draw_residual_norms(captures, out)


def report(answers: list[Answer], captures: list[Capture], errors: dict[str, float]) -> str:
    """The answers, the table of stores and the table of hook kinds."""
    said = [f"{PROMPTS[a.key]!r} -> {a.text!r}" for a in answers]
    stores = []
    for capture in captures:
        size = store_size(capture)
        count = len(capture.token_ids)
        tokens = f"{capture.prompt_len} + {count - capture.prompt_len}"
        taps = sum(max(1, len(hook["layers"])) for hook in capture.attrs["hooks"].values())
        stores.append(
            (capture.path.name, tokens, taps, format_bytes(size.raw), format_bytes(size.stored), size.ratio)
        )
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
