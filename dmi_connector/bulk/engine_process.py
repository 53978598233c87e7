# SPDX-License-Identifier: Apache-2.0
"""A process with one engine. `engines.py`, or on a Ray cluster `engine_worker.py`, starts it and exchanges messages.

Standard input: {"start": ...} first, then {"position", "key", "prompt"} for each prompt. At the end of the input, the
process finishes its prompts and exits. Standard output: {"ready": process id, "max_num_seqs"}, {"refused": position,
"why"}, {"ended": position, ...}, {"failed": why}, {"bye": 0}.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Iterator

from dmi_connector.engine.offline.lifetime import end_forks_with_this, end_with_parent
from dmi_connector.store.write.finish.upload import check_upload
from dmi_connector.store.write.messages import READ_BYTES, Decoder, Message, pack, write_all

_MOST_PER_STEP = 64
"""Maximum number of prompts to add between two steps. Each must be tokenized, and the engine waits meanwhile."""


class Inbox:
    """Messages from the file descriptor `fd`. ended: whether the end of the input was reached."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = Decoder()
        self._messages: list[Message] = []
        self.ended = False

    def take(self, most: int, wait: bool) -> list[Message]:
        """Up to `most` messages. wait: block until there is a message or the end of the input."""
        while not self.ended and len(self._messages) < most:
            blocks = wait and not self._messages
            if not select.select([self._fd], [], [], None if blocks else 0)[0]:
                break
            data = os.read(self._fd, READ_BYTES)
            self.ended = not data
            self._messages += self._decoder.feed(data)
        taken, self._messages = self._messages[:most], self._messages[most:]
        return taken

    @property
    def over(self) -> bool:
        """Whether the input has ended and all messages were taken."""
        return self.ended and not self._messages


def serve(inbox: Inbox, start: Message) -> Iterator[Message]:
    """Run an engine until it has finished all prompts of the input. Yields the output messages.

    start: the settings, a result of `RunSettings.engine_message`. Raises OptionError if uploads are configured and a
    test upload fails. Raises as `EngineFeed` does.
    """
    if url := start["capture"].get("upload"):
        check_upload(url)
    from dmi_connector.engine.offline.feed import EngineFeed, PromptRefused

    capture = {**start["capture"], "store_dir": start["store_dir"]}
    feed = EngineFeed(start["model"], capture, start["flags"], start["sampling"], start["max_tokens"])
    yield {"ready": os.getpid(), "max_num_seqs": feed.max_num_seqs}
    while not inbox.over or feed.busy:
        for message in inbox.take(_MOST_PER_STEP, wait=not feed.busy):
            try:
                feed.add(str(message["position"]), message["key"], message["prompt"])
            except PromptRefused as error:
                yield {"refused": message["position"], "why": " ".join(str(error).split())}
        if feed.busy:
            for one in feed.step():
                answer = {"prompt_tokens": one.prompt, "generated_tokens": one.generated, "finish_reason": one.finish}
                yield {"ended": int(one.name), "store": one.store, "error": one.error, **answer}
    feed.shutdown()
    yield {"bye": 0}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the process. Returns the exit status 0. An error is sent as "failed", and raised."""
    parser = argparse.ArgumentParser(prog="dmi-engine", description="An engine of dmi run, which starts this process.")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent, with which it ends")
    parser.add_argument("--log", required=True, help="file to which the output of the engine is appended")
    args = parser.parse_args(argv)
    end_with_parent(args.parent)
    end_forks_with_this()
    # Ctrl-C signals the whole process group. This process leaves the group, to finish the prompts in flight.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.dup(1)
    log = os.open(args.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    for number in (1, 2):
        os.dup2(log, number)
    inbox = Inbox(os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)

    def reply(message: Message) -> None:
        write_all(answers, pack(message))

    first = inbox.take(1, wait=True)
    if not first:
        return 0
    try:
        for message in serve(inbox, first[0]["start"]):
            reply(message)
    except Exception as error:
        reply({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:2000]})
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
