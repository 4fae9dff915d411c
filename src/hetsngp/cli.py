"""The command line. Thin: it reads and checks what was typed; the work is done in ``evaluation/``."""

# No postponed annotations: typer reads them where the commands are made, in a scope that has imported it.
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

from hetsngp.data.synthetic import NOISE_OF_ITS_OWN, TASKS
from hetsngp.recipes import METHODS
from hetsngp.schedule import DECAYS, OPTIMIZERS, Schedule
from hetsngp.training import Engine, Hardware, Keep, Plan
from hetsngp.training.hardware import PRECISIONS, STRATEGIES
from hetsngp.validation import check_choice

# Steps from one measurement of the spectral bound to the next (docs/decisions.md).
BOUND_EVERY = 10
NEEDS = ("typer", "rich", "matplotlib", "torchmetrics")


def main() -> None:
    """Entry point of ``hetsngp`` and of ``python -m hetsngp``."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        names = " and ".join(missing)
        print(f"the command line needs {names}: pip install 'hetsngp[cli]'", file=sys.stderr)
        raise SystemExit(1)
    make_app()()


def make_app() -> Any:
    """The typer application."""
    import typer

    app = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode=None
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"hetsngp {importlib.import_module('hetsngp').__version__}")
            raise typer.Exit

    @app.callback()
    def top(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Two honest kinds of doubt for any PyTorch classifier."""

    @app.command()
    def demo(
        methods: Annotated[
            str, typer.Option(help=f"Commas between, or 'all': {', '.join(METHODS)}.")
        ] = "all",
        tasks: Annotated[str, typer.Option(help=f"Commas between, or 'all': {', '.join(TASKS)}.")] = "all",
        seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: means and standard errors.")] = 1,
        seed: Annotated[int, typer.Option(min=0, help="First seed; the figures are of this one.")] = 0,
        out: Annotated[
            Path, typer.Option(help="Folder for figures, numbers and finished runs.", file_okay=False)
        ] = Path("out/demo"),
        label_noise: Annotated[
            float, typer.Option(help="Share of labels flipped, below 0.5; the circles have their own noise.")
        ] = 0.0,
        jobs: Annotated[
            int | None, typer.Option(min=1, help="Processes; default: one a core, at most 8.")
        ] = None,
        epochs: Annotated[
            int | None, typer.Option(min=1, help="In place of the recipe's, for a quick look.")
        ] = None,
    ) -> None:
        """Train the paper's methods on its synthetic tasks; write a table and the figures.

        Finished runs are kept in the folder and not repeated, so an interrupted demo goes on where it was.
        """
        from rich.console import Console

        from hetsngp.evaluation.demo import Plan, run_demo

        chosen_tasks = _chosen("task", tasks, tuple(TASKS))
        chosen_methods = _chosen("method", methods, tuple(METHODS))
        _check_label_noise(label_noise, chosen_tasks)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise typer.BadParameter(
                f"cannot make the folder {out}: {error.strerror}", param_hint="--out"
            ) from None
        plan = Plan(chosen_tasks, chosen_methods, tuple(range(seed, seed + seeds)), label_noise, epochs)
        console = Console()
        try:
            run_demo(plan, out, jobs, console)
        except KeyboardInterrupt:
            console.print(
                f"stopped; finished runs are kept in {out}: the same command goes on", soft_wrap=True
            )
            raise typer.Exit(130) from None
        except RuntimeError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None

    @app.command(
        epilog="Example: hetsngp train cifar100 --epochs 30 --lr 0.1 --batch-size 512 --out runs/first"
    )
    def train(
        data: Annotated[
            str,
            typer.Argument(
                help="A name (cifar100, svhn, …: docs/data.md), a folder with train/ and test/, a .npz file."
            ),
        ],
        out: Annotated[
            Path, typer.Option(help="Folder of the run; the same command goes on in it.", file_okay=False)
        ],
        method: Annotated[str, typer.Option(help=f"{', '.join(METHODS)}.")] = "hetsngp",
        network: Annotated[
            str, typer.Option(help="wrn-DEPTH-WIDTH, or a network of timm's, to be converted.")
        ] = "wrn-16-8",
        pretrained: Annotated[bool, typer.Option(help="Take timm's weights.")] = False,
        size: Annotated[int | None, typer.Option(min=1, help="Pixels; for folders of images.")] = None,
        held_out: Annotated[
            float, typer.Option(help="Share of the training images to stop and to calibrate by.")
        ] = 0.1,
        batch_size: Annotated[int, typer.Option(min=1, help="Over all processes.")] = 128,
        epochs: Annotated[int, typer.Option(min=1)] = 30,
        optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}.")] = "sgd",
        lr: Annotated[float, typer.Option(help="The largest rate.")] = 0.1,
        weight_decay: Annotated[float, typer.Option()] = 5e-4,
        decay: Annotated[str, typer.Option(help=f"{', '.join(DECAYS)}: how the rate falls.")] = "cosine",
        milestones: Annotated[
            str, typer.Option(help="Of --decay step: epochs, commas between; a tenth after each.")
        ] = "",
        warmup: Annotated[float, typer.Option(min=0, help="Epochs in which the rate rises.")] = 1.0,
        accumulate: Annotated[int, typer.Option(min=1, help="Batches a step.")] = 1,
        clip: Annotated[float | None, typer.Option(help="Largest norm of a gradient.")] = None,
        average: Annotated[
            float | None, typer.Option(help="Moving average of the weights, e.g. 0.998 a step.")
        ] = None,
        patience: Annotated[
            int | None, typer.Option(min=1, help="Stop after so many epochs without a better held-out NLL.")
        ] = None,
        seed: Annotated[int, typer.Option(min=0)] = 0,
        devices: Annotated[str, typer.Option(help="On each node: a number, or auto.")] = "auto",
        nodes: Annotated[
            int | None, typer.Option(min=1, help="Default: as torchrun or SLURM started us, or 1.")
        ] = None,
        strategy: Annotated[str, typer.Option(help=f"{', '.join(STRATEGIES)}.")] = "auto",
        accelerator: Annotated[str, typer.Option(help="auto, cpu or gpu.")] = "auto",
        precision: Annotated[str, typer.Option(help=f"{', '.join(PRECISIONS)}.")] = "32-true",
        channels_last: Annotated[bool, typer.Option(help="A memory format that GPUs like.")] = False,
        compile: Annotated[bool, typer.Option(help="torch.compile the network.")] = False,
        changed: Annotated[
            bool, typer.Option(help="Go on from a checkpoint made with other settings.")
        ] = False,
    ) -> None:
        """Train on images, fit the posterior, calibrate, and save a model that hetsngp.load reads.

        Writes OUT/model, summary.json, curves.png, metrics.csv and TensorBoard's files. On several GPUs or
        nodes start it as it is, with --devices, or by torchrun or srun: docs/training.md.
        """
        from hetsngp.training.images import ImageTask, train_images

        try:
            rate = Schedule(
                epochs,
                lr=lr,
                weight_decay=weight_decay,
                optimizer=optimizer,
                decay=decay,
                warmup=min(warmup, epochs / 2),
                milestones=_numbers("milestones", milestones),
                smooth=True,
            )
            plan = Plan(rate, accumulate, clip, average, patience, bound_every=BOUND_EVERY, seed=seed)
            task = ImageTask(data, network, method, pretrained, size, batch_size, held_out)
            count = devices if devices == "auto" else _whole("devices", devices)
            hardware = Hardware(count, nodes, strategy, accelerator, precision, channels_last, compile)
            engine = Engine(hardware)
            summary = train_images(task, plan, engine, Keep(out, changed=changed), show=True)
        except KeyboardInterrupt:
            print(f"stopped; the same command goes on from the last checkpoint in {out}", file=sys.stderr)
            raise typer.Exit(130) from None
        except (ValueError, OSError, ImportError, FloatingPointError) as error:
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None
        if engine.is_main:
            print(summary["posterior"])
            for part in ("held_out", "test"):
                if summary[part] is not None:
                    print(_measured(part.replace("_", "-"), **summary[part]))
            print(f"hetsngp.load({str(out / 'model')!r}) has the model")

    return app


