"""Mode "auto": which way the next step runs, decided by the steps that have run.

    MEASURE   every block is recomputed: what that takes. Then one block of each kind runs plain
    RULE      as many blocks plain as fit (rule.py); corrected by the peak of each step
    TRYING    what is finer, in real steps: inputs that leave for more plain blocks, then the search's plan.
              Each is compared with steps of the way that is followed, and followed itself only where every
              one of its last steps was faster than every one of these
    SETTLED   nothing more is tried. A step that passes the total goes back to RULE
    REFUSED   recomputing every block passes the total

Where a model of the machine and a step disagree, the step is right. One invariant: numbers only, and what is
decided is a function of what all ranks tell, so ranks whose blocks communicate decide the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from math import inf
from statistics import median
from typing import NamedTuple

from tabulate import tabulate

from offload.policy.rule import Cost, Rule, Trace, fitting, moved_bytes, peak_bytes
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_FIRST_AIM, _AIM = 0.99, 0.998
"""Of the total: before a step under a way was measured, and since. One H200, a 7 B shape with LoRA within
12 GB: inputs that leave took 1.001 of it by the second one."""

_LOOKS = 3
"""Steps in which the rule is corrected upwards."""

_TURNS = (True, True, False, True, False)
"""Steps of a candidate and of the way that is followed. The candidate's first one, which allocates, does not
count."""

_HOPELESS = 1.02
"""Of the way that is followed: a plan is given up of which two steps, one after the other, take longer. One
alone may have given cached memory back to the device, and taken it anew."""

_TIMES_LATER = 2
"""Steps after which two of those are timed that ran as a plan has settled: a time is known one step later."""

_MOST_PLAN_STEPS = 14
"""Under plans, until the last one is judged."""

_WAYS = ((False, False), (False, True), (True, True))
"""Whether inputs leave, and whether each kind of block is for itself."""

_FORWARD = 0.3
"""Of a step's time."""

_MOST_WAITS = 6
"""Steps beside which the host's memory for inputs is pinned; with less they stay where they are."""

_ALIKE = 0.05
"""Difference of the bytes of two steps' inputs up to which these are compared."""

_ALIKE_BY_BYTE = 0.1
"""The same of a plan's, whose times are compared by the byte: the device sets their pace. Of 14 steps under
two plans of WV, five ran under the last one, and two of these had steps as long within 5% to be compared
with."""

_REMEMBERED = 64
"""Last steps of a way that are kept."""

_NOT_SLOWER = 1.01
"""Without a total: a plan that frees memory for so much of the time is followed."""


class State(Enum):
    MEASURE = "measured"
    RULE = "rule"
    TRYING = "trying"
    SETTLED = "settled"
    REFUSED = "refused"


_STATES = {
    State.MEASURE: "no rule yet: what a block takes is measured; meanwhile every block is recomputed, or "
    "moved whole if a recompute would give it other bits",
    State.RULE: "as many whole blocks run plain as fit, and the others are recomputed; still measured",
    State.TRYING: "as many whole blocks run plain as fit; what is finer is tried",
    State.SETTLED: "settled: as many whole blocks run plain as fit, and the others are recomputed",
    State.REFUSED: "device_total leaves no choice: every block is recomputed, and its input moved",
}


class Ended(NamedTuple):
    """A whole step. peak_bytes: active at most. input_bytes: of its blocks, the measure of its tokens.
    seconds_before: of the step before it, None where they are not known. plan_is_new, plan_is_final: where
    it followed a plan, whether for the first time, and whether no other one will be made. unused_bytes: of
    other kinds' shares, which a later step may take."""

    peak_bytes: int
    input_bytes: int
    seconds_before: float | None
    plan_is_new: bool = False
    plan_is_final: bool = False
    unused_bytes: int = 0


