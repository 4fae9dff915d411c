"""Networks of three libraries and of one's own, end to end: convert, train, fit, save, load, predict."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.contract import toy
from tests.contract.toy import same_bits
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hetsngp
from hetsngp import ArtifactError
from hetsngp.nn.spectral import BoundedConv1d, BoundedConv2d, BoundedLinear

pytestmark = pytest.mark.slow

BOUNDED = (BoundedLinear, BoundedConv1d, BoundedConv2d)
CLASSES, BATCH = 3, 6
Y = torch.arange(BATCH) % CLASSES


class CNN(nn.Module):
    """A user's network, unknown to every library."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 12, 3, stride=2)
        self.norm2 = nn.BatchNorm2d(12)
        self.out = nn.Linear(12, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        return self.out(F.relu(self.norm2(self.conv(h))).mean((2, 3)))


# --- the networks -------------------------------------------------------------------------------------------


def from_timm(name: str, **options: Any) -> nn.Module:
    return pytest.importorskip("timm").create_model(
        name, pretrained=False, **{"num_classes": CLASSES, **options}
    )


def from_torchvision(name: str, **options: Any) -> nn.Module:
    models = pytest.importorskip("torchvision").models
    return models.get_model(name, weights=None, **{"num_classes": CLASSES, **options})


def bert(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **{"num_labels": CLASSES, **options},
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64,
        n_embd=24,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **{"num_labels": CLASSES, "pad_token_id": 0, **options},
    )
    return transformers.GPT2ForSequenceClassification(config)


def hugging_face_resnet() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    return transformers.ResNetForImageClassification(config)


def hugging_face_vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


def images(size: int = 32, channels: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, channels, size, size, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 1) -> dict[str, Tensor]:
    """Sentences of several lengths, filled up with token 0."""
    ids = torch.randint(3, 64, (BATCH, 7), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(7) < torch.tensor([7, 3, 5, 1, 6, 2])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def last_token(h: Tensor) -> Tensor:
    """Last position of each sentence of :func:`tokens`, where GPT-2 reads it."""
    return h[torch.arange(BATCH), tokens()["attention_mask"].sum(1) - 1]


@dataclass(frozen=True)
class Case:
    """A network, a batch for it, and what we know of it from its documentation."""

    make: Callable[[], nn.Module]
    batch: Any
    last: str
    """The layer that makes the logits."""
    large: str | None = None
    """A layer that is made larger than any bound; None: transformers are not bounded."""
    pick: Callable[[Tensor], Tensor] = torch.Tensor.detach
    """The features of each example, from what enters that layer."""
    known: bool = True
    """Whether the library constructs it again."""


NETWORKS = {
    "timm resnet18": Case(lambda: from_timm("resnet18"), images(), "fc", "layer1.0.conv2"),
    "timm convnext": Case(
        lambda: from_timm("convnext_atto"),
        images(),
        "head.fc",
        "stages.1.blocks.0.mlp.fc1",
        lambda h: h.flatten(1),
    ),
    "timm vit": Case(lambda: from_timm("vit_tiny_patch16_224", img_size=32), images(), "head"),
    "torchvision resnet50": Case(lambda: from_torchvision("resnet50"), images(), "fc", "layer1.0.conv2"),
    "bert": Case(bert, tokens(), "classifier"),
    "gpt2": Case(gpt2, tokens(), "score", None, last_token),
    "hugging face resnet": Case(
        hugging_face_resnet,
        {"pixel_values": images()},
        "classifier.1",
        "resnet.encoder.stages.0.layers.0.layer.0.convolution",
    ),
    "hugging face vit": Case(hugging_face_vit, {"pixel_values": images()}, "classifier"),
    "own": Case(CNN, images(), "out", "conv", known=False),
}
ALL = pytest.mark.parametrize("name", NETWORKS)


def unusual(net: nn.Module, seed: int = 0, large: str | None = None) -> nn.Module:
    """Every tensor gets values that no construction gives it, BatchNorm's statistics among them."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p += 0.02 * torch.randn(p.shape, generator=g)
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(0, 0.3, generator=g)
                module.running_var.uniform_(0.5, 2.0, generator=g)
                module.num_batches_tracked.fill_(17)
        if large is not None:
            net.get_submodule(large).weight *= 50
    return net


@functools.cache
def original(name: str) -> nn.Module:
    """As a user has it; not to be changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return unusual(NETWORKS[name].make(), large=NETWORKS[name].large).eval()


@functools.cache
def _converted(name: str, freeze: bool) -> hetsngp.Classifier:
    case = NETWORKS[name]
    return hetsngp.convert(
        original(name),
        "hetsngp",
        case.batch,
        freeze=freeze,
        dataset_size=BATCH,
        generator=torch.Generator().manual_seed(0),
        **toy.TINY,
    )


def converted(name: str, *, freeze: bool = False) -> hetsngp.Classifier:
    return copy.deepcopy(_converted(name, freeze))


def run(net: nn.Module, x: Any) -> Any:
    """As a user calls the network."""
    return net(**x) if isinstance(x, dict) else net(x)


def logits(net: nn.Module, x: Any) -> Tensor:
    output = run(net, x)
    return output if isinstance(output, Tensor) else output.logits


def features(net: nn.Module, case: Case) -> Tensor:
    """What enters the last layer of the original, caught by a hook; the mode is as it is."""
    caught: list[Tensor] = []
    hook = net.get_submodule(case.last).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        run(net, case.batch)
    hook.remove()
    (h,) = caught
    return case.pick(h)


def tensors(net: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, those that are not saved too."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors(net).items()}


# --- what is kept -------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("freeze", [False, True])
def test_every_tensor_but_the_last_layers_is_kept(name: str, freeze: bool) -> None:
    case, net = NETWORKS[name], original(name)
    model = converted(name, freeze=freeze)
    assert model.conversion.classifier == case.last
    expected = {n: t for n, t in tensors(net).items() if not n.startswith(case.last + ".")}
    assert len(expected) == len(tensors(net)) - len(tensors(net.get_submodule(case.last)))
    found = tensors(model.backbone.network)
    assert {n for n in found if not n.rpartition(".")[2].startswith("spectral_")} == set(expected)
    for n, t in expected.items():
        assert found[n].dtype == t.dtype
        assert torch.equal(found[n], t)
        assert found[n].data_ptr() != t.data_ptr()


@ALL
@pytest.mark.parametrize("freeze", [False, True])
def test_the_features_are_the_originals_to_the_bit(name: str, freeze: bool) -> None:
    case = NETWORKS[name]
    expected = features(original(name), case)
    with torch.no_grad():
        h = converted(name, freeze=freeze).eval().backbone(case.batch)
    assert h.shape == (BATCH, expected.shape[1])
    assert torch.equal(h, expected)


def test_timm_says_the_same_of_its_features() -> None:
    for name in ("timm resnet18", "timm convnext", "timm vit"):
        net: Any = original(name)
        with torch.no_grad():
            expected = net.forward_head(net.forward_features(NETWORKS[name].batch), pre_logits=True)
            assert torch.equal(converted(name).eval().backbone(NETWORKS[name].batch), expected)


@ALL
def test_in_training_too_the_features_and_statistics_are_the_originals(name: str) -> None:
    """The bound is measured in the first pass, and a layer that is larger has its own: nothing shrinks."""
    case, net = NETWORKS[name], copy.deepcopy(original(name)).train()
    model = converted(name).train()
    expected = features(net, case)
    torch.testing.assert_close(model.backbone(case.batch), expected, rtol=1e-4, atol=1e-5)
    found = dict(model.backbone.network.named_buffers())
    for n, t in net.named_buffers():
        torch.testing.assert_close(found[n], t, rtol=1e-4, atol=1e-5)


@ALL
def test_the_original_is_left_alone(name: str) -> None:
    case, net = NETWORKS[name], original(name)
    before, printed, answers = snapshot(net), repr(net), logits(net, case.batch).detach()
    model = hetsngp.convert(net, "sngp", case.batch, freeze=name == "torchvision resnet50", **toy.TINY)
    F.cross_entropy(model.train()(case.batch), Y).backward()
    after = tensors(net)
    assert list(after) == list(before)
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert repr(net) == printed
    assert torch.equal(logits(net, case.batch), answers)


@ALL
def test_layers_are_bounded_unless_it_is_a_transformer(name: str) -> None:
    case, model = NETWORKS[name], converted(name)
    found = [m for m in model.backbone.modules() if isinstance(m, BOUNDED)]
    if case.large is None:
        assert found == []
        return
    plain = [
        m
        for n, m in original(name).named_modules()
        if isinstance(m, nn.Linear | nn.Conv2d) and n != case.last
    ]
    assert len(found) == len(plain) == len(model.conversion.bounds)
    assert any(layer.name.endswith(case.large) for layer in model.conversion.raised)


# --- training, fitting, saving ------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("freeze", [False, True])
def test_a_plain_step_of_training_lowers_the_loss(name: str, freeze: bool) -> None:
    case, model = NETWORKS[name], converted(name, freeze=freeze).train()
    before = snapshot(model)
    loss = F.cross_entropy(model(case.batch), Y)
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    square = float(sum(g.double().square().sum() for g in grads.values()))
    # By Taylor a step of this length lowers the loss by 0.01, and a little less where it is curved.
    torch.optim.SGD(model.parameters(), lr=0.01 / square).step()
    with torch.no_grad():
        assert float(F.cross_entropy(model(case.batch), Y)) < float(loss) - 1e-3
    head = {n for n in grads if n.startswith("head.")}
    assert head
    assert (grads.keys() == head) == freeze
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert "head.latent.beta" in moved
    assert any(n.startswith("backbone.") for n in moved) != freeze
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == trainable
    # Zero for few: the bias of attention's keys, embeddings that do not occur.
    assert sum(bool(g.any()) for g in grads.values()) > 0.9 * len(trainable)


@ALL
def test_fit_predict_save_load(name: str, tmp_path: Path) -> None:
    case, model = NETWORKS[name], converted(name).train()
    optimizer = torch.optim.AdamW(model.parameter_groups(1e-4), lr=1e-3)
    loss = model.loss(case.batch, Y)
    assert torch.isfinite(loss)
    loss.backward()
    optimizer.step()
    report = hetsngp.fit_posterior(model, [(case.batch, Y)])
    assert report.count == BATCH
    prediction = model.predict(case.batch)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(BATCH))
    assert (prediction.model_uncertainty > 0).all()
    hetsngp.save(model, tmp_path)
    if not case.known:
        with pytest.raises(ArtifactError, match=r"'CNN'.*backbone=MyNetwork\(\)"):
            hetsngp.load(tmp_path)
    twin = hetsngp.load(tmp_path, backbone=None if case.known else CNN())
    assert same_bits(twin.predict(case.batch), prediction)
    assert twin.config == model.config
    state = model.state_dict()
    assert list(twin.state_dict()) == list(state)
    assert all(torch.equal(t, state[n]) for n, t in twin.state_dict().items())
    twin.train().loss(case.batch, Y).backward()  # it trains on


@pytest.mark.parametrize("name", ["timm vit", "bert", "own"])
def test_a_frozen_network_is_loaded_frozen(name: str, tmp_path: Path) -> None:
    case, model = NETWORKS[name], converted(name, freeze=True)
    hetsngp.fit_posterior(model, [(case.batch, Y)])
    hetsngp.save(model, tmp_path)
    twin = hetsngp.load(tmp_path, backbone=None if case.known else CNN())
    assert same_bits(twin.predict(case.batch), model.predict(case.batch))
    assert not any(p.requires_grad for p in twin.backbone.parameters())
    assert not any(module.training for module in twin.train().backbone.network.modules())


@ALL
def test_a_linear_head_gives_the_originals_probabilities(name: str) -> None:
    case, net = NETWORKS[name], original(name)
    with torch.no_grad():
        expected = F.log_softmax(logits(net, case.batch), 1)
        kept = hetsngp.convert(net, "deterministic", case.batch).eval()
        torch.testing.assert_close(kept(case.batch), expected)
    assert kept.conversion.kept_readout


@pytest.mark.parametrize("name", [n for n, case in NETWORKS.items() if case.known and "50" not in n])
def test_networks_of_libraries_need_no_example(name: str) -> None:
    case = NETWORKS[name]
    model = hetsngp.convert(original(name), freeze=True, **toy.TINY).eval()
    assert model.conversion.classifier == case.last
    assert torch.equal(model.backbone(case.batch), features(original(name), case))


def test_timm_networks_without_a_last_layer() -> None:
    net: Any = unusual(from_timm("convnext_atto", num_classes=0)).eval()
    with pytest.raises(ValueError, match=r"has no output.*num_classes="):
        hetsngp.convert(net, "sngp", images())
    model = hetsngp.convert(net, "sngp", images(), num_classes=5, freeze=True, **toy.TINY)
    assert model(images()).shape == (BATCH, 5)
    assert torch.equal(model.backbone(images()), net(images()))
    assert model.conversion.classifier is None
    assert "its 320 features given to a sngp head for 5 classes" in str(model.conversion)


# --- saved networks of libraries ----------------------------------------------------------------------------


def round_trip(net: nn.Module, x: Any, folder: Path, **load: Any) -> None:
    """A model with the network's own readout, so that every difference shows."""
    model = hetsngp.convert(unusual(net).eval(), "deterministic", x).eval()
    hetsngp.save(model, folder)
    twin = hetsngp.load(folder, **load)
    with torch.no_grad():
        torch.testing.assert_close(model(x), F.log_softmax(logits(net, x), 1))
        assert torch.equal(twin(x), model(x))


OTHERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "vit, grey, small": (lambda: from_timm("vit_tiny_patch16_224", in_chans=1, img_size=48), images(48, 1)),
    "vit, mean of tokens": (
        lambda: from_timm("vit_tiny_patch16_224", global_pool="avg", img_size=32),
        images(),
    ),
    "convnext, grey": (lambda: from_timm("convnext_atto", in_chans=1), images(32, 1)),
    "resnet, grey": (lambda: from_timm("resnet18", in_chans=1), images(32, 1)),
    "resnet, dropout": (lambda: from_timm("resnet18", drop_rate=0.2), images()),
    "torchvision mobilenet": (lambda: from_torchvision("mobilenet_v3_small"), images()),
    "bert, two classes": (lambda: bert(num_labels=2, hidden_act="relu"), tokens()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_networks_made_with_other_arguments_are_constructed_again(name: str, tmp_path: Path) -> None:
    make, x = OTHERS[name]
    round_trip(make(), x, tmp_path)


def test_a_network_that_cannot_be_described_is_asked_for(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return from_timm("convnext_atto", drop_path_rate=0.1)

    model = hetsngp.convert(unusual(make()), "deterministic", images()).eval()
    hetsngp.save(model, tmp_path)
    with pytest.raises(ArtifactError, match=r"'ConvNeXt'.*backbone=MyNetwork\(\)"):
        hetsngp.load(tmp_path)
    assert torch.equal(hetsngp.load(tmp_path, backbone=make())(images()), model(images()))


UNSEEN: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    # Neither shapes nor the printed network tell these from the usual ones.
    "heads": (lambda: from_timm("vit_tiny_patch16_224", num_heads=6, img_size=32), images()),
    "input": (
        lambda: from_torchvision("googlenet", transform_input=True, init_weights=False),
        images(),
    ),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_a_setting_that_does_not_show_is_kept_or_the_network_is_asked_for(name: str, tmp_path: Path) -> None:
    """Never other predictions without a word."""
    make, x = UNSEEN[name]
    model = hetsngp.convert(unusual(make()).eval(), "deterministic", x).eval()
    hetsngp.save(model, tmp_path)
    try:
        twin = hetsngp.load(tmp_path)
    except ArtifactError:
        twin = hetsngp.load(tmp_path, backbone=make())
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))


def test_a_network_without_the_replaced_layer_is_refused(tmp_path: Path) -> None:
    hetsngp.save(converted("own"), tmp_path)
    with pytest.raises(ArtifactError, match=r"no layer 'out'.*before hetsngp\.convert"):
        hetsngp.load(tmp_path, backbone=nn.Linear(3, 3))
    other = CNN()
    other.conv = nn.Conv2d(8, 12, 5)
    with pytest.raises(ArtifactError, match="do not fit"):
        hetsngp.load(tmp_path, backbone=other)


@pytest.mark.parametrize("names", [("bert", "bert"), ("own", "own"), ("timm vit", "own")])
def test_ensembles_of_converted_networks(names: tuple[str, str], tmp_path: Path) -> None:
    members = [converted(name) for name in names]
    batch = NETWORKS[names[0]].batch
    for seed, member in enumerate(members):
        unusual(member.backbone, seed)
        hetsngp.fit_posterior(member, [(batch, Y)])
    ensemble = hetsngp.Ensemble(members)
    hetsngp.save(ensemble, tmp_path)
    twin = hetsngp.load(tmp_path, backbone=CNN() if "own" in names else None)
    assert same_bits(twin.predict(batch), ensemble.predict(batch))
    assert (twin.predict(batch).member_uncertainty > 0).all()


# --- Hugging Face's batches ---------------------------------------------------------------------------------


def whole_sentences() -> dict[str, Tensor]:
    x = tokens()
    ids = torch.where(x["input_ids"] > 0, x["input_ids"], 5)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_batches_of_every_kind_give_the_same_features() -> None:
    transformers = pytest.importorskip("transformers")
    model = converted("bert").eval()
    x = whole_sentences()
    with torch.no_grad():
        expected = model.backbone(x)
        for batch in (
            {**x, "labels": Y},
            {**x, "label": Y},
            transformers.BatchEncoding(x),
            transformers.BatchEncoding({**x, "labels": Y}),
            x["input_ids"],
            (x["input_ids"], x["attention_mask"]),
        ):
            assert torch.equal(model.backbone(batch), expected)
    for example in (transformers.BatchEncoding({**x, "labels": Y}), x["input_ids"]):
        again = hetsngp.convert(original("bert"), "sngp", example, **toy.TINY).eval()
        assert torch.equal(again.backbone(x), expected)


def test_padding_does_not_reach_the_features() -> None:
    """A sentence alone and one filled up with tokens that do not count."""
    x = tokens()
    for name in ("bert", "gpt2"):
        model = converted(name).eval()
        with torch.no_grad():
            together = model.backbone(x)
            for i, length in enumerate(x["attention_mask"].sum(1).tolist()):
                alone = model.backbone({key: value[i : i + 1, :length] for key, value in x.items()})
                torch.testing.assert_close(alone[0], together[i], rtol=1e-4, atol=1e-5)


def rows_with_labels(name: str = "labels") -> list[dict[str, Tensor]]:
    x = tokens()
    return [{**{key: value[i] for key, value in x.items()}, name: Y[i]} for i in range(BATCH)]


@pytest.mark.parametrize("label", ["labels", "label"])
def test_loaders_of_dicts_train_and_fit_as_pairs_do(label: str) -> None:
    pairs = [({k: v[i : i + 3] for k, v in tokens().items()}, Y[i : i + 3]) for i in (0, 3)]
    dicts = DataLoader(rows_with_labels(label), batch_size=3)  # type: ignore[arg-type]
    models = []
    for loader in (pairs, dicts):
        model = converted("bert")
        model.dataset_size = None
        hetsngp.fitting.loop.train(
            model, loader, epochs=2, generator=torch.Generator().manual_seed(0), validation=loader
        )
        report = hetsngp.fit_posterior(model, loader)
        assert report.count == model.dataset_size == BATCH
        models.append(model)
    before, (one, two) = converted("bert").state_dict(), (m.state_dict() for m in models)
    assert all(torch.equal(one[n], t) for n, t in two.items())
    assert not torch.equal(one["head.latent.beta"], before["head.latent.beta"])
    assert same_bits(models[0].predict(tokens()), models[1].predict({**tokens(), "labels": Y}))


def test_batch_encodings_train_too() -> None:
    transformers = pytest.importorskip("transformers")
    model = converted("bert")
    batch = transformers.BatchEncoding({**tokens(), "labels": Y})
    hetsngp.fitting.loop.train(model, [batch], epochs=1)
    assert hetsngp.fit_posterior(model, [batch]).count == BATCH


def test_dicts_without_labels_are_answered_with_what_is_missing() -> None:
    model = converted("bert")
    message = r"loader yields a dict with 'input_ids', 'attention_mask' and no 'labels'"
    with pytest.raises(TypeError, match=message):
        hetsngp.fitting.loop.train(model, [tokens()], epochs=1)
    with pytest.raises(TypeError, match=message):
        hetsngp.fit_posterior(model, [tokens()])


def test_several_labels_an_example_have_the_sigmoid_link() -> None:
    net = bert(problem_type="multi_label_classification")
    model = hetsngp.convert(net, dataset_size=BATCH, **toy.TINY)
    assert model.head.sigmoid
    assert model.config["options"]["link"] == "sigmoid"
    y = F.one_hot(Y, CLASSES).float()
    hetsngp.fitting.loop.train(model, [{**tokens(), "labels": y}], epochs=1)
    hetsngp.fit_posterior(model, [{**tokens(), "labels": y}])
    assert model.predict(tokens()).probs.shape == (BATCH, CLASSES)
    asked = hetsngp.convert(net, link="softmax", **toy.TINY)
    assert not asked.head.sigmoid
    assert not converted("bert").head.sigmoid


def test_a_text_network_that_takes_no_batches_asks_for_one_of_the_users() -> None:
    with pytest.raises(ValueError, match=r"padding token.*example_input="):
        hetsngp.convert(gpt2(pad_token_id=None))


@pytest.mark.parametrize(
    ("name", "width", "millions"), [("resnet50", 2048, 23.5), ("vit_base_patch16_224", 768, 85.8)]
)
def test_the_large_backbones_of_the_paper_come_through_timm(name: str, width: int, millions: float) -> None:
    timm = pytest.importorskip("timm")
    side = 64 if name == "resnet50" else 224
    x, y = torch.randn(2, 3, side, side), torch.tensor([0, 3])
    model = hetsngp.convert(timm.create_model(name), "hetsngp", x, num_classes=4, copy=False)
    assert model.num_features == width
    parameters = sum(p.numel() for p in model.backbone.parameters())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.1)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    hetsngp.fit_posterior(model, [(x, y)])
    assert model.predict(x).probs.shape == (2, 4)