def _measured(part: str, accuracy: float, nll: float, ece: float, examples: int) -> str:
    return f"{part}: accuracy {accuracy:.4f}, NLL {nll:.4f}, ECE {ece:.4f} on {examples} images"


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--{name} takes a whole number or auto, got {text!r}") from None


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """A list with commas."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(
            f"--{name.replace('_', '-')} takes numbers with commas between, got {text!r}"
        ) from None


def _chosen(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names in a list with commas, each once; "all" for all of them."""
    import typer

    names = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    if "all" in names:
        return known
    try:
        if not names:
            raise ValueError(f"name at least one: {', '.join(known)}, or all")
        return tuple(check_choice(name, part, known) for part in names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{name}s") from None


def _check_label_noise(label_noise: float, tasks: tuple[str, ...]) -> None:
    import typer

    if not 0 <= label_noise < 0.5:
        message = f"must be at least 0 and below 0.5, got {label_noise:g}: 0.2 flips every fifth label"
        raise typer.BadParameter(message, param_hint="--label-noise")
    if label_noise and not set(tasks) - set(NOISE_OF_ITS_OWN):
        message = f"{', '.join(tasks)} has noise of its own: leave --label-noise out, or add another task"
        raise typer.BadParameter(message, param_hint="--label-noise")
