"""Ranks that are lost: each one counts, all others watch it count, and within a minute without they end.

A process that dies is noticed by torchrun at once, which ends the others and, with --max-restarts, starts all again.
One that only stands still is not: it was stopped, its machine was cut off, or a disk does not answer. The others then
wait for it inside an exchange of tensors. The timeout of that has to be long, since a rank may well take ten minutes to
compile, or to write a checkpoint, while the others wait for it with good reason. But a process that is busy with any of
this still has threads that run. So a thread of each rank adds to a number in the store of the process group every few
seconds, and looks at the numbers of the others. Where the store is gone with torchrun, or out of reach, it ends, too.

This file knows nothing of devices, models or training.
"""

import atexit
import contextlib
import os
import sys
import threading
import time

BEAT, PATIENCE = 5.0, 45.0  # seconds between two beats, and without any from a rank until it is lost


def watch_ranks(store, rank: int, world_size: int, beat: float = BEAT, patience: float = PATIENCE) -> None:
    """Start the thread. Where a rank is lost, or torchrun, this process says so and ends with exit code 1."""
    store = store.clone()  # a connection of its own: whoever waits for a key on the other one keeps it busy
    heard = dict.fromkeys(range(world_size), (0, time.monotonic()))  # of each rank: its count, and since when
    stop = threading.Event()

    def listen() -> None:
        store.add(f"beat {rank}", 1)
        for other in heard:
            count = store.add(f"beat {other}", 0)
            if count != heard[other][0]:
                heard[other] = (count, time.monotonic())

    failures = 0

    def ask() -> None:
        nonlocal failures
        try:
            listen()
            failures = 0
        except Exception:  # at the end of a run the store may go a moment before this process
            failures += 1

    def work() -> None:
        while not stop.wait(beat):
            began = time.monotonic()
            asking = threading.Thread(target=ask, name="heartbeat, asking", daemon=True)
            asking.start()
            asking.join(patience)  # where a cable was cut, TCP would wait for the answer a quarter of an hour
            asking.join(beat)  # once more: perhaps it was this process that stood still
            if failures > 1 or asking.is_alive():
                return end(rank, "torchrun has ended, or its node cannot be reached")
            lost = [other for other, (_, since) in heard.items() if time.monotonic() - since > patience]
            if lost and time.monotonic() - began < beat:  # else it is this process that stood still
                return end(rank, f"rank {lost[0]} has not been heard of for {patience:.0f} seconds, and is lost")

    thread = threading.Thread(target=work, name="heartbeat", daemon=True)
    thread.start()
    atexit.register(lambda: (stop.set(), thread.join(beat)))


def end(rank: int, problem: str) -> None:
    who = f"rank {rank}: " if rank else ""
    with contextlib.suppress(OSError, ValueError):  # whoever read this may be gone as well
        print(f"error: {who}{problem}; the same command with --resume goes on", file=sys.stderr, flush=True)
    os._exit(1)  # the main thread is inside an exchange, where nothing can be raised
