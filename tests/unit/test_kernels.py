# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels against their torch twins, under Triton's interpreter on the CPU and as compiled on a GPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

HEAD = """
import json, sys, traceback
import numpy
import torch
from dmi_connector.engine import kernels
from dmi_connector.reduce import parse

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""

TAIL = """
for case in json.loads(sys.argv[1]):
    torch.manual_seed(0)
    try:
        check(*case)
        found = "equal"
    except Exception:
        found = traceback.format_exc()
    print(json.dumps(found), flush=True)
"""

WRITE = """
def check(dtype, widths, tokens):
    kernels.DECODE_TOKENS = 4  # so that these sizes run both the one-token and the two-token programs
    dt = getattr(torch, dtype)
    size = dt.itemsize
    offsets, at = [], 64
    for w in widths:
        offsets.append(at)
        at += -(-w * size // 16) * 16
    row_bytes = -(-at // 64) * 64
    slots = torch.randperm(40, device=device)[:tokens].long() + 1
    if tokens > 2:
        slots[1] = -1  # padding
    values = []
    for w in widths:
        wide = torch.randn(tokens, 2 * w + 5, device=device)
        wide = (wide * 100).to(dt)
        values.append(wide[:, 3 : 3 + w] if w % 2 else wide[:, :w].contiguous())  # strided and contiguous
    values[-1] = values[-1].t().contiguous().t()  # a compiler may lay one out so
    twin = torch.full((41, row_bytes), 7, dtype=torch.uint8, device=device)
    mine = twin.clone()
    writer = kernels.RowWriter(widths, dt, offsets)
    writer.in_torch(twin, slots, values)
    for _ in range(2):  # the second launch takes what the first compiled
        mine.fill_(7)
        writer.in_triton(mine, slots, values)
    twin[0] = mine[0] = 7  # the null block takes the twin's padding
    assert torch.equal(mine, twin), (dtype, widths, tokens)
    pieces, base = [], 0
    for w, offset in zip(widths, offsets):
        nbytes = w * size // 4 * 4
        if nbytes:
            pieces.append((offset, nbytes, base))
            base += nbytes
    pieces.append((0, 8, base))
    segments = torch.tensor(pieces, device=device)
    slots = slots.clamp_min(0)
    cut = tokens // 2  # two payloads in one launch, and a gap between them
    second = -(-(base + 8) * cut // 16) * 16 + 48
    host = slots.cpu().numpy()
    index = [kernels.gather_index(host[:cut], 0), kernels.gather_index(host[cut:], second)]
    index = torch.from_numpy(numpy.concatenate(index)).to(device)
    want = torch.full((second + (base + 8) * (tokens - cut),), 9, dtype=torch.uint8, device=device)
    got = want.clone()
    kernels.gather_rows_torch(twin, index, segments, want)
    kernels._gather_rows_triton(twin, index, segments, got)
    assert torch.equal(got, want), ("gather", dtype, widths, tokens)
    rows = twin[slots[cut:]]
    for source, nbytes, base in pieces:
        block = want[second + base * len(rows) :][: nbytes * len(rows)].view(len(rows), nbytes)
        assert torch.equal(block, rows[:, source : source + nbytes])
"""

CASES = [
    ("bfloat16", [64, 128, 32], 1),
    ("bfloat16", [2560, 33, 1024, 16, 8, 4, 2, 640, 1, 96, 12, 24, 48, 2049, 6], 5),
    ("float32", [1030, 7], 9),
    ("int32", [1, 1], 3),
    ("float16", [1500, 20], 17),
]


@functools.cache
def checked(script: str, cases: str) -> list[str]:
    """What a process of its own found for each case: "equal" or an error. Importing torch and Triton takes seconds."""
    pytest.importorskip("triton")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", HEAD + script + TAIL, cases]
    done = subprocess.run(command, env={**os.environ, **interpreted}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{len(c[1])}x{c[2]}")
def test_kernels_equal_their_twins(case: tuple[str, list[int], int]) -> None:
    found = checked(WRITE, json.dumps(CASES))
    assert found[CASES.index(case)] == "equal", found[CASES.index(case)]


REDUCE = """
def check(dtype, specs, widths, tokens):
    if device.type == "cuda" and dtype == "float16":
        dtype = "bfloat16"
    dt = getattr(torch, dtype)
    reductions = [parse(spec) for spec in specs]
    offsets, at, values = [], 64, []
    for w, r in zip(widths, reductions):
        offsets.append(at)
        stored = (w, dtype) if r is None else (r.stored_width(w, dtype), r.stored_dtype(dtype))
        nbytes = stored[0] * getattr(torch, stored[1]).itemsize
        at += -(-nbytes // 16) * 16
        wide = torch.randn(tokens, w + 5, device=device) * torch.logspace(-3, 3, tokens, device=device)[:, None]
        x = wide.to(dt)[:, 2 : 2 + w]
        x[0] = x[0].round()  # ties
        x[-1] = (x[-1].float() * torch.logspace(-6, 0, w, device=device)).to(dt)  # down to what underflows
        if tokens > 3:
            x[2], x[3] = 0, 2.5
        values.append(x)
        if r is not None:
            r.prepare(w, device, 0, 0)
    row_bytes = -(-at // 64) * 64
    slots = torch.randperm(40, device=device)[:tokens].long() + 1
    slots[0] = 60_000  # beyond 32 bits where it is multiplied
    slots[1] = -1  # padding
    twin = torch.full((60_001, row_bytes), 7, dtype=torch.uint8, device=device)
    mine = twin.clone()
    places, end = [None] * len(specs), 0  # every third goes to the buffer
    for i in range(1, len(specs), 3):
        places[i], end = end, end + -(-widths[i] * dt.itemsize // 16) * 16
    buffers = torch.full((2, tokens, end + 64), 5, dtype=torch.uint8, device=device)
    for buffer, kept in ((None, ()), (buffers, places)):
        into = (None, None) if buffer is None else buffer
        twin.fill_(7)
        writer = kernels.RowWriter(widths, dt, offsets, reductions, 0, kept)
        writer.in_torch(twin, slots, values, into[0])
        for _ in range(2):  # the second launch takes what the first compiled
            mine.fill_(7)
            writer.in_triton(mine, slots, values, into[1])
        twin[0] = mine[0] = 7
        for spec, offset, stop in zip(specs, offsets, [*offsets[1:], at]):
            a, b = mine[:, offset:stop], twin[:, offset:stop]
            off = a != b
            assert torch.equal(a, b), (spec, off.nonzero()[:9].tolist(), a[off][:9].tolist(), b[off][:9].tolist())
        assert torch.equal(mine, twin)
        for i, place in enumerate(kept):
            if place is not None:
                put = buffers[:, :, place : place + widths[i] * dt.itemsize].contiguous().view(dt)
                wanted = torch.where(slots[:, None] < 0, 0, values[i])  # padding may be there or not
                assert torch.equal(torch.where(slots[:, None] < 0, 0, put[0]), wanted)
                assert torch.equal(torch.where(slots[:, None] < 0, 0, put[1]), wanted)
"""

REDUCE_CASES = [
    ("float32", ["int8", "int8(affine)", "fp8", "round(4)", "none"], [64, 50, 33, 100, 7], 5),
    (
        "float16",
        ["int8", "topk(8)", "topk(5,exact,sample=9)", "round(3)", "none", "rp(16)"],
        [1030, 200, 77, 40, 20, 128],
        6,
    ),
    (
        "float32",
        ["topk(7)", "topk(3,exact,sample=5)", "topk(1)", "round(23)", "rp(9,sign)", "topk(2,sample=66)"],
        [100, 128, 5, 12, 64, 150],
        4,
    ),
    ("float32", ["int8(32)", "int8(16)", "int8(1024)", "int8(64)", "int8(128)"], [2050, 17, 1030, 64, 500], 5),
    ("float32", ["topk(8)", "topk(5,exact)"], [40_001, 65_537], 3),  # wider counters, wider indexes
    ("float16", ["int8"] * 13, [32 + i for i in range(13)], 2),
]


@pytest.mark.parametrize("case", REDUCE_CASES, ids=lambda c: f"{c[0]}-{'-'.join(c[1][:3])}")
def test_reducing_kernels_equal_their_twins(case: tuple[str, list[str], list[int], int]) -> None:
    found = checked(REDUCE, json.dumps(REDUCE_CASES))
    assert found[REDUCE_CASES.index(case)] == "equal", found[REDUCE_CASES.index(case)]


LAYERS = """
def fitted(k, width, layers):
    import tempfile
    from safetensors.numpy import save_file
    from dmi_connector.reduce.basis import METADATA
    rng, tensors = numpy.random.default_rng(0), {}
    for layer in layers:
        part = {"mean": rng.normal(size=width), "std": numpy.geomspace(2, 0.1, k), "variance": numpy.array([9.0])}
        part["components"] = numpy.linalg.qr(rng.normal(size=(width, k)))[0]
        tensors |= {f"mlp_out.{layer}.{name}": numpy.ascontiguousarray(a, "f4") for name, a in part.items()}
    about = {"mlp_out": {"width": width, "k": k, "layers": layers}}
    directory = tempfile.TemporaryDirectory()
    path = directory.name + "/basis.safetensors"
    save_file(tensors, path, metadata={METADATA: json.dumps({"hooks": about, "stores": 1})})
    reduction = parse(f"pca({path})").bind("mlp_out", layers, width, 1)
    for layer in layers:
        reduction.prepare(width, device, layer, 0)
    directory.cleanup()
    return reduction

def check(spec, width, count, tokens):
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    layers = [2 * i + 1 for i in range(count)]
    reduction = fitted(int(spec[4:-1]), width, layers) if spec.startswith("pca") else parse(spec)
    wide = torch.randn(tokens, 3 + (count + 1) * width, device=device).to(getattr(torch, dtype))
    wide[1] = wide[1].round()  # ties
    wide[2] = 0
    values = wide[:, 2 : 2 + count * width].unflatten(1, (count, width))
    if not spec.startswith("pca"):
        for layer in layers:
            reduction.prepare(width, device, layer, 0)
    step = -(-reduction.stored_width(width, dtype) // 16) * 16
    offsets = 64 + step * torch.randperm(count, device=device)
    slots = torch.randperm(40, device=device)[:tokens].long() + 1
    slots[0] = -1
    twin = torch.full((41, 64 + step * count), 7, dtype=torch.uint8, device=device)
    mine = twin.clone()
    kernels.reduce_layers_torch(twin, slots, values, offsets, reduction, layers)
    kernels._reduce_layers_triton(mine, slots, values, offsets, reduction, layers)
    twin[0] = mine[0] = 7
    if spec.startswith("rp"):  # many layers may be summed in another order than one
        assert (mine != twin).float().mean() < 0.01, (mine != twin).float().mean()
    else:
        assert torch.equal(mine, twin), (mine != twin).nonzero()[:10].tolist()
    assert len({row.tobytes() for row in mine.cpu().numpy()}) == tokens  # padding has none; untouched rows are alike
"""

LAYERS_CASES = [
    *((spec, 200, 4, 5) for spec in ("topk(8)", "topk(5,exact,sample=9)", "rp(16)", "int8", "pca(8)")),
    *((spec, 2050, 2, 4) for spec in ("topk(64)", "topk(7,exact,sample=9)", "topk(128)", "topk(129)")),
]


@pytest.mark.parametrize("case", LAYERS_CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_kernel_of_many_layers_equals_its_twin(case: tuple[str, int, int, int]) -> None:
    found = checked(LAYERS, json.dumps(LAYERS_CASES))
    assert found[LAYERS_CASES.index(case)] == "equal", found[LAYERS_CASES.index(case)]
