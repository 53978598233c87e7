# SPDX-License-Identifier: Apache-2.0
"""Trains sparse autoencoders on stores with dictionary_learning and SAELens. Needs an environment of its own, as these
want other versions than vLLM:

    python3.11 -m venv DIR
    DIR/bin/pip install dictionary-learning sae-lens . && DIR/bin/python -m tests.trainers
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from dmi_connector import TokenDataset
from dmi_connector.layout import ArraySpec
from tests import storekit as kit

WIDTH, HIDDEN, STEPS, BATCH = 32, 64, 60, 256
SPEC = ArraySpec("resid_pre", "bfloat16", (0, 1), WIDTH)


def make_stores(folder: Path) -> None:
    """Stores of rows that are sums of few directions, which an autoencoder can learn."""
    stores, rng = kit.Store(8 << 20), np.random.default_rng(0)
    directions = rng.standard_normal((HIDDEN, WIDTH), dtype=np.float32)
    for i in range(20):
        weights = rng.random((2, 300, HIDDEN), dtype=np.float32) * (rng.random((2, 300, HIDDEN)) < 0.05)
        rows = np.ascontiguousarray(weights.astype(np.float32) @ directions)
        values = {"resid_pre": (rows.view("u4") >> 16).astype("u2")}
        stores.write(folder / f"{i}.zarr", [SPEC], 300, values=values, attrs={"num_layers": 2})
    assert stores.shutdown()


def with_dictionary_learning(folder: Path) -> None:
    """Its `trainSAE` takes the data set, and writes its config."""
    from dictionary_learning.dictionary import AutoEncoder
    from dictionary_learning.trainers.standard import StandardTrainer
    from dictionary_learning.training import trainSAE

    data = TokenDataset(folder, "resid_pre@1", BATCH, epochs=None, dtype=torch.float32)
    config = {
        **{"trainer": StandardTrainer, "dict_class": AutoEncoder, "activation_dim": WIDTH, "dict_size": HIDDEN},
        **{"lr": 1e-2, "device": "cpu", "steps": STEPS, "layer": 1, "lm_name": "tiny", "warmup_steps": 5},
        **{"sparsity_warmup_steps": None, "l1_penalty": 1e-3},
    }
    trainSAE(data, [config], STEPS, save_dir=str(folder / "dictionary"), device="cpu")
    assert '"resid_pre@1"' in (folder / "dictionary/trainer_0/config.json").read_text()
    trained = AutoEncoder.from_pretrained(folder / "dictionary/trainer_0/ae.pt")
    report("dictionary_learning", data, trained.decode(trained.encode(next(iter(data)))))


def with_sae_lens(folder: Path) -> None:
    """Its `SAETrainer` takes an iterator of batches."""
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    data = TokenDataset(folder, "resid_pre@1", BATCH, epochs=None, dtype=torch.float32)
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=WIDTH, d_sae=HIDDEN, l1_coefficient=1e-3))
    config = SAETrainerConfig(
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
        total_training_samples=STEPS * BATCH,
        device="cpu",
        autocast=False,
        lr=1e-2,
        lr_end=1e-3,
        lr_scheduler_name="constant",
        lr_warm_up_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        lr_decay_steps=0,
        n_restart_cycles=1,
        train_batch_size_samples=BATCH,
        dead_feature_window=1000,
        feature_sampling_window=1000,
        logger=LoggingConfig(log_to_wandb=False),
    )
    trained = SAETrainer(config, sae, iter(data)).fit()
    report("SAELens", data, trained(next(iter(data))))


def report(name: str, data: TokenDataset, rebuilt: torch.Tensor) -> None:
    """Print what part of a batch's variance is explained, which must be most of it."""
    batch = next(iter(data))
    assert isinstance(batch, torch.Tensor)
    explained = 1 - float(((batch - rebuilt.detach()) ** 2).sum() / ((batch - batch.mean(0)) ** 2).sum())
    print(f"{name}: {STEPS} steps of {BATCH} tokens explain {explained:.2f} of the variance")
    assert explained > 0.5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_stores(Path(folder))
        with_dictionary_learning(Path(folder))
        with_sae_lens(Path(folder))
