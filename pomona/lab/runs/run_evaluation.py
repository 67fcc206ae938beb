"""The evaluation of a run: its model on test and validation data, batch-norm statistics and averaged weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pomona.core.batch_norm import batchnorm_layers
from pomona.core.method import TrainingProgress
from pomona.data import ImageStream

from .evaluate import measure, reestimate_batchnorm

if TYPE_CHECKING:
    from .run import Run


def evaluate_run(run: Run) -> dict[str, float]:
    """Return loss and accuracy (perplexity for text) on the test part, and on the validation part if there is one.

    Soon after a mask change the batch-norm statistics are stale. The scores of a copy with new statistics are then
    added with the suffix `_reestimated`.
    """
    scores = score_model(run, run.model, "test")
    if run.data.valid is not None:
        scores |= {f"valid_{key}": value for key, value in score_model(run, run.model, "valid").items()}
    if has_stale_statistics(run):
        fresh = with_new_statistics(run)
        scores |= {f"{key}_reestimated": value for key, value in score_model(run, fresh, "test").items()}
    return scores


def score_model(run: Run, model: nn.Module, part: str) -> dict[str, float]:
    """Return the loss and the accuracy or perplexity of a model on one part of the run's data."""
    text = run.data.kind == "text"
    size = run.options.batch_size if text else run.options.eval_batch_size
    share, evaluated = rank_share(run), run.strategy.evaluated_model(model)
    if share:
        run.processes.copy_buffers(evaluated)
        size = max(1, size // run.processes.world_size) * run.processes.world_size
    batches = run.data.batches(size, part=part, channels_last=run.channels_last, **share)
    scores = measure(evaluated, batches.evaluate(), run.options.precision, run.processes.sum if share else None)
    return {"test_loss" if part == "test" else "loss": scores["loss"]} | (
        {"perplexity": scores["perplexity"]} if text else {"accuracy": scores["accuracy"]}
    )


def rank_share(run: Run) -> dict[str, Any]:
    """Return the options of batches that hold this process's share of rows; none where it reads them all.

    Every process evaluates data in memory alone. Images that must be decoded first are shared among the processes.
    """
    if run.processes.world_size == 1 or not isinstance(run.data.train, ImageStream):
        return {}
    return {"rank": run.processes.rank, "world": run.processes.world_size}


def has_stale_statistics(run: Run) -> bool:
    """Return whether the mask changed so recently that running batch-norm statistics cannot have adapted."""
    return bool(run.options.reestimate and batchnorm_layers(run.model)) and changed_recently(run)


def changed_recently(run: Run) -> bool:
    """Return whether the last mask change of this stage is at most one interval between updates ago."""
    if run.pruner is None:
        return False
    since_change = run.step - run.stage_start - run.pruner.last_change
    progress = TrainingProgress(since_change, run.stage_steps, run.steps_per_epoch)
    return since_change <= run.pruner.method.interval(progress)


def with_new_statistics(run: Run) -> nn.Module:
    """Return a copy of the model with batch-norm statistics from training batches.

    Where the processes share the batches, the statistics are the mean of theirs.
    """
    share = rank_share(run)
    batches = run.training_batches(**share).epoch(max(run.step - 1, 0) // run.steps_per_epoch)
    fresh = reestimate_batchnorm(run.model, batches, run.options.reestimate, run.options.precision)
    for layer in batchnorm_layers(fresh) if share else ():
        for buffer in (layer.running_mean, layer.running_var):
            if buffer is not None:
                run.processes.mean(buffer)
    return fresh


def install_average(run: Run) -> None:
    """Give the model its averaged weights, pruned by the masks, and batch-norm statistics for them."""
    run.average.install()
    if run.pruner is not None:
        run.pruner.apply(run.model)
    if batchnorm_layers(run.model) and run.options.reestimate:
        run.model.load_state_dict(with_new_statistics(run).state_dict())
