"""Turns timed from outside: what a contender does for a sample has to be in that sample.

A turn begins when a contender is told the inputs, or in a backward the upstream gradient, and ends when its results lie
in the letterbox, where nobody changes them any more. Beside the call there are inputs to draw and results to copy,
which take as long in each process of the baseline. What takes longer in a contender's turns is work that its samples
leave out: done when inputs are laid out or results are read, in a pause, or by a clock of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from swiglu_bench.cases.cases import Mode
from swiglu_bench.check.inputs import new_draw
from swiglu_bench.measure.clock import Sample
from swiglu_bench.measure.rounds import Rounds
from swiglu_bench.measure.statistics import percentile
from swiglu_bench.worker.batches import SHARE, Unsettled, WrongTime
from swiglu_bench.worker.places import Contender, Court
from swiglu_bench.worker.round_judge import led_sample

UNSEEN_MS = {"cuda": 0.2, "cpu": 0.05}
"""What a turn may take longer than one of the baseline, beside that share of a call."""
LOOKS, WARMUPS, TURNS = 3, 2, 15
"""Further looks at one whose turns take longer, and the turns of each: one that finds nothing acquits it. A fault is
what all of them show by more than twice how far the baseline's own processes are apart."""


log = logging.getLogger(__name__)


class Turns:
    """The turns of one case's contenders."""

    def __init__(self, place: Court, mode: Mode, equals: Sequence[Contender], others: Sequence[Contender]) -> None:
        """`equals` are processes of the baseline."""
        self._place, self._mode = place, mode
        self._equals, self._others = equals, others

    def disagreements(self, rounds: Rounds) -> dict[str, Exception]:
        """What is wrong, by contender, after further looks; agreement is left out."""
        samples = {name: timing.samples for name, timing in rounds.timings.items()}
        failures: dict[str, Exception] = {}
        for one in self._others:
            excess_ms, apart_ms = self._excess_ms(one.name, samples)
            log.debug("%s: turns exceed what is allowed by %.3f ms", one.name, excess_ms)
            proven, looks = excess_ms > apart_ms, 0
            try:
                while excess_ms > 0 and looks < LOOKS:
                    looks += 1
                    excess_ms, apart_ms = self._excess_ms(one.name, self._look_again(one))
                    proven &= excess_ms > apart_ms
            except Exception as error:  # a contender may raise anything
                failures[one.name] = error
                continue
            if excess_ms > 0:
                what = f"its turns take {excess_ms:.3f} ms more than its samples and turns of the baseline explain"
                undecided = f"{what}, which the machine is too busy to prove"
                failures[one.name] = WrongTime(what) if proven else Unsettled(undecided)
        return failures

    def _excess_ms(self, name: str, samples: Mapping[str, Sequence[Sample]]) -> tuple[float, float]:
        """What a contender's turns take beyond what is allowed, and how far the baseline's processes are apart."""
        usual = [_beside_ms(samples[one.name]) for one in self._equals if samples[one.name]]
        if not usual or not samples[name]:
            return 0.0, 0.0
        claimed_ms = percentile([sample.ms for sample in samples[name]], 50)
        unseen_ms = UNSEEN_MS[self._place.settings.device.type] + SHARE * claimed_ms
        return _beside_ms(samples[name]) - percentile(usual, 50) - unseen_ms, 2 * (max(usual) - min(usual))

    def _look_again(self, suspect: Contender) -> dict[str, list[Sample]]:
        """Turns of a contender and of the baseline's processes, one after the other."""
        found: dict[str, list[Sample]] = {one.name: [] for one in (suspect, *self._equals)}
        leads = dict.fromkeys(found, 100.0)
        for number in range(WARMUPS + TURNS):
            for one in (suspect, *self._equals):
                sample, _ = led_sample(self._place, one, self._mode, new_draw(), leads[one.name])
                leads[one.name] = 1.2 * min(sample.queue_us, 1e4)
                if number >= WARMUPS:
                    found[one.name].append(sample)
        return found


def _beside_ms(samples: Sequence[Sample]) -> float:
    """What turns take beside their samples. Not sample by sample, or one that says the truth at times would hide it.

    Of the faster ones, for other programs only add; who makes half of its samples smaller shows in these, too.
    """
    return percentile([one.turn_ms for one in samples], 25) - percentile([one.ms for one in samples], 25)
