"""What IteRand costs: a re-draw of all layers, the selection of every step, and how small a ticket is.

    python benchmarks/iterand.py [--json FILE] [--quick]

Steps with and without edge-popup take turns, in one captured CUDA graph each, and the medians of their turns are
compared; a re-draw is timed by itself. The paper: 97.10 ms for a re-draw of ResNet-18, 200.55 ms of ResNet-50.
Targets on an NVIDIA H200: a re-draw of either under 2 ms, the selection under 5 % of ResNet-18's step. On a CPU
the same is measured with small widths, to see that it runs. Then the ticket of a ResNet-18 at p = 0.6, whose signs
after a whole training are as good as tossed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import record
import torch
from recording import recorded
from torch import nn

import pomona as pm
from pomona.sparse import ticket

PAPER = {"resnet18": 97.10, "resnet50": 200.55}  # milliseconds
STEPS = 16  # in a turn


def network(name: str, device: str, rho: float) -> nn.Module:
    """A network for CIFAR that score methods take."""
    torch.manual_seed(0)
    model = pm.models.build(name, num_classes=10, stem="cifar", rho=rho, affine=False).to(device)
    return model.to(memory_format=torch.channels_last) if device == "cuda" else model


def attached(name: str, device: str, rho: float, pruner: pm.Pruner) -> tuple[nn.Module, Any]:
    model = network(name, device, rho)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    pruner.attach(model, optimizer, total_steps=10**6)
    return model, optimizer


def seconds(run: Callable[[], Any], device: str, repeats: int) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats + 2):
        wait(device)
        start = time.perf_counter()
        run()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def redraws(name: str, device: str, rho: float, repeats: int) -> dict[str, Any]:
    """A re-draw of every layer."""
    pruner = pm.IteRand(sparsity=0.6, rate=0.1)
    attached(name, device, rho, pruner)
    numbers = iter(range(1, 10**6))
    (buffers,) = pruner.attached_engine().buffers
    taken = seconds(lambda: buffers.redraw_weights(next(numbers)), device, repeats)
    weights = sum(mask.numel() for mask in pruner.masks().values())
    return {"model": name, "rho": rho, "weights": weights, "ms": 1e3 * taken, "paper_ms": PAPER[name]}


def loop(model: nn.Module, optimizer: Any, pruner: pm.Pruner | None, batch: int, device: str) -> Callable[[], None]:
    """A turn of training steps on one batch: a captured CUDA graph, or the plain loop on a CPU."""
    x = torch.randn(batch, 3, 32, 32, device=device)
    y = torch.randint(0, 10, (batch,), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    if device == "cpu":
        return lambda: [step() for _ in range(STEPS)] and None
    replay = recorded(step, optimizer)

    def turn() -> None:
        for _ in range(STEPS):
            replay()
            if pruner is not None:
                pruner.tick()

    return turn


def steps(name: str, device: str, rho: float, batch: int, turns: int) -> dict[str, Any]:
    """A training step with edge-popup over a dense one, and what of it is the selection."""
    plain = network(name, device, rho)
    pruner = pm.EdgePopup(sparsity=0.6)
    model, optimizer = attached(name, device, rho, pruner)
    loops = {
        "dense": loop(
            plain, torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, weight_decay=5e-4), None, batch, device
        ),
        "edge_popup": loop(model, optimizer, pruner, batch, device),
    }
    times: dict[str, list[float]] = {kind: [] for kind in loops}
    for turn in range(turns + 1):
        for kind in loops if turn % 2 else reversed(loops):
            wait(device)
            start = time.perf_counter()
            loops[kind]()
            wait(device)
            if turn:  # the first one warms up
                times[kind].append((time.perf_counter() - start) / STEPS)
    dense, popup = (1e3 * statistics.median(times[kind]) for kind in loops)
    chosen = 1e3 * select(pruner, device, 50 if device == "cuda" else 3)
    return {
        "model": name,
        "rho": rho,
        "batch": batch,
        "dense_ms": dense,
        "edge_popup_ms": popup,
        "ratio": popup / dense,
        "selection_ms": chosen,
        "selection_share": chosen / popup,
    }


def select(pruner: pm.Pruner, device: str, repeats: int) -> float:
    """The exact selection of every layer by itself."""
    (buffers,) = pruner.attached_engine().buffers
    if buffers.top_k is None:
        return seconds(pruner.choose, device, repeats)

    def several() -> None:
        for _ in range(20):  # so that one launch is not what is measured
            buffers.top_k.run(buffers.latent, buffers.mask)

    return seconds(recorded(several), device, repeats) / 20


def tickets(rho: float) -> list[dict[str, Any]]:
    """Bytes of the float32 state over bytes of its ticket."""
    rows = []
    for kind in ("edge_popup", "iterand sc", "iterand ku"):
        pruner = (
            pm.EdgePopup(sparsity=0.6) if kind == "edge_popup" else pm.IteRand(sparsity=0.6, distribution=kind[-2:])
        )
        model, _ = attached("resnet18", "cpu", rho, pruner)
        redraw = kind != "edge_popup"
        for slot in pruner.slots if redraw else ():
            # About 117 re-draws of a tenth: the last of them is long ago for most weights.
            age = torch.empty(slot.mask.shape).geometric_(0.1 * 0.6)
            slot.draw_number.copy_((117 - age).clamp(min=0).int())
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
        packed = time.perf_counter()
        back = ticket.loads(data)
        read = time.perf_counter()
        if not all(torch.equal(value, back.state[name]) for name, value in state.items()):
            raise SystemExit(f"the ticket of {kind} is not its network")
        whole = sum(value.numel() * value.element_size() for value in state.values())
        rows.append({"ticket": kind, "bytes": len(data), "state_bytes": whole, "ratio": whole / len(data),
                     "write_s": packed - start, "read_s": read - packed})  # fmt: skip
    return rows


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--quick", action="store_true", help="few turns and narrow networks, to see that it runs")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    rho = 0.125 if options.quick or device == "cpu" else 1.0
    repeats = 3 if options.quick or device == "cpu" else 50
    drawn = [redraws(name, device, rho, repeats) for name in PAPER]
    taken = [steps("resnet18", device, rho, 128 if device == "cuda" else 8, 3 if repeats == 3 else 20)]
    sizes = tickets(0.125 if options.quick else 1.0)
    for row in drawn:
        print(f"re-draw of {row['model']}, {row['weights']:,} weights: {row['ms']:.3f} ms (paper {row['paper_ms']} ms)")
    for row in taken:
        print(
            f"step of {row['model']}, batch {row['batch']}: dense {row['dense_ms']:.3f} ms, edge-popup "
            f"{row['edge_popup_ms']:.3f} ms ({row['ratio']:.3f}×), selection {row['selection_ms']:.3f} ms "
            f"({row['selection_share']:.2%})"
        )
    for row in sizes:
        print(
            f"ticket, {row['ticket']:10}: {row['bytes']:,} bytes, 1/{row['ratio']:.1f}, "
            f"written in {row['write_s']:.1f} s, read in {row['read_s']:.1f} s"
        )
    record.write(options.json, redraws=drawn, steps=taken, tickets=sizes)


if __name__ == "__main__":
    main()
