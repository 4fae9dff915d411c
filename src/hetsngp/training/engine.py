"""Engine: trains a model and fits its posterior on the devices there are, one or many."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetsngp.fitting.early_stopping import EpochResult, best_epoch
from hetsngp.fitting.progress import at_a_terminal
from hetsngp.functional.sampling import PartGenerator
from hetsngp.io.artifact import save
from hetsngp.models.classifier import Classifier, evaluating, to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.loaders import is_device_loader, tell_counts
from hetsngp.nn.spectral import bounded_layers, settle_bounds
from hetsngp.nn.spectral_cache import release_bounds
from hetsngp.posterior.calibration import TOLERANCE
from hetsngp.posterior.fit import PosteriorReport, fit_posterior, refuse_training_data
from hetsngp.training.checkpointing.randomness import own_randomness
from hetsngp.training.checkpointing.states import load_model, whole
from hetsngp.training.config import CheckpointConfig, TrainConfig
from hetsngp.training.feeds import Feed, num_examples, share_of
from hetsngp.training.gradients import FabricGradients
from hetsngp.training.hardware import Hardware
from hetsngp.training.logs import Row
from hetsngp.training.run import Data, Refit, TrainingRun, samples_beta
from hetsngp.validation import check_batch


@dataclass(frozen=True)
class Trained:
    """What :meth:`Engine.train` gives back."""

    model: Classifier
    """The model that was given, trained; under fsdp, where that one is in shares, a whole copy of it."""
    history: list[EpochResult]
    rows: list[Row]
    """What ``metrics.csv`` has: an entry for each epoch, with its seconds."""
    resumed: int
    """Updates that an earlier run had made."""
    chosen: bool = True
    """Whether the epoch was chosen by held-out data, if there were any."""

    @property
    def best(self) -> int:
        """The epoch whose weights the model has: that of the lowest held-out NLL, or the last."""
        return best_epoch(self.history) if self.chosen else self.history[-1].epoch


class Engine:
    """Lightning Fabric with one loop on it, the one of :mod:`hetsngp.fitting.loop`, for every method.

    Making one starts the processes that ``hardware`` asks for: each runs the whole script, so make it before
    anything else. With one process there is nothing to start.

    >>> import hetsngp, tempfile
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> from hetsngp.fitting.schedule import Schedule
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> loader, held_out = DataLoader(data, 20, shuffle=True), [(x[:8], (x[:8, 0] > 0).long())]
    >>> model = hetsngp.build("hetsngp", ResidualMLP(2, width=16), num_classes=2)
    >>> engine = Engine(Hardware(accelerator="cpu"))
    >>> plan = Plan(Schedule(epochs=3, lr=0.01, warmup=1, smooth=True), average=0.9)
    >>> trained = engine.train(model, loader, plan, held_out=held_out, keep=Keep(tempfile.mkdtemp()))
    >>> len(trained.history)
    3
    >>> engine.fit_posterior(trained.model, loader, held_out).posterior
    'kronecker'
    """

    def __init__(self, hardware: Hardware | None = None) -> None:
        self.hardware = Hardware() if hardware is None else hardware
        self.fabric = self.hardware.launch()

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        main: bool = self.fabric.is_global_zero
        return main

    @property
    def device(self) -> torch.device:
        """Of this process."""
        device: torch.device = self.fabric.device
        return device

    def train(
        self,
        model: Classifier,
        loader: Iterable[Any],
        plan: TrainConfig,
        *,
        held_out: Iterable[Any] | None = None,
        keep: CheckpointConfig | str | os.PathLike[str] | None = None,
        show: bool | None = None,
        clean: Iterable[Any] | None = None,
    ) -> Trained:
        """Train ``model`` by ``plan``; ``loader`` and ``held_out`` hold all data, and are shared out here.

        With ``held_out`` the model ends with the weights of the epoch whose NLL was lowest there, unless
        ``plan.best`` is False. ``keep`` names a folder: what was begun in it is gone on with. ``show``:
        progress; None: at a terminal.

        A model built with ``sample_beta=True`` is trained under its posterior from the second epoch on: after
        each epoch but the last one pass over ``clean`` fits it, as :meth:`fit_posterior` does and without
        calibration. ``clean`` is for loaders that augment from disk: the training data as they are. None: all
        that a DeviceLoader has, as it is, or what any other ``loader`` yields. The model ends without a
        posterior, as any other, for :meth:`fit_posterior`. The plain loop does none of this.
        """
        if isinstance(model, Ensemble):
            raise TypeError(
                "an ensemble is trained member by member, each in a folder of its own: "
                "[engine.train(m, loader, plan, keep=f'runs/{i}') for i, m in enumerate(ensemble.members)]"
            )
        if plan.patience is not None and held_out is None:
            raise ValueError("patience needs held-out data to watch: train(..., held_out=loader)")
        if samples_beta(model) and self.hardware.strategy == "fsdp":
            raise ValueError(
                "sample_beta passes over the data between epochs with the whole model, of which each process "
                "has a share under fsdp: Hardware(strategy='ddp')"
            )
        refuse_training_data(loader, held_out)
        if keep is not None and not isinstance(keep, CheckpointConfig):
            keep = CheckpointConfig(Path(keep))
        try:
            with own_randomness(plan.seed + self.fabric.global_rank, self.device):
                tell_counts(model, loader)  # by a pass over the loader, which may draw
                if samples_beta(model) and is_device_loader(loader):
                    loader = loader.to(self.device)  # type: ignore[attr-defined]  # once, for two uses
                refit = self._refit(model, loader if clean is None else clean)
                run, whole_model = self._prepare(model, loader, plan, held_out, keep, show, refit)
                with run.gradients.gathering():
                    run.go()
        finally:  # after an error, too, a model is as it was but for its weights
            release_bounds(model)
            model.backbone._compiled_call_impl = None  # prediction is for batches of any shape
        if whole_model is not model:
            load_model(whole_model, whole(model.state_dict()))
        return Trained(whole_model.to(self.device).eval(), run.history, run.rows, run.resumed, plan.best)

    def _prepare(
        self,
        model: Classifier,
        loader: Iterable[Any],
        plan: TrainConfig,
        held_out: Iterable[Any] | None,
        keep: CheckpointConfig | None,
        show: bool | None,
        refit: Refit | None,
    ) -> tuple[TrainingRun, Classifier]:
        """The run, and the model to give back."""
        hardware, fabric = self.hardware, self.fabric
        sharded = hardware.strategy == "fsdp"
        feed = Feed(loader, model, fabric, channels_last=hardware.channels_last, seed=plan.seed)
        about = {"examples": num_examples(loader), "batch_size": getattr(loader, "batch_size", None)}
        model.to(self.device)
        if hardware.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        whole_model = copy.deepcopy(model) if sharded else model
        if hardware.compile:
            # Gradients that are added up over batches, or sent to others, must not lie in a graph's memory.
            graphs = self.device.type == "cuda" and fabric.world_size == plan.accumulate == 1
            self._compile(model, feed, graphs=graphs)
        generator = PartGenerator.of(plan.seed, fabric.global_rank, fabric.world_size)
        gradients = FabricGradients(
            fabric, model, plan, generator, channels_last=hardware.channels_last, sharded=sharded
        )
        watched = held_out
        if held_out is not None and not sharded:
            watched = share_of(held_out, fabric)
        elif is_device_loader(held_out):
            watched = held_out.to(self.device)  # type: ignore[union-attr]
        show = at_a_terminal() if show is None else show
        data = Data(feed, watched, not sharded, about, refit)
        return TrainingRun(fabric, gradients, data, plan, keep, show), whole_model

    def _refit(self, model: Classifier, clean: Iterable[Any]) -> Refit | None:
        if not samples_beta(model):
            return None
        if is_device_loader(clean):
            clean = clean.to(self.device)  # type: ignore[attr-defined]
        return Refit(model, partial(self.fit_posterior, model, clean))

    def _compile(self, model: Classifier, feed: Feed, *, graphs: bool) -> None:
        """``graphs``: launch the backbone as CUDA graphs, and leave the host's time to the head."""
        if bounded_layers(model.backbone):
            # Power iterations start at the sizes that the first batch brings, which is no part of the graph.
            x, _, _ = check_batch(next(iter(feed.begin(1))), "loader")
            with evaluating(model), self.fabric.autocast():
                settle_bounds(model.backbone, lambda: model.backbone(to_device(x[:2], self.device)))
        model.backbone.compile(mode="reduce-overhead" if graphs else None)

    def fit_posterior(
        self,
        model: Classifier,
        loader: Iterable[Any],
        calibration: Iterable[Any] | None = None,
        *,
        tolerance: float = TOLERANCE,
    ) -> PosteriorReport:
        """:func:`hetsngp.fit_posterior`, each process passing over its part of ``loader``.

        What the posterior is made of are sums over the data, and these are added up over processes; each
        then calibrates on all of ``calibration``, to the same end. Of a DeviceLoader every image is taken
        as it is, however it augments; a DataLoader that augments should be replaced by one that does not.
        """
        refuse_training_data(loader, calibration)
        if is_device_loader(loader):
            loader = loader.clean()  # type: ignore[attr-defined]
        if is_device_loader(calibration):
            calibration = calibration.to(self.device)  # type: ignore[union-attr]
        model.to(self.device)

        def add_up(tensor: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.fabric.all_reduce(tensor, reduce_op="sum")
            return total

        reduce = add_up if self.fabric.world_size > 1 else None
        return fit_posterior(
            model, share_of(loader, self.fabric), calibration, tolerance=tolerance, reduce=reduce
        )

    def save(self, model: Classifier, path: str | os.PathLike[str]) -> None:
        """:func:`hetsngp.save`, by the main process; all wait for it."""
        if self.is_main:
            save(model, path)
        self.fabric.barrier()