class Facts(NamedTuple):
    """Facts that one rank reports of a step. seconds_before, bytes_before: of the step before it, and of its
    inputs. fits: the rules that fit it: the last blocks plain, the best of each kind, and these
    while inputs leave. stay_fit: inputs may stay. may_move: the link has the time for those that leave.
    has_host: and the host the memory. is_shorter: than the measured one, so it says less of the rule."""

    seconds_before: float | None
    is_over: bool
    fits: tuple[Rule, ...] | None
    plan_is_new: bool = False
    plan_is_final: bool = False
    stay_fit: bool = True
    may_move: bool = True
    has_host: bool = False
    is_shorter: bool = False
    bytes_before: int = 0

    @staticmethod
    def common(told: Sequence[Facts]) -> Facts:
        """Facts of the slowest and the fullest rank."""
        seconds = [facts.seconds_before for facts in told if facts.seconds_before is not None]
        fits = [facts.fits for facts in told if facts.fits is not None]
        least = (
            tuple(min(own, key=lambda rule: rule.num_plain) for own in zip(*fits, strict=True))
            if len(fits) == len(told)
            else None
        )
        return Facts(
            max(seconds) if len(seconds) == len(told) else None,
            any(facts.is_over for facts in told),
            least,
            any(facts.plan_is_new for facts in told),
            all(facts.plan_is_final for facts in told),
            all(facts.stay_fit for facts in told),
            all(facts.may_move for facts in told),
            all(facts.has_host for facts in told),
            any(facts.is_shorter for facts in told),
            max(facts.bytes_before for facts in told),
        )


class Tried(NamedTuple):
    """A way that steps ran. steps: bytes of the inputs and seconds of each. peak_bytes: active at most, of
    its last step."""

    name: str
    steps: list[tuple[int, float]]
    peak_bytes: int = 0

    def seconds_like(self, nbytes: int, *, by_byte: bool = False) -> list[float]:
        """Seconds of the last three steps whose inputs have about so many bytes. by_byte: that they would
        take with just so many."""
        most = _ALIKE_BY_BYTE if by_byte else _ALIKE
        alike = [(own, seconds) for own, seconds in self.steps if abs(own - nbytes) <= most * nbytes][-3:]
        return [seconds * (nbytes / own if by_byte and own else 1.0) for own, seconds in alike]


