"""The training loop of a run, in two forms.

`EagerLoop` is the usual PyTorch loop. `CapturedLoop` captures the whole step once as a CUDA graph, from gathering a
batch on the GPU to projecting the weights, and replays it: Python then costs some microseconds a step. The sample
order, the crops and the learning rates of an epoch lie on the device and are indexed there by a counter that lies on
the device too, so nothing is copied between two steps. Masks are updated between replays, and a step whose gradient a
method needs (RigL) is taken without the graph.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pomona.core.fused.captured_graphs import GRAPH_CAPTURE_LOCK, capture_stream, pause_garbage_collection
from pomona.data import StreamedBatches
from pomona.errors import require

from ..kernels.convolution import fast_convolutions
from .concurrency import CONCURRENT_RUN, SHARED_STATE_LOCK
from .distillation import distillation_loss
from .evaluate import autocast, cross_entropy
from .graph_launcher import GRAPH_LAUNCHER
from .numerical_safety import step_or_skip

if TYPE_CHECKING:
    from .run import Run

COMPILE_FROM_STEPS = 5000  # shorter stages take less time without compilation
SYNC_INTERVAL = 16  # steps between two events by which the host follows the device; the most that are taken at once
MAX_COMPILED_MODELS = 64  # architectures that one process may compile
WARMUP_STEPS = 2  # before a capture: the first step allocates and tunes, the second must find nothing left to do


class Loop(Protocol):
    """The part of a run that takes the steps of a stage."""

    loss_interval: int  # steps between two readings of the loss; 0 reads it at the end of an epoch only

    def run_epoch(self, epoch: int, start: int) -> Iterator[int]:
        """Take the steps of an epoch, beginning with `start`; yield how many were taken at once, usually one."""

    def take_losses(self) -> Tensor | None:
        """Return the losses of the steps since the last call, or None if there are none."""


def choose_loop(run: Run) -> str:
    """Return the kind of loop that the recipe asks for, where "auto" is the fastest possible one.

    Raises PomonaError if the run cannot use that kind.
    """
    kind, obstacle = run.options.loop, capture_obstacle(run)
    require(
        obstacle is None or not CONCURRENT_RUN.get(),
        f"'{run.recipe.name}' {obstacle}, so it cannot run concurrently with others: run it without --concurrent.",
    )
    require(
        kind != "eager" or not CONCURRENT_RUN.get(),
        f"'{run.recipe.name}' asks for train.loop = \"eager\", which cannot run concurrently with others: "
        "leave it out.",
    )
    if kind == "auto":
        compiles = run.stage_steps >= COMPILE_FROM_STEPS and _has_triton()
        return "eager" if obstacle else "compiled" if compiles else "captured"
    require(
        kind == "eager" or obstacle is None,
        f'train.loop = "{kind}" {obstacle}: set it to "eager", or leave it out.',
    )
    return kind


def make_loop(run: Run, kind: str) -> Loop:
    """Return the loop of a kind that `choose_loop` returned."""
    return EagerLoop(run) if kind == "eager" else CapturedLoop(run, kind == "compiled")


def capture_obstacle(run: Run) -> str | None:
    """Return why a step of this run cannot be captured, as the end of a sentence, or None if it can."""
    if run.device.type != "cuda":
        return f"needs a GPU, and this run is on '{run.device}'"
    if run.processes.world_size > 1:
        return f"is for a single process, and {run.processes.world_size} train here together"
    if isinstance(run.batches, StreamedBatches):
        return "needs all images on the GPU, and these stay on the disk"
    if run.options.nonfinite == "skip":
        return 'cannot leave out single steps, which train.nonfinite = "skip" asks for'
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in run.model.modules()):
        return "would replay one and the same dropout"
    if any(isinstance(m, nn.RNNBase) for network in run.networks for m in network.modules()):
        return "has recurrent layers, which cuDNN does not let be captured"
    return None


class EagerLoop:
    """One step after another in plain PyTorch."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # On a CPU reading the loss costs nothing; on a GPU it waits for the device.
        self.loss_interval = 1 if run.device.type == "cpu" else run.options.log_every
        self.losses: list[Tensor] = []

    def run_epoch(self, epoch: int, start: int) -> Iterator[int]:
        """Take the steps of an epoch, beginning with `start`, and yield 1 after each."""
        run = self.run
        for index, (inputs, targets) in enumerate(run.batches.epoch(epoch, start), start):
            for group in run.optimizer.param_groups:
                group["lr"] = run.rate(epoch * run.steps_per_epoch + index - run.stage_start)
            self.losses.append(train_step(run, eager_forward, inputs, targets))
            yield 1

    def take_losses(self) -> Tensor | None:
        """Return the losses of the steps since the last call, or None if there are none."""
        losses, self.losses = self.losses, []
        return torch.stack(losses) if losses else None


