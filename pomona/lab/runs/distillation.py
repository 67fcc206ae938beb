"""Knowledge distillation: a run that learns the outputs of a trained network beside the labels (Hinton et al., 2015).

    [teacher]
    run = "runs/dense"       # or file = "model.safetensors"
    weight = 0.9
    temperature = 4.0

The loss of a batch is (1 − weight) · CE + weight · T² · KL(teacher ‖ student): the cross-entropy of the labels, and the
divergence between the softmax outputs of both networks at temperature T. The teacher runs on the student's batch, in
evaluation mode and in the run's precision. It never changes, so it is not part of a checkpoint: a resumed run loads it
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from pomona.errors import PomonaError, require

from ..recipes.options import TeacherOptions
from ..recipes.recipe import Recipe
from ..recipes.sections import hash_file
from .folder import MODEL_FILE, RECIPE_FILE, read_summary
from .model_file import load_model, read_model_options

OUTPUT_OPTIONS = ("num_classes", "vocabulary")  # options of a model that both networks must have in common


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return T² · KL(teacher ‖ student) of the softmax outputs at temperature T, in float32, as a mean over samples.

    The classes are the last dimension of the logits. The factor T² keeps the size of the gradient when T changes.
    """
    student, teacher = (
        functional.log_softmax(one.flatten(0, -2).float() / temperature, dim=-1) for one in (logits, teacher_logits)
    )
    return temperature**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def load_teacher(recipe: Recipe, student: Mapping[str, Any], device: torch.device) -> nn.Module | None:
    """Return the recipe's teacher on the device, in evaluation mode and without gradients; None if there is none.

    `student` has the name and the options of the run's own model. The random generators are left as they were.
    Raises PomonaError if the teacher is missing, damaged, another one than at the start, or for other data or classes.
    """
    if not recipe.teacher.is_named:
        require(
            recipe.teacher == TeacherOptions(),
            "the section [teacher] names no teacher: give the folder of a finished run, teacher.run, or teacher.file.",
        )
        return None
    file = find_teacher_file(recipe)
    try:
        options = read_model_options(file)
        with torch.random.fork_rng(devices=[]):  # building a network draws its first weights
            teacher = load_model(file)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PomonaError(
            f"the teacher in '{file}' cannot be read: give the {MODEL_FILE} of a finished run, or train it again."
        ) from error
    for key in OUTPUT_OPTIONS:
        own, other = student.get(key), options.get(key)
        require(own == other, f"the teacher in '{file}' has {key} = {other}, and this run has {key} = {own}.")
    return teacher.eval().requires_grad_(False).to(device)


def find_teacher_file(recipe: Recipe) -> Path:
    """Return the file with the teacher's weights, after checking that it is the teacher which the recipe means."""
    teacher = recipe.teacher
    if teacher.run is None:
        found = hash_file("teacher.file", str(teacher.file))
        require(
            found == teacher.fingerprint,
            f"the teacher in '{teacher.file}' has the hash {found}, and that of this run has {teacher.fingerprint}.",
        )
        return Path(str(teacher.file))
    folder = Path(teacher.run)
    summary = read_summary(folder)
    if summary is None:
        raise PomonaError(f"the teacher of this run, '{folder}', is not a finished run: train it first.")
    trained = Recipe.load_stored(folder / RECIPE_FILE)
    require(
        teacher.fingerprint in (trained.fingerprint(), summary["fingerprint"]),
        f"the run in '{folder}' has the fingerprint {trained.fingerprint()}, and the teacher of this run has "
        f"{teacher.fingerprint}.",
    )
    for key, own in recipe.data.to_dict().items():
        other = trained.data.to_dict().get(key)
        require(
            own == other or key == "augment",
            f"the teacher in '{folder}' was trained with data.{key} = {other!r}, and this run has {own!r}: "
            "train both on the same data.",
        )
    return folder / MODEL_FILE
