"""Configs of timm, torchvision and transformers in a saved model: nothing is fetched, and no file but the
folder's is opened, whatever they say; memory is bounded by the weights file.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.toy import same_bits
from torch import nn

import hetsngp
from hetsngp import ArtifactError
from hetsngp.conversion.library_configs import DownloadRefused, check_numbers, check_sources, offline
from hetsngp.files import with_checksum
from hetsngp.io import construction
from hetsngp.limits import LimitExceeded

TIMM = {"model_name": "resnet18", "num_classes": 3}
BERT: dict[str, Any] = {"model_type": "bert", "_name_or_path": "someone/something", "num_hidden_layers": 2}


def transformers_config(**changes: Any) -> dict[str, Any]:
    return {"class": "BertForSequenceClassification", "config": {**BERT, **changes}}


# --- names of weights and code ------------------------------------------------------------------------------

REFUSED_OF_TIMM: list[dict[str, Any]] = [
    {"model_name": "hf-hub:someone/net"},
    {"model_name": "hf_hub:someone/net"},
    {"model_name": "HF-HUB:someone/net"},
    {"model_name": "local-dir:/etc"},
    {"model_name": "https://example.com/net"},
    {"model_name": "someone/net"},
    {"model_name": "../net"},
    {"model_name": "net\\..\\x"},
    {"model_name": "resnet18\n"},
    {"model_name": ""},
    {"model_name": None},
    {"model_name": ["resnet18"]},
    {"checkpoint_path": "/etc/passwd"},
    {"checkpoint_path": ""},
    {"pretrained": True},
    {"pretrained": False},
    {"pretrained_cfg": {"file": "/etc/passwd"}},
    {"pretrained_cfg_overlay": {"url": "http://example.com"}},
    {"cache_dir": "/tmp"},
    {"features_only": True},
    {"pruned": True},
]
REFUSED_OF_TRANSFORMERS: list[dict[str, Any]] = [
    {"backbone": "someone/net"},
    {"backbone": "resnet50"},
    {"use_timm_backbone": True},
    {"use_pretrained_backbone": True},
    {"backbone_kwargs": {"pretrained": True}},
    {"backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:someone/net"}},
    {"backbone_config": {"model_type": "resnet", "backbone": "resnet50"}},
    {"architecture": "hf-hub:someone/net"},
    {"model_args": {"checkpoint_path": "/etc/passwd"}},
    {"model_args": {"pretrained_cfg": {"url": "http://example.com"}}},
    {"auto_map": {"AutoModel": "someone/net--modeling.Net"}},
    {"text_config": {"auto_map": {"AutoModel": "modeling.Net"}}},
    {"custom_code": "x"},
    {"trust_remote_code": True},
    {"quantization_config": {"quant_method": "awq"}},
    {"vision_config": {"inner": [{"quantization_config": {"load_in_4bit": True}}]}},
    {"pretrained_model_name_or_path": "someone/net"},
    {"_attn_implementation": "kernels-community/flash-attn"},
    {"attn_implementation": "someone/kernel@v1:attention"},
    {"attn_implementation": {"": "sdpa", "text_config": "someone/kernel"}},
    {"_attn_implementation_internal": "someone/kernel"},
    {"attn_implementation": "flash_attention_2"},
    {"experts_implementation": "someone/kernel"},
    {"use_kernels": True},
    {"gguf_file": "x.gguf"},
]


@pytest.mark.parametrize("change", REFUSED_OF_TIMM, ids=str)
def test_other_sources_of_timm_are_refused(change: dict[str, Any]) -> None:
    check_sources("timm", TIMM)
    with pytest.raises(DownloadRefused, match=r"allow_download=True"):
        check_sources("timm", {**TIMM, **change})


@pytest.mark.parametrize("change", REFUSED_OF_TRANSFORMERS, ids=str)
@pytest.mark.parametrize("deep", [False, True], ids=["outside", "inside"])
def test_other_sources_of_transformers_are_refused(change: dict[str, Any], deep: bool) -> None:
    check_sources("transformers", transformers_config())
    with pytest.raises(DownloadRefused, match=r"allow_download=True"):
        check_sources("transformers", transformers_config(**({"text_config": change} if deep else change)))


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": None, "use_timm_backbone": False, "auto_map": {}, "quantization_config": None},
        {"_attn_implementation": "sdpa", "_attn_implementation_autoset": True},
        {"backbone_config": {"model_type": "timm_backbone", "backbone": "resnet50.a1_in1k"}},
        {"adapter_kernel_size": 3, "pretraining_tp": 1, "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_entries_that_name_nothing_are_not_refused(change: dict[str, Any]) -> None:
    check_sources("transformers", transformers_config(**change))


def test_a_connection_is_refused_whatever_led_to_it() -> None:
    import socket
    import threading

    results: list[Any] = []

    def connect() -> None:
        try:
            socket.create_connection(("127.0.0.1", 9), timeout=1).close()
        except Exception as error:
            results.append(type(error))

    with offline():
        connect()
        other = threading.Thread(target=connect)
        other.start()
        other.join()
    connect()
    assert results[0] is DownloadRefused
    assert DownloadRefused not in results[1:]  # other threads, and this one later, are free


# --- numbers ------------------------------------------------------------------------------------------------


def test_whole_numbers_are_bounded_by_the_largest_saved_size() -> None:
    check_numbers("timm", {"num_classes": 21_843, "img_size": [224, 224]}, 512)
    check_numbers("timm", {"num_classes": 3_000_000}, 3_000_000)
    check_numbers(
        "transformers", {"rope_theta": 10**7, "text": {"rope_parameters": {"rope_theta": 10**7}}}, 9
    )
    for change in ({"num_labels": 10**8}, {"a": [{"b": [[-(10**8)]]}]}, {"max_position_embeddings": 10**7}):
        with pytest.raises(ValueError, match=r"more than the saved weights have.*HETSNGP_MAX_CONFIG_NUMBER"):
            check_numbers("transformers", change, 512)


def test_the_bound_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETSNGP_MAX_CONFIG_NUMBER", str(10**8))
    check_numbers("transformers", {"num_labels": 10**8}, 512)


def test_long_texts_are_right_where_positions_are_rotations() -> None:
    pytest.importorskip("transformers")
    check_numbers("transformers", {"model_type": "llama", "max_position_embeddings": 10**7}, 512)
    with pytest.raises(ValueError, match="HETSNGP_MAX_CONFIG_POSITIONS"):
        check_numbers("transformers", {"model_type": "llama", "max_position_embeddings": 10**9}, 512)
    with pytest.raises(ValueError, match="HETSNGP_MAX_CONFIG_NUMBER"):
        check_numbers("transformers", {"model_type": "distilbert", "max_position_embeddings": 10**7}, 512)


# --- construction -------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Two layers that share a weight, a mask that is not saved, and one that is not registered."""

    def __init__(self, size: int = 4, layers: int = 1) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(size, size))
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.layers[0].weight = weight
        self.tied = weight
        self.register_buffer("mask", torch.arange(size).float(), persistent=False)
        self.table = torch.ones(size)


