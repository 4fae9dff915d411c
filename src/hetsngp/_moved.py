"""Names of release 0.1 that have moved or changed: they keep working, with a DeprecationWarning.

``import hetsngp.loop`` finds ``hetsngp.fitting.loop``. Where one module of 0.1 became several, each name is
taken from the one that has it now.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

MOVED: dict[str, tuple[str, ...]] = {
    "artifact": ("io.artifact",),
    "calibration": ("posterior.calibration",),
    "cli.devices": ("serving.bundle",),
    "counting": ("models.loader_counts",),
    "crossfit": ("posterior.cross_fitting",),
    "data.arrays": ("data.images.npz",),
    "data.cifar": ("data.datasets.cifar",),
    "data.class_folders": ("data.images.folders",),
    "data.class_matching": ("data.class_maps",),
    "data.corrupted_files": ("data.datasets.cifar_c",),
    "data.corruptions.frosting": ("data.corruptions.frost_images",),
    "data.corruptions.draws": ("data.corruptions.counter_rng",),
    "data.decoding": ("data.images.decoding",),
    "data.device_loader": ("data.images.device_loader",),
    "data.files": ("data.images.files",),
    "data.folders": (
        "data.images.folders",
        "data.images.files",
        "data.images.decoding",
    ),
    "data.frames": ("data.tables",),
    "data.imagenet": ("data.datasets.imagenet",),
    "data.imagenet21k": ("data.datasets.imagenet21k",),
    "data.inputs": ("data.preprocessing",),
    "data.multi_label": ("data.images.multi_label",),
    "data.noisy_labels": ("data.datasets.human_labels",),
    "data.places": ("data.datasets.places",),
    "data.registry": ("data.datasets.registry",),
    "data.roots": ("data.datasets.dataset",),
    "data.shard_choice": ("data.shards.streams",),
    "data.shard_index": ("data.shards.index",),
    "data.svhn": ("data.datasets.svhn",),
    "data.synsets": ("data.datasets.synsets",),
    "data.synthetic": ("data.datasets.synthetic",),
    "data.tar_samples": ("data.shards.tar_samples",),
    "descent": ("fitting.lbfgs",),
    "ensemble": ("models.ensemble",),
    "estimator.weights": ("estimator.classifier",),
    "evaluation.corrupted_plots": ("evaluation.report_plots",),
    "evaluation.curves": ("evaluation.figures",),
    "evaluation.demo": ("paper.synthetic.demo",),
    "evaluation.digests": ("evaluation.fingerprints",),
    "evaluation.measuring": ("evaluation.evaluator",),
    "evaluation.parts": ("evaluation.fingerprints", "evaluation.cache"),
    "evaluation.plots": (
        "paper.synthetic.plots",
        "evaluation.figures",
    ),
    "evaluation.reports": ("evaluation.report",),
    "evaluation.rows": ("evaluation.set_predictions",),
    "evaluation.run_report": ("evaluation.run_evaluation",),
    "evaluation.runs": ("paper.synthetic.processes",),
    "evaluation.store": (
        "paper.synthetic.store",
        "files",
    ),
    "evaluation.synthetic": ("paper.synthetic.experiment", "paper.synthetic.summary"),
    "evaluation.tables": ("paper.synthetic.summary",),
    "factors": ("types",),
    "features": ("frozen.features",),
    "functional.control": ("functional.sampling",),
    "functional.flows": ("functional.dirichlet",),
    "functional.points": ("functional.sampling",),
    "functional.streaming": ("functional.sampling",),
    "leaving": ("posterior.leave_one_out",),
    "libraries": ("conversion.libraries",),
    "locating": ("conversion.tracing",),
    "loop": ("fitting.loop",),
    "metrics.library": ("metrics.probabilities",),
    "model": ("models.classifier",),
    "multi_input": ("models.multi_input",),
    "nn.flows": ("nn.dirichlet",),
    "nn.gaussian": ("nn.heads",),
    "nn.held": ("nn.spectral_cache",),
    "nn.inducing": ("nn.latent",),
    "nn.inputs": ("nn.multi_input",),
    "nn.linear": ("nn.initialization",),
    "nn.normalization": ("nn.latent",),
    "nn.statistics": ("nn.posteriors",),
    "options": ("models.options",),
    "parts": ("models.components",),
    "progress": ("fitting.progress",),
    "recipes": ("models.methods",),
    "report": ("posterior.fit",),
    "reproduction": ("paper",),
    "reproduction.measuring": ("paper.measurements", "paper.results"),
    "reproduction.paper": ("paper.definitions",),
    "reproduction.plots": ("paper.plots",),
    "reproduction.reproducing": ("paper.reproduction",),
    "reproduction.results": ("paper.results",),
    "reproduction.runs": ("paper.runs",),
    "reproduction.runtime": ("paper.runtime.measurement",),
    "reproduction.runtime_tables": ("paper.runtime.definitions",),
    "reproduction.runtime_text": ("paper.runtime.text",),
    "reproduction.runtime_timing": ("paper.runtime.timing",),
    "reproduction.sets": ("paper.sets",),
    "reproduction.synthetic": ("paper.synthetic.table",),
    "reproduction.tables": ("paper.definitions",),
    "reproduction.text": ("paper.text",),
    "saved": ("io.artifact",),
    "schedule": ("fitting.schedule",),
    "serving.lines": ("serving.output",),
    "serving.predicting": ("serving.predictions",),
    "serving.sheet": ("serving.contact_sheet",),
    "serving.verdicts": ("serving.decisions",),
    "storage": (
        "io.storage",
        "files",
    ),
    "table": ("fitting.table_trainer",),
    "tracing": ("conversion.tracing",),
    "training.average": ("training.moving_average",),
    "training.bounds": ("training.gradients",),
    "training.checkpoint": ("training.checkpointing.checkpoint_files",),
    "training.feeds": ("training.loaders",),
    "training.plan": ("training.config",),
    "training.randomness": ("training.checkpointing.randomness",),
    "training.recipe": ("training.recipes.recipe",),
    "training.recipe_keys": ("training.recipes.keys",),
    "training.refit": ("training.run",),
    "training.saving": ("training.checkpointing.checkpoint",),
    "training.states": ("training.checkpointing.state_dicts",),
    "training.task": ("training.recipes.task",),
    "watching": ("fitting.early_stopping",),
}
"""Module of 0.1 → the modules that have its names now; under ``hetsngp``."""


RENAMED: dict[str, str] = {
    "functional.sampling.Points": "IntegrationPoints",
    "functional.sampling.spread": "num_coordinates",
    "models.components.Parts": "Components",
    "models.loader_counts.tell_counts": "set_missing_counts",
    "nn.spectral_cache.hold_bounds": "cache_spectral_norms",
    "nn.spectral_cache.refresh_bounds": "remeasure_spectral_norms",
    "nn.spectral_cache.release_bounds": "uncache_spectral_norms",
    "validation.trusting": "skip_validation",
    "serving.Line": "PredictionRecord",
    "serving.Served": "ServedModel",
    "serving.bundle.Served": "ServedModel",
    "serving.contact_sheet.draw_lines": "draw_contact_sheet",
    "serving.decisions.never_said": "unused_verdicts",
    "serving.draw_lines": "draw_contact_sheet",
    "serving.output.Line": "PredictionRecord",
    "serving.predictions.Line": "PredictionRecord",
    "data.corrupted.Mapped": "LazyMap",
    "data.corruptions.Draws": "CounterRNG",
    "data.corruptions.counter_rng.Draws": "CounterRNG",
    "data.images.decoding.middle": "resize_and_center_crop",
    "data.images.decoding.random_part": "random_resized_crop",
    "data.preprocessing.Inputs": "Preprocessing",
    "data.preprocessing.is_made": "made_by_hetsngp",
    "data.preprocessing.some_of": "subset",
    "data.shards.streams.part_of": "hold_out_shards",
    "fitting.early_stopping.Best": "BestWeights",
    "fitting.early_stopping.watch": "run_with_early_stopping",
    "fitting.lbfgs.descend": "fit_map",
    "fitting.loop.Place": "TrainState",
    "fitting.loop.follow": "train_with_schedule",
    "fitting.progress.RowProgress": "ExampleProgress",
    "fitting.table_trainer.TableFit": "TableTrainer",
    "fitting.table_trainer.merge_copies": "merge_duplicates",
    "training.Keep": "CheckpointConfig",
    "training.Plan": "TrainConfig",
    "training.config.Keep": "CheckpointConfig",
    "training.config.Plan": "TrainConfig",
    "training.recipes.recipe.BOOK": "CONFIGS",
    "training.recipes.recipe.book_names": "recipe_names",
    "evaluation.fingerprints.Digest": "Fingerprinter",
    "evaluation.fingerprints.Unseen": "CannotFingerprint",
    "evaluation.set_predictions.Rows": "SetPredictions",
    "evaluation.set_predictions.predict_rows": "predict_batches",
    "evaluation.report.OutsideSet": "OODSet",
    "paper.Table": "PaperTable",
    "paper.synthetic.experiment.RECIPES": "SETTINGS",
    "paper.definitions.Table": "PaperTable",
    "posterior.calibration.row_keys": "feature_keys",
}
"""Name of 0.1, in the module that has it now → its new name there."""


def submodule(package: str, name: str) -> types.ModuleType:
    """``__getattr__`` of a package for its modules, which 0.1 imported with ``import hetsngp``."""
    if (
        name.startswith("_")
        or not name.isidentifier()
        or importlib.util.find_spec(f"{package}.{name}") is None
    ):
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(f"{package}.{name}")


def renamed(module: str, name: str) -> Any:
    """``__getattr__`` of a module for names of 0.1: warns, and returns what has the new name."""
    new = RENAMED.get(f"{module.removeprefix('hetsngp.')}.{name}")
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is now called {new}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new)


def renamed_arguments(**names: str) -> Callable[[T], T]:
    """Decorate a function or a (data)class: keyword ``old`` is taken as ``new``, with a DeprecationWarning.

    A class also restores pickles of 0.1, in which the attributes have their old names.

    >>> @renamed_arguments(rate="lr")
    ... def step(lr: float) -> float:
    ...     return lr
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     step(rate=0.1), str(caught[0].message)
    (0.1, 'step: rate is now called lr')
    """

    def decorate(decorated: T) -> T:
        target: Any = decorated
        is_class = isinstance(decorated, type)
        called = target.__init__ if is_class else target

        @functools.wraps(called)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in names.items():
                if old in kwargs:
                    text = f"{decorated.__name__}: {old} is now called {new}"
                    if new in kwargs:
                        raise TypeError(f"{text}, and both are given")
                    warnings.warn(text, DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return called(*args, **kwargs)

        def restore(self: Any, state: dict[str, Any]) -> None:
            self.__dict__.update(rename_keys(state, names))

        if is_class:
            target.__init__, target.__setstate__ = call, restore
            return decorated
        return call  # type: ignore[return-value]

    return decorate


def rename_keys(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Copy of ``values`` with each key in ``names`` replaced; the order stays."""
    return {names.get(key, key): value for key, value in values.items()}


