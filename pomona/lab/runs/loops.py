"""The training loop of a run, in two forms.

`Eager` is the loop that anyone would write. `Captured` records the whole step once, from the gathering
of a batch on the GPU to the projection of the weights, as a CUDA graph and replays it: Python then costs
some microseconds a step. Orders, crops and rates of an epoch lie on the device and are looked up there by
a counter that lies there too, so nothing is copied between two steps. Masks are updated between replays,
and a step that a method wants to look into (RigL's) is taken without the recording.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pomona.core.fused.captured_graphs import GRAPH_CAPTURE_LOCK, capture_stream
from pomona.errors import require

from ..kernels.convolution import quick
from .evaluate import autocast, cross_entropy

if TYPE_CHECKING:
    from .run import Run

# Held by a run that calls its model in Python or touches what all runs share: generators, the compiler, a tracer,
# which while it works catches the calls of every model there is.
SETUP = threading.RLock()
PACKED = ContextVar("PACKED", default=False)  # whether this thread's run is one of several on a GPU
LONG = 5000  # steps from which on it pays to compile
AHEAD = 16  # steps after which the host looks how far the device is


class Loop(Protocol):
    """Takes the steps of a stage."""

    interval: int  # steps between two looks at the loss; 0 looks at the end of an epoch alone

    def epoch(self, epoch: int, start: int) -> Iterator[None]:
        """Take the steps of an epoch from `start` on, with a stop after each."""

    def losses(self) -> Tensor | None:
        """Of the steps since this was last called."""


def choose(run: Run) -> str:
    """The loop that the recipe asks for; "auto" is the quickest that can do it."""
    kind, why = run.options.loop, unfit(run)
    require(
        why is None or not PACKED.get(),
        f"'{run.recipe.name}' {why}, so it cannot be packed with others: run it without --packed.",
    )
    require(
        kind != "eager" or not PACKED.get(),
        f"'{run.recipe.name}' asks for train.loop = \"eager\", which cannot be packed with others: leave it out.",
    )
    if kind == "auto":
        return "eager" if why else "compiled" if run.steps >= LONG and _compiles() else "captured"
    require(kind == "eager" or why is None, f'train.loop = "{kind}" {why}: set it to "eager", or leave it out.')
    return kind


def make(run: Run, kind: str) -> Loop:
    """The loop of that kind."""
    return Eager(run) if kind == "eager" else Captured(run, kind == "compiled")


def unfit(run: Run) -> str | None:
    """Why a step of this run cannot be captured, or None."""
    if run.device.type != "cuda":
        return f"needs a GPU, and this run is on '{run.device}'"
    if run.team.world > 1:
        return f"is for a single process, and {run.team.world} train here together"
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in run.model.modules()):
        return "would replay one and the same dropout"
    if any(isinstance(m, nn.RNNBase) for m in run.model.modules()):
        return "has recurrent layers, which cuDNN does not let be captured"
    return None


class Eager:
    """One step after another, as PyTorch is written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # The loss is read at every step where that costs nothing, and from a GPU now and then.
        self.interval = 1 if run.device.type == "cpu" else run.options.log_every
        self.taken: list[Tensor] = []

    def epoch(self, epoch: int, start: int) -> Iterator[None]:
        run = self.run
        for k, (inputs, targets) in enumerate(run.batches.epoch(epoch, start), start):
            for group in run.optimizer.param_groups:
                group["lr"] = run.rate(epoch * run.per_epoch + k - run.first)
            self.taken.append(step(run, forward, inputs, targets))
            yield

    def losses(self) -> Tensor | None:
        taken, self.taken = self.taken, []
        return torch.stack(taken) if taken else None


