# SPDX-License-Identifier: Apache-2.0
"""Where the time of a step goes between an engine's process and its ranks.

With asynchronous scheduling vLLM has two steps under way. So the answer to step k lets the engine plan step k + 2,
while the GPU works on k + 1. Each rank notes when vLLM called it, when it launched the model's graph and when its
answer was on its way. Events of CUDA tell when the GPU began and ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

Notes = dict[str, list[Any]]
"""Of one rank: `execute`, `sample`: (begin, end) of calls; `launch`: of graphs; `answer`: (end, whether it has tokens);
`begin`, `graph`, `end`: of the GPU, before the graph, after it and after the sampler. Seconds of `time.perf_counter`.
"""


def worker_chain(worker: Any, start: bool) -> Notes:
    """Runs inside each worker: note the steps from the first call on, and return the notes at the second."""
    import torch
    from vllm.v1.executor.multiproc_executor import WorkerProc

    cuda, now = torch.cuda.is_available(), time.perf_counter
    if not start:
        for owner, name, original in reversed(worker.dmi_chain_undo):
            setattr(owner, name, original)
        found: Notes = worker.dmi_chain
        if cuda:
            torch.cuda.synchronize()
            for name in ("begin", "graph", "end"):
                base, began = worker.dmi_chain_base
                found[name] = [began + base.elapsed_time(event) / 1e3 for event in found[name]]
        return found
    notes: Notes = {name: [] for name in ("execute", "sample", "launch", "answer", "begin", "graph", "end")}
    worker.dmi_chain, worker.dmi_chain_undo = notes, []

    def mark() -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    if cuda:
        torch.cuda.synchronize()
        base = mark()
        torch.cuda.synchronize()
        worker.dmi_chain_base = base, now()

    def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        worker.dmi_chain_undo.append((owner, name, original))
        setattr(owner, name, make(original))

    def called(name: str, after: str = "") -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def timed(*args: Any, **named: Any) -> Any:
                begin, result = now(), original(*args, **named)
                if cuda and after:
                    notes[after].append(mark())
                notes[name].append((begin, now()))
                return result

            return timed

        return make

    def launched(original: Any) -> Any:
        def timed(*args: Any, **named: Any) -> Any:
            notes["launch"].append(now())
            notes["begin"].append(mark())
            result = original(*args, **named)
            notes["graph"].append(mark())
            return result

        return timed

    def answered(original: Any) -> Any:
        def timed(self: Any, output: Any) -> None:
            original(self, output)
            notes["answer"].append((now(), output is not None))

        return timed

    runner = worker.model_runner
    wrap(runner, "execute_model", called("execute"))
    wrap(runner, "sample_tokens", called("sample", "end"))
    if cuda:
        wrap(runner.cudagraph_manager, "run_fullgraph", launched)
    wrap(WorkerProc, "enqueue_output", answered)
    return {}


def summarise(ranks: list[Notes]) -> dict[str, Any]:
    """Medians in ms. Without a GPU: step, execute and sample alone.

    step: from one step's begin to the next one's. execute, sample: vLLM's calls, by rank; launch: from the begin of the
    first to the launch of the graph. gpu_graph, gpu_rest, gpu_waits: the model, the sampler, and until the next graph.
    answered: from the GPU's end until the answer is on its way. engine: from the last rank's answer to step k until the
    first rank begins step k + 2.
    """
    first, count = ranks[0], min(len(rank["execute"]) for rank in ranks)
    result: dict[str, Any] = {
        "steps": count,
        "step": _ms(b[0] - a[0] for a, b in zip(first["execute"], first["execute"][1:], strict=False)),
    }
    answers = []
    for rank in ranks:
        found: dict[str, float] = {}
        for name in ("execute", "sample"):
            found[name] = _ms(end - begin for begin, end in rank[name])
        ends = [end for end, tokens in rank["answer"] if tokens]
        if rank["end"] and len(ends) >= count:  # ranks whose answer nobody takes give none
            answers.append(ends)
        if rank["begin"] and len(rank["begin"]) == len(rank["execute"]):  # each step was a graph
            found["launch"] = _ms(at - begin for (begin, _), at in zip(rank["execute"], rank["launch"], strict=True))
            found["gpu_graph"] = _ms(b - a for a, b in zip(rank["begin"], rank["graph"], strict=True))
            found["gpu_rest"] = _ms(b - a for a, b in zip(rank["graph"], rank["end"], strict=False))
            found["gpu_waits"] = _ms(b - a for a, b in zip(rank["end"], rank["begin"][1:], strict=False))
            if len(ends) >= count:
                found["answered"] = _ms(b - a for a, b in zip(rank["end"], ends, strict=False))
        result.setdefault("ranks", []).append(found)
    if answers:
        last = [max(of) for of in zip(*answers, strict=False)]
        result["engine"] = _ms(begin - end for end, (begin, _) in zip(last, first["execute"][2:], strict=False))
    return result


def _ms(seconds: Iterable[float]) -> float:
    return round(1e3 * statistics.median(seconds), 3)
