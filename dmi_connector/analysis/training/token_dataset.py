# SPDX-License-Identifier: Apache-2.0
"""A PyTorch data set: shuffled batches of the rows of hooks from many stores."""

from __future__ import annotations

from typing import Any

from dmi_connector.analysis.training.token_batches import TokenBatches
from dmi_connector.analysis.training.token_loader import TokenLoader


class TokenDataset(TokenBatches):
    """Shuffled batches of the rows of hooks in many stores.

    Loop over the data set, pass it to a `DataLoader` with batch_size=None, or use `loader`. With one hook, a batch is a
    tensor [batch_size, width]. With a list of hooks, a batch is a dict of such tensors by hook, and row i of each
    tensor is of the same token. Tensors have the stored dtype, or `dtype`. Reduced hooks are decoded to float32.

    captures: the result of `open_captures`, or a directory of stores. hooks: a hook such as "resid_pre@3" (hook@layer),
    "resid_final" or "blocks.3.attn.hook_z", or a list of hooks. "logits" cannot be combined with other hooks. A list
    may also name fields of `RowView.tokens`. The batch then has a tensor [batch_size] for each field, in the dtype of
    the field. The field `key` is a list.

    batch_size: rows per batch. seed: with the same seed and the same numbers of ranks and workers, batches are the
    same. shuffle: whether to draw chunks of rows from all stores at random, and to mix the rows of chunks that are read
    together; False keeps the order of the stores. buffer_tokens: approximate number of rows that are read together.

    epochs: number of epochs in one loop; None: a loop does not end. Each epoch has another order. A loop begins with
    the epoch after the last epoch of the loop before it, see `set_epoch`. Tokens that do not fill a batch are left out
    of the epoch.

    skip, phase, after, mask, last: the choice of rows of each store, see `Captures.rows`. dtype: dtype of the tensors.

    finite: what happens to rows with a NaN or an infinity, including infinities from the conversion to `dtype`. "skip"
    leaves these rows out, so that a batch has fewer rows. A batch without a finite row is left out. "keep" returns the
    rows. "fail" raises NotFinite. "skip" and "keep" warn (RuntimeWarning), and `not_finite` counts the rows.

    normalize: a normalisation of the rows, see `Normalization`. "mean_norm" and "whiten" are fitted on rows of this
    data set when it is created. A file of `save_normalization`, or `normalization` of another data set, is applied as
    it is. Normalised batches are float32, unless `dtype` is given.

    rank, world_size: those of this process; None: those of torch.distributed if it is initialised, otherwise 0 and 1.
    Ranks and workers read different tokens, and each returns the same number of batches.

    Memory: two buffers of about `buffer_tokens` rows of all hooks. A batch may be a view of a buffer. Clone the batches
    that you keep, because a view keeps its whole buffer in memory.

    Raises ValueError for hooks that cannot be batched, for TransformerLens' names of hooks whose reduction does not
    keep their values, and if the stores hold too few tokens. Raises KeyError for a hook or layer that the first store
    lacks. Other stores are opened when they are read, and raise KeyError then. `open_captures(..., hooks=hooks)` leaves
    stores without the hooks out. Raises NotFinite, a ValueError, if "skip" leaves no row of a batch and there are
    several ranks, because ranks need the same number of batches.
    """

    def loader(self, workers: int = 0, **options: Any) -> TokenLoader:
        """A loop in `workers` processes that can be resumed exactly. options: arguments of torch's `DataLoader`."""
        return TokenLoader(self, workers, options)
