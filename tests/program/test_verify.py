from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.program.program import lower
from jaxpipe.program.spec import PhaseSpec, PieceSpec, operands, register_class
from jaxpipe.program.verify import verify
from tests.program.toys import interpret, named_plan, random_program, sequential, toy_specs

randoms = st.integers(0, 2**32 - 1).map(Random)


def other(random: Random, old: int, count: int) -> int:
    """A number below `count` other than `old`."""
    return (old + random.randrange(1, count)) % count


def change_register(random, program, specs):
    """One operand of one instruction names another register of its class, or the one past its end."""
    d, at, classes = random_instruction(random, program, specs)
    table, a = program.operands.copy(), random.randrange(len(classes))
    count = dict(program.signature.registers)[classes[a]]
    table[d, at, a] = other(random, table[d, at, a], count + 1)
    return replace(program, operands=table)


def swap_registers(random, program, specs):
    """Two operands of one instruction change places."""
    d, at, classes = random_instruction(random, program, specs)
    table = program.operands.copy()
    a, b = (random.randrange(len(classes)) for _ in range(2))
    table[d, at, [a, b]] = table[d, at, [b, a]]
    return replace(program, operands=table)


def random_instruction(random, program, specs):
    """(device, number, register class of each operand) of an instruction that has operands."""
    examples, found = {(x.kind, x.policy): x for x in specs}, []
    for d, used in enumerate(program.count.sum(1)):
        for at in range(used):
            op = program.signature.ops[program.op[d, at]]
            spec = examples[op.kind, op.policy]
            classes = [register_class(spec, o) for side in operands(spec, op.phase, op.kept) for o in side]
            found += [(d, at, classes)] * bool(classes)
    return random.choice(found)


def random_message(random, program) -> tuple[int, int, int] | None:
    """(device, channel, tick) of an arrival."""
    sizes = dict(program.signature.registers)
    spare = np.array([sizes[c.register_class] for c in program.signature.channels])[None, :, None]
    found = np.argwhere(program.receive != spare) if spare.size else []
    return tuple(random.choice(found)) if len(found) else None


def redirect_sending(random, program, specs):
    """A message carries another register."""
    if not (message := random_message(random, program)):
        return program
    target, c, tick = message
    channel = program.signature.channels[c]
    send, count = program.send.copy(), dict(program.signature.registers)[channel.register_class]
    source = target - channel.offset
    send[source, c, tick] = other(random, send[source, c, tick], count + 1)
    return replace(program, send=send)


def redirect_arrival(random, program, specs):
    """A message lands in another register, or in the spare one, that is: nowhere."""
    if not (message := random_message(random, program)):
        return program
    channel = program.signature.channels[message[1]]
    receive = program.receive.copy()
    count = dict(program.signature.registers)[channel.register_class]
    receive[message] = other(random, receive[message], count + 1)
    return replace(program, receive=receive)


def drop_message(random, program, specs):
    """A message lands in the spare register."""
    if not (message := random_message(random, program)):
        return program
    receive = program.receive.copy()
    channel = program.signature.channels[message[1]]
    receive[message] = dict(program.signature.registers)[channel.register_class]
    return replace(program, receive=receive)


def move_message(random, program, specs):
    """A message travels a tick earlier or later, in place of what travels then."""
    if not (message := random_message(random, program)):
        return program
    target, c, tick = message
    to = tick + random.choice([-1, 1])
    if not 0 <= to < program.length:
        return program
    receive, send = program.receive.copy(), program.send.copy()
    source = target - program.signature.channels[c].offset
    receive[target, c, [tick, to]] = receive[target, c, [to, tick]]
    send[source, c, [tick, to]] = send[source, c, [to, tick]]
    return replace(program, receive=receive, send=send)


def move_action(random, program, specs):
    """An action runs a tick earlier or later, in place of what runs then."""
    d, tick = random.choice(np.argwhere(program.count > 0))
    to = tick + random.choice([-1, 1])
    if not 0 <= to < program.length:
        return program
    first, count = program.first.copy(), program.count.copy()
    first[d, [tick, to]], count[d, [tick, to]] = first[d, [to, tick]], count[d, [to, tick]]
    return replace(program, first=first, count=count)


def change_span(random, program, specs):
    """A tick runs one instruction more or fewer, at its start or end."""
    d, tick = random.choice(np.argwhere(program.count > 0))
    first, count = program.first.copy(), program.count.copy()
    step = random.choice([-1, 1])
    count[d, tick] += step
    if random.random() < 0.5:
        first[d, tick] -= step
    return replace(program, first=first, count=count)


def change_op(random, program, specs):
    """An instruction runs another op: another phase, kind, policy, slot or set of kept values."""
    d, at, _ = random_instruction(random, program, specs)
    op = program.op.copy()
    op[d, at] = other(random, op[d, at], len(program.signature.ops))
    return replace(program, op=op)


def change_microbatch(random, program, specs):
    """An instruction runs for another micro-batch, or for one that does not exist."""
    d, at, _ = random_instruction(random, program, specs)
    microbatch = program.microbatch.copy()
    microbatch[d, at] = other(random, microbatch[d, at], program.signature.microbatches + 1)
    return replace(program, microbatch=microbatch)


def change_slots(random, program, specs):
    """A device holds its pieces of one kind in another order, or one fewer."""
    kind = random.choice(sorted(program.slots))
    rows = [list(row) for row in program.slots[kind]]
    row = random.choice(rows)
    if len(row) > 1 and random.random() < 0.5:
        row.reverse()
    elif row:
        row.pop()
    return replace(program, slots=program.slots | {kind: tuple(map(tuple, rows))})


