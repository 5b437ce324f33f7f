"""Implementations that end their process, or never return: at import, when built, when first called or when timed."""

import ctypes
import os
import signal
import sys
import time

import torch

from swiglu_bench.spec.implementation import Step, implementation

TIMED = 5
"""Calls that a forward in a check and the admission to a measurement do not reach."""


def spin():
    print("turning and turning")
    while True:
        time.sleep(0.01)


def device_assert():
    torch.zeros(4, device="cuda")[torch.full((1,), 10**9, device="cuda")]


def keep_the_gpu_busy():
    torch.cuda._sleep(10**14)
    torch.cuda.synchronize()


def out_of_memory():
    raise MemoryError("no room at all")


def deadly(name, action, after=0):
    @implementation(name, scopes=["glu"], description="dies")
    def build(problem):
        calls = []

        def forward(x):
            calls.append(1)
            if len(calls) > after:
                action()
            gate, up = x @ problem.weights["w_gate"].T, x @ problem.weights["w_up"].T
            return torch.nn.functional.silu(gate) * up

        return Step(forward)

    return build


sound = deadly("sound", lambda: None, after=10**9)
exits = deadly("exits", lambda: os._exit(3))
leaves = deadly("leaves", lambda: sys.exit(4))
aborts = deadly("aborts", os.abort)
faults = deadly("faults", lambda: ctypes.string_at(0))
killed = deadly("killed", lambda: os.kill(os.getpid(), signal.SIGKILL))
hangs = deadly("hangs", spin)
full = deadly("full", out_of_memory)
exits_late = deadly("exits-late", lambda: os._exit(5), TIMED)
hangs_late = deadly("hangs-late", spin, TIMED)
asserts = deadly("asserts", device_assert)
asserts_late = deadly("asserts-late", device_assert, TIMED)
busy = deadly("busy", keep_the_gpu_busy)
escapes = deadly("../../escapes", lambda: os._exit(6))


@implementation("dies-when-built", scopes=["glu"], description="dies")
def dies_when_built(problem):
    print("building")
    os._exit(7)
