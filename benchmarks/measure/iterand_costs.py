"""Time IteRand (a re-draw of all layers, the mask selection of every step), and measure the size of its tickets.

    python benchmarks/measure/iterand_costs.py [--json FILE] [--quick]

Steps with and without edge-popup take turns, each in one captured CUDA graph, and the medians of their turns are
compared. A re-draw is timed separately. Chijiwa et al. (2021) report 97.10 ms for a re-draw of ResNet-18 and 200.55 ms
for ResNet-50. Targets on an NVIDIA H200: a re-draw of either under 2 ms, the selection under 5 % of ResNet-18's step.
On a CPU, narrow networks are measured to see that the script runs. The tickets are those of a ResNet-18 at p = 0.6. The
signs of its weights are simulated as if drawn at random, as they are after a full training.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda_graph import capture_step
from interleaved_timing import time_call, time_in_turns
from record_file import write_record
from torch import nn

import pomona as pm
from pomona.sparse import ticket

PAPER = {"resnet18": 97.10, "resnet50": 200.55}  # milliseconds
STEPS_PER_TURN = 16
REDRAWS, REDRAW_RATE, SPARSITY = 117, 0.1, 0.6  # re-draws in a full training, their rate r, the sparsity p


def build_network(name: str, device: str, rho: float) -> nn.Module:
    """Return a CIFAR network that score methods accept: its norms have nothing to train."""
    torch.manual_seed(0)
    model = pm.models.build(name, num_classes=10, stem="cifar", rho=rho, affine=False).to(device)
    return model.to(memory_format=torch.channels_last) if device == "cuda" else model


def attach_to_network(name: str, device: str, rho: float, pruner: pm.Pruner) -> tuple[nn.Module, Any]:
    """Build a network and an optimizer, attach `pruner` to them, and return both."""
    model = build_network(name, device, rho)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    pruner.attach(model, optimizer, total_steps=10**6)
    return model, optimizer


def median_seconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Return the median time of a call over `repeats` calls, after two calls to warm up."""
    return statistics.median([time_call(call, device) for _ in range(repeats + 2)][2:])


def measure_redraw(name: str, device: str, rho: float, repeats: int) -> dict[str, Any]:
    """Time a re-draw of every layer."""
    pruner = pm.IteRand(sparsity=0.6, rate=0.1)
    attach_to_network(name, device, rho, pruner)
    numbers = iter(range(1, 10**6))
    (buffers,) = pruner.attached_engine().buffers
    taken = median_seconds(lambda: buffers.redraw_weights(next(numbers)), device, repeats)
    weights = sum(mask.numel() for mask in pruner.masks().values())
    return {"model": name, "rho": rho, "weights": weights, "ms": 1e3 * taken, "paper_ms": PAPER[name]}


