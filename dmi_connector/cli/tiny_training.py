# SPDX-License-Identifier: Apache-2.0
"""Trains tiny models on English that every Python has, for analyses that need a model which predicts something."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

_HELD_OUT = 200_000
"""Characters at the end of the text."""


def texts(flat: bool = True) -> tuple[str, str]:
    """(To train on, held out): the documentation that comes with Python, some hundred thousand characters each.

    flat: each run of blanks and line ends is one space. Small models learn little else where they are many.
    """
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    parts = (text[:-_HELD_OUT], text[-_HELD_OUT:])
    return (" ".join(parts[0].split()), " ".join(parts[1].split())) if flat else parts


def train(
    model: str | Path, text: str, steps: int = 350, batch: int = 8, tokens: int = 128, rate: float = 1e-2
) -> list[float]:
    """Train a model that `make_model` wrote, on the CPU, from transformers' own initialisation. Replaces its weights.

    A step takes `batch` pieces of `tokens` tokens of the text. rate: the largest learning rate of AdamW, whose schedule
    has one cycle. Sets torch's seed. Returns the loss of each step, in nats a token.
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
