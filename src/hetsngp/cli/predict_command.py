"""``hetsngp predict``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Enter the command."""
    import typer

    @app.command(epilog="Example: hetsngp predict runs/cifar10-cpu photos/*.jpg --json")
    def predict(
        run: Annotated[Path, typer.Argument(help="Folder of a run, or of a model in it.")],
        files: Annotated[
            list[str],
            typer.Argument(
                metavar="FILE…",
                help="Images, folders of images, or a set by name (cifar10: its test images).",
            ),
        ],
        json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
        sheet: Annotated[
            Path | None,
            typer.Option(
                metavar="PNG", help="Also a picture of the first 64 with their verdicts.", dir_okay=False
            ),
        ] = None,
        limit: Annotated[
            int | None,
            typer.Option(
                min=1, help="So many of each set and of each folder, and of the files named one by one."
            ),
        ] = None,
        batch_size: Annotated[int, typer.Option(min=1)] = 64,
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto: a GPU if there is one.")] = "auto",
    ) -> None:
        """A line for each input: label, confidence, data and model uncertainty (nats), and a verdict.

        confident: of held-out inputs called so, 95 % were right. ambiguous (a or b): the labels here are
        noisy, or the classes overlap. unfamiliar: unlike the training data, so that the label is a guess. The
        thresholds were set on held-out data by the training (docs/serving.md); where there is none
        for a word, no input gets it, and a note says so: without confident, ambiguous means not unfamiliar.
        """
        from hetsngp.serving.bundle import find_device, open_run
        from hetsngp.serving.output import predict_and_show

        served = open_run(run, device=find_device(device))
        predict_and_show(served, files, as_json=json, contact_sheet=sheet, limit=limit, batch_size=batch_size)
