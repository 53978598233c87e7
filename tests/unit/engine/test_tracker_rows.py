# SPDX-License-Identifier: Apache-2.0
"""Rows, samples and losses in the tracker's messages, compared with the request and its blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from dmi_connector.engine.messages import Close, Report, Rows, StepMetadata
from dmi_connector.engine.scheduler.tracker import Tracker
from dmi_connector.store.format.completeness import Cause
from tests.trackerkit import FakeRequest, ask, dropped, generate, make_tracker

BLOCK, CHUNK = 16, 16
GROUP = 1
"""The cache group of the rows. Group 0 has other blocks."""


def block(number: int, life: int = 0) -> int:
    """Block `number` of a request. Blocks are not in order. life: how often the request was resumed."""
    return (7 * number + 3) % 64 + 100 * (1 + life)


def slot(position: int, life: int = 0) -> int:
    return block(position // BLOCK, life) * BLOCK + position % BLOCK


class Run:
    """One request in a simulated scheduler that allocates its blocks as needed.

    told: the message of each step. A step computes `tokens` tokens, and the last step samples a token. The tracker
    looks for chunks in each step.
    """

    def __init__(self, tracker: Tracker, request: FakeRequest) -> None:
        self.tracker, self.request = tracker, request
        self.told: list[StepMetadata] = []
        self.blocks = self.life = 0
        self.known = False
        tracker.slots.group = GROUP
        tracker.on_new_request(request)  # type: ignore[arg-type]

    def step(self, tokens: int, resumed: bool = False, ahead: int = 0) -> StepMetadata:
        """Compute tokens. ahead: number of further scheduled tokens whose ids are not known yet."""
        request = self.request
        need = -(-(request.num_computed_tokens + tokens + ahead) // BLOCK)
        had = 0 if resumed else self.blocks
        self.life += resumed
        fresh = ([1] * (need - had), [block(n, self.life) for n in range(had, need)])
        self.blocks = max(had, need)
        nothing: Any = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        new, of_running = [], nothing
        if self.known:
            of_running = SimpleNamespace(
                req_ids=[request.request_id],
                new_block_ids=[fresh if need > had else None],
                resumed_req_ids={request.request_id} if resumed else set(),
                num_computed_tokens=[request.num_computed_tokens],
            )
        else:
            new = [
                SimpleNamespace(
                    req_id=request.request_id, block_ids=fresh, num_computed_tokens=request.num_computed_tokens
                )
            ]
        self.known = True
        output: Any = SimpleNamespace(
            preempted_req_ids=None,
            num_scheduled_tokens={request.request_id: tokens + ahead},
            total_num_scheduled_tokens=tokens + ahead,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=of_running,
        )
        self.tracker._rows_since = 1 << 61
        self.told.append(self.tracker.step(output))
        request.num_computed_tokens += tokens + ahead
        if request.num_computed_tokens >= request.num_tokens:
            request.tokens.append(1000 + request.num_tokens)
        return self.told[-1]

    def preempt(self) -> None:
        """Preempt the request in a step of other requests. The result of its last step is not there yet."""
        last = self.request.tokens.pop()
        nothing: Any = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
        output: Any = SimpleNamespace(
            preempted_req_ids={self.request.request_id},
            num_scheduled_tokens={"another": 1},
            total_num_scheduled_tokens=1,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=nothing,
        )
        self.told.append(self.tracker.step(output))
        self.request.tokens.append(last)

    def next_turn(self, tokens: Sequence[int]) -> None:
        """Begin the next turn of a session. vLLM replaces the last sampled token by the tokens of its prompt."""
        request = self.request
        kept = request.num_tokens - 1
        request.tokens[kept:] = tokens
        request.num_prompt_tokens = len(request.tokens)
        self.tracker.tracked[request.request_id].kept = kept

    def finish(self) -> tuple[Close, dict[str, Any]]:
        keep, response = self.tracker.finish(
            self.request,
            [block(n, self.life) for n in range(self.blocks)],  # type: ignore[arg-type]
        )
        assert response is not None
        close = self.tracker.pending_closes[-1]
        assert keep == (close.keeps_blocks is not None)
        return close, response


def rows_of(run: Run, close: Close) -> list[Rows]:
    return [*itertools.chain.from_iterable(told.chunks for told in run.told), *close.rows]


def pairs(rows: list[Rows]) -> list[tuple[int, int]]:
    """(number in the store, slot) of each row."""
    return [(one.first + i, int(at)) for one in rows for i, at in enumerate(one.slots)]


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (5, None), (38, None), (5, 33), (0, 45), (41, 44), (41, None)])
@pytest.mark.parametrize("hooks", ["resid_pre", "resid_pre,logits"])
def test_each_wanted_row_and_sample_is_sent_once_from_its_own_slot(
    tmp_path: Path, hooks: str, start: int, stop: int | None, output: bool
) -> None:
    """A prompt of 40 tokens takes two steps. Then 20 tokens are generated. The last has no row."""
    tracker = make_tracker(tmp_path, hooks)
    run = Run(tracker, ask({"include_output_tokens": output, "dmi": {"tokens": [start, stop]}}, 40))
    run.step(21)
    run.step(19)
    for _ in range(19):
        run.step(1)
    assert run.request.num_tokens == 60 and run.request.num_computed_tokens == 59
    close, response = run.finish()
    end = min(59 if output else 40, 999 if stop is None else stop)
    end = max(end, min(start, end))
    wanted = range(start, end)
    assert pairs(rows_of(run, close)) == [(p - start, slot(p)) for p in wanted]
    assert [len(one.slots) for told in run.told for one in told.chunks] == [CHUNK] * (len(wanted) // CHUNK)
    assert close.length == len(wanted) and close.token_ids == run.request.tokens[start:end]
    first = max(39, start)
    sampled = range(first, end) if "logits" in hooks else range(0)
    found = [(s.index, s.position, s.slot) for told in run.told for s in told.samples]
    assert found == [(p - first, p, slot(p)) for p in sampled]
    assert close.samples == len(sampled) and close.losses == []
    assert "dmi_missing" not in response and tracker.handed == len(wanted) and tracker.tracked == {}


def test_a_chunk_is_sent_in_the_step_that_computes_its_last_row(tmp_path: Path) -> None:
    run = Run(make_tracker(tmp_path, "resid_pre"), ask({"include_output_tokens": True}, 30))
    assert run.step(15).chunks == []
    assert [one.first for one in run.step(15).chunks] == [0]
    run.step(1)
    assert [one.first for one in run.step(1).chunks] == [16]


def test_the_blocks_of_a_resumed_request_take_the_place_of_its_old_ones(tmp_path: Path) -> None:
    """Earlier rows are in earlier messages. Later rows are in the new blocks."""
    run = Run(make_tracker(tmp_path, "resid_pre"), ask({"include_output_tokens": True}, 40))
    run.step(20)
    run.request.num_computed_tokens = 0
    run.step(30, resumed=True)
    run.step(10)
    close, _ = run.finish()
    assert pairs(rows_of(run, close)) == [(p, slot(p, int(p >= 16))) for p in range(40)]


def test_rows_of_tokens_without_a_known_id_wait(tmp_path: Path) -> None:
    """With asynchronous scheduling, a step may compute a token after a stop."""
    run = Run(make_tracker(tmp_path, "resid_pre"), ask({"include_output_tokens": True}, 30))
    assert [one.first for one in run.step(30).chunks] == [0] and run.step(1, ahead=1).chunks == []
    run.request.tokens = run.request.tokens[:31]
    run.request.num_computed_tokens = 31
    close, _ = run.finish()
    assert close.length == 30 and [len(one.slots) for one in close.rows] == [14]


@pytest.mark.parametrize("pooling", [False, True])
def test_a_request_that_ends_before_its_first_token_has_a_row_for_each_of_its_prompt(
    tmp_path: Path, pooling: bool
) -> None:
    """A pooling request, which samples no token, and a request that is aborted in prefill."""
    request = ask({}, 20)
    if pooling:
        request.sampling_params = None
    run = Run(make_tracker(tmp_path, "resid_pre" if pooling else "resid_pre,logits"), request)
    run.step(20)
    request.tokens = request.tokens[:20]
    [opened] = run.told[0].opens
    assert opened.attrs["seed"] is None
    close, _ = run.finish()
    assert close.length == 20 and close.losses == [] and close.samples == (not pooling)


@pytest.mark.parametrize(
    ("start", "computed", "lost"), [(0, 25, [[25, 40]]), (10, 25, [[15, 30]]), (30, 25, [[0, 10]])]
)
def test_a_request_that_ends_inside_its_prompt_lacks_the_rest_of_it(
    tmp_path: Path, start: int, computed: int, lost: list[list[int]]
) -> None:
    """Rows are counted from the start of the store."""
    run = Run(make_tracker(tmp_path, "resid_pre"), ask({"dmi": {"tokens": [start, None]}}, 40))
    run.step(computed)
    close, response = run.finish()
    [loss] = close.losses
    assert (loss.cause, [list(rows) for rows in loss.rows]) == (Cause.ENDED_EARLY, lost)
    assert loss.facts == {"end": computed, "expected": 40, "finish": "length"}
    assert close.length == max(0, computed - start)
    assert response["dmi_missing"] == lost and response["dmi_reason"] == loss.words


@pytest.mark.parametrize(("start", "copied", "rows"), [(0, 32, 40), (5, 32, 35)])
def test_a_request_that_ends_while_it_is_preempted_says_so(tmp_path: Path, start: int, copied: int, rows: int) -> None:
    """Its rows were computed, and whole chunks were copied. The other rows were lost with its blocks. Rows are counted
    from `start`.
    """
    asked = ask({"include_output_tokens": True, "dmi": {"tokens": [start, None]}}, 40)
    run = Run(make_tracker(tmp_path, "resid_pre"), asked)
    run.step(40)
    run.request.num_computed_tokens = 0
    close, response = run.finish()
    [loss] = close.losses
    assert (loss.cause, loss.rows) == (Cause.PREEMPTED, ((copied, rows),)) and close.length == copied
    assert response["dmi_reason"].endswith(f"while it was preempted, with {copied} of {rows} rows copied")


def test_a_request_that_is_aborted_while_it_is_preempted_counts_as_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its computed tokens are those whose rows were copied. vLLM counts none."""
    monkeypatch.setattr(FakeRequest, "get_finished_reason", staticmethod(lambda: "abort"))
    run = Run(make_tracker(tmp_path, "resid_pre"), ask({"include_output_tokens": True}, 40))
    run.step(40)
    run.request.num_computed_tokens = 0
    [loss] = run.finish()[0].losses
    assert loss.cause.label == "aborted" and loss.words.endswith("after 32 of 40 tokens were computed")


