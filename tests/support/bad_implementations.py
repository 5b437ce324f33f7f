"""Implementations that die, hang or misbehave: when built, when first called, or not before they are timed."""

import ctypes
import functools
import json
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import replace
from multiprocessing.connection import Connection

import torch

from swiglu_bench.cases.implementation import Step, implementation
from swiglu_bench.check.usage import SIZES
from swiglu_bench.worker.workbench import Workbench

CHECKED = 2
"""Calls of the checks that come before the timed loop."""


def used_as_a_model_does(problem):
    return problem.case.shape.hidden == SIZES["cpu"][0]


def bad(name, action=lambda: None, result=lambda output: output, after=0):
    """Right but for `action` before each call after the first few, and what `result` makes of the output."""

    @implementation(name, scopes=["glu"], description="bad")
    def build(problem):
        calls = []

        def forward(x):
            calls.append(1)
            if not after or (len(calls) > after and not used_as_a_model_does(problem)):
                action()
            gate, up = x @ problem.weights["w_gate"].T, x @ problem.weights["w_up"].T
            return result(torch.nn.functional.silu(gate) * up)

        return Step(forward)

    return build


def once(action):
    return functools.cache(lambda: action())


def spin():
    print("turning and turning")
    while True:
        time.sleep(0.01)


def raises(error):
    def action():
        raise error

    return action


# Deaths and hangs

sound = bad("sound")
exits = bad("exits", lambda: os._exit(3))
leaves = bad("leaves", lambda: sys.exit(4))
aborts = bad("aborts", os.abort)
faults = bad("faults", lambda: ctypes.string_at(0))
killed = bad("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
hangs = bad("hangs", spin)
exits_late = bad("exits-late", lambda: os._exit(5), after=CHECKED)
hangs_late = bad("hangs-late", spin, after=CHECKED)
alarmed = bad("alarmed", lambda: signal.setitimer(signal.ITIMER_REAL, 0.001), after=CHECKED)


@implementation("dies-when-built", scopes=["glu"], description="dies")
def dies_when_built(problem):
    print("building")
    os._exit(7)


# What it raises


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def out_of_memory():
    raise MemoryError("no room at all")


full = bad("full", out_of_memory)
unspeakable = bad("unspeakable", raises(Unspeakable()), after=CHECKED)


# What breaks a GPU for its process


def device_assert():
    torch.zeros(4, device="cuda")[torch.full((1,), 10**9, device="cuda")]


def keep_the_gpu_busy():
    torch.cuda._sleep(10**14)
    torch.cuda.synchronize()


asserts = bad("asserts", device_assert)
asserts_late = bad("asserts-late", device_assert, after=CHECKED)
busy = bad("busy", keep_the_gpu_busy)


# What it says to its parent


def replace_json():
    json.dumps = lambda *_, **__: "{}"


def rename_a_field():
    real = json.dumps
    json.dumps = lambda *given, **more: real(*given, **more).replace("queue_us", "queue_ms")


def tell_everybody(message):
    def action():
        for number in range(3, 64):
            try:
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    os.write(number, message)
            except OSError:
                pass

    return action


def claims(**figures):
    """Say something else in each sample."""

    def action():
        def changed(message, **more):
            if isinstance(message[1], dict) and "queue_us" in message[1]:
                message = message[0], message[1] | figures
            return real(message, **more)

        real = json.dumps
        json.dumps = changed

    return once(action)


def answer_twice():
    real = Connection.send_bytes

    def twice(self, message):
        real(self, message)
        real(self, message)

    Connection.send_bytes = twice


def answer_by_fork():
    real = Connection.send_bytes

    def by_fork(self, message):
        child = os.fork()
        if not child:
            real(self, message)
            os._exit(0)
        os.waitpid(child, 0)

    Connection.send_bytes = by_fork


forks = bad("forks", once(answer_by_fork), after=CHECKED)
no_time = bad("no-time", claims(ms=0.0), after=CHECKED)
long_time = bad("long-time", claims(queue_us=1e300), after=CHECKED)
no_number = bad("no-number", claims(ms=float("nan")), after=CHECKED)
says_it_twice = bad("says-it-twice", once(answer_twice), after=CHECKED)
no_json = bad("no-json", replace_json, after=CHECKED)
other_report = bad("other-report", rename_a_field, after=CHECKED)
babbles = bad("babbles", tell_everybody(struct.pack("!i", 7) + b"garbage"), after=CHECKED)
shouts = bad("shouts", tell_everybody(b"\xff" * 64), after=CHECKED)
begins_a_sentence = bad("begins-a-sentence", tell_everybody(struct.pack("!i", 2**20) + b"["), after=CHECKED)


# What it does to others, and to its own samples


def burning_threads():
    def burn():
        while True:
            zlib.crc32(bytes(2**22))  # without Python's lock

    for _ in range(16):
        threading.Thread(target=burn, daemon=True).start()


def burning_child():
    subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)


def edit_samples():
    real = Workbench._take

    def take(self, *given):
        report = real(self, *given)
        return replace(report, ms=report.ms / 50, host_us=report.host_us / 50)

    Workbench._take = take


editing = once(edit_samples)
burns_threads = bad("burns-threads", once(burning_threads))
burns_child = bad("burns-child", once(burning_child))
edits = bad("edits", lambda: (editing(), time.sleep(0.002)))
