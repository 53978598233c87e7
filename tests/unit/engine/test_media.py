# SPDX-License-Identifier: Apache-2.0
"""Images of a request in the attributes of its store, and the headers of rows of multimodal models."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from vllm.multimodal.inputs import PlaceholderRange

from dmi_connector.engine.model.architectures import ARCHITECTURES
from dmi_connector.engine.model.coverage import Coverage
from dmi_connector.engine.scheduler.media import media_attributes
from dmi_connector.engine.taps import op
from dmi_connector.engine.taps.deferred import DeferredReductions
from dmi_connector.engine.taps.inputs import write_inputs
from dmi_connector.layout import RowField
from tests.tapkit import RowMemory
from tests.trackerkit import FakeRequest, ask, generate, make_tracker

ITEM = SimpleNamespace(modality="image", identifier="one", mm_position=PlaceholderRange(offset=3, length=4))
BROKEN = SimpleNamespace(
    modality="image",
    identifier="two",
    mm_position=PlaceholderRange(10, 6, torch.tensor([True, True, False, True, True, False])),
)
PLACES = [[[3, 7]], [[10, 12], [13, 15]]]


def with_images() -> FakeRequest:
    request = ask({"include_output_tokens": True})
    request.mm_features = [BROKEN, ITEM]
    return request


def test_a_store_lists_images_in_order_with_the_positions_of_their_embeddings(tmp_path: object) -> None:
    """A token between two rows of an image, such as a line break, is text."""
    tracker, request = make_tracker(tmp_path), with_images()
    tracker.on_new_request(request)  # type: ignore[arg-type]
    steps, _ = generate(tracker, request, 3)
    attrs = steps[0].opens[0].attrs
    assert [item["hash"] for item in attrs["media"]] == ["one", "two"]
    assert [item["positions"] for item in attrs["media"]] == PLACES
    assert "identities" not in attrs and "visual_layers" not in attrs


@pytest.mark.parametrize("first", [[], [ITEM]], ids=["text", "image"])
@pytest.mark.parametrize("later", [[], [BROKEN]], ids=["text", "image"])
def test_images_of_a_later_turn_are_reported_at_the_end(tmp_path: object, first: list[Any], later: list[Any]) -> None:
    """Without them, the rows of the later turn could not be checked."""
    tracker, request = make_tracker(tmp_path), ask({"include_output_tokens": True})
    request.mm_features = list(first)
    tracker.on_new_request(request)  # type: ignore[arg-type]
    finish = tracker.finish

    def turn(request: Any, blocks: list[int]) -> Any:
        request.mm_features += later
        request.num_prompt_tokens = 41
        return finish(request, blocks)

    tracker.finish = turn  # type: ignore[method-assign]
    steps, _ = generate(tracker, request, 1)
    opened, closed = steps[0].opens[0].attrs, tracker.pending_closes[-1].attrs
    assert len(opened.get("media", [])) == len(first)
    assert len(closed.get("media", [])) == (len(first) + 1 if later else 0)
    assert closed.get("last_prompt_len") == (41 if later else None)


def test_sums_are_not_promised_where_visual_features_are_added(tmp_path: object) -> None:
    context = replace(make_tracker(tmp_path).context, visual_layers=2)
    attrs = media_attributes(with_images(), context)  # type: ignore[arg-type]
    assert attrs["identities"] is False and attrs["visual_layers"] == 2
    assert media_attributes(ask({}), context) == {}  # type: ignore[arg-type]


def test_visual_layers_are_those_of_the_config_of_the_whole_model() -> None:
    config = SimpleNamespace(vision_config=SimpleNamespace(deepstack_visual_indexes=[5, 11, 17]))
    assert ARCHITECTURES["Qwen3VLForConditionalGeneration"].visual_layers(config) == 3
    assert ARCHITECTURES["Qwen3ForCausalLM"].visual_layers(config) == 0
    assert ARCHITECTURES["Gemma3ForConditionalGeneration"].visual_layers(SimpleNamespace(vision_config=None)) == 0


class Context:
    """A fake of vLLM's forward context."""


@pytest.mark.parametrize("planned", [[40, 41, 90, 91, 0], [40], None], ids=["batch", "stale", "profiling"])
def test_a_header_has_the_position_in_the_request_and_those_on_the_axes(
    planned: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first position is vLLM's own. A run without vLLM's metadata has no rows."""
    step = None if planned is None else SimpleNamespace(positions=torch.tensor(planned))
    rows, slots = torch.zeros(8, 128, dtype=torch.uint8), torch.tensor([3, 5, 1, -1])
    forward: Any = Context()
    forward.no_compile_layers = {"rows": RowMemory(rows, slots, step)}
    monkeypatch.setattr(op.forward_context, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(op.forward_context, "get_forward_context", lambda: forward)
    field = RowField("mrope_positions", 0, "int32", 3, 64)
    place = op.Place(0, 0, {}, DeferredReductions([], torch.device("cpu")), Coverage([field]))
    stand = torch.zeros(1, dtype=torch.int32)
    op.stand_for(stand, place)
    ids, axes = torch.tensor([7, 8, 9, 0]), torch.tensor([[5, 6, 7, 0], [15, 16, 17, 0], [25, 26, 27, 0]])
    torch.ops.dmi.tap_header(ids, axes, torch.zeros(1, dtype=torch.int32), stand, [0, 4, 64], "rows")
    words = rows.view(torch.int32)[[3, 5, 1]]
    at = planned[:3] if planned and len(planned) > 3 else [5, 6, 7]
    assert words[:, 0].tolist() == [7, 8, 9] and words[:, 1].tolist() == at
    assert words[:, 16:19].tolist() == [[5, 15, 25], [6, 16, 26], [7, 17, 27]]
    place.coverage.check(4)


def test_a_forward_that_got_no_token_ids_stops() -> None:
    """Its rows could not be told from those of another request."""
    arch = ARCHITECTURES["Qwen3VLForConditionalGeneration"]
    taps: Any = SimpleNamespace(context=SimpleNamespace(arch=arch, first_stage=True))
    message = "Qwen3VLForConditionalGeneration: the forward got no token ids, .*; turn off the feature"
    with pytest.raises(RuntimeError, match=message):
        write_inputs(taps, None, torch.arange(3), torch.zeros(3, 8))
