# SPDX-License-Identifier: Apache-2.0
"""Time that the taps of one step take, for 11 wide hooks of every layer of a model with Qwen3-4B's widths.

    python -m benchmarks.kernels --out results.json [--tokens 1,32,128,2048] [--layers 36] [--repeat 25]

Taps are measured with full rows and with several reductions. On a GPU, the kernels run in a CUDA graph, as in a decode
step. They are measured alone, and between the matrix products and norms of a model. On a CPU, equivalent torch code
runs, whose times do not predict times on a GPU.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks import common
from benchmarks.common import WIDTHS
from dmi_connector.engine.kernels.row_writer import RowWriter
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.layout import HEADER_BYTES, ROW_ALIGN, ROW_BYTES_ALIGN, RowField
from dmi_connector.reduce import parse

RULES = {
    "none": dict.fromkeys(WIDTHS, "none"),
    "int8": dict.fromkeys(WIDTHS, "int8"),
    "int8(32)": dict.fromkeys(WIDTHS, "int8(32)"),
    "fp8": dict.fromkeys(WIDTHS, "fp8"),
    "topk(64) of mlp_post": {"mlp_post": "topk(64)"},
    "rp(512) of resid_*": {"resid_pre": "rp(512)", "resid_mid": "rp(512)"},
    "mixed": {**dict.fromkeys(WIDTHS, "int8"), "resid_pre": "rp(512)", "resid_mid": "rp(512)", "mlp_post": "topk(64)"},
}


def timed(work: Callable[[], None], repeat: int) -> float:
    """Median microseconds that `work` takes: in a CUDA graph on a GPU, otherwise on the CPU."""
    work()
    if not torch.cuda.is_available():
        return thread_time(work, repeat)
    torch.cuda.synchronize()
    graph, begin_event, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeat + 3):
        begin_event.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin_event.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def fields_of(rule: dict[str, str], layers: int, device: torch.device) -> tuple[list[RowField], int]:
    """(fields of a row with the hooks of a rule, bytes of a row). rule: {hook: reduction}."""
    found, at = [], HEADER_BYTES
    for layer in range(layers):
        for hook, spec in rule.items():
            reduction = parse(spec)
            row_field = RowField(hook, layer, "bfloat16", WIDTHS[hook], at, reduction)
            if reduction is not None:
                reduction.prepare(WIDTHS[hook], device, layer, 0)
            found.append(row_field)
            at += -(-row_field.nbytes // ROW_ALIGN) * ROW_ALIGN
    return found, -(-at // ROW_BYTES_ALIGN) * ROW_BYTES_ALIGN


def measure(rule: dict[str, str], tokens: int, layers: int, repeat: int) -> dict[str, float]:
    """Microseconds of the taps of one step of `tokens` tokens. rule: {hook: reduction}.

    at_once_us: each layer is reduced by its own tap. thread_us: time of the thread to launch these taps. at_end_us: all
    layers are reduced at the end of the step. It is left out if taps do not defer reductions for this number of tokens.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = {h: torch.randn(tokens, WIDTHS[h], device=device).bfloat16() for h in rule}
    fields, row_bytes = fields_of(rule, layers, device)
    rows = torch.empty(tokens + 5, row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(tokens + 5, device=device)[:tokens]
    of_layers = [[f for f in fields if f.layer == layer] for layer in range(layers)]

    deferred = DeferredReductions(fields, device)

    def writers(later: bool) -> list[tuple[RowWriter, list[torch.Tensor]]]:
        found = []
        for layer, own in enumerate(of_layers):
            offsets = [f.offset for f in own]
            places = deferred.places(offsets) if later else ()
            reductions = [f.reduction for f in own]
            writer = RowWriter([f.width for f in own], torch.bfloat16, offsets, reductions, layer, places)
            found.append((writer, [values[f.hook] for f in own]))
        return found

    now, later = writers(False), writers(True)

    def taps_now() -> None:
        for write, own in now:
            write(rows, slots, own)

    def taps_later() -> None:
        for write, own in later:
            write(rows, slots, own, deferred.buffer)
        deferred.reduce(rows, slots, tokens)

    result = {"at_once_us": timed(taps_now, repeat), "thread_us": thread_time(taps_now, repeat)}
    if deferred.takes(tokens):
        result["at_end_us"] = timed(taps_later, repeat)
    return {name: round(us, 1) for name, us in result.items()}


def layer_of(x: torch.Tensor, weights: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Compute a layer without attention. Returns (its output, the values of its hooks in the order of WIDTHS)."""
    qkv, o, gate_up, down = weights
    ln1 = F.rms_norm(x, x.shape[1:])
    q, k, v = F.linear(ln1, qkv).split([4096, 1024, 1024], dim=1)
    values = [x, ln1, q, k, v, q.contiguous()]
    values += [F.linear(values[-1], o)]
    mid = x + values[-1]
    ln2 = F.rms_norm(mid, mid.shape[1:])
    gate, up = F.linear(ln2, gate_up).chunk(2, dim=1)
    values += [mid, ln2, F.silu(gate) * up]
    values += [F.linear(values[-1], down)]
    return mid + values[-1], values


def measure_in_model(tokens: int, layers: int, repeat: int) -> dict[str, float]:
    """Microseconds of the layers of a model without taps (`model_us`), and those that taps add (`taps_us`)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = ((6144, 2560), (2560, 4096), (2 * 9728, 2560), (2560, 9728))
    make = torch.randn if device.type == "cuda" else torch.zeros
    weights = [[make(s, dtype=torch.bfloat16, device=device) * 0.02 for s in shapes] for _ in range(layers)]
    fields, row_bytes = fields_of(RULES["none"], layers, device)
    rows = torch.empty(tokens + 5, row_bytes, dtype=torch.uint8, device=device)
    slots = torch.randperm(tokens + 5, device=device)[:tokens]
    start = torch.randn(tokens, WIDTHS["resid_pre"], device=device).bfloat16()
    of_layers = [[f for f in fields if f.layer == layer] for layer in range(layers)]

    def model(taps: bool) -> Callable[[], None]:
        writers = [RowWriter([f.width for f in own], torch.bfloat16, [f.offset for f in own]) for own in of_layers]

        def work() -> None:
            x = start
            for own, write in zip(weights, writers, strict=True):
                x, values = layer_of(x, own)
                if taps:
                    write(rows, slots, values)

        return work

    alone, with_taps = timed(model(False), repeat), timed(model(True), repeat)
    return {"model_us": round(alone, 1), "taps_us": round(with_taps - alone, 1)}


def thread_time(work: Callable[[], None], repeat: int) -> float:
    """Median microseconds that the thread takes to launch `work` without a CUDA graph, as in a prefill step."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return statistics.median(times)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    p = common.parser("benchmarks.kernels", __doc__)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--tokens", default="1,32,128,2048")
    p.add_argument("--layers", type=int, default=common.QWEN3_LAYERS)
    p.add_argument("--repeat", type=int, default=25)
    args = p.parse_args(argv)
    results: dict[str, Any] = {"header": common.header("benchmarks.kernels", argv), "model": {}, "rules": {}}
    for tokens in map(int, args.tokens.split(",")):
        results["model"][str(tokens)] = found = measure_in_model(tokens, args.layers, args.repeat)
        print(f"{tokens:6d} {'in a model':24s} {found}", flush=True)
        for name, rule in RULES.items():
            found = measure(rule, tokens, args.layers, args.repeat)
            results["rules"].setdefault(name, {})[str(tokens)] = found
            print(f"{tokens:6d} {name:24s} {found}", flush=True)
            common.save(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
