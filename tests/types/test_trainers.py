# SPDX-License-Identifier: Apache-2.0
"""dictionary_learning and SAELens train sparse autoencoders on stores, which learn the rows: `make types`."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dmi_connector import TokenDataset
from dmi_connector.cli.main import main
from dmi_connector.layout import ArraySpec
from tests import snippets
from tests import storekit as kit

WIDTH, HIDDEN, STEPS, BATCH, CONTEXT = 32, 64, 60, 256, 64
SPEC = ArraySpec("resid_pre", "bfloat16", (0, 12), WIDTH)
HOOK = "blocks.12.hook_resid_pre"


def needs(package: str, types: str) -> pytest.MarkDecorator:
    """Skip if a package is not installed. A package that is installed but cannot be imported fails the test."""
    reason = f"{package} is not installed; run make types TYPES={types}"
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores whose rows are sums of few directions, which an autoencoder can learn."""
    folder, owner, rng = tmp_path_factory.mktemp("captures"), kit.Store(8 << 20), np.random.default_rng(0)
    directions = rng.standard_normal((HIDDEN, WIDTH), dtype=np.float32)
    for i in range(20):
        weights = rng.random((2, 300, HIDDEN), dtype=np.float32) * (rng.random((2, 300, HIDDEN)) < 0.05)
        rows = np.ascontiguousarray(weights.astype(np.float32) @ directions)
        values = {"resid_pre": (rows.view("u4") >> 16).astype("u2")}
        owner.write(folder / f"{i}.zarr", [SPEC], 300, values=values, attrs={"num_layers": 13})
    assert owner.shutdown()
    return folder


@pytest.fixture
def data(stores: Path) -> TokenDataset:
    """Endless batches, used with both libraries as in docs/READING.md."""
    torch.manual_seed(0)
    return TokenDataset(stores, "resid_pre@12", BATCH, epochs=None, dtype=torch.float32)


def explained(data: TokenDataset, sae: torch.nn.Module) -> float:
    """The share of a batch's variance that an autoencoder explains."""
    batch = next(iter(data))
    assert isinstance(batch, torch.Tensor)
    rebuilt = sae(batch)
    return 1 - float(((batch - rebuilt.detach()) ** 2).sum() / ((batch - batch.mean(0)) ** 2).sum())


@needs("dictionary_learning", "dictionary-learning")
def test_dictionary_learning_trains_on_the_data_set(data: TokenDataset, tmp_path: Path) -> None:
    from dictionary_learning.dictionary import AutoEncoder
    from dictionary_learning.trainers.standard import StandardTrainer
    from dictionary_learning.training import trainSAE

    config = {
        **{"trainer": StandardTrainer, "dict_class": AutoEncoder, "activation_dim": WIDTH, "dict_size": HIDDEN},
        **{"lr": 1e-2, "device": "cpu", "steps": STEPS, "layer": 1, "lm_name": "tiny", "warmup_steps": 5},
        **{"sparsity_warmup_steps": None, "l1_penalty": 1e-3, "seed": 0},
    }
    trainSAE(data, [config], STEPS, save_dir=str(tmp_path), device="cpu")
    saved = tmp_path / "trainer_0"
    assert "resid_pre@12" in json.dumps(json.loads((saved / "config.json").read_text())["buffer"])
    trained = AutoEncoder.from_pretrained(saved / "ae.pt")
    assert explained(data, trained) > 0.5 > explained(data, AutoEncoder(WIDTH, HIDDEN))


@needs("dictionary_learning", "dictionary-learning")
def test_the_page_trains_with_dictionary_learning(data: TokenDataset, stores: Path, tmp_path: Path) -> None:
    from dictionary_learning.trainers.top_k import AutoEncoderTopK

    given = {"captures": str(stores), "k": 8, "width": WIDTH, "steps": 100, "model": "tiny", "device": "cpu"}
    snippets.run("dictionary_learning", {**given, "folder": str(tmp_path)})
    trained = AutoEncoderTopK.from_pretrained(tmp_path / "trainer_0/ae.pt", k=8)
    assert explained(data, trained) > 0.5 > explained(data, AutoEncoderTopK(WIDTH, 16 * WIDTH, 8))


def sae_lens_parts(batch: int) -> dict[str, Any]:
    """SAELens' trainer settings for this batch size, and an untrained autoencoder."""
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
    from sae_lens.config import LoggingConfig, SAETrainerConfig

    config = SAETrainerConfig(
        n_checkpoints=0,
        checkpoint_path=None,
        save_final_checkpoint=False,
        total_training_samples=STEPS * batch,
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
        train_batch_size_samples=batch,
        dead_feature_window=1000,
        feature_sampling_window=1000,
        logger=LoggingConfig(log_to_wandb=False),
    )
    sae = StandardTrainingSAEConfig(d_in=WIDTH, d_sae=HIDDEN, l1_coefficient=1e-3)
    return {"config": config, "sae": StandardTrainingSAE(sae)}


@needs("sae_lens", "sae-lens")
def test_saelens_trains_on_the_data_set(data: TokenDataset, stores: Path) -> None:
    parts = sae_lens_parts(4096)
    before = explained(data, parts["sae"])
    left = snippets.run("SAELens without a copy", {"captures": str(stores), **parts})
    assert explained(data, left["trained"]) > 0.5 > before


@needs("sae_lens", "sae-lens")
def test_saelens_trains_on_the_exported_activations(data: TokenDataset, stores: Path, tmp_path: Path) -> None:
    import datasets
    import sae_lens
    from sae_lens.training.activations_store import ActivationsStore
    from sae_lens.training.sae_trainer import SAETrainer

    flags = ["--to", "saelens", "--hook", "resid_pre@12", "--context-size", str(CONTEXT)]
    assert main(["export", str(stores), *flags, "-o", str(tmp_path)]) == 0
    config = sae_lens.LanguageModelSAERunnerConfig(
        sae=sae_lens.StandardTrainingSAEConfig(d_in=WIDTH, d_sae=HIDDEN, l1_coefficient=1e-3),
        dataset_path="none",
        hook_name=HOOK,
        context_size=CONTEXT,
        use_cached_activations=True,
        cached_activations_path=str(tmp_path),
        training_tokens=STEPS * BATCH,
        store_batch_size_prompts=8,
        train_batch_size_tokens=BATCH,
        n_batches_in_buffer=4,
        device="cpu",
        logger=sae_lens.LoggingConfig(log_to_wandb=False),
    )
    # SAELens opens a data set of texts even if it is not used
    texts = datasets.Dataset.from_list([{"tokens": [0] * CONTEXT}])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SAELens warns that the texts are short and that epochs repeat
        source = ActivationsStore.from_config(None, config, override_dataset=texts)
        parts = sae_lens_parts(BATCH)
        before = explained(data, parts["sae"])
        trained = SAETrainer(parts["config"], parts["sae"], source).fit()
    assert explained(data, trained) > 0.5 > before