def test_turns_of_a_session_go_on_numbering_their_rows_of_logits(tmp_path: Path) -> None:
    run = Run(make_tracker(tmp_path, "resid_pre,logits"), ask({"include_output_tokens": True}, 20))
    run.step(20)
    run.step(1)
    run.step(1)
    run.next_turn(range(10))
    run.step(10)
    run.step(1)
    found = [(one.index, one.position) for told in run.told for one in told.samples]
    assert found == [(0, 19), (1, 20), (2, 21), (3, 31), (4, 32)]
    close, _ = run.finish()
    assert close.samples == 5 and close.length == 33


def test_a_sample_after_the_stop_of_a_turn_gives_its_number_to_the_next(tmp_path: Path) -> None:
    """With asynchronous scheduling, the sample was requested before the stop was known."""
    run = Run(make_tracker(tmp_path, "resid_pre,logits"), ask({"include_output_tokens": True}, 20))
    for tokens in (20, 1, 1, 1):
        run.step(tokens)
    run.request.num_computed_tokens = 22
    del run.request.tokens[23:]
    run.next_turn(range(10))
    run.known = False
    run.step(4)
    run.request.num_computed_tokens = run.blocks = 0
    run.known = False  # the V2 runner gets a resumed request as a new one
    run.step(32)
    run.step(1)
    found = [(one.index, one.position) for told in run.told for one in told.samples]
    assert found == [(0, 19), (1, 20), (2, 21), (3, 22), (3, 31), (4, 32)]
    assert run.finish()[0].samples == 5


