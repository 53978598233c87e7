# SPDX-License-Identifier: Apache-2.0
"""A hidden-states backend of speculators, named `dmi`, which reads stores directly. No export is needed.

Importing this module registers the backend. speculators looks for backends before it parses its arguments, so run the
training of speculators through this module:

    python -m dmi_connector.analysis.training.speculators_backend --hidden-states-backend dmi --dmi-store-dir DIR ...
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

try:
    import torch
    from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
except ImportError as error:
    raise ImportError("speculators_backend: hs_connectors is not installed; install speculators") from error

from dmi_connector.analysis.export.numbering import NUMBERINGS, number_captures, order_is_no_row
from dmi_connector.analysis.export.progress import refuse_later_part
from dmi_connector.analysis.export.residual_stream import stream_rows
from dmi_connector.analysis.export.speculators import training_ids
from dmi_connector.args import capture_args
from dmi_connector.captures.capture import Capture, open_capture
from dmi_connector.captures.captures import open_captures
from dmi_connector.captures.finite import POLICIES, FiniteCheck, NotFinite
from dmi_connector.dtypes import as_torch

if TYPE_CHECKING:
    from speculators.train.recovery import SampleUnavailable

NAME = "dmi"
logger = logging.getLogger(__name__)


class StoreTransfer(HiddenStatesTransfer):  # type: ignore[misc, unused-ignore]
    """Reads hidden states from stores. speculators calls its methods.

    store_dir: a directory of stores. layers: auxiliary layer ids; None: all captured layers. number_by: how stores are
    numbered, see `number_captures`. finite: what happens to samples with a NaN or an infinity. "skip" leaves the
    samples out, and "keep" returns them. Both log a warning. "fail" raises NotFinite.
    """

    def __init__(
        self,
        store_dir: str,
        layers: Sequence[int] | None = None,
        number_by: str = "order",
        finite: str = "skip",
    ) -> None:
        self.finite = FiniteCheck(finite, "--dmi-finite")
        self.store_dir, self.layers, self.number_by = store_dir, layers, number_by
        self._stores: dict[int, Any] | None = None
        self._ids: list[int] | None = None  # layer ids of the first store

    def setup(self) -> None:
        """Read the index of the directory, and number its stores.

        Raises ValueError for stores of several models, and as `number_captures` does.
        """
        captures = open_captures(self.store_dir)
        captures.check_one_model()
        try:
            numbers = number_captures(captures, self.number_by)
        except ValueError as error:
            raise ValueError(_own_option(str(error).removeprefix("export: "))) from error
        if self.number_by == "order" and (warning := order_is_no_row(captures)) is not None:
            logger.warning("dmi: --dmi-number-by order of %s: %s", self.store_dir, _own_option(warning))
        self._stores = {n: info.store for n, info in zip(numbers, captures.infos, strict=True)}

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | SampleUnavailable | None:
        """`hidden_states` [tokens, layers, hidden], the last layer last, and `token_ids` int64 [tokens].

        Returns None if no store has the number `file_idx`, and SampleUnavailable if `finite` leaves the store out.
        Raises ValueError for a store that lacks a layer, has other layers than the first store that was read, or lacks
        the first tokens of its request.
        """
        if self._stores is None:
            self.setup()
        assert self._stores is not None
        store = self._stores.get(file_idx)
        if store is None:
            return None
        with open_capture(store, timeout=0) as capture:
            return self._tensors(capture)

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | SampleUnavailable:
        """The tensors of `get_cached` for a request that vLLM has just served.

        hs_transfer_params: `kv_transfer_params` of the response. Raises ValueError if the response names no store, and
        as `get_cached` does.
        """
        store = hs_transfer_params.get("dmi_store")
        if store is None:
            raise ValueError(f"the response names no store: {hs_transfer_params.get('dmi_error', hs_transfer_params)}")
        with open_capture(store) as capture:
            return self._tensors(capture)

    def _tensors(self, capture: Capture) -> dict[str, torch.Tensor] | SampleUnavailable:
        refuse_later_part(capture)
        ids = training_ids(capture, self.layers)
        self._ids = self._ids or ids
        if ids != self._ids:
            raise ValueError(f"{capture.path} has the layer ids {ids}, others have {self._ids}; give --dmi-layers")
        seen = len(self.finite.first)
        try:
            stream = self.finite.check(capture.path, stream_rows(capture, ids, slice(None)))
        except NotFinite as error:
            if self.finite.policy == "fail":
                raise
            from speculators.train.recovery import SampleUnavailable  # the training has imported this module already

            logger.warning("dmi: %s; sample left out, %d so far", error, len(self.finite.first))
            return SampleUnavailable(reason=str(error))
        if len(self.finite.first) > seen:
            logger.warning("dmi: %s, with values that are not finite, is kept; %d so far", capture.path, seen + 1)
        return {
            "hidden_states": as_torch(stream),
            "token_ids": torch.from_numpy(capture.token_ids.astype("i8")),
        }


def _own_option(text: str) -> str:
    """A message of `dmi export`, with the name that its option has here."""
    return text.replace("--number-by", "--dmi-number-by")


class StoreBackend(HiddenStatesBackend):  # type: ignore[misc, unused-ignore]
    """Adds our options to the parsers of speculators, and makes a `StoreTransfer` from them."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Add the options of training."""
        parser.add_argument("--dmi-store-dir", type=str, default=None, help="Directory of stores.")
        parser.add_argument("--dmi-layers", type=int, nargs="+", default=None, help="Auxiliary layer ids.")
        parser.add_argument("--dmi-number-by", choices=NUMBERINGS, default="order", help="As in dmi export.")
        parser.add_argument("--dmi-finite", choices=POLICIES, default="skip", help="Samples with a NaN or an infinity.")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Add the options of a capturing server."""
        parser.add_argument("--dmi-store-dir", type=str, default="captures", help="Directory of stores.")
        parser.add_argument("--dmi-hooks", type=str, default="hidden-states", help="As --hooks of dmi serve.")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:
        """Make a `StoreTransfer` from parsed options. Raises ValueError without a directory of stores."""
        if args.dmi_store_dir is None:
            raise ValueError("--dmi-store-dir is missing; give the directory of stores")
        return StoreTransfer(args.dmi_store_dir, args.dmi_layers, args.dmi_number_by, args.dmi_finite)

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """The `kv_transfer_config` of a capturing server, with `owner="target"`."""
        return capture_args(args.dmi_hooks, args.dmi_store_dir, owner="target")["kv_transfer_config"]


def main() -> None:
    """Run speculators' training with the backend."""
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    train(TrainConfig.resolve())


if __name__ == "__main__":
    # Import the module by its name instead of __main__, so that data loader workers can unpickle its classes.
    from dmi_connector.analysis.training import speculators_backend

    speculators_backend.main()
else:
    HiddenStatesBackend.register(NAME)(StoreBackend)
