# SPDX-License-Identifier: Apache-2.0
"""A torch data set of tokens: shuffled batches of the rows of one or several hooks from many stores."""

from __future__ import annotations

from typing import Any

from dmi_connector.analysis.training.token_batches import TokenBatches
from dmi_connector.analysis.training.token_loader import TokenLoader


class TokenDataset(TokenBatches):
    """Batches of rows of hooks in many stores. Give it to a `DataLoader` with batch_size=None, or loop over it.

    With one hook a batch is a tensor [batch_size, width], with a list of hooks a dict of them, in which row i of each
    is of the same token. Tensors have the stored dtype, or `dtype`; reduced hooks are decoded to float32.

    captures: from `open_captures`, or a directory. hooks: such as "resid_pre@3" (hook@layer), "resid_final" or
    "blocks.3.attn.hook_z"; "logits" alone. In a list also fields of `RowView.tokens`, which come beside the rows: one
    value for each in tensors of the field's dtype, keys as a list.

    Order: chunks of tokens are drawn from all stores at random; those of `buffer_tokens` are read together, and their
    tokens mixed. The same seed gives the same batches; it depends on the numbers of ranks and workers. Each epoch has
    another order, and so has each loop: it begins with the epoch after those of the loop before, see `set_epoch`.
    Tokens that do not fill a batch are left out of that epoch. shuffle=False: the order of the stores.

    epochs: how often one loop gives all tokens; None: without end. skip, phase, after, mask, last: which rows of each
    store there are, see `Captures.rows`. finite: what happens to rows with a NaN or an infinity, also one that only
    `dtype` makes: "skip" leaves them out, so that a batch has fewer rows, and a batch of such rows alone does not come;
    "keep" gives them; "fail" raises NotFinite. The first two warn (RuntimeWarning), and `not_finite` counts them.
    normalize: "mean_norm", "whiten", a file of `save_normalization`, or `normalization` of another data set. The first
    two are fitted on rows of this one when it is made. Batches are float32 then, unless `dtype` is given. See
    `Normalization`.
    rank, world_size: of this process; by default those of torch.distributed, if that is initialised. Ranks and workers
    read different tokens, and give equally many batches.

    Memory: two buffers of `buffer_tokens` rows of all hooks. A batch is a part of such a buffer: clone what you keep.

    Raises ValueError for hooks that cannot be batched, for names of TransformerLens whose hook was stored as other
    values, and when the stores hold too few tokens; NotFinite, a ValueError, also where "skip" leaves nothing of a
    batch while other ranks wait for it; KeyError for a hook or layer that the first store did not capture. Other stores
    are opened when they are read. One that did not capture it raises KeyError then: `open_captures(..., hooks=hooks)`
    leaves such stores out.
    """

    def loader(self, workers: int = 0, **options: Any) -> TokenLoader:
        """A loader with `workers` processes, and with exact resume. options: for torch's DataLoader."""
        return TokenLoader(self, workers, options)
