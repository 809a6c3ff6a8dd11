"""Toy models and plans over integers, without JAX.

A toy piece computes with integers modulo a prime, so that any value used in a wrong place changes the
result with near certainty. `sequential` runs a model piece by piece from the names of its values;
`interpreter.interpret` runs a program from its tables as the executor does. They share the toy pieces only.
"""

import functools
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from jaxpipe.planning.plan import Action, Plan
from jaxpipe.planning.schedules import SCHEDULES
from jaxpipe.program.program import Program, lower
from jaxpipe.program.spec import PhaseSpec, PieceSpec

PRIME = 2**31 - 1

KINDS = {
    # kind: reads, writes, has parameters
    "embed": ((), ("x",), True),
    "block": (("x",), ("x",), True),
    "pre": (("x",), ("q", "k"), True),
    "core": (("q", "k"), ("o",), False),
    "post": (("x", "o"), ("x",), True),
    "side": (("x",), ("s",), True),
    "use": (("s", "x"), ("x",), True),
    "rotate": (("x",), ("x",), False),
    "head": (("x",), (), True),
}
CLASSES = {"x": "wide", "q": "wide", "k": "narrow", "o": "wide", "s": "narrow"}
STYLES = ("residuals", "reads", "writes", "no stash")
"""What the backward looks at: residuals of the forward, or the values that were read; the written values
too; and whether its W takes the cotangents again instead of a stash."""


def toy_phases(kind: str, style: str, forward_only: bool = False) -> dict[str, PhaseSpec]:
    """The phases of a toy kind."""
    reads, writes, has_params = KINDS[kind]
    if forward_only:
        return {"F": PhaseSpec(reads, writes)}
    if not writes:
        return {phase: PhaseSpec(reads) for phase in "BI"}
    residuals, stash = style != "reads", style != "no stash" and has_params
    given = {"reads": () if residuals else reads, "residuals": residuals}
    given["writes"] = writes if style == "writes" else ()
    phases = {"F": PhaseSpec(reads, writes, residuals), "B": PhaseSpec(**given, cotangents=writes)}
    phases["I"] = PhaseSpec(**given, stash=stash, cotangents=writes)
    if has_params:
        phases["W"] = PhaseSpec(**given, stash=stash, cotangents=() if stash else writes)
    return phases


def toy_specs(kinds: Sequence[str], styles: Sequence[str], forward_only: bool = False) -> list[PieceSpec]:
    """Specs of a chain of toy pieces; a read means the latest writer before it."""
    latest, specs = {}, []
    for i, (kind, style) in enumerate(zip(kinds, styles, strict=True)):
        reads, writes, has_params = KINDS[kind]
        policy = "forward" if forward_only else style
        specs.append(
            PieceSpec(
                name=f"{i}/{kind}",
                kind=kind,
                policy=policy,
                has_params=has_params,
                reads={n: latest[n] for n in reads},
                writes=writes,
                classes={n: CLASSES[n] for n in (*reads, *writes)},
                phases=toy_phases(kind, style, forward_only),
                residual_class=f"{kind}/{policy}/residuals",
                stash_class=f"{kind}/{policy}/stash",
            )
        )
        latest |= dict.fromkeys(writes, i)
    return specs


def random_kinds(random: Random) -> list[str]:
    """A random model: attention with pieces between, values that several pieces read, blocks."""
    kinds = ["embed"]
    for _ in range(random.randint(0, 3)):
        match random.choice(["block", "rotate", "attention", "side", "both"]):
            case "attention":
                kinds += ["pre", "core", "post"]
            case "side":
                kinds += ["side"] + [random.choice(["use", "block"]) for _ in range(2)] + ["use"]
            case "both":
                kinds += ["pre", "side", "core", "use", "post", "use"][: random.choice([5, 6])]
            case kind:
                kinds.append(kind)
    return [*kinds, "head"]


def random_styles(random: Random, kinds: Sequence[str]) -> list[str]:
    """One style a kind, or styles piece by piece."""
    if random.random() < 0.5:
        by_kind = {kind: random.choice(STYLES) for kind in kinds}
        return [by_kind[kind] for kind in kinds]
    return [random.choice(STYLES) for _ in kinds]


def toy_plan(specs: Sequence[PieceSpec], bounds, stage_to_device, devices, microbatches, schedule) -> Plan:
    """A plan for toy pieces."""
    names, policies = tuple(s.name for s in specs), tuple(s.policy for s in specs)
    return Plan(
        "toy", devices, microbatches, names, tuple(bounds), tuple(stage_to_device), policies, schedule
    )


def random_program(random: Random, forward_only: bool = False) -> tuple[Plan, list[PieceSpec], Program]:
    """A random plan for a random model, lowered."""
    kinds = random_kinds(random)
    specs = toy_specs(kinds, random_styles(random, kinds), forward_only)
    plan = random_plan(random, specs, forward_only)
    return plan, specs, lower(plan, specs)


def named_plan(specs: Sequence[PieceSpec], schedule: str, devices: int, microbatches: int) -> Plan:
    """GPipe or 1F1B on stages of near equal length."""
    bounds = [round(i * len(specs) / devices) for i in range(devices + 1)]
    rows = SCHEDULES[schedule](devices, microbatches)
    return toy_plan(specs, bounds, range(devices), devices, microbatches, rows)


