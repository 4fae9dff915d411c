"""Write ``pickles.pkl`` beside this file. It ran once, with hetsngp 0.1.0 (e9b2389), and stays as a record:

    git worktree add /tmp/hetsngp-0.1 e9b2389
    PYTHONPATH=/tmp/hetsngp-0.1/src python tests/saved_0_1/make_pickles.py tests/saved_0_1/pickles.pkl

Objects that users may pickle, by their names; pickle writes class paths of 0.1, most of which have moved.
"""

import pickle
import sys
from pathlib import Path

import torch
from hetsngp.loop import Schedule
from make import points, train

import hetsngp
from hetsngp.nn.backbones import ResidualMLP


def main(out: Path) -> None:
    assert hetsngp.__version__ == "0.1.0"
    torch.set_num_threads(1)
    loader, held_out, x = points()
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(0)
    network = ResidualMLP(2, width=4, depth=1, generator=g)
    model = hetsngp.build("hetsngp", network, 3, generator=g, random_features=4, rank=1, dataset_size=60)
    train(model, loader)
    members = [
        hetsngp.build(name, ResidualMLP(2, width=2, depth=1, generator=g), 3, generator=g, random_features=2)
        for name in ("deterministic", "posterior_network")
    ]
    converted = hetsngp.convert(torch.nn.Linear(2, 3), "deterministic", torch.zeros(2, 2))
    objects = {
        "model": model,
        "x": x,
        "prediction": model.predict(x),
        "utility": model.utility(x),
        "report": hetsngp.fit_posterior(model, loader, calibration=held_out),
        "ensemble": hetsngp.Ensemble(members),
        "conversion": converted.conversion,
        "schedule": Schedule(epochs=3, lr=0.1, gp_lr=2.0),
        "features": hetsngp.FeatureSet(torch.zeros(2, 4), torch.zeros(2).long()),
    }
    # The model was fitted once more for the report: what is pickled is what predicts `prediction`.
    objects["prediction"] = model.predict(x)
    with open(out, "wb") as file:
        pickle.dump(objects, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
