"""Changed files of saved models, served runs and checkpoints, and hostile configs of libraries.

With the checksums kept every change must be refused or be without effect; with all checksums made anew the
files are a different model, or none: what counts there is that the reader ends with an answer or with an
error of ours, within its memory.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import shutil
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.attacks.harness import ROOT, Result, Wrong, run_case
from torch import Tensor, nn

import hetsngp
from hetsngp.files import has_checksum, sha256_of, with_checksum
from hetsngp.nn.backbones import ResidualMLP, WideResNet

SAVED_0_1 = ROOT / "tests" / "saved_0_1"
SECONDS = 30.0
COUNTS = {"config": 500, "weights": 250, "serving": 200, "checkpoint config": 150, "checkpoint weights": 50}
"""Changes of each file with the checksum kept; as many more with it made anew."""
TINY: dict[str, Any] = {"random_features": 16, "rank": 2, "dataset_size": 12}
X = torch.linspace(-3, 3, 24).reshape(12, 2)
Y = torch.arange(12) % 3


@dataclass(frozen=True)
class Target:
    """Saved files, and what their reader answers."""

    folder: Path
    read: Callable[[Path], Any]
    answer: Any

    def check(self, path: Path) -> None:
        """Read changed files in ``path``: another answer is a silent error."""
        found = self.read(path)
        if not _equal(found, self.answer):
            raise Wrong("another answer, and no error")


def attack(seed: int, share: float, folder: Path) -> Iterator[Result]:
    """Every case, or about ``share`` of each kind."""
    targets = _make_targets(folder / "originals", seed)
    for kind, count in COUNTS.items():
        some = [target for name, target in targets.items() if name in _OF_KIND[kind]]
        for anew in (False, True):
            title = f"{kind}, checksum {'made anew' if anew else 'kept'}"
            for i in range(_number(count, share)):
                rng = random.Random(f"{seed} {title} {i}")
                target = rng.choice(some)
                yield _changed_case(title, kind, target, anew, rng, folder / "case")
    yield from _without_checksums(targets, folder / "case")
    hostile = list(_hostile_configs())
    for i in sorted(random.Random(seed).sample(range(len(hostile)), _number(len(hostile), share))):
        library, change = hostile[i]
        yield _hostile_case(library, change, targets, folder / "case")


def _number(count: int, share: float) -> int:
    return min(count, max(4, round(count * share)))


# --- the files --------------------------------------------------------------------------------------------

_OF_KIND = {
    "config": ("model", "ensemble", "converted"),
    "weights": ("model", "ensemble", "converted"),
    "serving": ("run",),
    "checkpoint config": ("checkpoint",),
    "checkpoint weights": ("checkpoint",),
}


def _make_targets(folder: Path, seed: int) -> dict[str, Target]:
    torch.manual_seed(seed)
    models = {
        "model": _fitted(hetsngp.build("hetsngp", ResidualMLP(2, width=8, depth=1), 3, **TINY)),
        "ensemble": hetsngp.Ensemble(
            [_fitted(hetsngp.build("sngp", ResidualMLP(2, width=4, depth=1), 3, **TINY)) for _ in range(2)]
        ),
        "converted": _fitted(hetsngp.convert(_own_network(), "heteroscedastic", X, **TINY)),
    }
    targets = {}
    for name, model in models.items():
        hetsngp.save(model, folder / name)
        targets[name] = _target(folder / name, _read_model)
    for name, network, x in _library_networks():
        hetsngp.save(hetsngp.convert(network, "deterministic", x), folder / name)
        targets[name] = _target(folder / name, hetsngp.load)
    targets["run"] = _make_run(folder / "run")
    targets["checkpoint"] = _make_checkpoint(folder / "checkpoint")
    return targets


def _target(folder: Path, read: Callable[[Path], Any]) -> Target:
    return Target(folder, read, read(folder) if read is not hetsngp.load else None)


def _fitted(model: Any) -> Any:
    hetsngp.fit_posterior(model, [(X, Y)])
    return model


def _own_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))


def _library_networks() -> Iterator[tuple[str, nn.Module, Any]]:
    """One small network of each library that is installed."""
    images, tokens = torch.zeros(2, 3, 32, 32), {"input_ids": torch.arange(8).reshape(2, 4)}
    try:
        import timm

        yield "timm", timm.create_model("test_vit", num_classes=3, img_size=32), images
    except ImportError:
        pass
    try:
        import torchvision

        network = torchvision.models.get_model("shufflenet_v2_x0_5", weights=None, num_classes=3)
        yield "torchvision", network, torch.zeros(2, 3, 64, 64)
    except ImportError:
        pass
    try:
        import transformers
    except ImportError:
        return
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, hidden_size=16, num_labels=3, **sizes)
    yield "transformers", transformers.BertForSequenceClassification(config), tokens


def _make_run(folder: Path) -> Target:
    """Served run: a model of images, ``serving.json``, and an image to predict."""
    from PIL import Image

    from hetsngp.data.preprocessing import Preprocessing
    from hetsngp.serving import as_json, open_run, predict_files
    from hetsngp.serving.bundle import write_serving
    from hetsngp.serving.decisions import Thresholds

    model = hetsngp.build("sngp", WideResNet(depth=10, width=1), 3, posterior="none", **TINY)
    hetsngp.save(model, folder / "model")
    inputs = Preprocessing((8, 8), (0.5,) * 3, (0.25,) * 3, ("cat", "dog", "owl"), resize=9)
    thresholds = Thresholds(0.3, 1.5, correct=0.95, share=0.05, held_out=50, accuracy=0.97, coverage=0.6)
    write_serving(folder / "model", inputs, thresholds, {"recipe": "x"})
    pixels = torch.arange(12 * 16 * 3, dtype=torch.uint8).reshape(12, 16, 3)
    Image.fromarray(pixels.numpy()).save(folder / "image.png")

    def read(path: Path) -> Any:
        served = open_run(path)
        record = next(iter(predict_files(served, [folder / "image.png"])))
        return as_json(record), served.thresholds.to_dict(), served.inputs.to_dict(), dict(served.about)

    return _target(folder, read)


def _make_checkpoint(folder: Path) -> Target:
    from hetsngp.training.checkpointing.checkpoint_files import read_state, write_state

    metrics = [{"epoch": i, "loss": math.nan if i == 2 else 1.0 / (i + 1)} for i in range(4)]
    model = {"layer.weight": torch.randn(4, 3), "layer.bias": torch.zeros(4)}
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 3)}}
    state = {"epoch": 3, "model": model, "optimizer": {"state": moments, "lr": (0.1, 0.2)}, "log": metrics}
    write_state(folder, state)
    return _target(folder, read_state)


def _read_model(path: Path) -> Any:
    network = _own_network() if path.name == "converted" else None
    return hetsngp.load(path, backbone=network).predict(X)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        return all(_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b or (a != a and b != b)


# --- changed files ------------------------------------------------------------------------------------------


def _changed_case(
    title: str, kind: str, target: Target, anew: bool, rng: random.Random, scratch: Path
) -> Result:
    case = scratch / target.folder.name
    _copy(target.folder, case)
    folder = case / "model" if (case / "model").is_dir() else case
    if kind.endswith("weights"):
        file = next(folder.glob("model-*.safetensors"))
        change = _change_weights(rng, file, target.folder.parent)
    else:
        file = folder / ("serving.json" if kind == "serving" else "config.json")
        change = _change_json(rng, file, target.folder.parent)
    if anew:
        _make_checksums_anew(folder)
    # Until its file has a checksum, a change of serving.json cannot be noticed.
    unchecked = kind == "serving" and has_checksum(_content(target.folder / "model" / "serving.json")) is None
    read = target.read if anew or unchecked else target.check
    return run_case(title, f"{target.folder.name}: {change}", lambda: read(case), seconds=SECONDS)


def _copy(original: Path, case: Path) -> None:
    if case.parent.exists():
        shutil.rmtree(case.parent)
    shutil.copytree(original, case)


def _content(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _make_checksums_anew(folder: Path) -> None:
    """Write matching checksums into every file that can still be parsed."""
    digest = None
    for name in ("config.json", "serving.json"):
        try:
            content = _content(folder / name)
            if name == "config.json":
                digest = sha256_of(folder / str(content["weights"]))
            if digest is not None:
                content["sha256"] = digest
            if "checksum" in content or content.get("version") == 2:
                content = with_checksum(content)
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        except (OSError, ValueError, TypeError, KeyError, RecursionError, AttributeError):
            continue


OTHERS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 7, 64, 2**14, 2**31, 2**63, 10**12, 10**30, 10**400, -(10**12)),
    *(0.0, 0.5, -0.5, 1e-300, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *(
        "",
        "x",
        "0",
        "3",
        "None",
        "../../x",
        "é\u0000",
        "x" * 5000,
        [],
        {},
        [1],
        [[[]]],
        {"a": 1},
        [None] * 1000,
    ),
)


def _change_json(rng: random.Random, file: Path, originals: Path) -> str:
    """Change a JSON file in one or two places; returns what was done."""
    choice = rng.random()
    if choice < 0.25:
        return _change_bytes(rng, file)
    if choice < 0.30:
        return _deep(rng, file)
    if choice < 0.35:
        return _duplicate_key(rng, file)
    if choice < 0.38:
        other = rng.choice(sorted(originals.rglob(file.name)))
        shutil.copy(other, file)
        return f"replaced by that of {other.parent.relative_to(originals)}"
    content = _content(file)
    done = [_change_value(rng, content) for _ in range(rng.choice((1, 1, 2)))]
    file.write_text(json.dumps(content), encoding="utf-8")
    return "; ".join(done)


def _change_value(rng: random.Random, content: Any) -> str:
    places = list(_places(content))
    if not places:
        return "nothing"
    holder, key = rng.choice(places)
    value = holder[key]
    operation = rng.choice(("replace", "replace", "replace", "delete", "rename", "number", "swap", "add"))
    if operation == "delete":
        del holder[key]
    elif operation == "rename" and isinstance(holder, dict):
        holder[rng.choice((key.upper(), key + "_", "", "x"))] = holder.pop(key)
    elif operation == "number" and isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = rng.choice((value + 1, value - 1, -value, value * 2, value * 10**6, float(value)))
    elif operation == "swap":
        other, place = rng.choice(places)
        holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
    elif operation == "add" and isinstance(value, dict):
        value["added"] = rng.choice(OTHERS)
    else:
        holder[key] = copy.deepcopy(rng.choice(OTHERS))
    return f"{operation} {key!r}"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of nested dicts and lists, as its container and its key."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _deep(rng: random.Random, file: Path) -> str:
    """Put a value into thousands of brackets, or a number of thousands of digits, into the text."""
    text = file.read_text(encoding="utf-8")
    depth = rng.choice((50, 500, 900, 5000, 100_000))
    deep = rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * depth))
    places = [i for i, letter in enumerate(text) if letter == ":"]
    at = rng.choice(places) + 1
    end = min(i for i in (text.find(",", at), text.find("\n", at), len(text)) if i >= 0)
    file.write_text(text[:at] + deep + text[end:], encoding="utf-8")
    return f"a value of depth {depth}"


def _duplicate_key(rng: random.Random, file: Path) -> str:
    """Give a key twice, with two values."""
    lines = file.read_text(encoding="utf-8").splitlines()
    places = [i for i, line in enumerate(lines) if '": ' in line and line.rstrip().endswith(",")]
    if not places:
        return "nothing"
    at = rng.choice(places)
    value = json.dumps(rng.choice([other for other in OTHERS if not isinstance(other, float)]))
    twice = f"{lines[at].partition(': ')[0]}: {value},"
    lines.insert(at + rng.randrange(2), twice)
    file.write_text("\n".join(lines), encoding="utf-8")
    return f"twice {twice.strip()[:40]}"


def _change_bytes(rng: random.Random, file: Path) -> str:
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    length = rng.choice((1, 2, 8, 64, 1000))
    operation = rng.choice(("flip", "flip", "flip", "set", "delete", "insert", "truncate", "repeat", "zero"))
    if operation == "flip":
        for _ in range(rng.choice((1, 1, 1, 5))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif operation == "set":
        data[at] = rng.choice(b'0123456789.-+eE"{}[],: \x00\xff')
    elif operation == "delete":
        del data[at : at + length]
    elif operation == "insert":
        data[at:at] = rng.randbytes(length)
    elif operation == "truncate":
        del data[at:]
    elif operation == "repeat":
        data[at:at] = data[at : at + length]
    else:
        data[at : at + length] = bytes(len(data[at : at + length]))
    file.write_bytes(bytes(data))
    return f"{operation} at byte {at}"


DTYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I32",
    "I8",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F8_E5M2",
    "C64",
    "U64",
    "X",
    3,
)


def _change_weights(rng: random.Random, file: Path, originals: Path) -> str:
    """Change a safetensors file: its bytes, its header, a value, or the whole of it."""
    choice = rng.random()
    if choice < 0.35:
        return _change_bytes(rng, file)
    if choice < 0.40:
        other = rng.choice(sorted(originals.rglob("model-*.safetensors")))
        shutil.copy(other, file)
        return f"replaced by that of {other.parent.relative_to(originals)}"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], bytearray(data[8 + length :])
    if choice < 0.55:
        value = rng.choice((math.nan, math.inf, -math.inf, 1e30, 3e38, 1e-45, -0.0))
        at = rng.randrange(len(body) // 4) * 4
        body[at : at + 4] = struct.pack("<f", value)
        file.write_bytes(data[: 8 + length] + body)
        return f"{value} in the data"
    if choice < 0.62:
        wrong = rng.choice((0, 1, length - 1, length + 1, len(data), 2**31, 100_000_001, 2**63, 2**64 - 1))
        file.write_bytes(struct.pack("<Q", wrong) + data[8:])
        return f"header of length {wrong}"
    entries = json.loads(header)
    done = _change_header(rng, entries)
    text = json.dumps(entries).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return done


def _change_header(rng: random.Random, entries: dict[str, Any]) -> str:
    names = [name for name in entries if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    entry = entries[name]
    operation = rng.choice(
        ("dtype", "shape", "offsets", "rename", "delete", "swap", "many", "empty", "value")
    )
    if operation == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif operation == "shape":
        size = math.prod(entry["shape"])
        shapes = ([size], [1, size], [size, 1], [-1], [2**40, 2**40], [0], [2**62, 0], [10**30], ["3"], None)
        entry["shape"] = rng.choice((*shapes, entry["shape"][::-1], [1] * 500 + [size]))
    elif operation == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            (
                [end, begin],
                [0, 0],
                [0, 2**60],
                [begin, end + 1],
                [-1, end],
                [begin + 4, end + 4],
                [begin],
                "x",
            )
        )
    elif operation == "rename":
        new = rng.choice(("", "x", name + "x", name.upper(), "members.0.x", "members.9." + name))
        entries[new] = entries.pop(name)
    elif operation == "delete":
        del entries[name]
    elif operation == "swap":
        entries[name], entries[other] = entries[other], entries[name]
    elif operation == "many":
        end = max(e["data_offsets"][1] for e in entries.values() if "data_offsets" in e)
        empty = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}
        entries.update({f"more.{i}": empty for i in range(rng.choice((10, 20_000)))})
    elif operation == "empty":
        end = max(e["data_offsets"][1] for e in entries.values() if "data_offsets" in e)
        entries["vast"] = {"dtype": "F32", "shape": [10**12, 0], "data_offsets": [end, end]}
    else:
        entries[name] = rng.choice((None, 3, [], {}, "x"))
    return f"header: {operation} {name}"


# --- files without checksums --------------------------------------------------------------------------------


def _without_checksums(targets: dict[str, Target], scratch: Path) -> Iterator[Result]:
    title = "files without checksums"
    for name in ("hetsngp", "ensemble", "converted_bert", "run", "interrupted/checkpoint"):
        yield run_case(title, f"0.1's {name}", lambda name=name: _read_0_1(SAVED_0_1 / name), seconds=SECONDS)
    for name in ("model", "ensemble", "run", "checkpoint"):
        target = targets[name]
        case = scratch / target.folder.name
        for file in ("config.json", "serving.json"):
            _copy(target.folder, case)
            folder = case / "model" if (case / "model").is_dir() else case
            if not (folder / file).is_file() or "checksum" not in _content(folder / file):
                continue
            content = _content(folder / file)
            del content["checksum"]
            (folder / file).write_text(json.dumps(content))
            read = _must_refuse(lambda target=target, case=case: target.read(case))
            yield run_case(title, f"new {name}, {file}", read, seconds=SECONDS)


def _read_0_1(folder: Path) -> None:
    """Load and predict what 0.1 saved, which must give a warning."""
    from hetsngp.serving import open_run
    from hetsngp.training.checkpointing.checkpoint_files import read_state

    if folder.name == "converted_bert":
        try:
            import transformers  # noqa: F401
        except ImportError:
            return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if folder.name == "checkpoint":
            read_state(folder)
        elif folder.name == "run":
            open_run(folder)
        else:
            model = hetsngp.load(folder)
            if folder.name == "hetsngp":
                model.predict(torch.zeros(2, 2))
    if not any("checksum" in str(warning.message) for warning in caught):
        raise Wrong("a file without a checksum gave no warning")


def _must_refuse(read: Callable[[], Any]) -> Callable[[], None]:
    def function() -> None:
        read()
        raise Wrong("was read, but must be refused")

    return function


# --- configs of libraries -----------------------------------------------------------------------------------

TIMM_CHANGES: tuple[dict[str, Any], ...] = (
    *({"model_name": f"{scheme}:someone/network"} for scheme in ("hf-hub", "hf_hub", "HF-HUB", "timm", "x")),
    *({"model_name": name} for name in ("local-dir:/etc", "local-dir:.", "file:///etc/passwd", "//host/x")),
    *({"model_name": name} for name in ("https://example.com/x", "someone/network", "../x", "x\\y", "C:\\x")),
    *({"model_name": name} for name in ("", "no_such_network", "resnet18.no_such_tag", "test_vit\n", "é")),
    *({"model_name": name} for name in (None, 3, ["test_vit"], {"a": 1})),
    *({"checkpoint_path": path} for path in ("/etc/passwd", "https://example.com/x.pth", "x", "", None)),
    *({"pretrained": value} for value in (True, False, "yes")),
    {"pretrained_cfg": {"url": "https://example.com/x"}},
    {"pretrained_cfg": "a1_in1k"},
    {"pretrained_cfg": {"file": "/etc/passwd"}, "pretrained": True},
    {"pretrained_cfg_overlay": {"hf_hub_id": "someone/network"}},
    {"cache_dir": "/tmp/somewhere"},
    {"features_only": True},
    {"pruned": True},
    {"scriptable": True},
    *({"num_classes": n} for n in (3_000_000, 10**8, 10**12, -1, "3", 2.5, [3], 10**400)),
    *({"in_chans": n} for n in (0, -1, 10**5, 10**12, "3")),
    *({"img_size": n} for n in (10**5, [10**5, 10**5], [10**9, 1], -1, "x", [[32]])),
    *({"global_pool": n} for n in ("no_such_pool", "", 3, ["avg"])),
    *({"drop_rate": n} for n in (-1.0, 1e308, "x")),
    {"depth": 20_000},
    {"embed_dim": 10**6},
    {"no_such_argument": 1},
)
TORCHVISION_CHANGES: tuple[dict[str, Any], ...] = (
    *({"name": name} for name in ("fasterrcnn_resnet50_fpn", "deeplabv3_resnet50", "retinanet_resnet50_fpn")),
    *({"name": name} for name in ("no_such_network", "", None, 3, ["x"], "https://example.com/x", "../x")),
    *({"name": name} for name in ("quantized_resnet18", "vit_h_14", "raft_large", "r3d_18")),
    *({"num_classes": n} for n in (3_000_000, 10**8, 10**12, -1, "3", None)),
    *({key: "DEFAULT"} for key in ("weights", "weights_backbone", "progress")),
)
TRANSFORMERS_CHANGES: tuple[dict[str, Any], ...] = (
    *({"backbone": name} for name in ("someone/network", "resnet50", "hf-hub:x/y", "/etc", ["x"])),
    *(
        {key: True}
        for key in ("use_timm_backbone", "use_pretrained_backbone", "trust_remote_code", "use_kernels")
    ),
    {"backbone_kwargs": {"pretrained": True}},
    {"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:someone/network"}},
    {"backbone_config": {"model_type": "resnet", "backbone": "resnet50"}},
    {"model_args": {"checkpoint_path": "/etc/passwd"}},
    {"architecture": "hf-hub:someone/network"},
    *({"auto_map": value} for value in ({"AutoModel": "x/y--z.Z"}, {"AutoConfig": "z.Z"}, "x")),
    {"text_config": {"auto_map": {"AutoModel": "x/y--z.Z"}}},
    *({"quantization_config": {"quant_method": name}} for name in ("awq", "gptq", "bitsandbytes", "x")),
    {"vision_config": [{"quantization_config": {"load_in_4bit": True}}]},
    {"pretrained_model_name_or_path": "someone/network"},
    {"encoder_pretrained_model_name_or_path": "someone/network"},
    *(
        {"_attn_implementation": name}
        for name in ("kernels-community/flash-attn", "x/y@v1:z", "flash_attention_2")
    ),
    *({"attn_implementation": name} for name in ("kernels-community/x", {"": "x/y"}, "paged|x/y", 3)),
    {"_attn_implementation_internal": "x/y"},
    {"experts_implementation": "x/y"},
    *({"num_labels": n} for n in (10**8, 10**12, -1, "3", None, [3], 10**400)),
    *({"num_hidden_layers": n} for n in (20_000, 10**8, -1, "2", 1.5, None)),
    *({"hidden_size": n} for n in (10**5, 10**12, 0, -16, "16", 15)),
    *({"vocab_size": n} for n in (10**5, 10**12, 0, -1, "20")),
    *({"num_attention_heads": n} for n in (0, -1, 3, 10**5, "2")),
    *({"max_position_embeddings": n} for n in (10**5, 10**8, -1)),
    *({"intermediate_size": n} for n in (10**5, 10**9, 0)),
    {"hidden_size": 10**5, "intermediate_size": 10**5, "vocab_size": 10**5},
    *({"hidden_act": name} for name in ("no_such_function", "os.system", None, 3)),
    *({"dtype": name} for name in ("load", "no_such_type", "float8_e4m3fn", "int8", 3)),
    *({"torch_dtype": name} for name in ("hub", "complex64")),
    *({"model_type": name} for name in ("no_such_type", "", None, 3, ["bert"])),
    {"id2label": {str(i): "x" for i in range(100_000)}},
    {"id2label": {"x": "y"}},
    {"id2label": 3},
    {"layer_norm_eps": "x"},
    {"problem_type": "no_such_type"},
    {"per_layer_config": {"0": {"hidden_size": 10**5}}},
    {"chunk_size_feed_forward": 10**5},
    {"return_dict": False},
)
TRANSFORMERS_CLASSES: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (name, {"model_type": kind, **more})
        for name, kind in (
            ("DetrForObjectDetection", "detr"),
            ("UperNetForSemanticSegmentation", "upernet"),
            ("VitMatteForImageMatting", "vitmatte"),
            ("TvpModel", "tvp"),
        )
        for more in ({}, {"use_timm_backbone": False}, {"backbone_config": None}, {"backbone": None})
    ),
    ("RagModel", {"model_type": "rag"}),
    ("TimmBackbone", {"model_type": "timm_backbone", "backbone": "hf-hub:someone/network"}),
    ("TimmWrapperModel", {"model_type": "timm_wrapper", "architecture": "local-dir:/etc"}),
    ("LlamaForSequenceClassification", {"model_type": "llama", "num_hidden_layers": 20_000}),
    ("LlamaForSequenceClassification", {"model_type": "llama", "max_position_embeddings": 10**9}),
    (
        "GPT2ForSequenceClassification",
        {"model_type": "gpt2", "n_positions": 100_000, "n_embd": 2, "n_head": 1},
    ),
    ("GPTNeoForSequenceClassification", {"model_type": "gpt_neo", "max_position_embeddings": 100_000}),
    ("MarianModel", {"model_type": "marian", "max_position_embeddings": 131_072, "d_model": 120}),
    *(
        (name, {"model_type": "bert"})
        for name in ("PreTrainedModel", "AutoModel", "pipeline", "os", "", "__doc__")
    ),
    ("GPT2ForSequenceClassification", {"model_type": "bert"}),
)
REFUSED = ("model_name", "checkpoint_path", "pretrained", "backbone", "auto_map", "quantization_config")
"""Keys that name weights or code: a network must not be constructed with them."""


def _hostile_configs() -> Iterator[tuple[str, dict[str, Any]]]:
    every = {"timm": TIMM_CHANGES, "torchvision": TORCHVISION_CHANGES, "transformers": TRANSFORMERS_CHANGES}
    for library, changes in every.items():
        yield from ((library, {"config": change}) for change in changes)
    for name, config in TRANSFORMERS_CLASSES:
        yield "transformers", {"class": name, "whole": config}
    for library in every:
        yield from ((library, {"whole": value}) for value in (None, 3, "x", [], {}))


def _hostile_case(library: str, change: dict[str, Any], targets: dict[str, Target], scratch: Path) -> Result:
    title, name = "configs of libraries", f"{library}: {str(change)[:120]}"
    if library not in targets:
        return run_case(title, f"{name} (not installed)", lambda: None)
    case = scratch / library
    _copy(targets[library].folder, case)
    content = _content(case / "config.json")
    backbone = content["model"]["backbone"]
    if "whole" in change and library == "transformers" and "class" in change:
        backbone["config"] = {"class": change["class"], "config": change["whole"]}
    elif "whole" in change:
        backbone["config"] = change["whole"]
    else:
        inner = backbone["config"]["config"] if library == "transformers" else backbone["config"]
        inner.update(change["config"])
    (case / "config.json").write_text(json.dumps(with_checksum(content)))
    refused = any(key in change.get("config", {}) for key in REFUSED)

    def function() -> None:
        with _watched(case):
            hetsngp.load(case)
        if refused:
            raise Wrong("was loaded, but names weights or code")

    return run_case(title, name, function, seconds=SECONDS)


class _watched:
    """Context in which connections and files outside of ``folder`` and the installed packages are noted."""

    def __init__(self, folder: Path) -> None:
        self.own = (str(folder), sys.prefix, sys.base_prefix, str(ROOT), "/proc/", "/sys/", "/dev/")
        self.seen: list[str] = []
        self.active = False

    def __enter__(self) -> None:
        sys.addaudithook(self.note)  # the process of this case ends with it
        self.active = True

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if self.active and event in ("socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"):
            self.seen.append(event)
        if self.active and event == "open" and isinstance(args[0], str) and not args[0].startswith(self.own):
            self.seen.append(f"open {args[0]}")

    def __exit__(self, *error: Any) -> None:
        self.active = False
        if self.seen:
            raise Wrong(f"reached beyond the folder: {self.seen[:3]}")


if __name__ == "__main__":
    sys.exit("run tools/attack.py")