def stop_early(random, program, specs):
    """The last tick is left out."""
    return replace(program, length=program.length - 1)


MUTATIONS = (
    change_register,
    swap_registers,
    redirect_sending,
    redirect_arrival,
    drop_message,
    move_message,
    move_action,
    change_span,
    change_op,
    change_microbatch,
    change_slots,
    stop_early,
)


def differs(a, b) -> bool:
    tables = zip(a.tables().values(), b.tables().values())
    same = all(np.array_equal(x, y) for x, y in tables)
    return not same or a.slots != b.slots or a.length != b.length


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda f: f.__name__)
def test_a_changed_program_is_rejected_or_means_the_same(mutate):
    rejected, accepted = 0, 0

    @settings(deadline=None, max_examples=25)
    @given(randoms)
    def run(random):
        nonlocal rejected, accepted
        plan, specs, program = random_program(random)
        for _ in range(4):
            changed = mutate(random, program, specs)
            if not differs(program, changed):
                continue
            try:
                verify(changed, specs)
            except ValueError:
                rejected += 1
                continue
            accepted += 1
            assert interpret(changed, specs) == sequential(specs, plan.microbatches)

    run()
    assert rejected > accepted  # 0.97 of all are rejected; the rest concern padding and idle slots


def small(kinds=("embed", "block", "block", "head"), styles=None, devices=1, microbatches=2):
    specs = toy_specs(kinds, styles or ["residuals"] * len(kinds))
    return specs, lower(named_plan(specs, "gpipe", devices, microbatches), specs)


def with_op(program, old, new):
    """`program` with one op taken for another."""
    ops = tuple(new if op == old else op for op in program.signature.ops)
    return replace(program, signature=replace(program.signature, ops=ops))


def test_names_tick_device_and_instruction():
    specs, program = small()
    program.microbatch[0, 1] = 1
    message = (
        r"tick 0, device 0, instruction 1 \(F of block, micro-batch 1\) "
        r"reads \[\('value', 0, 'x', 0\)\]; expected \[\('value', 0, 'x', 1\)\]"
    )
    with pytest.raises(ValueError, match=message):
        verify(program, specs)


def test_a_phase_that_never_runs_is_found():
    specs, program = small()
    program.count[0, program.length - 1] -= 1  # leaves out the last B of the embedding
    with pytest.raises(ValueError, match=r"piece '0/embed', micro-batch 1: phases ran .*'B': 0"):
        verify(program, specs)


def test_the_kept_values_of_an_op_must_be_those_of_the_wiring():
    specs, program = small(("embed", "pre", "core", "post", "head"))
    op = next(op for op in program.signature.ops if (op.kind, op.phase) == ("pre", "B"))
    assert op.kept == ("x",)
    with pytest.raises(ValueError, match="B of pre"):
        verify(with_op(program, op, op._replace(kept=())), specs)


def test_an_op_must_have_the_policy_of_its_piece():
    specs, program = small(("embed", "block", "block", "head"), ("reads", "reads", "writes", "reads"))
    mine, other_policy = (op for op in program.signature.ops if (op.kind, op.phase) == ("block", "F"))
    with pytest.raises(ValueError, match="F of block"):
        verify(with_op(program, mine, other_policy._replace(slot=mine.slot)), specs)


def test_a_piece_has_one_parameter_slot():
    specs, program = small(("embed", "block", "head"), devices=3)
    slots = program.slots | {"block": ((), (1,), (1,))}
    with pytest.raises(ValueError, match="'1/block' is in 2 parameter slots; expected one"):
        verify(replace(program, slots=slots), specs)


def test_the_spare_register_is_for_arrivals_only():
    specs, program = small(("embed", "block", "head"), devices=3)
    spare = dict(program.signature.registers)["wide"]
    program.operands[0, 0, 0] = spare
    with pytest.raises(ValueError, match=rf"names register wide\[{spare}\] of {spare}"):
        verify(program, specs)


@pytest.mark.parametrize("table", ["first", "count", "op", "microbatch", "send", "receive"])
@pytest.mark.parametrize("value", [-1, 1000])
def test_numbers_out_of_range_are_found(table, value):
    specs, program = small(devices=2)
    entry = program.tables()[table]
    entry[(0,) * entry.ndim] = value
    with pytest.raises(ValueError, match=rf"table '{table}' holds {value} at \(0, 0"):
        verify(program, specs)


def test_two_arrivals_in_one_register_are_found():
    specs, program = small(("embed", "pre", "core", "post", "head"), devices=5)
    # Channels of one class: offsets 1 and -1 and more. Let two of them write register 0 of device 1.
    same = [c for c, x in enumerate(program.signature.channels) if x.register_class == "wide"]
    program.receive[1, same[:2], 0] = 0
    with pytest.raises(ValueError, match=r"two messages arrive in register wide\[0\] of device 1"):
        verify(program, specs)


def test_pieces_that_read_nothing_and_have_no_parameters_are_counted_apart():
    """Two such pieces of one kind look alike to the tables; each must run once a micro-batch."""
    phases = {"F": PhaseSpec((), ("s",)), "B": PhaseSpec(), "I": PhaseSpec()}
    position = PieceSpec("p", "position", "none", False, {}, ("s",), {"s": "narrow"}, phases)
    kinds = ("embed", "side", "use", "side", "use", "head")
    specs = toy_specs(kinds, ["none"] * 6)
    specs[1], specs[3] = replace(position, name="1"), replace(position, name="3")
    program = lower(named_plan(specs, "gpipe", 1, 2), specs)
    verify(program, specs)