class Ladder:
    """total_bytes: of device memory that a step may take; is_asked: by the user, else all of the device's.

    rule: that the next step runs, where it follows no plan. follows_plan: whether it does.
    trace: of the step that was measured, None before. costs: by kind of block, set once they are known.
    bytes_per_s: of the link to the host. has_no_room: it was refused, until steps are shorter. waits: nothing
    finer than the rule is tried, since the total is still being shared with other kinds. launches: the host's
    seconds of a block over the device's. pins: pins so many bytes for inputs, or a part of them beside this
    step, and returns whether they are there.
    """

    def __init__(self, total_bytes: int, *, is_asked: bool = True) -> None:
        self.total_bytes, self.is_asked = total_bytes, is_asked
        self.state = State.MEASURE
        self.rule = Rule()
        self.follows_plan = False
        self.trace: Trace | None = None
        self.costs: Mapping[Hashable, Cost] = {}
        self.bytes_per_s = inf
        self.launches = 0.0
        self.has_no_room = self.waits = False
        self.pins: Callable[[int], bool] = lambda nbytes: True
        self.tried: dict[str, Tried] = {}
        self._offset = 0.0  # of peaks, measured less what is calculated
        self._least_offset = -inf  # by steps that passed the total
        self._looks = 0
        self._queue: list[Rule] = []
        self._at = 0  # of `_WAYS`, that is followed
        self._rivals = [0, 1, 2]  # that are to be tried
        self._rival: tuple[int, Rule, Rule] | None = None  # that is tried, its rule, and the one followed
        self._waited = 0  # steps, for host memory
        self._has_tried_plan = False
        self._plan_steps = self._final_steps = 0  # the latter: since no other plan is to come
        self._plan_failed = False  # in the step that is ending
        self._before: tuple[str, int] | None = None  # the step before: its way, its inputs' bytes

    # -- what the caller asks --------------------------------------------------------------------------------
    @property
    def wants_plan(self) -> bool:
        """Predicate: a plan is to be searched for, and followed once it is ready."""
        is_free = not self._queue and self._rival is None and not self._rivals
        return self.state is State.TRYING and is_free and not self.follows_plan

    @property
    def ran_plan(self) -> bool:
        """Predicate: the step that has ended followed a plan."""
        return self._before is not None and self._before[0] == "plan"

    @property
    def keeps_all(self) -> bool:
        """Predicate: every block runs plain."""
        trace = self.trace
        return (
            trace is not None
            and not self.follows_plan
            and all(
                self.rule.is_plain(chunk, place)
                for chunk, kinds in trace.kinds.items()
                for place in range(len(kinds))
            )
        )

    def text(self) -> str:
        """Describe in words what is done now, and what was tried."""
        rows = [
            (tried.name, f"{seconds * 1e3:.1f}", f"{tried.peak_bytes / 1e9:.2f}")
            for name, tried in self.tried.items()
            if (seconds := self.seconds(name)) is not None
        ]
        if (plan := self.tried.get("plan")) is not None and not plan.steps:
            rows.append((plan.name, "", ""))
        state = _STATES[self.state]
        if self.state is State.SETTLED and self.keeps_all:
            state = "settled: all fits, so every block runs plain, without hooks, and report() counts no step"
        if not rows:
            return state
        columns = ("left", "right", "right")
        table = tabulate(rows, ("a step", "ms", "GB"), colalign=columns, disable_numparse=True)
        return f"{state}\n{table}"

    def seconds(self, name: str | None = None) -> float | None:
        """Median seconds of a step that ran this way, of those as long as the measured one where there are
        such; None where none is known. name: None for the way that is followed."""
        tried = self.tried.get(self._name if name is None else name)
        if tried is None or not tried.steps:
            return None
        like = 0 if self.trace is None else self.trace.input_bytes
        return median(tried.seconds_like(like) or [seconds for _, seconds in tried.steps[-3:]])

    def rule_for(self, factor: float, more_bytes: int = 0) -> Rule:
        """The rule of a forward with `factor` times as many tokens as the measured ones had, before which so
        many bytes more are on the device than before those."""
        trace, rule = self.trace, self.rule
        is_least = not rule.num_plain and rule.moves
        if trace is None or not self.costs or rule.only is not None or is_least:
            return rule
        if more_bytes <= self.free_bytes(factor):
            return rule
        aim = self._aim(factor) - more_bytes
        return self._within(aim, rule.moves, factor=factor)

    def _within(self, aim: float, moves: bool, by_kind: bool = True, factor: float = 1.0) -> Rule:
        """The rule for a calculated peak of so many bytes."""
        assert self.trace is not None
        rule = fitting(self.trace, self.costs, aim, moves=moves, by_kind=by_kind, factor=factor)
        is_over = not rule.num_plain and peak_bytes(self.trace, self.costs, rule, factor) > aim
        return rule._replace(moves=True) if is_over else rule  # the last resort is that inputs leave

    def free_bytes(self, factor: float = 1.0) -> float:
        """Bytes that may be on the device beside a step under the rule; below 0 where a longer one passes the
        total. What the aim leaves is for what differs between steps: a loss that is kept, a batch that came
        early."""
        assert self.trace is not None
        left = self._aim(factor) - peak_bytes(self.trace, self.costs, self.rule, factor)
        return left if factor > 1.0 else max(0.0, left) + (1.0 - _AIM) * self.total_bytes

    def _aim(self, factor: float) -> float:
        """Bytes for the calculated peak of such a forward. What was calculated too high for the measured
        length says nothing of a longer one."""
        offset = self._offset if factor <= 1.0 else max(0.0, self._offset) * factor
        return self.total_bytes * _AIM - offset

    def begin_again(self, more_bytes: int, first_bytes: int) -> None:
        """From the next step on other kinds take so many bytes more, or fewer: the rule is another one, and
        nothing was tried beside it. first_bytes: that they may take beside in their first step."""
        assert self.trace is not None
        self.trace.shift(more_bytes)
        self.state, self.follows_plan, self._looks = State.RULE, False, 0
        self.tried, self._queue, self._rivals, self._rival = {}, [], [0, 1, 2], None
        self._has_tried_plan, self._before, self._waited = False, None, 0
        self._offset = max(0.0, self._offset)
        aim = self.total_bytes * _FIRST_AIM - self._offset - first_bytes
        self.rule = self._within(aim, *_WAYS[self._at])
        self._at = 2 if self.rule.moves else self._at

    def recompute_s(self, more_bytes: int) -> float | None:
        """Seconds of recomputes where other kinds take so many bytes more than now; None where no rule fits:
        not the one that was measured, whatever others have taken less than was calculated."""
        assert self.trace is not None
        aim = self.total_bytes * _FIRST_AIM - more_bytes
        moves, by_kind = _WAYS[self._at]
        least = peak_bytes(self.trace, self.costs, Rule(moves=moves or self.trace.moves))
        if least > aim - max(0.0, self._offset):
            return None
        rule = fitting(self.trace, self.costs, aim - self._offset, moves=moves, by_kind=by_kind)
        return sum(
            self.costs[kind].again_s
            for chunk, kinds in self.trace.kinds.items()
            for place, kind in enumerate(kinds)
            if not rule.is_plain(chunk, place)
        )

    # -- steps -----------------------------------------------------------------------------------------------
    def facts(self, step: Ended) -> Facts:
        """Facts that this rank reports of a step that has ended."""
        fits, trace = None, self.trace
        is_over = step.peak_bytes > self.total_bytes
        if trace is not None and self.costs and (is_over or self.state is not State.SETTLED):
            measured = self.state is not State.MEASURE
            peak = step.peak_bytes + step.unused_bytes
            if step.peak_bytes and measured and not self._ran_plan:
                factor = step.input_bytes / max(1, trace.input_bytes)
                if abs(factor - 1.0) <= _ALIKE:
                    said = peak_bytes(trace, self.costs, self.rule_for(factor), factor)
                    if is_over and self._looks:  # once more: what fewer plain blocks take tells no more
                        self._least_offset = max(self._least_offset, peak - said)
                    self._offset = max(self._least_offset, peak - said)
                elif is_over:  # more microbatches, or fewer blocks: what of it is longer is not known
                    said = peak_bytes(trace, self.costs, self.rule)
                    self._least_offset = self._offset = max(self._offset, peak - said)
            aims = (_AIM if measured and at == self._at else _FIRST_AIM for at in range(len(_WAYS)))
            fits = tuple(
                fitting(
                    trace, self.costs, aim * self.total_bytes - self._offset, moves=moves, by_kind=by_kind
                )
                for aim, (moves, by_kind) in zip(aims, _WAYS, strict=True)
            )
        stays = trace is None or not trace.moves or not fits
        may_move, has_host = True, False
        if trace is not None and fits is not None:
            moved, most = moved_bytes(trace, self.costs, fits[2])
            rule_s = self.seconds()
            may_move = rule_s is None or moved / self.bytes_per_s <= _FORWARD * rule_s
            is_next = self.state is State.TRYING and self._rival is None and self._rivals[:1] == [2]
            has_host = is_next and may_move and self.pins(most)
        return Facts(
            step.seconds_before,
            is_over,
            fits,
            step.plan_is_new,
            step.plan_is_final,
            stays or self._takes(Rule(moves=False)) <= _FIRST_AIM * self.total_bytes,
            may_move,
            has_host,
            trace is not None and step.input_bytes < (1.0 - _ALIKE) * trace.input_bytes,
            0 if self._before is None else self._before[1],
        )

    @property
    def _ran_plan(self) -> bool:
        """Predicate: the step that is ending followed a plan."""
        return self.follows_plan or self._plan_failed

    def _takes(self, rule: Rule) -> float:
        assert self.trace is not None
        return peak_bytes(self.trace, self.costs, rule)

    def ended(self, step: Ended, facts: Facts) -> None:
        """A step has ended; decide how the next one runs. facts: of all ranks that decide together."""
        self._note_time(step, facts)
        ran_plan, self._plan_failed = self._ran_plan, False
        if self.state is State.MEASURE:
            if facts.fits is not None:
                self._at = 0 if facts.stay_fit else 2
                self.rule = facts.fits[self._at]
                self.state = State.RULE
        elif self.state is State.RULE:
            self._correct(facts)
        elif self.state is State.TRYING:
            self._try(facts)
        elif self.state is State.SETTLED and facts.is_over and not ran_plan:
            self.state, self._looks = State.RULE, _LOOKS
            self._correct(facts)

    def plan_begins(self) -> None:
        """A plan is followed from the next step on."""
        self.follows_plan, self._plan_steps, self._final_steps = True, 0, 0

    def no_plan(self) -> None:
        """There is none to try."""
        self._has_tried_plan = True
        if self.state is State.TRYING:
            self.state = State.SETTLED

    def plan_fails(self) -> None:
        """The plan that is followed had no room in the step that is ending."""
        if self.follows_plan:
            self._end_plan(follows=False)
            self._plan_failed = True

    def refuse(self) -> None:
        """A step that recomputes every block passes the total."""
        self.state, self.rule, self.follows_plan = State.REFUSED, Rule(), False

    @property
    def _name(self) -> str:
        return "plan" if self.follows_plan else name_of(self.rule)

    def _note_time(self, step: Ended, facts: Facts) -> None:
        if self._before is not None and facts.seconds_before is not None:
            name = self._before[0]
            if name in self.tried:
                steps = self.tried[name].steps
                steps.append((facts.bytes_before, facts.seconds_before))
                del steps[:-_REMEMBERED]
        name = "plan" if self._ran_plan else self._name
        self._before = name, step.input_bytes
        if facts.plan_is_new and name == "plan":  # of another plan
            self.tried.pop("plan", None)
        known = self.tried.get(name)
        self.tried[name] = Tried(name, [] if known is None else known.steps, step.peak_bytes)

    def _correct(self, facts: Facts) -> None:
        """The rule by the peak of the step that ran it."""
        self._looks += 1
        if facts.fits is None:
            return
        if facts.is_over and not self.rule.num_plain:  # the last resort is that inputs leave
            if self.rule.moves:
                self.refuse()
                return
            self._at = 2
        elif self._at == 2 and facts.stay_fit and facts.fits[2].num_plain <= facts.fits[0].num_plain:
            self._at = 0  # inputs leave for more plain blocks alone
        rule = facts.fits[self._at]
        if facts.is_over or (self._looks < _LOOKS and rule.num_plain != self.rule.num_plain):
            self.rule = rule
            return
        if self.waits or (self.keeps_all and facts.is_shorter):
            return
        self.state = State.SETTLED if self.keeps_all and self.is_asked else State.TRYING
        self._try(facts)

    def _try(self, facts: Facts) -> None:
        if self.state is not State.TRYING:
            return
        if self.follows_plan:
            self._judge_plan(facts)
        elif self._rival is not None:
            at, new, old = self._rival
            if facts.is_over and self.rule == new:  # what it spares is not there
                self._queue, self._rival, self.rule = [], None, old
            elif self._queue:
                self.rule = self._queue.pop(0)
            else:
                self._rival = None
                wins = self._wins(name_of(new), name_of(old))
                self._at, self.rule = (at, new) if wins else (self._at, old)
        elif self._rivals and facts.fits is not None:
            at = self._rivals[0]
            new = facts.fits[at]
            # inputs leave for more plain blocks alone, and where the link has the time
            may_move = new.num_plain > self.rule.num_plain and facts.may_move
            is_rival = at != self._at and new != self.rule and (facts.stay_fit if at < 2 else may_move)
            if is_rival and at == 2 and not facts.has_host:
                self._waited += 1
                if self._waited < _MOST_WAITS:
                    return
                logger.info("auto: the host has no pinned memory for inputs, which stay on the device")
                is_rival = False
            self._rivals.pop(0)
            if is_rival:
                self._rival = at, new, self.rule
                self._queue = [new if is_new else self.rule for is_new in _TURNS]
                self.rule = self._queue.pop(0)
            else:
                self._try(facts)
        elif self._has_tried_plan:
            self.state = State.SETTLED

    def _judge_plan(self, facts: Facts) -> None:
        self._plan_steps += 1
        self._final_steps = self._final_steps + 1 if facts.plan_is_final else 0
        is_final = self._final_steps > _TIMES_LATER
        over = self._over("plan", name_of(self.rule), median)[1:]  # in the first step the groups are new
        is_over = self._plan_steps >= _MOST_PLAN_STEPS
        if (is_final or is_over) and self._wins("plan", name_of(self.rule)):
            self._end_plan(follows=True)
        elif is_over or (len(over) > 1 and min(over[-2:]) >= (1.0 if is_final else _HOPELESS)):
            self._end_plan(follows=False)

    def _end_plan(self, *, follows: bool) -> None:
        self._has_tried_plan, self.follows_plan, self.state = True, follows, State.SETTLED

    def _wins(self, new: str, old: str) -> bool:
        """Return True if the last two steps of the new way were faster than two as long of the old one; of a
        plan for steps that vary, if most of all were."""
        is_plan = new == "plan"
        is_free = is_plan and not self.is_asked
        varies = is_plan and len({nbytes for nbytes, _ in self.tried[new].steps}) > 1
        over = self._over(new, old, median if is_free or varies else min)
        last = over if varies else over[-2:]
        if len(last) < 2:
            return False
        most = median(last) if is_free or varies else max(last)
        return most <= _NOT_SLOWER if is_free else most < 1.0

    def _over(self, new: str, old: str, of: Callable[[Sequence[float]], float]) -> list[float]:
        """Seconds of steps of the new way over the median, or the least, of the last two that were as long of
        the old one, or, for a plan, where that has not two, of other rules. A step without two such is left
        out."""
        found, tried, is_plan = [], self.tried, new == "plan"
        others = [tried[name] for name in tried if is_plan and name != new]
        for nbytes, seconds in tried[new].steps if new in tried else ():
            alike = tried[old].seconds_like(nbytes, by_byte=is_plan) if old in tried else []
            if len(alike) < 2:
                alike = [each for other in others for each in other.seconds_like(nbytes, by_byte=is_plan)]
            if len(alike) > 1:
                theirs = of(alike[-2:])
                found.append(seconds / theirs if theirs else inf)  # of a device without a clock
        return found


def name_of(rule: Rule) -> str:
    """In words, for explain()."""
    places = (f"{first}-{last}" if last > first else f"{first}" for first, last in _runs(rule))
    plain = f"{rule.num_plain} plain ({', '.join(places)})" if rule.num_plain else "all recomputed"
    return f"{plain}, inputs of the others leave" if rule.moves else plain


def _runs(rule: Rule) -> list[tuple[int, int]]:
    """Places of plain blocks that follow one another, of the first stage."""
    runs: list[tuple[int, int]] = []
    for place in sorted(next(iter(rule.plain.values()), ())):
        if runs and runs[-1][1] == place - 1:
            runs[-1] = runs[-1][0], place
        else:
            runs.append((place, place))
    return runs