class CapturedLoop:
    """The step as a CUDA graph, and as a second one where the last batch of an epoch is smaller."""

    loss_interval = 0

    def __init__(self, run: Run, compiled: bool) -> None:
        self.run, self.compiled = run, compiled
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by the size of the batch
        new: Callable[..., Tensor] = lambda *shape, **options: torch.zeros(*shape, device=run.device, **options)  # noqa: E731
        self.counter = new(1, dtype=torch.int64)  # the step within the epoch
        self.rates, self.loss_buffer = new(run.steps_per_epoch), new(run.steps_per_epoch)
        self.order, self.augmentation = (
            None if part is None else part.to(run.device) for part in run.batches.draw_epoch(0)
        )
        self.rate = new(())
        self.steps_read = self.steps_taken = 0  # steps of the epoch whose loss was read, and that were taken

    def run_epoch(self, epoch: int, start: int) -> Iterator[int]:
        """Replay the step for each batch of an epoch, beginning with `start`; yield how many were replayed at once."""
        run = self.run
        self.load_epoch(epoch, start)
        for group in run.optimizer.param_groups:
            group["lr"] = self.rate
        events: deque[torch.cuda.Event] = deque()
        index, since_event = start, SYNC_INTERVAL
        while index < run.steps_per_epoch:
            size, taken = self.batch_size_at(index), 1
            if run.pruner is not None and run.pruner.wants_gradient():
                with SHARED_STATE_LOCK:
                    self.take_step(eager_forward, size)
            else:
                if not self.graphs:
                    with SHARED_STATE_LOCK:
                        self.capture()
                    self.counter.fill_(index)
                taken = self.replay(index, size)
                if run.pruner is not None:
                    run.pruner.tick(taken)
            index += taken
            since_event += taken
            self.steps_taken = index
            if since_event >= SYNC_INTERVAL:  # not too far ahead of the device: a full queue would block other runs
                since_event = 0
                events.append(torch.cuda.Event())
                events[-1].record()
                if len(events) > 2:
                    events.popleft().synchronize()
            yield taken

    def replay(self, index: int, size: int) -> int:
        """Replay the step from a batch of `size` rows on, and return how many steps were taken.

        A concurrent run takes all steps at once up to the next one after which the host has something to do.
        """
        run, launcher, count = self.run, GRAPH_LAUNCHER.get(), 1
        if launcher is not None and not run.options.ema:
            end = min(index + SYNC_INTERVAL, index + run.steps_to_checkpoint, run.steps_per_epoch)
            count = sum(self.batch_size_at(i) == size for i in range(index, end))
            count = count if run.pruner is None else run.pruner.steps_to_update(count)
        if launcher is None or count == 1:
            self.graphs[size].replay()
        else:
            launcher.replay(self.graphs[size], count)
        return count

    def take_losses(self) -> Tensor | None:
        """Return a copy of the losses since the last call, or None if there are none."""
        losses = self.loss_buffer[self.steps_read : self.steps_taken].clone()
        self.steps_read = self.steps_taken
        return losses if len(losses) else None

    def batch_size_at(self, index: int) -> int:
        """Return the number of rows in a batch of the epoch."""
        batches = self.run.batches
        return min(batches.batch_size, len(batches.split) - index * batches.batch_size)

    def load_epoch(self, epoch: int, start: int) -> None:
        """Copy the order, augmentation and learning rates of an epoch to the device."""
        run = self.run
        first = epoch * run.steps_per_epoch - run.stage_start
        rates = torch.tensor([run.rate(first + index) for index in range(run.steps_per_epoch)])
        drawn = (*run.batches.draw_epoch(epoch), rates)
        for buffer, values in zip((self.order, self.augmentation, self.rates), drawn, strict=True):
            if buffer is not None and values is not None:
                buffer.copy_(values.pin_memory(), non_blocking=True)
        self.counter.fill_(start)
        self.steps_read = self.steps_taken = start

    def take_step(self, forward: Forward, size: int) -> None:
        """Take one step on a batch of `size` rows, with device operations only."""
        run = self.run
        rows_at = self.counter * run.batches.batch_size + torch.arange(size, device=run.device)
        assert self.order is not None
        rows, augmentation = self.order[rows_at], None if self.augmentation is None else self.augmentation[rows_at]
        inputs, targets = run.batches.gather_batch(rows, augmentation)
        self.rate.copy_(self.rates.index_select(0, self.counter)[0])
        loss = train_step(run, forward, inputs, targets)
        self.loss_buffer.index_copy_(0, self.counter, loss.float()[None])
        self.counter += 1

    def capture(self) -> None:
        """Capture the step for each batch size. The effects of the warm-up steps are undone."""
        run, losses = self.run, self.loss_buffer.clone()
        # The smaller last batch is not worth a compilation.
        sizes = {self.batch_size_at(run.steps_per_epoch - 1): False, self.batch_size_at(0): self.compiled}
        stream = capture_stream(run.device)
        with (
            GRAPH_CAPTURE_LOCK,
            pause_garbage_collection(),
            fast_convolutions(nn.ModuleList(run.networks), run.options.precision == "bf16"),
            torch.backends.cudnn.flags(enabled=True, benchmark=True),
        ):
            with preserved_state(run):
                run.stage.optimizer.initialize_state(run.optimizer)
                stream.wait_stream(torch.cuda.current_stream(run.device))
                with torch.cuda.stream(stream):
                    for size, compiled in sizes.items():
                        for _ in range(WARMUP_STEPS):
                            self.counter.zero_()
                            self.take_step(compiled_forward if compiled else eager_forward, size)
                torch.cuda.current_stream(run.device).wait_stream(stream)
            self.loss_buffer.copy_(losses)
            for group in run.optimizer.param_groups:
                group["lr"] = self.rate
            run.stage.optimizer.initialize_state(run.optimizer)
            for size, compiled in sizes.items():
                run.optimizer.zero_grad()
                self.graphs[size] = torch.cuda.CUDAGraph()
                # All graphs are captured on one stream, for which cuBLAS has one workspace: each graph needs its own.
                torch._C._cuda_clearCublasWorkspaces()
                with torch.cuda.graph(self.graphs[size], stream=stream, capture_error_mode="thread_local"):
                    self.take_step(compiled_forward if compiled else eager_forward, size)
            torch._C._cuda_clearCublasWorkspaces()
            run.optimizer.zero_grad()