def test_an_outline_of_clearly_more_tensors_is_stopped() -> None:
    saved = dict(Masked().state_dict())
    made: list[int] = []

    class Counted(nn.Linear):
        def __init__(self) -> None:
            made.append(1)
            super().__init__(2, 2)

    with construction.bounded_outline(saved):
        assert Masked().tied.device.type == "meta"
    with pytest.raises(LimitExceeded, match="clearly more tensors"), construction.bounded_outline(saved):
        nn.ModuleList(Counted() for _ in range(10**6))
    assert len(made) < 1000
    with pytest.raises(LimitExceeded, match="clearly more elements"), construction.bounded_outline(saved):
        nn.Linear(10**5, 10**4)
    nn.Linear(2, 2)  # outside nothing is counted


def test_tensors_that_are_not_saved_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        outline = Masked(2**15)
    saved = {"x": torch.empty(2**16, device="meta")}
    construction.check_unsaved(outline, saved)
    monkeypatch.setenv("HETSNGP_MAX_UNSAVED_BYTES", "1")
    construction.check_unsaved(outline, saved)  # the mask and the table have as many bytes as the file
    with pytest.raises(LimitExceeded, match=r"4 bytes of tensors that are not saved"):
        construction.check_unsaved(outline, {"x": torch.empty(2**16 - 1, device="meta")})


