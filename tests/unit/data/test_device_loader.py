"""The loader's batches are what a slow loop over images gives, however an epoch is divided or resumed."""

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from hetsngp.data.images import device_loader
from hetsngp.data.images.arrays import ImageArrays
from hetsngp.data.images.device_loader import Augmentation, DeviceLoader, crop_and_flip
from hetsngp.models.loader_counts import dataset_size

N, HEIGHT, WIDTH, CROP = 60, 5, 6, 2
BYTES = {"mean": [0.0, 0.0], "std": [1 / 255, 1 / 255]}  # x is then the byte itself
FOUR_SIGMA = 6.3e-5

Batches = list[tuple[Tensor, Tensor]]


def numbered(count: int = N) -> ImageArrays:
    """Random images whose label is their own number, so that a batch tells which images it holds."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 2, HEIGHT, WIDTH), dtype=np.uint8)
    return ImageArrays(torch.from_numpy(pixels), torch.arange(count), tuple(map(str, range(count))))


def training(count: int = N, batch_size: int = 12, seed: int = 0, **options: object) -> DeviceLoader:
    given = {**BYTES, "shuffle": True, "augment": Augmentation(CROP), **options}
    return DeviceLoader(numbered(count), batch_size, seed=seed, **given)  # type: ignore[arg-type]


def joined(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


def same(one: Iterable[tuple[Tensor, Tensor]], other: Iterable[tuple[Tensor, Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return bool(pairs) and all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def window(image: np.ndarray, top: int, left: int, flip: int, crop: int = CROP) -> np.ndarray:
    """The oracle: pad one image (C, H, W), cut, mirror."""
    padded = np.pad(image, ((0, 0), (crop, crop), (crop, crop)))
    cut = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
    return cut[:, :, ::-1] if flip else cut


EVERY_WINDOW = [(t, q, f) for t in range(2 * CROP + 1) for q in range(2 * CROP + 1) for f in (0, 1)]


# --- crops and flips -----------------------------------------------------------------------------------


def test_every_window_is_the_one_a_loop_cuts() -> None:
    images = numbered(len(EVERY_WINDOW)).images
    found = crop_and_flip(images, torch.tensor(EVERY_WINDOW).T, CROP)
    loop = [window(image, *where) for image, where in zip(images.numpy(), EVERY_WINDOW, strict=True)]
    assert found.dtype == torch.uint8
    assert np.array_equal(found.numpy(), np.stack(loop))


def test_every_window_is_the_one_torchvision_cuts() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2.functional")
    images = numbered(len(EVERY_WINDOW)).images
    found = crop_and_flip(images, torch.tensor(EVERY_WINDOW).T, CROP)
    for image, (top, left, flip), ours in zip(images, EVERY_WINDOW, found, strict=True):
        theirs = v2.crop(image, top - CROP, left - CROP, HEIGHT, WIDTH)
        assert torch.equal(ours, v2.horizontal_flip(theirs) if flip else theirs)


def chosen_windows(loader: DeviceLoader, epochs: int = 1) -> Counter[tuple[int, int, int]]:
    """Which window each image got, by trying all; fails where an image is none of them."""
    every = [
        {window(image, *w).tobytes(): w for w in EVERY_WINDOW} for image in loader.dataset.images.numpy()
    ]
    assert all(len(windows) == len(EVERY_WINDOW) for windows in every)
    counts: Counter[tuple[int, int, int]] = Counter()
    for _ in range(epochs):
        for x, y in loader:
            pictures = x.to(torch.uint8).numpy()
            assert np.array_equal(pictures, x.numpy())
            counts.update(
                every[n][picture.tobytes()] for n, picture in zip(y.tolist(), pictures, strict=True)
            )
    return counts


def test_batches_hold_windows_of_the_labelled_images_all_equally_often() -> None:
    counts = chosen_windows(training(count=200, batch_size=50), epochs=10)
    assert counts.total() == 2000
    # 50 windows, 40 times each on average: corner, height, width and mirror, and that none depends on another
    assert chisquare([counts[w] for w in EVERY_WINDOW]).pvalue > FOUR_SIGMA


def test_crop_and_flip_can_each_be_left_out() -> None:
    only_flips = chosen_windows(training(augment=Augmentation(0)))
    assert set(only_flips) == {(CROP, CROP, 0), (CROP, CROP, 1)}
    only_crops = chosen_windows(training(augment=Augmentation(CROP, flip=False)))
    assert len({w[:2] for w in only_crops}) > 10
    assert not any(flip for *_, flip in only_crops)
    assert set(chosen_windows(training(augment=None))) == {(CROP, CROP, 0)}


# --- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [None, Augmentation(CROP)])
def test_pixels_are_normalised_and_the_padding_is_black(augment: Augmentation | None) -> None:
    mean, std = torch.tensor([0.3, 0.6]), torch.tensor([0.25, 0.1])
    data = ImageArrays(torch.full((8, 2, 4, 4), 51).byte(), torch.zeros(8).long(), ("grey",))
    (x, y), *_ = DeviceLoader(data, 8, augment=augment, mean=mean, std=std)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    grey, black = ((value - mean.double()) / std.double() for value in (51 / 255, 0.0))
    for channel in range(2):
        expected = {float(v[channel]) for v in ((grey, black) if augment else (grey,))}
        assert x[:, channel].unique().tolist() == pytest.approx(sorted(expected), abs=1e-6)


def test_without_numbers_the_data_gives_them() -> None:
    loader = DeviceLoader(numbered(), 7)
    x, y = joined(loader)
    assert torch.equal(y, torch.arange(N))
    torch.testing.assert_close(x.double().mean((0, 2, 3)), torch.zeros(2).double(), atol=1e-6, rtol=0)
    deviation = x.double().std((0, 2, 3), correction=0)
    torch.testing.assert_close(deviation, torch.ones(2).double(), atol=1e-6, rtol=0)
    again = DeviceLoader(numbered(), 7, mean=loader.mean, std=loader.std)
    assert same(loader, again)


@pytest.mark.parametrize("augment", [None, Augmentation(CROP)])
def test_channels_last_changes_memory_and_nothing_else(augment: Augmentation | None) -> None:
    plain, last = training(augment=augment), training(augment=augment).to("cpu", channels_last=True)
    for (x, _), (z, _) in zip(plain, last, strict=True):
        assert torch.equal(x, z)
        assert x.is_contiguous()
        assert z.is_contiguous(memory_format=torch.channels_last)


def test_batches_may_be_written_on() -> None:
    loader = DeviceLoader(numbered(), N)
    for x, y in loader:
        x.zero_(), y.zero_()
    assert torch.equal(loader.dataset.labels, torch.arange(N))
    assert torch.equal(loader.dataset.images, numbered().images)


# --- an epoch is one thing, whoever asks ---------------------------------------------------------------


def test_an_epoch_is_a_permutation_that_seed_and_epoch_decide() -> None:
    torch.manual_seed(1)
    loader = training()
    epochs: list[Batches] = [list(loader) for _ in range(3)]
    for epoch, batches in enumerate(epochs):
        assert torch.equal(joined(batches)[1].sort().values, torch.arange(N))
        torch.manual_seed(2)
        before = torch.get_rng_state()
        other = training()
        other.set_epoch(epoch)
        assert same(other, batches)
        assert torch.equal(torch.get_rng_state(), before)  # nothing drawn from the random numbers of others
        assert not same(training(seed=1), batches)
    assert not same(epochs[0], epochs[1])
    assert not same(epochs[1], training(seed=1))  # seed and epoch are no sum
    loader.set_epoch(1)
    assert same(loader, epochs[1])
    assert same(loader, epochs[2])


def test_augmentation_does_not_change_the_order() -> None:
    assert torch.equal(joined(training())[1], joined(training(augment=None))[1])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_share_out_every_batch(world_size: int) -> None:
    shards = [training().shard(rank, world_size) for rank in range(world_size)]
    together = [joined(parts) for parts in zip(*shards, strict=True)]
    assert {len(x) for shard in shards for x, _ in shard} == {12 // world_size}
    assert same(together, training())


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [10, 11, 13, 15, 16])
def test_evaluation_in_uneven_parts_misses_and_repeats_nothing(world_size: int, count: int) -> None:
    whole = DeviceLoader(numbered(count), 5)
    shards = [whole.shard(rank, world_size) for rank in range(world_size)]
    parts = [list(shard) for shard in shards]
    assert [len(part) for part in parts] == [len(shard) for shard in shards]
    assert all(len(y) for part in parts for _, y in part)
    for number, (x, y) in enumerate(whole):
        xs, ys = joined(part[number] for part in parts if number < len(part))
        assert torch.equal(xs, x)
        assert torch.equal(ys, y)
    assert sum(len(y) for part in parts for _, y in part) == count


@pytest.mark.parametrize("make", [training, lambda: training().shard(1, 2)])
def test_an_epoch_goes_on_from_any_batch(make: Callable[[], DeviceLoader]) -> None:
    whole = list(make())
    for batch in range(len(whole)):
        loader = make()
        loader.start_at(batch)
        assert len(loader) == len(whole)
        assert same(loader, whole[batch:])
        loader.set_epoch(0)
        assert same(loader, whole)  # the start was for once


def test_starting_at_the_end_leaves_nothing() -> None:
    loader = training()
    loader.start_at(5)
    assert list(loader) == []
    assert len(list(loader)) == 5


def test_nothing_is_done_for_skipped_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(images: Tensor, windows: Tensor, padding: int) -> Tensor:
        calls.append(len(images))
        return crop_and_flip(images, windows, padding)

    monkeypatch.setattr(device_loader, "crop_and_flip", counted)
    loader = training()
    loader.start_at(3)
    assert len(list(loader)) == len(calls) == 2


def test_two_iterators_of_one_loader_do_not_meet() -> None:
    alone = training()
    first, second, third = list(alone), list(alone), list(alone)
    loader = training()
    one = iter(loader)
    begun = [next(one), next(one)]
    two = iter(loader)
    other = [next(two)]
    loader.start_at(4)
    three = list(loader)
    assert same([*begun, *one], first)
    assert same([*other, *two], second)
    assert same(three, third[4:])


# --- devices, sizes, errors ----------------------------------------------------------------------------


def test_a_copy_shares_the_bytes_and_counts_its_own_epochs() -> None:
    loader = training()
    moved, part = loader.to("cpu"), loader.shard(0, 2)
    assert moved.dataset is loader.dataset is part.dataset
    list(moved)
    assert (loader.epoch, moved.epoch, part.epoch) == (0, 1, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("channels_last", [False, True])
def test_an_epoch_is_the_same_on_a_gpu_and_never_waits_for_it(channels_last: bool) -> None:
    loader = training().to("cuda", channels_last)
    batches = iter(loader)
    first = next(batches)  # with the epoch's draws, whose way to the device is waited for
    torch.cuda.set_sync_debug_mode("error")
    try:
        rest = list(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert first[0].is_cuda
    assert first[1].is_cuda
    assert same([(x.cpu(), y.cpu()) for x, y in [first, *rest]], training())


def test_sizes() -> None:
    data = numbered(11)
    assert len(DeviceLoader(data, 4)) == len(list(DeviceLoader(data, 4))) == 3
    assert len(DeviceLoader(data, 4, shuffle=True)) == len(list(DeviceLoader(data, 4, shuffle=True))) == 2
    assert len(DeviceLoader(data, 4, shuffle=True, drop_last=False)) == 3
    assert len(DeviceLoader(data, 4, drop_last=True)) == 2
    loader = DeviceLoader(data, 4)
    assert (dataset_size(loader), loader.batch_size, loader.dataset) == (11, 4, data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Augmentation(crop=-1), "0 for no cropping"),
        (lambda: training(augment=Augmentation(HEIGHT)), "choose less than 5"),
        (lambda: training(batch_size=0), "batch_size must be a positive whole number"),
        (lambda: training(batch_size=N + 1), "smaller batch_size, or drop_last=False"),
        (lambda: training(seed=-1), "seed must be a whole number of at least 0"),
        (lambda: training(mean=None), "belong together"),
        (lambda: training(mean=[0.5]), "mean must be 2 finite numbers"),
        (lambda: training(std=[0.5, 0.0]), "give mean and std yourself"),
        (lambda: training().shard(0, 5), "choose 10 or 15"),
        (lambda: training().shard(0, 24), "choose 24"),
        (lambda: DeviceLoader(numbered(), 2).shard(0, 3), "choose 3"),
        (lambda: training().shard(2, 2), "rank must be one of 0 … 1"),
        (lambda: training().shard(0, 2).shard(0, 2), "shard the loader of all processes"),
        (lambda: training().set_epoch(-1), "at least 0"),
        (lambda: training().start_at(6), "an epoch has 5 batches"),
    ],
)
def test_errors_name_the_fix(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()