def test_a_turn_that_ends_after_a_preemption_keeps_its_samples(tmp_path: Path) -> None:
    """A step in flight ends the turn. vLLM 0.33 keeps its tokens, of which the prefix cache has fewer."""
    run = Run(make_tracker(tmp_path, "resid_pre,logits"), ask({"include_output_tokens": True}, 20))
    for tokens in (20, 1, 1):
        run.step(tokens)
    run.preempt()
    run.next_turn(range(10))
    run.request.num_computed_tokens, run.blocks = 16, 0
    run.known = False
    run.step(16)
    run.step(1)
    found = [(one.index, one.position) for told in run.told for one in told.samples]
    assert found == [(0, 19), (1, 20), (2, 21), (3, 31), (4, 32)]
    assert run.finish()[0].samples == 5


def test_a_session_that_loses_rows_of_its_last_turn_keeps_the_samples_of_earlier_ones(tmp_path: Path) -> None:
    """It ends while it is preempted, and has only its whole chunks. They end inside the prompt of the last turn."""
    run = Run(make_tracker(tmp_path, "resid_pre,logits"), ask({"include_output_tokens": True}, 20))
    for tokens in (20, 1, 1):
        run.step(tokens)
    run.next_turn(range(16))
    for tokens in (16, 1):
        run.step(tokens)
    run.request.num_computed_tokens = 0
    close, _ = run.finish()
    found = [(one.index, one.position) for told in run.told for one in told.samples]
    assert found == [(0, 19), (1, 20), (2, 21), (3, 37), (4, 38)]
    assert (close.length, close.samples) == (32, 3)