def test_constructed_without_weights_the_rest_is_computed_and_sharing_stays() -> None:
    with construction.without_weights():
        network = Masked()
    assert all(p.device.type == "meta" for p in network.parameters())
    assert torch.equal(network.mask, torch.arange(4.0))
    assert torch.equal(network.table, torch.ones(4))
    assert network.layers[0].weight is network.tied
    saved = {name: t.double() for name, t in Masked().state_dict().items()}
    assert construction.allocate(network, saved)
    assert network.layers[0].weight is network.tied
    assert network.tied.dtype == torch.float64
    network.load_state_dict(saved)
    with construction.without_weights():
        unknown = Masked()
    assert not construction.allocate(unknown, {"tied": saved["tied"]})
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_an_lstm_uses_the_weights_it_was_given() -> None:
    """It keeps a second list of its weights."""
    original = nn.LSTM(3, 4)
    with construction.without_weights():
        network = nn.LSTM(3, 4)
    assert construction.allocate(network, original.state_dict())
    network.load_state_dict(original.state_dict())
    x = torch.randn(5, 2, 3)
    assert torch.equal(network(x)[0], original(x)[0])


# --- saved models -------------------------------------------------------------------------------------------


def bert(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**{**sizes, "intermediate_size": 16, "num_labels": 3, **options})
    return transformers.BertForSequenceClassification(config)


