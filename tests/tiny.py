# SPDX-License-Identifier: Apache-2.0
"""The tiny models of `dmi_connector.tiny`, which the demo uses too, under the name tests import them by."""

from __future__ import annotations

from dmi_connector.tiny import ARCHS, BOS, CHAT_TEMPLATE, ENV, EOS, PAD, VOCAB, make_model, make_tokenizer

__all__ = ["ARCHS", "BOS", "CHAT_TEMPLATE", "ENV", "EOS", "PAD", "VOCAB", "make_model", "make_tokenizer"]