def random_plan(random: Random, specs: Sequence[PieceSpec], forward_only: bool = False) -> Plan:
    """A valid plan: its rows are cut from one random order in which every action follows what it needs.

    Stages without parameters may float: each micro-batch of theirs runs on a device of its own.
    """
    count, devices, microbatches = len(specs), random.randint(1, 4), random.randint(1, 5)
    stages = random.randint(1, count)
    bounds = [0, *sorted(random.sample(range(1, count), stages - 1)), count]
    home = [random.randrange(devices) for _ in range(stages)]
    fixed = [any(s.has_params for s in specs[a:b]) for a, b in pairwise(bounds)]
    floats, fused = random.random() < 0.6, random.choice([0.0, 0.5, 1.0])
    rows = [[] for _ in range(devices)]
    waiting = {}  # action -> the action before which it cannot run
    last = stages - 1
    device_of = {}
    for s in range(stages):
        for m in range(microbatches):
            device_of[s, m] = random.randrange(devices) if floats and not fixed[s] else home[s]
            waiting[Action(s, "F", m)] = {(s - 1, "F", m)} if s else set()
            if forward_only:
                continue
            before = {(s, "F", m)} | ({(s + 1, "I", m)} if s < last else set())
            if random.random() < fused:
                waiting[Action(s, "B", m)] = before
            else:
                waiting |= {Action(s, "I", m): before, Action(s, "W", m): {(s, "I", m)}}
    depth_first, done = random.random() < 0.5, set()
    while waiting:
        ready = [action for action, needs in waiting.items() if needs <= done]
        action = ready[-1] if depth_first and random.random() < 0.8 else random.choice(ready)
        del waiting[action]
        done.add((action.stage, "I" if action.phase == "B" else action.phase, action.microbatch))
        rows[device_of[action.stage, action.microbatch]].append(action)
    return toy_plan(specs, bounds, home, devices, microbatches, tuple(map(tuple, rows)))


# The toy pieces. `weigh` gives every (kind, use, name) a coefficient of its own.


@functools.cache
def weigh(*key: str) -> int:
    return Random("/".join(key)).randrange(2, PRIME)


def mix(kind: str, use: str, values: dict[str, int]) -> int:
    return sum(weigh(kind, use, name) * value for name, value in values.items()) % PRIME


def toy_forward(kind: str, parameter: int, data: int, read: dict[str, int]) -> dict[str, int]:
    """Written values by name; for a kind that writes nothing, its loss by the name "loss"."""
    names = KINDS[kind][1] or ("loss",)
    return {n: (parameter * mix(kind, n, read) + data * weigh(kind, n)) % PRIME for n in names}


def toy_input_gradient(kind: str, parameter: int, read: dict, written: dict, cotangents: dict) -> dict:
    """For each value read something that depends on all that the backward may look at."""
    outer, inner = mix(kind, "outer", cotangents or {"loss": 1}), mix(kind, "inner", read | written)
    return {n: (parameter + weigh(kind, n) * inner) * outer % PRIME for n in read}


def toy_stash(kind: str, cotangents: dict) -> int:
    return mix(kind, "stash", cotangents or {"loss": 1})


def toy_weight_gradient(kind: str, data: int, read: dict, written: dict, stash: int) -> int:
    return stash * (mix(kind, "weight", read | written) + data) % PRIME


def sees(kind: str, style: str, written: dict) -> dict:
    """The written values that the backward looks at."""
    return written if style == "writes" else {}


def toy_data(microbatch: int) -> int:
    return weigh("data", str(microbatch))


def toy_parameters(specs: Sequence[PieceSpec]) -> list[int]:
    return [weigh("parameter", spec.name) if spec.has_params else 1 for spec in specs]


def sequential(specs: Sequence[PieceSpec], microbatches: int, forward_only: bool = False):
    """(gradient of each piece, loss), summed over micro-batches: piece by piece, no program."""
    parameters, gradients, loss = toy_parameters(specs), [0] * len(specs), 0
    for m in range(microbatches):
        values, seen = {}, []
        for spec, parameter in zip(specs, parameters):
            read = {n: values[n] for n in KINDS[spec.kind][0]}
            written = toy_forward(spec.kind, parameter, toy_data(m), read)
            loss += written.pop("loss", 0)
            values |= written
            seen.append((read, written))
        if forward_only:
            continue
        sums = defaultdict(int)  # cotangents of the values alive at this point of the way back
        for i in reversed(range(len(specs))):
            kind, (read, written) = specs[i].kind, seen[i]
            cotangents = {n: sums.pop(n) for n in written}
            written = sees(kind, specs[i].policy, written)
            for n, ct in toy_input_gradient(kind, parameters[i], read, written, cotangents).items():
                sums[n] = (sums[n] + ct) % PRIME
            stash = toy_stash(kind, cotangents)
            gradients[i] += toy_weight_gradient(kind, toy_data(m), read, written, stash)
    gradients = [g % PRIME if s.has_params else 0 for g, s in zip(gradients, specs)]
    return ([0] * len(specs) if forward_only else gradients), loss % PRIME