TOKENS = {"input_ids": torch.arange(8).reshape(2, 4)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    hetsngp.save(hetsngp.convert(bert(), "deterministic", TOKENS), tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **values: Any) -> None:
    """Set entries of the config of transformers, with the checksum made anew."""
    config = json.loads((folder / "config.json").read_text())
    config["model"]["backbone"]["config"]["config"].update(values)
    (folder / "config.json").write_text(json.dumps(with_checksum(config)))


def test_the_origin_of_a_network_is_ignored(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "_name_or_path" not in (saved / "config.json").read_text()
    expected = hetsngp.load(saved)(TOKENS)
    change(saved, _name_or_path="someone/something", name_or_path="/etc", _commit_hash="0")
    model = hetsngp.load(saved)
    assert torch.equal(model(TOKENS), expected)
    assert model.backbone.network.config.name_or_path == ""


def test_a_network_that_needs_code_is_refused_unless_that_is_allowed(saved: Path) -> None:
    expected = hetsngp.load(saved)(TOKENS)
    change(saved, auto_map={"AutoModel": "someone/net--modeling.Net"})
    with pytest.raises(ArtifactError, match=r"auto_map.*allow_download=True"):
        hetsngp.load(saved)
    assert torch.equal(hetsngp.load(saved, allow_download=True)(TOKENS), expected)


def test_a_network_with_code_of_its_own_is_described_without_it(tmp_path: Path) -> None:
    network = bert()
    network.config.auto_map = {"AutoModel": "someone/net--modeling.Net"}  # type: ignore[union-attr]
    model = hetsngp.convert(network, "deterministic", TOKENS).eval()
    hetsngp.save(model, tmp_path)
    assert torch.equal(hetsngp.load(tmp_path)(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_labels": 10**8}, "num_labels is 100000000, far more"),
        ({"num_hidden_layers": 20_000}, "clearly more tensors than the weights file has"),
        (
            {"hidden_size": 100_000, "num_attention_heads": 1},
            "clearly more elements than the weights file has",
        ),
        ({"num_hidden_layers": "2"}, "transformers cannot construct"),
        ({"hidden_act": "no such thing"}, "transformers cannot construct"),
        ({"model_type": "no such thing"}, "transformers cannot construct"),
        ({"backbone": "someone/net"}, "backbone is 'someone/net'"),
    ],
    ids=str,
)
def test_configs_that_ask_for_too_much(saved: Path, values: dict[str, Any], words: str) -> None:
    change(saved, **values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArtifactError, match=words):
        hetsngp.load(saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # KiB


def test_buffers_that_are_not_saved_are_the_networks_own(tmp_path: Path) -> None:
    """Rotary frequencies and tables of positions are computed by the constructor."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaConfig(**sizes, intermediate_size=16, num_labels=3, pad_token_id=0)
    depths = {"depths": [1], "num_heads": [1], "embed_dim": 8, "window_size": 4}
    swin = transformers.SwinConfig(image_size=16, patch_size=4, num_labels=3, **depths)
    images = {"pixel_values": torch.randn(2, 3, 16, 16)}
    networks: list[tuple[nn.Module, Any]] = [
        (transformers.LlamaForSequenceClassification(llama), TOKENS),
        (transformers.SwinForImageClassification(swin), images),
    ]
    for i, (network, x) in enumerate(networks):
        model = hetsngp.convert(network, "deterministic", x).eval()
        buffers = dict(model.named_buffers())
        assert set(buffers) - set(model.state_dict())
        hetsngp.save(model, tmp_path / str(i))
        twin = hetsngp.load(tmp_path / str(i))
        assert twin.config == model.config
        assert same_bits(twin.predict(x), model.predict(x))
        assert all(torch.equal(t, buffers[name]) for name, t in twin.named_buffers())


@pytest.mark.parametrize("method", ["deterministic", "hetsngp"])
def test_initial_values_are_not_drawn(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are made once: those of the file."""
    saved = tmp_path / "model"
    hetsngp.save(hetsngp.convert(bert(), method, TOKENS), saved)
    drawn: list[int] = []
    normal = torch.Tensor.normal_

    def counted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(0 if self.device.type == "meta" else self.numel())
        return normal(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", counted)
    hetsngp.load(saved)
    assert sum(drawn) == 0
    bert()
    assert sum(drawn) > 0  # so they are counted


# --- what the process does ----------------------------------------------------------------------------------

WATCHED = """
import json, sys, warnings
import torch, hetsngp
from hetsngp.files import with_checksum

folder, cases = sys.argv[1], json.loads(sys.stdin.read())
hetsngp.load(folder)  # what is imported lazily is imported now
file = folder + "/config.json"
config = json.load(open(file))
own = [folder, sys.prefix, sys.base_prefix, "/proc/", "/sys/", "/dev/"]
seen, watching = [], False

def hook(event, args):
    if not watching:
        return
    if event.startswith("socket.") and event != "socket.__new__":
        seen.append(event)
    elif event == "open" and isinstance(args[0], str) and not args[0].startswith(tuple(own)):
        # Some versions of transformers look up the user's token before they try to connect.
        if not args[0].endswith("huggingface/token"):
            seen.append("open " + args[0])
    elif event in ("subprocess.Popen", "os.system", "exec_module"):
        seen.append(event)

sys.addaudithook(hook)
outcomes = []
for case in cases:
    changed = json.loads(json.dumps(config))
    inner = changed["model"]["backbone"]
    if case.get("name"):
        inner.update(case)
    else:
        inner["config"]["config"].update(case)
    with open(file, "w") as handle:
        handle.write(json.dumps(with_checksum(changed)))
    watching = True
    try:
        hetsngp.load(folder)
        outcomes.append("loaded")
    except hetsngp.ArtifactError:
        outcomes.append("refused")
    watching = False
print(json.dumps([seen, outcomes]))
"""


@pytest.mark.slow
def test_no_connection_is_made_and_no_other_file_opened(saved: Path) -> None:
    """Every hostile config in a process of its own, watched by an audit hook of the interpreter."""
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    detection = {"class": "DetrForObjectDetection", "config": {"model_type": "detr"}}
    cases: list[dict[str, Any]] = [
        *REFUSED_OF_TRANSFORMERS,
        *({"name": "timm", "config": {**TIMM, **case}} for case in REFUSED_OF_TIMM),
        {"name": "torchvision", "config": {"name": "fasterrcnn_resnet50_fpn", "num_classes": 3}},
        {"name": "torchvision", "config": {"name": "deeplabv3_resnet50", "num_classes": 3}},
        *(
            {"name": "transformers", "config": {**detection, "config": {**detection["config"], **more}}}
            for more in ({"use_timm_backbone": False}, {"backbone_config": None}, {})
        ),
    ]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WATCHED, str(saved)],
        input=json.dumps(cases),
        env={**os.environ, "PYTHONPATH": str(Path(hetsngp.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    seen, outcomes = json.loads(run.stdout.splitlines()[-1])
    assert seen == []
    assert outcomes == ["refused"] * len(cases)


def test_many_threads_construct_at_once(saved: Path) -> None:
    """Limits and devices of one load do not reach networks that other threads make."""
    from concurrent.futures import ThreadPoolExecutor

    expected = hetsngp.load(saved)(TOKENS)

    def work(i: int) -> bool:
        if i % 2:
            return torch.equal(hetsngp.load(saved)(TOKENS), expected)
        network = nn.Sequential(*(nn.Linear(3, 3) for _ in range(300)))
        return all(p.device.type == "cpu" for p in copy.deepcopy(network).parameters())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