def test_a_window_after_the_first_turn_has_the_samples_in_it(tmp_path: Path) -> None:
    wanted = {"include_output_tokens": True, "dmi": {"tokens": [20, 32]}}
    run = Run(make_tracker(tmp_path, "resid_pre,logits"), ask(wanted, 20))
    run.step(20)
    run.step(1)
    run.next_turn(range(11))
    run.step(11)
    run.step(1)
    assert [(one.index, one.position) for told in run.told for one in told.samples] == [(0, 20), (1, 31)]
    assert run.finish()[0].samples == 2


def test_no_blocks_are_kept_where_clients_may_send_an_id_again(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path, "resid_pre")
    tracker.keep_rows, tracker.slots.keep = 15, False
    run = Run(tracker, ask({}, 20))
    run.step(20)
    assert run.finish()[0].keeps_blocks is None and not tracker.slots.held


def test_an_open_names_what_the_store_has_to_know(tmp_path: Path) -> None:
    request = ask({"include_output_tokens": True, "dmi": {"key": "k", "tokens": [3, None], "hooks": "resid_pre@1"}}, 40)
    request.sampling_params = SimpleNamespace(seed=11)
    request.lora_request = SimpleNamespace(lora_name="fine")
    run = Run(make_tracker(tmp_path), request)
    run.step(40)
    run.step(1)
    [opened] = [one for told in run.told for one in told.opens]
    assert opened.attrs == {"prompt_len": 40, "seed": 11, "include_output_tokens": True, "adapter": "fine"}
    assert (opened.capture, opened.request_id, opened.key, opened.start) == (1, "cmpl-1", "k", 3)
    assert opened.hooks == {"resid_pre": (1,)} and opened.most_rows == 40 + 64 - 3
    close, response = run.finish()
    assert response == {"dmi_store": opened.path, "dmi_request_id": "cmpl-1", "dmi_key": "k"}
    assert Path(opened.path).parent == tmp_path and Path(opened.path).name.startswith("k--cmpl-1-")
    assert (close.capture, close.attrs) == (1, {"finish_reason": "length"})


def test_a_sink_without_stores_names_none(tmp_path: Path) -> None:
    run = Run(make_tracker(tmp_path, sink="host"), ask({}, 20))
    run.step(20)
    assert run.finish()[1] == {"dmi_store": None, "dmi_request_id": "cmpl-1"}


