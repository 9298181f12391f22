"""What is known before a run: what would stop it, what does not fit, and hints."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ..core.options import FEW_CLASSES
from ..data.decoded import Decoded, DecodedSuite
from ..data.folders import unread_files
from ..data.types import ImageSet
from ..methods import METHODS
from ..parts.augment import require_kornia
from .plan import Job, PlanError
from .run import Run
from .stream import SampledDomain

__all__ = ["check", "fitting", "hints", "unfit"]


def check(run: Run, jobs: Iterable[Job] | None = None) -> None:
    """Raise for all that would stop the run later or make it meaningless, as far as little work can tell.

    Shifts, source images, methods and their arguments, class counts, the first image, the folder and what is in it.
    `jobs` are those to check for, by default all; there is nothing to check for those that are done.
    """
    with run.world.together():
        due = _due(run, run.plan.jobs() if jobs is None else jobs)
    for method, job in due.items():
        _check_adapter(run, method, job)


def _due(run: Run, jobs: Iterable[Job]) -> dict[str, Job]:
    """Return a job of each method that is not done, after all checks that need no adapter."""
    found = {job: run.folder.read(job) for job in jobs}
    due = {job.method: job for job, result in found.items() if result is None or not result.done}
    if not due:
        return due
    if run.world.size > 1 and run.plan.skip_broken:
        raise PlanError("several ranks cannot leave out broken images: `acclimate scan` lists them; remove them")
    run.scenario(run.plan.seeds[0])
    needing = [method for method in due if run.needs_source(method)]
    if needing and run.plan.source is None and not run.has_clean:
        raise PlanError(
            f"{needing[0]} needs clean images, and {run.plan.data.partition(':')[0]} has none: name them with "
            f"source=, such as {'scenes' if run.task == 'segmentation' else 'imagenet'}:FOLDER, or set "
            f"{needing[0]}.beta=0"
        )
    for method, why in unfit(run).items():
        if method in due:
            raise PlanError(f"{method} does not fit: {why}. Leave it out")
    run.folder.check_writable()
    run.suite.check_classes(run.outputs)
    return due


def _check_adapter(run: Run, method: str, job: Job) -> None:
    """Raise if a method cannot be built; two images stand for those of the Fisher importance."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when it is built to run
            adapter = run.adapter(job, source_images=2)
        require_kornia(getattr(adapter, "augment", None))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in run.plan.overrides.get(method, {}).items())
        raise PlanError(f"{method}{given and f' with {given}'} cannot be built: {error}") from error


def unfit(run: Run) -> dict[str, str]:
    """Return the methods of the plan that cannot run here, with the reason."""
    found = {
        name: f"it is for {METHODS[name].task}, and the data for {run.task}"
        for name in run.plan.methods
        if METHODS[name].task not in ("any", run.task)
    }
    if "bn-adapt" in run.plan.methods and not run.network.has_batch_norm:
        found["bn-adapt"] = "it needs BatchNorm layers, and the network has none"
    return found


def fitting(run: Run) -> Run:
    """Return the same run without the methods that do not fit."""
    methods = [name for name in run.plan.methods if name not in unfit(run)]
    return Run(replace(run.plan, methods=methods), run.folder.path, run, run.world)


def hints(run: Run) -> list[str]:
    """Return which class each folder is, options that have no effect, and options to try."""
    found = [f"classes: {note}"] if (note := run.suite.class_note()) else []
    if run.plan.cache and not (isinstance(run.suite, DecodedSuite) and run.suite.kept):
        found.append("--cache makes no difference here: it is for image files and a network with a fixed crop")
    classes, other = run.outputs, FEW_CLASSES.get(run.family)
    if not run.plan.preset and other is not None and classes < 100:
        found.append(
            f"{run.family}'s hyper-parameters are for 1,000 classes, and the network has {classes}: also "
            f"try --preset {other}, or let `acclimate tune` choose"
        )
    elif not run.plan.preset and not _is_of_the_paper(run.plan.model):
        found.append(
            f"learning rates are those for {run.family}, which is another network: `acclimate tune` chooses some "
            "for yours"
        )
    if idle := [name for name in run.plan.overrides if name not in (*run.plan.methods, "guard")]:
        found.append(f"--set of {', '.join(idle)} has no effect: that method does not run")
    if unread := unread_files(_image_sets(run)):
        found.append(unread)
    return found


def _image_sets(run: Run) -> Iterator[ImageSet]:
    """Yield the images of the stream."""
    for domain in run.scenario(run.plan.seeds[0]).domains:
        for part in domain.parts if isinstance(domain, SampledDomain) else ():
            yield part.images.images if isinstance(part.images, Decoded) else part.images


def _is_of_the_paper(model: str) -> bool:
    """Return whether a network's name says that it is a ResNet-50, a ViT-Base or a SegFormer-B5."""
    return any(name in model.lower() for name in ("resnet50", "vit_b", "vit-b", "segformer-b5", "segformer_b5"))