Forward = Callable[[nn.Module, Tensor, torch.device, str], Tensor]


def eager_forward(model: nn.Module, inputs: Tensor, device: torch.device, precision: str) -> Tensor:
    """Return the logits of a model in a precision."""
    with autocast(device, precision):
        return model(inputs)


def compiled_forward(*arguments: Any) -> Tensor:
    """Return the logits of `eager_forward`, compiled; one compilation serves all runs of an architecture."""
    # Without this option inductor chooses slow layouts for convolutions where few of them are left to it.
    compiled = torch.compile(eager_forward, dynamic=False, options={"force_layout_optimization": True})
    with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_MODELS):
        return compiled(*arguments)


def train_step(run: Run, forward: Forward, inputs: Tensor, targets: Tensor) -> Tensor:
    """Take one training step on a batch and return its loss."""
    logits = forward(run.parallel_model, inputs, run.device, run.options.precision)
    loss = cross_entropy(logits, targets, label_smoothing=run.options.label_smoothing)
    if run.teacher is not None:
        with torch.no_grad():
            teacher_logits = forward(run.teacher, inputs, run.device, run.options.precision)
        options = run.recipe.teacher
        distilled = distillation_loss(logits, teacher_logits, options.temperature)
        loss = (1 - options.weight) * loss + options.weight * distilled
    run.optimizer.zero_grad()
    loss.backward()
    if run.options.clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), run.options.clip)
    step_or_skip(run)
    return loss.detach()


@contextlib.contextmanager
def preserved_state(run: Run) -> Iterator[None]:
    """Restore the model, the optimizer and the pruner, whose state is the optimizer's, when the block ends."""
    model, optimizer = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    try:
        yield
    finally:
        run.optimizer.zero_grad()
        run.model.load_state_dict(model)
        run.optimizer.load_state_dict(optimizer)


def _has_triton() -> bool:
    """Return whether Triton is installed, which torch.compile needs to make GPU kernels."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