@pytest.mark.parametrize(
    ("policy", "keep_rows", "gathered", "kept"),
    [
        ("block", 15, 0, True),
        ("block", 20, 0, False),
        ("block", 19, 0, True),
        ("block", 15, 5, False),
        ("block", 15, 4, True),
        ("drop", 15, 0, False),
    ],
)
def test_blocks_are_kept_while_more_rows_wait_than_staging_memory_takes(
    tmp_path: Path, policy: str, keep_rows: int, gathered: int, kept: bool
) -> None:
    tracker = make_tracker(tmp_path, "resid_pre", policy=policy)
    tracker.keep_rows = keep_rows
    run = Run(tracker, ask({}, 20))
    run.step(20)
    tracker.on_report(Report(gathered, {}))
    close, _ = run.finish()
    assert close.keeps_blocks == ("cmpl-1" if kept else None)
    step: Any = SimpleNamespace(
        preempted_req_ids=None,
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
        ),
    )
    assert tracker.step(step).closes == [close] and tracker.step(step).closes == []


def test_blocks_that_the_engine_has_freed_are_not_kept(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path, "resid_pre")
    tracker.keep_rows = 0
    run = Run(tracker, ask({}, 32))
    run.step(32)
    keep, _ = tracker.finish(run.request, [])  # type: ignore[arg-type]
    assert not keep and tracker.pending_closes[0].keeps_blocks is None


def test_a_response_lists_only_the_losses_of_its_request(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path, "resid_pre")
    runs = [Run(tracker, ask({}, 20, f"r{i}")) for i in range(2)]
    for run in runs:
        run.step(20)
    tracker.on_report(Report(20, {1: [dropped([16, 20])], 2: [dropped([0, 16])]}))
    tracker.on_report(Report(20, {1: [dropped([0, 4])]}))
    said = runs[0].finish()[1]
    assert (said["dmi_missing"], said["dmi_reason"]) == ([[0, 4], [16, 20]], "writing fell behind (policy drop)")
    assert [*tracker.lost] == [2] and runs[1].finish()[1]["dmi_missing"] == [[0, 16]]


def test_requests_without_a_capture_leave_no_trace(tmp_path: Path) -> None:
    """The requests are not captured, refused, and ended before the first token."""
    tracker = make_tracker(tmp_path, max_total_bytes=1 << 30)
    ended: list[tuple[str, bool]] = []
    tracker.quota.ended = lambda path, nothing: ended.append((Path(path).name[:4], nothing))  # type: ignore[method-assign]
    for name, kv in (("off", {"dmi": {"enabled": False}}), ("bad", {"dmi": 3}), ("soon", {}), ("well", {})):
        tracker.on_new_request(ask(kv, 20, name))  # type: ignore[arg-type]
    assert sorted(tracker.tracked) == ["soon", "well"] and list(tracker.refused) == ["bad"]
    finish: Any = tracker.finish
    assert finish(ask({}, 20, "off"), []) == (False, None)
    keep, response = finish(ask({}, 20, "bad"), [])
    assert not keep and list(response) == ["dmi_error"] and response["dmi_error"].startswith("dmi: 3 ")
    keep, response = finish(ask({}, 20, "soon"), [])
    assert not keep and "before its first token" in response["dmi_error"] and tracker.pending_closes == []
    assert tracker.take_counts() == {"refused": 1, "cancelled": 1} and tracker.take_counts() == {}
    assert tracker.refused == {} and list(tracker.tracked) == ["well"] and ended == [("soon", True)]
    run = Run(tracker, ask({}, 20, "next"))
    run.step(20)
    run.finish()
    assert ended[1:] == [("next", False)] and tracker.take_counts() == {}


def test_prompt_embeddings_and_options_that_break_are_refused(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path)

    class Embedded(FakeRequest):
        prompt_token_ids = None  # type: ignore[assignment]

    class Broken(dict[str, Any]):
        def get(self, *_: object) -> Any:
            raise RuntimeError("x" * 3000)

    tracker.on_new_request(Embedded("a", {}, [1], 1))  # type: ignore[arg-type]
    tracker.on_new_request(ask(Broken(), 20, "b"))  # type: ignore[arg-type]
    assert tracker.refused["a"].startswith("prompt_embeds: ") and tracker.tracked == {}
    assert tracker.refused["b"].startswith("kv_transfer_params: they could not be handled: RuntimeError: xxx")
    assert len(tracker.refused["b"]) == 2000
    tracker.refused.add("c", "\ud800")
    assert tracker.refused["c"] == "\\ud800"


