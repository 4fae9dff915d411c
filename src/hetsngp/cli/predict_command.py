"""``hetsngp predict``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(epilog="Example: hetsngp predict runs/cifar10-cpu photos/*.jpg --json")
    def predict(
        run: Annotated[
            Path,
            typer.Argument(
                metavar="RUN", help="Folder of a finished run, its folder model/, or one of hetsngp.save."
            ),
        ],
        files: Annotated[
            list[str],
            typer.Argument(
                metavar="FILE",
                help="Image files, folders of images, .npz files, or names of data sets (their test images).",
            ),
        ],
        json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
        contact_sheet: Annotated[
            Path | None,
            typer.Option(
                "--sheet", metavar="PNG", help="Draw the first 64 images with their verdicts.", dir_okay=False
            ),
        ] = None,
        limit: Annotated[
            int | None,
            typer.Option(
                min=1, help="Most images to take from each data set, from each folder, and of the files."
            ),
        ] = None,
        batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
        classes: Annotated[
            str | None,
            typer.Option(
                metavar="NAMES",
                help="Names of the classes, a,b,c or a file with one on each line, of a model that was saved "
                "without them (hetsngp.save).",
            ),
        ] = None,
        device: Annotated[
            str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")
        ] = "auto",
    ) -> None:
        """Predict images: label, uncertainties and a verdict.

        Prints a line per image: label, confidence, data and model uncertainty in nats, and a verdict.

        confident: of held-out images with this verdict, 95 % (or what the recipe asked for) were classified
        correctly. ambiguous (a or b): the classes overlap here, or the training labels are noisy. unfamiliar:
        unlike the training data, so the label is a guess.

        hetsngp train sets the thresholds on held-out images (docs/serving.md). Where it could not set one, no
        image gets that verdict, and a note says so; without confident, ambiguous means not unfamiliar.
        """
        from hetsngp.serving.bundle import find_device, open_run
        from hetsngp.serving.output import predict_and_show
        from hetsngp.serving.plain_models import read_class_names

        names = None if classes is None else read_class_names(classes)
        served = open_run(run, device=find_device(device), class_names=names)
        predict_and_show(
            served, files, as_json=json, contact_sheet=contact_sheet, limit=limit, batch_size=batch_size
        )
