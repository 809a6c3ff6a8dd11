"""Predictions against times and memory that others measured on GPUs."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from jaxpipe.costs.table import CostTable, PieceCost
from jaxpipe.planning.adaptive import adapipe, mist, mist_objective
from jaxpipe.planning.build import staged_plan
from jaxpipe.planning.named import named_plan
from jaxpipe.planning.schedules import one_f_one_b
from jaxpipe.planning.simulator import simulate

DATA = Path(__file__).parent.parent / "data"
GIB, MIB = 2**30, 2**20


def one_stage_a_device(costs, microbatches, bounds, policies=None):
    devices = len(bounds) - 1
    schedule = one_f_one_b(devices, microbatches)
    return staged_plan("measured", costs, microbatches, range(devices), schedule, bounds, policies)


def a100_rows():
    """Rows of plain 1F1B: stage times in ms, micro-batches, measured time of an iteration in ms."""
    with open(DATA / "a100_measured_stage_times.csv") as file:
        for row in csv.DictReader(file):
            if row["method"] in ("base", "redis"):
                times = ([float(us) / 1e3 for us in row[f"{x}_us_per_stage"].split()] for x in "FB")
                yield *times, int(row["microbatches"]), float(row["iter_ms_measured"])


A100_ROWS = list(a100_rows())


def test_all_rows_of_plain_1f1b_are_there():
    assert len(A100_ROWS) == 8
    assert all(len(forward) == len(backward) == 8 for forward, backward, *_ in A100_ROWS)


@pytest.mark.parametrize(("forward", "backward", "microbatches", "measured"), A100_ROWS)
def test_stage_times_predict_the_iteration(forward, backward, microbatches, measured):
    """F and B of each stage are measured; messages, 2 x 7 of them on the way, are neglected."""
    pieces = tuple(PieceCost(f"p{i}", "k", *times, 0) for i, times in enumerate(zip(forward, backward)))
    costs = CostTable("ms", pieces)
    predicted = simulate(one_stage_a_device(costs, microbatches, range(9)), costs).makespan
    assert predicted == pytest.approx(measured, rel=0.016)
    # The objective that `mist` minimises is as good: one stage, with the head, outweighs the others.
    assert mist_objective(forward, backward, microbatches) == pytest.approx(measured, rel=0.016)


MIST = json.loads((DATA / "mist_l4_tuned.json").read_text())["configs"]
MIST_CASES = {
    # hidden size, layers, heads, flash attention, sequences a micro-batch (configs of the Mist repository)
    "1.3b-s_2048-v_50304-b_32-n_1-m_2-f_False": (2048, 24, 16, False, 1),
    "1.3b-s_2048-v_50304-b_32-n_1-m_2-f_True": (2048, 24, 16, True, 2),
    "2.7b-s_2048-v_50304-b_64-n_1-m_4-f_False": (2560, 32, 32, False, 1),
}
"""The configurations that use neither data nor tensor parallelism nor offloading."""


def gpt(hidden, layers, heads, flash, batch, sequence=2048, vocabulary=50304):
    """GPT on an L4 as Mist counts it: whole layers, time in operations, memory in bytes.

    16 bytes a parameter: weight and gradient in fp16, master weight and both moments in fp32. Activations
    of a layer by Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1) without dropout masks: 32 bsh
    bytes, and 2 abs^2 for the probabilities that attention without flash keeps. The head keeps its input,
    the normalised one, the logits and their gradient, all fp16. Mist lets a plan use 88% of 22.488 GiB.
    """
    tokens = batch * sequence
    state = 2 * tokens * hidden
    operations = tokens * (24 * hidden**2 + 4 * sequence * hidden)
    attention = 0 if flash else 2 * heads * batch * sequence**2
    layer = [operations] * 3 + [12 * hidden**2, 16 * state + attention, 0, state]
    head = [2 * tokens * hidden * vocabulary] * 3 + [hidden * vocabulary, 2 * state + 4 * tokens * vocabulary]
    pieces = [PieceCost("embed", "embed", 0, 0, 0, (vocabulary + sequence) * hidden, output_bytes=state)]
    pieces += [PieceCost(f"layer{i}", "layer", *layer) for i in range(layers)]
    pieces.append(PieceCost("head", "head", *head))
    return CostTable("unit", tuple(pieces), memory_limit_bytes=int(0.88 * 22.488 * GIB), state_factor=16)


def tuned_by_mist(case, costs):
    """The plan that Mist found and ran: the first layers of a stage are those recomputed."""
    layers, again = case["layers_per_stage"], case["ckpt_layers_per_stage"]
    firsts = [1 + sum(layers[:stage]) for stage in range(len(layers))]  # the embedding goes with the first
    policies = ["none"] * len(costs.pieces)
    for first, count in zip(firsts, again):
        policies[first : first + count] = ["full"] * count
    return one_stage_a_device(costs, case["grad_accum"], (0, *firsts[1:], len(costs.pieces)), policies)


def layers_by_stage(plan):
    """Layers, and layers recomputed, of each stage."""
    runs = [
        [i for i in range(i, j) if plan.pieces[i].startswith("layer")] for i, j in pairwise(plan.stage_bounds)
    ]
    return [len(run) for run in runs], [sum(plan.recompute[i] == "full" for i in run) for run in runs]


@pytest.mark.parametrize("name", MIST_CASES)
def test_memory_of_the_plans_that_mist_ran(name):
    case, costs = MIST[name], gpt(*MIST_CASES[name])
    peaks = simulate(tuned_by_mist(case, costs), costs).peak_bytes
    text = case["measured"]["exec_stage_peak_allocated_memories"]
    measured = [int(size.split()[0]) for size in text.strip("[]").split(",")]
    assert [peak / MIB for peak in peaks] == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize("name", MIST_CASES)
@pytest.mark.parametrize("schedule", ["mist", "adapipe"])
def test_plans_resemble_those_that_mist_found(name, schedule):
    """The same layers where nothing has to be recomputed; else within one layer, and recompute comes first.

    Mist prices layers by profiles that its results do not hold; here attention costs its operations only.
    """
    case, costs = MIST[name], gpt(*MIST_CASES[name])
    theirs = tuned_by_mist(case, costs)
    plan = named_plan(schedule, costs, theirs.devices, theirs.microbatches)
    layers, again = layers_by_stage(plan)
    if not any(case["ckpt_layers_per_stage"]):
        assert (layers, again) == (case["layers_per_stage"], case["ckpt_layers_per_stage"])
        return
    assert all(abs(a - b) <= 1 for a, b in zip(layers, case["layers_per_stage"]))
    assert again == sorted(again, reverse=True)
    assert again[0] > 0
    assert again[-2:] == case["ckpt_layers_per_stage"][-2:] == [0, 0]
    assert abs(sum(again) - sum(case["ckpt_layers_per_stage"])) <= 1
    # In the memory that their plan takes by this account, theirs is no quicker.
    peak = max(simulate(theirs, costs).peak_bytes)
    same = replace(costs, memory_limit_bytes=peak)
    rival = named_plan(schedule, same, theirs.devices, theirs.microbatches)
    assert simulate(rival, same).makespan <= simulate(theirs, costs).makespan


def v100_table(layers, limit):
    """GPT 1.3B with operators profiled on a V100, 1 sequence a micro-batch; times in us, memory in bytes.

    Weights are fp16; master weight, moments and gradient make it 16 bytes a parameter.
    """
    with open(DATA / "aceso_v100_gpt_1_3b.csv") as file:
        profile = {row.pop("op_name"): {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)}
    kinds = {
        "pre": ("enc-1st-layernorm", "enc-attention-qkv"),
        "attention": tuple(f"enc-attention-{op}" for op in ("score", "softmax", "dropout", "context")),
        "post": ("enc-attention-dense", "enc-post-attention-dropout"),
        "mlp": (
            *("enc-2nd-layernorm", "enc-MLP-GEMM-1", "enc-MLP-gelu", "enc-MLP-GEMM-2"),
            "enc-post-MLP-dropout",
        ),
    }

    def piece(name, kind, operators):
        forward, backward, weights, stash = (
            sum(profile[op][column] for op in operators)
            for column in ("forward-compute", "backward-compute", "weights", "activations")
        )
        output = int(profile[operators[-1]]["output_size"] * MIB)
        return PieceCost(name, kind, forward, backward, 0, int(weights * MIB), int(stash * MIB), 0, output)

    pieces = [piece("embed", "embed", ["encoder-embedding"])]
    for layer in range(layers):
        pieces += [piece(f"{layer}/{kind}", kind, operators) for kind, operators in kinds.items()]
    pieces.append(piece("head", "head", ["final-layernorm", "gpt-post-process"]))
    return CostTable("us", tuple(pieces), memory_limit_bytes=limit, state_factor=8)


@pytest.mark.parametrize("search", [mist, adapipe])
def test_profiled_operators_give_selective_recompute(search):
    """Attention holds most memory for its time, so it goes first (Korthikanti et al. 2022, section 5).

    The earlier a stage, the more micro-batches it holds, so the more it has to recompute.
    """
    costs = v100_table(24, None)
    free = search(costs, 4, 16)
    held = max(simulate(one_stage_a_device(costs, 16, *free[:2]), costs).peak_bytes)
    assert set(free.recompute) == {"none"}
    for share in (0.8, 0.5, 0.4):
        limited = replace(costs, memory_limit_bytes=share * held)
        tuned = search(limited, 4, 16)
        plan = one_stage_a_device(limited, 16, *tuned[:2])
        again = [i for i, policy in enumerate(tuned.recompute) if policy == "full"]
        assert {costs.pieces[i].kind for i in again} == {"attention"}
        by_stage = [sum(i <= piece < j for piece in again) for i, j in pairwise(tuned.bounds)]
        assert by_stage == sorted(by_stage, reverse=True)
        assert max(simulate(plan, limited).peak_bytes) <= share * held
        everything = one_stage_a_device(costs, 16, tuned.bounds, ["full"] * len(costs.pieces))
        assert simulate(plan, limited).makespan < simulate(everything, costs).makespan