class Captured:
    """The step as a CUDA graph, and a second one where the last batch of an epoch is smaller."""

    interval = 0

    def __init__(self, run: Run, compiled: bool) -> None:
        self.run, self.compiled = run, compiled
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the size of the batch
        new: Callable[..., Tensor] = lambda *shape, **options: torch.zeros(*shape, device=run.device, **options)  # noqa: E731
        self.counter = new(1, dtype=torch.int64)  # the step within the epoch
        self.rates, self.record = new(run.per_epoch), new(run.per_epoch)
        self.order, self.plan = (None if part is None else part.to(run.device) for part in run.batches.draw_epoch(0))
        self.rate = new(())
        self.read = self.now = 0  # the steps of the epoch whose loss was read, and that were taken

    def epoch(self, epoch: int, start: int) -> Iterator[None]:
        run = self.run
        self.fill(epoch, start)
        for group in run.optimizer.param_groups:
            group["lr"] = self.rate
        marks: deque[torch.cuda.Event] = deque()
        for k in range(start, run.per_epoch):
            size = self.size(k)
            if run.pruner is not None and run.pruner.wants_gradient():
                with SETUP:
                    self.step(forward, size)
            else:
                if not self.graphs:
                    with SETUP:
                        self.capture()
                    self.counter.fill_(k)
                self.graphs[size].replay()
                if run.pruner is not None:
                    run.pruner.tick()
            self.now = k + 1
            if k % AHEAD == 0:  # not too far ahead of the device: a full queue would block other runs
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 2:
                    marks.popleft().synchronize()
            yield

    def losses(self) -> Tensor | None:
        taken = self.record[self.read : self.now].clone()
        self.read = self.now
        return taken if len(taken) else None

    def size(self, k: int) -> int:
        """Rows in batch k."""
        batches = self.run.batches
        return min(batches.batch_size, len(batches.split) - k * batches.batch_size)

    def fill(self, epoch: int, start: int) -> None:
        """Lay out an epoch on the device."""
        run = self.run
        first = epoch * run.per_epoch - run.first
        rates = torch.tensor([run.rate(first + k) for k in range(run.per_epoch)])
        for ours, theirs in zip(
            (self.order, self.plan, self.rates), (*run.batches.draw_epoch(epoch), rates), strict=True
        ):
            if ours is not None and theirs is not None:
                ours.copy_(theirs.pin_memory(), non_blocking=True)
        self.counter.fill_(start)
        self.read = self.now = start

    def step(self, forward: Forward, size: int) -> None:
        """One step, all of it on the device."""
        run = self.run
        at = self.counter * run.batches.batch_size + torch.arange(size, device=run.device)
        assert self.order is not None
        rows, plan = self.order[at], None if self.plan is None else self.plan[at]
        inputs, targets = run.batches.gather_batch(rows, plan)
        self.rate.copy_(self.rates.index_select(0, self.counter)[0])
        loss = step(run, forward, inputs, targets)
        self.record.index_copy_(0, self.counter, loss.float()[None])
        self.counter += 1

    def capture(self) -> None:
        """Record the step. Whatever the rehearsals did is undone."""
        run, record = self.run, self.record.clone()
        sizes = {self.size(run.per_epoch - 1): False, self.size(0): self.compiled}  # the smaller one is not worth it
        stream = capture_stream(run.device)
        with (
            GRAPH_CAPTURE_LOCK,
            quick(run.model, run.options.precision == "bf16"),
            torch.backends.cudnn.flags(enabled=True, benchmark=True),
        ):
            with rehearsal(run):
                run.stage.optimizer.prepare(run.optimizer)
                stream.wait_stream(torch.cuda.current_stream(run.device))
                with torch.cuda.stream(stream):
                    for size, compiled in sizes.items():
                        for _ in range(2):
                            self.counter.zero_()
                            self.step(compiled_forward if compiled else forward, size)
                torch.cuda.current_stream(run.device).wait_stream(stream)
            self.record.copy_(record)
            for group in run.optimizer.param_groups:
                group["lr"] = self.rate
            run.stage.optimizer.prepare(run.optimizer)
            for size, compiled in sizes.items():
                run.optimizer.zero_grad()
                self.graphs[size] = torch.cuda.CUDAGraph()
                # All are recorded on one stream, for which cuBLAS has one workspace: each graph is to have its own.
                torch._C._cuda_clearCublasWorkspaces()
                with torch.cuda.graph(self.graphs[size], stream=stream, capture_error_mode="thread_local"):
                    self.step(compiled_forward if compiled else forward, size)
            torch._C._cuda_clearCublasWorkspaces()
            run.optimizer.zero_grad()


Forward = Callable[[nn.Module, Tensor, torch.device, str], Tensor]


def forward(model: nn.Module, inputs: Tensor, device: torch.device, precision: str) -> Tensor:
    """The logits."""
    with autocast(device, precision):
        return model(inputs)


def compiled_forward(*arguments: Any) -> Tensor:
    """The same, compiled; one compilation serves all runs of one architecture."""
    # Without the second option inductor guesses the layout of convolutions wrongly where few are left to it.
    compiled = torch.compile(forward, dynamic=False, options={"force_layout_optimization": True})
    with torch._dynamo.config.patch(recompile_limit=64):  # so many architectures may one process train
        return compiled(*arguments)


def step(run: Run, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
    """One step of training; the loss."""
    logits = forward(run.network, inputs, run.device, run.options.precision)
    loss = cross_entropy(logits, targets, label_smoothing=run.options.label_smoothing)
    run.optimizer.zero_grad()
    loss.backward()
    if run.options.clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), run.options.clip)
    run.optimizer.step()
    return loss.detach()


@contextlib.contextmanager
def rehearsal(run: Run) -> Iterator[None]:
    """Steps taken within leave no trace in model, optimizer and pruner."""
    model, optimizer = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))  # the pruner's is in there
    try:
        yield
    finally:
        run.optimizer.zero_grad()
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)


def _compiles() -> bool:
    """Whether torch.compile can make kernels for a GPU here."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