def renamed_attribute(old: str, new: str) -> property:
    """Attribute or method ``old`` of a class, which is ``new`` now: reading it gives a DeprecationWarning."""

    def read(self: Any) -> Any:
        text = f"{type(self).__name__}.{old} is now called {new}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(read)


class MovedModule(types.ModuleType):
    """A module of 0.1: its names are looked up in the modules that have them now."""

    def _targets(self) -> list[types.ModuleType]:
        names = MOVED[self.__name__.removeprefix("hetsngp.")]
        return [importlib.import_module(f"hetsngp.{name}") for name in names]

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `from hetsngp.loop import *`
            return sorted({public for module in self._targets() for public in _public_names(module)})
        if not name.startswith("__"):
            for module in self._targets():
                new = RENAMED.get(f"{module.__name__.removeprefix('hetsngp.')}.{name}", name)
                if hasattr(module, new):
                    return getattr(module, new)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def _public_names(module: types.ModuleType) -> list[str]:
    return getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])


class MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules in :data:`MOVED`; asked last, so that it costs other imports nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.removeprefix("hetsngp.")
        if name not in MOVED or name == fullname:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MOVED)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        new = " and ".join(f"hetsngp.{name}" for name in MOVED[spec.name.removeprefix("hetsngp.")])
        _warn_importer(f"{spec.name} has moved to {new}")
        return MovedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _warn_importer(message: str) -> None:
    """Warn of the line that imports: the first outside the import system, this file and ``hetsngp``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _imports(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        DeprecationWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _imports(module: str) -> bool:
    return module in (__name__, "hetsngp") or module.partition(".")[0] == "importlib"


def install() -> None:
    """Add the finder, once."""
    if not any(isinstance(finder, MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(MovedFinder())
