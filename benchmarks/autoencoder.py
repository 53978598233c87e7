# SPDX-License-Identifier: Apache-2.0
"""Trains a small sparse autoencoder on captured rows, for benchmarks.fidelity. Written as SAELens writes one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LATENTS, ACTIVE = 512, 16
"""Latents, and how many of them a row has at most."""
STEPS, BATCH, RATE = 500, 256, 1e-3


def rows_of(stores: Sequence[Path], hook: str, layer: int) -> np.ndarray:
    """Rows of all stores but the first of each, whose token has nothing before it, float32 [n, width]."""
    from dmi_connector.captures.capture import open_capture

    found = []
    for store in stores:
        with open_capture(store, timeout=60) as capture:
            found.append(capture.numpy(hook, layer)[1:])
    return np.concatenate(found)


def train(rows: np.ndarray, folder: Path) -> dict[str, Any]:
    """Train relu((x - b_dec) W_enc + b_enc), of which the ACTIVE largest are kept, to add up to `rows` [n, width].

    Writes it into `folder`, in the space of `rows`, and returns what is to be said of it. Seeded, on the CPU.
    """
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    scale = rows.shape[1] ** 0.5 / float(np.linalg.norm(rows, axis=1).mean())
    data = torch.from_numpy(rows * np.float32(scale))
    directions = torch.nn.functional.normalize(torch.randn(LATENTS, rows.shape[1]), dim=1)
    made = {"W_enc": directions.T.clone(), "b_enc": torch.zeros(LATENTS), "W_dec": directions, "b_dec": data.mean(0)}
    parts = {name: torch.nn.Parameter(value) for name, value in made.items()}
    optimiser = torch.optim.Adam(parts.values(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=STEPS)
    variance, fired, left = (data - data.mean(0)).square().sum(1).mean(), torch.zeros(LATENTS), 0.0
    for step in range(STEPS):
        batch = data[torch.randint(0, len(data), (BATCH,))]
        latents = torch.relu((batch - parts["b_dec"]) @ parts["W_enc"] + parts["b_enc"])
        most = latents.topk(ACTIVE, dim=1)
        kept = torch.zeros_like(latents).scatter(1, most.indices, most.values)
        loss = (kept @ parts["W_dec"] + parts["b_dec"] - batch).square().sum(1).mean() / variance
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        with torch.no_grad():
            parts["W_dec"].div_(parts["W_dec"].norm(dim=1, keepdim=True))
            if step >= STEPS - 100:
                fired += (kept > 0).sum(0)
                left += loss.item() / 100
    found = {name: part.detach() for name, part in parts.items()}
    found |= {"W_enc": found["W_enc"] * scale, "b_dec": found["b_dec"] / scale, "W_dec": found["W_dec"] / scale}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in found.items()}, folder / "sae_weights.safetensors")
    settings = {"architecture": "topk", "k": ACTIVE, "apply_b_dec_to_input": True}
    (folder / "cfg.json").write_text(json.dumps(settings))
    about = {"latents": LATENTS, "k": ACTIVE, "rows": len(rows), "explained_in_training": round(1 - left, 4)}
    return {**about, "dead": int((fired == 0).sum())}