def make_loop(
    model: nn.Module, optimizer: Any, pruner: pm.Pruner | None, batch: int, device: str
) -> Callable[[], None]:
    """Return a function that runs one turn of steps on one batch: a CUDA graph, or the plain loop on a CPU."""
    x = torch.randn(batch, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    if device == "cpu":
        return lambda: [step() for _ in range(STEPS_PER_TURN)] and None
    replay = capture_step(step, optimizer)

    def turn() -> None:
        for _ in range(STEPS_PER_TURN):
            replay()
            if pruner is not None:
                pruner.tick()

    return turn


def measure_steps(name: str, device: str, rho: float, batch: int, turns: int) -> dict[str, Any]:
    """Time a training step with edge-popup against a dense one, and the mask selection within it."""
    plain = build_network(name, device, rho)
    pruner = pm.EdgePopup(sparsity=0.6)
    model, optimizer = attach_to_network(name, device, rho, pruner)
    dense_optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    loops = {
        "dense": make_loop(plain, dense_optimizer, None, batch, device),
        "edge_popup": make_loop(model, optimizer, pruner, batch, device),
    }
    times = time_in_turns(loops, turns, STEPS_PER_TURN, device)
    dense, popup = (1e3 * statistics.median(times[kind]) for kind in loops)
    selection = 1e3 * measure_selection(pruner, device, 50 if device == "cuda" else 3)
    return {
        "model": name,
        "rho": rho,
        "batch": batch,
        "dense_ms": dense,
        "edge_popup_ms": popup,
        "ratio": popup / dense,
        "selection_ms": selection,
        "selection_share": selection / popup,
    }


def measure_selection(pruner: pm.Pruner, device: str, repeats: int) -> float:
    """Return the seconds of the exact mask selection of all layers, without the rest of the step."""
    (buffers,) = pruner.attached_engine().buffers
    if buffers.top_k is None:
        return median_seconds(pruner.update_from_scores, device, repeats)

    count = 20  # in one graph, so that the launch of the graph does not dominate

    def several() -> None:
        for _ in range(count):
            buffers.top_k.run(buffers.latent, buffers.mask)

    return median_seconds(capture_step(several), device, repeats) / count


def measure_tickets(rho: float) -> list[dict[str, Any]]:
    """Return the sizes of the float32 state and of its ticket, and the times to write and read it, by method."""
    rows = []
    for kind in ("edge_popup", "iterand sc", "iterand ku"):
        pruner = (
            pm.EdgePopup(sparsity=0.6) if kind == "edge_popup" else pm.IteRand(sparsity=0.6, distribution=kind[-2:])
        )
        model, _ = attach_to_network("resnet18", "cpu", rho, pruner)
        redraw = kind != "edge_popup"
        for slot in pruner.slots if redraw else ():
            # The number of the last re-draw of each weight, if masks moved freely.
            age = torch.empty(slot.mask.shape).geometric_(REDRAW_RATE * SPARSITY)
            slot.draw_number.copy_((REDRAWS - age).clamp(min=0).int())
            key = slot.name, slot.target.fan_in, slot.parameter.detach()
            slot.weight.copy_(pruner.method.stream.weights(*key, slot.draw_number))
        pruner.refresh()
        pruner.finish()
        state = model.state_dict()
        drawn = {
            slot.name: ticket.DrawnTensor(slot.target.fan_in, slot.mask, slot.draw_number) for slot in pruner.slots
        }
        start = time.perf_counter()
        data = ticket.dumps(state, drawn, pruner.method.stream)
        written = time.perf_counter()
        back = ticket.loads(data)
        read = time.perf_counter()
        if not all(torch.equal(value, back.state[name]) for name, value in state.items()):
            raise SystemExit(f"the ticket of {kind} does not reproduce its network")
        whole = sum(value.numel() * value.element_size() for value in state.values())
        rows.append({"ticket": kind, "bytes": len(data), "state_bytes": whole, "ratio": whole / len(data),
                     "write_s": written - start, "read_s": read - written})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument(
        "--quick", action="store_true", help="few turns and narrow networks, to see that the script runs"
    )
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    rho = 0.125 if options.quick or device == "cpu" else 1.0
    repeats = 3 if options.quick or device == "cpu" else 50
    redraws = [measure_redraw(name, device, rho, repeats) for name in PAPER]
    steps = [measure_steps("resnet18", device, rho, 128 if device == "cuda" else 8, 3 if repeats == 3 else 20)]
    tickets = measure_tickets(0.125 if options.quick else 1.0)
    for row in redraws:
        print(f"re-draw of {row['model']}, {row['weights']:,} weights: {row['ms']:.3f} ms (paper {row['paper_ms']} ms)")
    for row in steps:
        print(
            f"step of {row['model']}, batch {row['batch']}: dense {row['dense_ms']:.3f} ms, edge-popup "
            f"{row['edge_popup_ms']:.3f} ms ({row['ratio']:.3f}×), selection {row['selection_ms']:.3f} ms "
            f"({row['selection_share']:.2%})"
        )
    for row in tickets:
        print(
            f"ticket, {row['ticket']:10}: {row['bytes']:,} bytes, 1/{row['ratio']:.1f}, "
            f"written in {row['write_s']:.1f} s, read in {row['read_s']:.1f} s"
        )
    write_record(options.json, redraws=redraws, steps=steps, tickets=tickets)


if __name__ == "__main__":
    main()