def test_a_request_that_fails_after_its_admission_is_served_without_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count for the quota."""
    tracker, ended = make_tracker(tmp_path), []
    monkeypatch.setattr(tracker.scores, "arrived", lambda _tracked: 1 // 0)
    monkeypatch.setattr(tracker.quota, "ended", lambda path, nothing: ended.append((Path(path).parent, nothing)))
    request = ask({}, 20, "a")
    tracker.on_new_request(request)  # type: ignore[arg-type]
    assert tracker.refused["a"].startswith("kv_transfer_params: they could not be handled: ZeroDivisionError")
    assert tracker.tracked == {} and ended == [(tmp_path, True)]
    assert "dmi_error" in (tracker.finish(request, [])[1] or {}) and tracker.tracked == {}  # type: ignore[arg-type]


BEAM = {"max_tokens": 1, "detokenize": False, "seed": None}
"""Sampling parameters of one step of a beam search, as in vLLM's server."""


@pytest.mark.parametrize("end", ["", "-0a1b2c3d"])
def test_a_step_of_a_beam_is_not_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str) -> None:
    tracker = make_tracker(tmp_path)
    for number in range(2):
        request = ask(None, request_id=f"cmpl-7-0123456789abcdef-beam-{number}{end}")
        request.sampling_params = SimpleNamespace(**BEAM)
        tracker.on_new_request(request)
        assert tracker.finish(request, []) == (False, None)
    assert [record.getMessage() for record in caplog.records] == [
        "dmi: requests of beam search are not captured: vLLM does not hand on their options"
    ]


@pytest.mark.parametrize(
    ("request_id", "more"),
    [
        ("cmpl-beam-0", {}),
        ("cmpl-7-0123456789abcdef-beam-0-more", {}),
        ("cmpl-7-0123456789abcdef-beam-0", {"detokenize": True}),
        ("cmpl-7-0123456789abcdef-beam-0", {"max_tokens": 2}),
    ],
)
def test_a_request_that_looks_like_a_beam_is_captured(tmp_path: Path, request_id: str, more: dict[str, Any]) -> None:
    tracker = make_tracker(tmp_path)
    request = ask(None, request_id=request_id)
    request.sampling_params = SimpleNamespace(**BEAM | more)
    tracker.on_new_request(request)
    assert request_id in tracker.tracked


def test_refusals_are_logged_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("dmi_connector.engine.scheduler.refused_requests.time", SimpleNamespace(monotonic=lambda: now))
    tracker = make_tracker(tmp_path)
    for number in range(4):
        now += 20.0 * (number == 3)
        tracker.on_new_request(ask({"dmi": {"keyy": 1}}, request_id=f"r{number}"))
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("dmi: request 'r0' is not captured: \"dmi: option 'keyy' is unknown")
    assert last.startswith("dmi: request 'r3' is not captured") and last.endswith("(and 2 before it)")


def test_tokens_after_the_end_are_named_in_the_response(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path)
    request = ask({"include_output_tokens": True, "dmi": {"tokens": [100, 200]}})
    tracker.on_new_request(request)
    _, response = generate(tracker, request, 3)
    assert response is not None and "dmi_missing" not in response
    assert response["dmi_reason"].startswith("dmi.tokens: [100, 200] is after the last row")


@pytest.mark.parametrize(("generated", "says"), [(20, "is after the prompt"), (2, "is after the last row")])
def test_tokens_after_the_prompt_name_the_option_that_they_need(tmp_path: Path, generated: int, says: str) -> None:
    """Generated tokens have rows only with include_output_tokens."""
    tracker = make_tracker(tmp_path)
    request = ask({"dmi": {"tokens": [10, 15]}}, 8)
    tracker.on_new_request(request)
    _, response = generate(tracker, request, generated)
    assert response is not None and response["dmi_reason"].startswith(f"dmi.tokens: [10, 15] {says}")
    assert ("set include_output_tokens" in response["dmi_reason"]) == (generated == 20)


def test_the_owner_of_the_slots_is_told_which_stores_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, told = make_tracker(tmp_path, "resid_pre"), list[Any]()
    monkeypatch.setattr(tracker.slots, "stored", lambda path, whole: told.append((path, whole)), raising=True)
    tracker.on_report(Report(0, stored={"a.zarr": True, "b.zarr": False}))
    assert told == [("a.zarr", True), ("b.zarr", False)]
