# SPDX-License-Identifier: Apache-2.0
"""Trains tiny models on the documentation that comes with Python, for analyses of a model that is not random."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

_HELD_OUT = 200_000
"""Number of characters at the end of the text that are held out."""


def texts(flat: bool = True) -> tuple[str, str]:
    """(text to train on, held-out text): the documentation in Python's `pydoc_data`, in English.

    Each text has some hundred thousand characters. flat: replace each run of white space by one space. Otherwise small
    models learn little but white space.
    """
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    parts = (text[:-_HELD_OUT], text[-_HELD_OUT:])
    return (" ".join(parts[0].split()), " ".join(parts[1].split())) if flat else parts


def train(
    model: str | Path, text: str, steps: int = 350, batch: int = 8, tokens: int = 128, rate: float = 1e-2
) -> list[float]:
    """Train a model on the CPU, and replace its weights.

    model: directory that `make_model` wrote. Training starts from transformers' own initialisation. Each step takes
    `batch` random pieces of `tokens` tokens of `text`. rate: maximum learning rate of AdamW, with a one-cycle schedule.
    Sets torch's global seed to 0. Returns the loss of each step, in nats per token.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(text, verbose=False)["input_ids"])
    net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    optimiser = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - tokens, (batch,))
        pieces = torch.stack([ids[i : i + tokens] for i in starts])
        loss = net(pieces, labels=pieces).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(round(loss.item(), 4))
    net.save_pretrained(model)
    return losses
