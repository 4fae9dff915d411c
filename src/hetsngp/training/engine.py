"""Engine: train a model and fit its posterior, on one device or many."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hetsngp._moved import renamed_arguments
from hetsngp.fitting.early_stopping import EpochResult, best_epoch
from hetsngp.fitting.progress import at_a_terminal
from hetsngp.functional.label_loss import LabelLoss
from hetsngp.io.artifact import save
from hetsngp.models.classifier import Classifier, evaluating, to_device
from hetsngp.models.ensemble import Ensemble
from hetsngp.models.loader_counts import set_missing_counts
from hetsngp.nn.heads import GaussianHead
from hetsngp.nn.spectral import bounded_layers, measure_bounds
from hetsngp.nn.spectral_cache import uncache_spectral_norms
from hetsngp.posterior.calibration import TOLERANCE
from hetsngp.posterior.fit import PosteriorReport, fit_posterior
from hetsngp.training.checkpointing.randomness import seeded_rng
from hetsngp.training.checkpointing.state_dicts import full_tensors, load_model
from hetsngp.training.config import CheckpointConfig, TrainConfig
from hetsngp.training.gradients import FabricGradients, GraphedLabelLoss
from hetsngp.training.hardware import Hardware
from hetsngp.training.loaders import ResumableLoader, num_examples, shard_loader
from hetsngp.training.logs import MetricsRow
from hetsngp.training.main_process import on_main, run_writer
from hetsngp.training.run import PosteriorRefit, RunData, TrainingRun, samples_beta
from hetsngp.training.same_data import loader_fingerprints
from hetsngp.validation import check_batch, check_held_out, is_device_loader


@dataclass(frozen=True)
class Trained:
    """Result of :meth:`Engine.train`."""

    model: Classifier
    """The given model, trained; under fsdp, which shards that one, a full copy of it."""
    history: list[EpochResult]
    rows: list[MetricsRow]
    """Rows of ``metrics.csv``, one for each epoch."""
    resumed: int
    """Number of updates that earlier calls had made."""
    chosen: bool = True
    """Whether the epoch was chosen by held-out NLL, if there are held-out data."""

    @property
    def best(self) -> int:
        """Epoch whose weights the model has: that of the lowest held-out NLL, or the last."""
        return best_epoch(self.history) if self.chosen else self.history[-1].epoch


class Engine:
    """Lightning Fabric with one loop on it, the one of :mod:`hetsngp.fitting.loop`, for every method.

    The constructor starts the processes that ``hardware`` asks for, each of which runs the whole script: make
    the engine before anything else.

    >>> import hetsngp, tempfile
    >>> from hetsngp.nn.backbones import ResidualMLP
    >>> from hetsngp.fitting.schedule import Schedule
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> loader, held_out = DataLoader(data, 20, shuffle=True), [(x[:8], (x[:8, 0] > 0).long())]
    >>> model = hetsngp.build("hetsngp", ResidualMLP(2, width=16), num_classes=2)
    >>> engine = Engine(Hardware(accelerator="cpu"))
    >>> config = TrainConfig(Schedule(epochs=3, lr=0.01, warmup=1, smooth=True), ema_decay=0.9)
    >>> trained = engine.train(model, loader, config, held_out=held_out, checkpoints=tempfile.mkdtemp())
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
        """Whether this process is the one that prints and writes."""
        main: bool = self.fabric.is_global_zero
        return main

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        device: torch.device = self.fabric.device
        return device

    @renamed_arguments(plan="config", keep="checkpoints")
    def train(
        self,
        model: Classifier,
        loader: Iterable[Any],
        config: TrainConfig,
        *,
        held_out: Iterable[Any] | None = None,
        checkpoints: CheckpointConfig | str | os.PathLike[str] | None = None,
        show: bool | None = None,
        clean: Iterable[Any] | None = None,
    ) -> Trained:
        """Train ``model``; ``loader`` and ``held_out`` hold all data, of which each process takes its part.

        With ``held_out`` the model ends with the weights of the epoch whose NLL was lowest there, unless
        ``config.best`` is False. ``checkpoints`` is, or names, a folder: a run that was interrupted there is
        resumed; other data than those it began with are refused (docs/training.md has what is compared), and
        so is another run that writes there at the same time. ``show``: whether to show progress; None: at a
        terminal.

        A model built with ``sample_beta=True`` is trained under its posterior from the second epoch on: after
        each epoch but the last one pass over ``clean`` fits it, as :meth:`fit_posterior` does and without
        calibration. ``clean``: the training data without augmentation, needed where ``loader`` augments
        images from disk; None: all images of a DeviceLoader without augmentation, or ``loader``. The model
        ends without a posterior, as any other, for :meth:`fit_posterior`. The plain loop does none of this.
        """
        if isinstance(model, Ensemble):
            raise TypeError(
                "an ensemble is trained member by member, each with its own folder: [engine.train(m, loader, "
                "config, checkpoints=f'runs/{i}') for i, m in enumerate(ensemble.members)]"
            )
        if config.patience is not None and held_out is None:
            raise ValueError("patience needs held-out data: train(..., held_out=loader)")
        if samples_beta(model) and self.hardware.strategy == "fsdp":
            raise ValueError(
                "sample_beta passes over the data between epochs with the full model, of which each process "
                "has a shard under fsdp: Hardware(strategy='ddp')"
            )
        check_held_out(loader, held_out)
        if checkpoints is not None and not isinstance(checkpoints, CheckpointConfig):
            checkpoints = CheckpointConfig(Path(checkpoints))
        with ExitStack() as stack:
            if checkpoints is not None:
                stack.enter_context(run_writer(self.fabric, checkpoints.folder))
            return self._train(model, loader, config, held_out, checkpoints, show, clean)

    def _train(
        self,
        model: Classifier,
        loader: Iterable[Any],
        config: TrainConfig,
        held_out: Iterable[Any] | None,
        checkpoints: CheckpointConfig | None,
        show: bool | None,
        clean: Iterable[Any] | None,
    ) -> Trained:
        try:
            with seeded_rng(config.seed + self.fabric.global_rank, self.device):
                set_missing_counts(model, loader)  # may pass over the loader, which draws random numbers
                if samples_beta(model) and is_device_loader(loader):
                    loader = loader.to(self.device)  # type: ignore[attr-defined]  # once for training and refitting
                refit = self._refit(model, loader if clean is None else clean)
                run, full_model = self._prepare(model, loader, config, held_out, checkpoints, show, refit)
                with run.gradients.whole_batches():
                    run.go()
        finally:  # after an error, too, only the weights of the model have changed
            uncache_spectral_norms(model)
            model.backbone._compiled_call_impl = None  # predictions have batches of any shape
            _set_label_loss(model, None)
        if full_model is not model:
            load_model(full_model, full_tensors(model.state_dict()))
        return Trained(full_model.to(self.device).eval(), run.history, run.rows, run.resumed, config.best)

    def _prepare(
        self,
        model: Classifier,
        loader: Iterable[Any],
        config: TrainConfig,
        held_out: Iterable[Any] | None,
        checkpoints: CheckpointConfig | None,
        show: bool | None,
        refit: PosteriorRefit | None,
    ) -> tuple[TrainingRun, Classifier]:
        """Make the run, and the model to return."""
        hardware, fabric = self.hardware, self.fabric
        sharded = hardware.strategy == "fsdp"
        batches = ResumableLoader(
            loader, model, fabric, channels_last=hardware.channels_last, seed=config.seed
        )
        about = {"examples": num_examples(loader), "batch_size": getattr(loader, "batch_size", None)}
        fingerprints = self._fingerprints(loader, held_out, checkpoints)
        model.to(self.device)
        if hardware.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        full_model = copy.deepcopy(model) if sharded else model
        if hardware.compile:
            # Gradients that are accumulated, or sent to other processes, must not lie in a graph's memory.
            graphs = self.device.type == "cuda" and fabric.world_size == config.accumulate == 1
            self._compile(model, batches, graphs=graphs)
        generator = torch.Generator().manual_seed(config.seed)
        gradients = FabricGradients(
            fabric, model, config, generator, channels_last=hardware.channels_last, sharded=sharded
        )
        validation = held_out
        if held_out is not None and not sharded:
            validation = shard_loader(held_out, fabric)
        elif is_device_loader(held_out):
            validation = held_out.to(self.device)  # type: ignore[union-attr]
        show = at_a_terminal() if show is None else show
        data = RunData(batches, validation, not sharded, about, refit, fingerprints)
        return TrainingRun(fabric, gradients, data, config, checkpoints, show), full_model

    def _fingerprints(
        self, loader: Iterable[Any], held_out: Iterable[Any] | None, checkpoints: CheckpointConfig | None
    ) -> dict[str, Any]:
        """Fingerprints of the data, by which a resumed run recognises them; a collective call."""
        if checkpoints is None:
            return {}
        if checkpoints.fingerprints is not None:
            return checkpoints.fingerprints
        everything = checkpoints.hash_all_data
        return on_main(
            self.fabric, lambda: loader_fingerprints(loader, held_out, self.device, everything=everything)
        )

    def _refit(self, model: Classifier, clean: Iterable[Any]) -> PosteriorRefit | None:
        if not samples_beta(model):
            return None
        if is_device_loader(clean):
            clean = clean.to(self.device)  # type: ignore[attr-defined]
        return PosteriorRefit(model, partial(self.fit_posterior, model, clean))

    def _compile(self, model: Classifier, loader: ResumableLoader, *, graphs: bool) -> None:
        """Compile the backbone; ``graphs``: as CUDA graphs, which leaves the host's time to the head.

        On a GPU the loss of labels becomes a CUDA graph whether or not the backbone is one.
        """
        if bounded_layers(model.backbone):
            # Power iterations get their shapes from the first batch, which must not happen inside the graph.
            x, _, _ = check_batch(next(iter(loader.begin(1))), "loader")
            with evaluating(model), self.fabric.autocast():
                measure_bounds(model.backbone, lambda: model.backbone(to_device(x[:2], self.device)))
        model.backbone.compile(mode="reduce-overhead" if graphs else None)
        if self.device.type == "cuda":
            _set_label_loss(model, GraphedLabelLoss())

    def fit_posterior(
        self,
        model: Classifier,
        loader: Iterable[Any],
        calibration: Iterable[Any] | None = None,
        *,
        tolerance: float = TOLERANCE,
    ) -> PosteriorReport:
        """:func:`hetsngp.fit_posterior`, each process passing over its part of ``loader``.

        The posterior is computed from sums over the data, which are added over processes; each process then
        calibrates on all of ``calibration``, with the same result. A DeviceLoader yields every image once,
        without augmentation; replace a DataLoader that augments by one that does not.
        """
        check_held_out(loader, calibration)
        if is_device_loader(loader):
            loader = loader.clean()  # type: ignore[attr-defined]
        if is_device_loader(calibration):
            calibration = calibration.to(self.device)  # type: ignore[union-attr]
        model.to(self.device)

        def add_over_processes(tensor: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = self.fabric.all_reduce(tensor, reduce_op="sum")
            return total

        reduce = add_over_processes if self.fabric.world_size > 1 else None
        return fit_posterior(
            model, shard_loader(loader, self.fabric), calibration, tolerance=tolerance, reduce=reduce
        )

    def save(self, model: Classifier, path: str | os.PathLike[str]) -> None:
        """:func:`hetsngp.save`, by the main process; all wait for it."""
        on_main(self.fabric, lambda: save(model, path))


def _set_label_loss(model: Classifier, loss: LabelLoss | None) -> None:
    """Replace the loss of labels in all heads; None: by their own again."""
    for head in model.modules():
        if isinstance(head, GaussianHead):
            vars(head).pop("label_loss", None)
            if loss is not None:
                head.label_loss = loss
