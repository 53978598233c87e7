# SPDX-License-Identifier: Apache-2.0
"""What bfloat16 alone changes: small random models of each family in transformers, in bfloat16 against float32.

    python -m benchmarks.rounding [--archs qwen3,gpt_oss]

The limits of `benchmarks.check_gpu` come from its result. Each row of logits is of one token of a random prompt. It
counts the rows whose cosine is below LEAST_COSINE_OF_ARCH, and those that would give another greedy token. Of these it
records the largest gap of the two tokens (`same_tokens.gap`). In models with experts it does both once more for the
rows that have the same experts in every layer. Takes some minutes on two cores.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.check_gpu import LEAST_COSINE_OF_ARCH, LENGTHS, sizes_of
from benchmarks.same_tokens import gap

MODULE = "benchmarks.rounding"
GENERATED = 48
"""Tokens behind each prompt, as in check_gpu."""


def rows_of(arch: str, lengths: Sequence[int]) -> Iterator[tuple[float, float, bool | None]]:
    """(cosine, gap, whether all experts are the same) of each row of logits. The last is None without experts."""
    import torch

    from dmi_connector.analysis.oracle.transformers_oracle import Oracle
    from dmi_connector.cli.tiny_models import make_model

    with tempfile.TemporaryDirectory() as folder:
        make_model(arch, folder, dtype="bfloat16", **sizes_of(arch))
        exact, rounded = Oracle(folder, torch.float32), Oracle(folder, torch.bfloat16)
    rng = np.random.default_rng(1)
    for length in lengths:
        ids = rng.integers(10, 500, length + GENERATED).tolist()
        want, got = exact.run(ids), rounded.run(ids)
        experts = None
        if "topk_ids" in want:
            experts = (np.sort(got["topk_ids"], -1) == np.sort(want["topk_ids"], -1)).all((0, 2))
        for number, (a, b) in enumerate(zip(got["logits"], want["logits"], strict=True)):
            cosine = float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))
            yield cosine, gap(a, int(a.argmax()), int(b.argmax())), None if experts is None else bool(experts[number])


def measure(arch: str, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """The figures of one family."""
    rows = list(rows_of(arch, lengths))

    def figures(some: list[tuple[float, float, bool | None]]) -> dict[str, Any]:
        return {
            "rows": len(some),
            "rows_below": sum(cosine < LEAST_COSINE_OF_ARCH for cosine, _, _ in some),
            "other_tokens": sum(tie > 0 for _, tie, _ in some),
            "largest_tie": max(tie for _, tie, _ in some),
        }

    found = figures(rows)
    return found if rows[0][2] is None else {**found, "same_experts": figures([row for row in rows if row[2]])}


def main(argv: list[str] | None = None) -> int:
    from dmi_connector.cli.tiny_models import ARCHS, FAMILIES

    argv = sys.argv[1:] if argv is None else argv
    p = common.parser(MODULE, __doc__)
    p.add_argument("--out", default="benchmarks/results/cpu-rounding.json")
    p.add_argument("--archs", default=",".join((*ARCHS, *FAMILIES)), help="of dmi_connector.cli.tiny_models")
    p.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="of the prompts")
    args = p.parse_args(argv)
    results: dict[str, Any] = {"header": common.header(MODULE, argv), "models": {}}
    for arch in args.archs.split(","):
        results["models"][arch] = measure(arch, [int(length) for length in args.lengths.split(",")])
        print(arch, results["models"][arch], flush=True)
        common.save(args.out, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
