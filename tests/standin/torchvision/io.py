# SPDX-License-Identifier: Apache-2.0
"""Names that transformers imports. Tests read no image files."""

from __future__ import annotations

import enum
from typing import Any, NoReturn


class ImageReadMode(enum.Enum):
    """How an image is decoded."""

    RGB = "RGB"


def decode_image(*_: Any, **__: Any) -> NoReturn:
    """Not implemented. Raises NotImplementedError."""
    raise NotImplementedError("tests/standin decodes no image files: hand over PIL images")
