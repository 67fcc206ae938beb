"""Images from the disk: the same batches for any number of workers, from any batch on, and one sentence for damage."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from image_helpers import make_image_folder, save_picture

from pomona.data import Batches, Dataset, ImageStream, StreamedBatches, image_files, load, worker_pool
from pomona.data.augment import ResizedCrop
from pomona.data.image_files import EncodedImage, read_image_file
from pomona.data.image_stream import scale_box
from pomona.data.keyed_random import uniform
from pomona.errors import PomonaError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_folder(tmp_path_factory.mktemp("images"))


def load_stream(folder: Path, **options) -> Dataset:
    return load("imagefolder", root=folder, **{"size": 16, "stream": True, "workers": 2, **options})


def read_all(batches) -> tuple[torch.Tensor, torch.Tensor]:
    found = list(batches)
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def assert_equal(got, expected) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_each_image_is_read_once_and_no_pixels_are_held(folder: Path):
    data = load_stream(folder)
    assert isinstance(data.train, ImageStream)
    assert data.train.x.is_meta
    assert data.describe()["train"] == 12
    inputs, targets = read_all(data.batches(5, seed=3).epoch(0))
    assert inputs.shape == (12, 3, 16, 16)
    assert inputs.is_contiguous()
    assert sorted(targets.tolist()) == sorted(data.train.y.tolist())
    assert not torch.equal(inputs, read_all(data.batches(5, seed=3).epoch(1))[0])
    assert not torch.equal(inputs, read_all(data.batches(5, seed=4).epoch(0))[0])


@pytest.mark.parametrize("augment", ["resized_crop(pad=0)", "standard(pad=2)", None])
def test_batches_do_not_depend_on_the_number_of_workers(folder: Path, augment: str | None):
    expected = read_all(load_stream(folder, workers=1).batches(4, seed=1, augment=augment).epoch(2))
    for workers in (2, 5):
        assert_equal(
            read_all(load_stream(folder, workers=workers).batches(4, seed=1, augment=augment).epoch(2)), expected
        )


@pytest.mark.parametrize("augment", ["resized_crop(pad=0)", "standard(pad=2)"])
def test_an_epoch_can_be_taken_up_at_any_batch(folder: Path, augment: str):
    batches = load_stream(folder).batches(3, seed=1, augment=augment)
    whole = list(batches.epoch(1))
    for start in range(5):
        tail = list(load_stream(folder, workers=1).batches(3, seed=1, augment=augment).epoch(1, start))
        assert len(tail) == 4 - start
        for got, expected in zip(tail, whole[start:], strict=True):
            assert_equal(got, expected)


def test_ranks_read_their_shares_of_each_global_batch(folder: Path):
    data = load_stream(folder)
    whole = list(data.batches(4, seed=1).epoch(0))
    shares = [list(data.batches(4, seed=1, rank=rank, world=2).epoch(0)) for rank in range(2)]
    for expected, first, second in zip(whole, *shares, strict=True):
        assert_equal((torch.cat([a, b]) for a, b in zip(first, second, strict=True)), expected)


def test_evaluation_scales_the_short_side_to_8_7_and_crops_the_center(folder: Path):
    from PIL import Image

    data = load_stream(folder)
    inputs, targets = read_all(data.batches(4, part="test", mean=(0, 0, 0), std=(1, 1, 1)).evaluate())
    assert torch.equal(targets, data.test.y)
    for row in range(len(targets)):
        image = Image.open(data.test.paths[row])
        side = round(7 / 8 * min(image.size))
        left, top = (image.width - side) // 2, (image.height - side) // 2
        expected = image.crop((left, top, left + side, top + side)).resize((16, 16), Image.Resampling.BILINEAR)
        assert (inputs[row] * 255 - torch.from_numpy(np.array(expected)).permute(2, 0, 1)).abs().max() <= 1.01


def test_training_crops_boxes_of_the_whole_image_as_resized_crop_draws_them(folder: Path):
    from PIL import Image, ImageOps

    data = load_stream(folder)
    batches = data.batches(12, seed=5, shuffle=False, mean=(0, 0, 0), std=(1, 1, 1))
    inputs, _ = read_all(batches.epoch(3))
    drawn = uniform((12, ResizedCrop.uniforms_per_image), 5, 3, 1)
    flips = 0
    for row in range(12):
        image = Image.open(data.train.paths[row])
        top, left, height, width, flip = ResizedCrop(pad=0).draw_params(
            drawn[row : row + 1], image.height, image.width
        )[0]
        expected = image.crop((left, top, left + width, top + height)).resize((16, 16), Image.Resampling.BILINEAR)
        expected = ImageOps.mirror(expected) if flip else expected
        flips += int(flip)
        assert (inputs[row] * 255 - torch.from_numpy(np.array(expected)).permute(2, 0, 1)).abs().max() <= 1.01
    assert 0 < flips < 12


def test_random_numbers_of_some_rows_are_those_of_all():
    assert np.array_equal(uniform((3, 23), 7, 1, 1, start=4), uniform((9, 23), 7, 1, 1)[4:7])


def test_channels_last_and_dtype(folder: Path):
    inputs, _ = next(load_stream(folder).batches(4, channels_last=True, dtype=torch.bfloat16).epoch(0))
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert inputs.dtype == torch.bfloat16


def test_large_folders_are_streamed_by_themselves(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert not isinstance(load("imagefolder", root=folder, size=16).train, ImageStream)
    monkeypatch.setattr("pomona.data.image_folder.MEMORY_LIMIT", 18 * 3 * 16 * 16)
    assert not isinstance(load("imagefolder", root=folder, size=16).train, ImageStream)
    monkeypatch.setattr("pomona.data.image_folder.MEMORY_LIMIT", 18 * 3 * 16 * 16 - 1)
    assert isinstance(load("imagefolder", root=folder, size=16).train, ImageStream)
    assert not isinstance(load("imagefolder", root=folder, size=16, stream=False).train, ImageStream)


def test_a_validation_part_is_held_out_of_a_stream(folder: Path):
    data, whole = load_stream(folder, validation=3), load_stream(folder)
    assert isinstance(data.valid, ImageStream)
    assert (len(data.train), len(data.valid)) == (9, 3)
    parts = [{part.paths[k] for k in range(len(part))} for part in (data.train, data.valid, whole.train)]
    assert parts[0] | parts[1] == parts[2]
    assert read_all(data.batches(3, part="valid").evaluate())[0].shape == (3, 3, 16, 16)


def test_an_image_in_another_format_or_color_space_is_read(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    make_image_folder(tmp_path, 2, 2, 2)
    place = tmp_path / "train" / "n00000000"
    save_picture(place / "is_png.JPEG", 1, format="PNG")
    for mode, name in (("CMYK", "cmyk.jpg"), ("L", "gray.jpg"), ("P", "palette.gif"), ("RGBA", "alpha.png")):
        image.new(mode, (20, 20), 7).save(place / name)
    assert read_all(load_stream(tmp_path).batches(4).epoch(0))[0].shape == (7, 3, 16, 16)


def write_png_header(path: Path, width: int, height: int) -> None:
    import struct
    import zlib

    chunks = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT" + zlib.compress(b"\0" * 1000)
    framed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(framed))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("damage", ["text", "truncated", "empty", "bomb", "large bomb", "removed"])
def test_damaged_images_are_named_in_one_sentence(tmp_path: Path, damage: str, stream: bool):
    make_image_folder(tmp_path, 4, 2, 2)
    bad = tmp_path / "train" / "n00000000" / "train_0.JPEG"
    expected = {"bomb": "pixels", "large bomb": "pixels", "removed": "is not a regular file"}.get(damage, "is damaged")
    if damage == "text":
        bad.write_text("not an image")
    elif damage == "truncated":
        bad.write_bytes(bad.read_bytes()[:300])
    elif damage == "empty":
        bad.write_bytes(b"")
    elif "bomb" in damage:
        write_png_header(bad, 30000, 5000 if damage == "bomb" else 30000)
    else:
        bad.unlink()
        bad.symlink_to(tmp_path / "nowhere")
    with pytest.raises(PomonaError, match=rf"train_0.JPEG .*{expected}") as error:
        read_all(load_stream(tmp_path, stream=stream).batches(2).epoch(0))
    assert "\n" not in str(error.value)


def test_files_that_vanish_or_become_pipes_while_training_are_named(tmp_path: Path):
    make_image_folder(tmp_path, 4, 2, 2)
    data = load_stream(tmp_path)
    bad = tmp_path / "train" / "n00000000" / "train_0.JPEG"
    bad.unlink()
    with pytest.raises(PomonaError, match=r"train_0.JPEG cannot be read \(No such file"):
        read_all(data.batches(2).epoch(0))
    os.mkfifo(bad)
    with pytest.raises(PomonaError, match=r"train_0.JPEG' is no regular file, but a pipe"):
        read_all(data.batches(2).epoch(0))
    with pytest.raises(PomonaError, match=r"train_0.JPEG is not a regular file, as an image must be: remove it"):
        load_stream(tmp_path)


def test_large_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_picture(tmp_path / "a.jpg", 0)
    monkeypatch.setattr(image_files, "MAX_FILE_BYTES", 100)
    with pytest.raises(PomonaError, match=r"a.jpg' has [\d,]+ bytes, and at most 100 are read"):
        read_image_file(tmp_path / "a.jpg")


def test_options_that_do_not_fit_are_refused(folder: Path):
    with pytest.raises(PomonaError, match=r"cropped without padding, got pad=4: use resized_crop\(pad=0\)"):
        load_stream(folder).batches(4, augment="resized_crop")
    with pytest.raises(PomonaError, match="workers must be 0 or more, got -1"):
        load_stream(folder, workers=-1)
    with pytest.raises(PomonaError, match="in the order of an epoch only"):
        load_stream(folder).batches(4).gather_batch(torch.tensor([0]), None)


@pytest.mark.skipif(not worker_pool.HAS_FORK, reason="workers are threads here")
def test_a_killed_worker_ends_the_epoch_with_one_sentence(folder: Path):
    reading = load_stream(folder).batches(2).epoch(0)
    next(reading)
    pool = reading.gi_yieldfrom.gi_frame.f_locals["pool"]
    workers = list(pool.workers)
    for process in workers:
        os.kill(process, signal.SIGSTOP)
    os.kill(workers[0], signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        PomonaError, match=r"worker process \d+ was killed by SIGKILL while it read \d+ images?, of which"
    ):
        list(reading)
    assert time.monotonic() - start < 10
    for process in workers:
        with pytest.raises(ChildProcessError):  # no worker is left
            os.waitpid(process, os.WNOHANG)


def test_threads_read_the_same_batches_where_there_is_no_fork(folder: Path, monkeypatch: pytest.MonkeyPatch):
    expected = read_all(load_stream(folder).batches(4, seed=1).epoch(0))
    monkeypatch.setattr(worker_pool, "HAS_FORK", False)
    assert_equal(read_all(load_stream(folder).batches(4, seed=1).epoch(0)), expected)
    next(load_stream(folder).batches(2).epoch(0))  # left early, all threads end


@pytest.mark.parametrize("size", [(64, 48), (67, 51), (200, 150), (401, 333)])
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_simplejpeg_and_pillow_decode_to_the_same_pixels(tmp_path: Path, size: tuple[int, int], factor: int):
    pytest.importorskip("simplejpeg")
    save_picture(tmp_path / "a.jpg", 3, size, quality=90)
    fast = EncodedImage(tmp_path / "a.jpg", read_image_file(tmp_path / "a.jpg"))
    plain = EncodedImage(tmp_path / "a.jpg", read_image_file(tmp_path / "a.jpg"))
    assert fast.jpeg is not None
    plain.jpeg = None
    assert np.array_equal(fast.decode(factor), plain.decode(factor))
    assert fast.decode(factor).shape == (-(-size[1] // factor), -(-size[0] // factor), 3)


def test_a_large_jpeg_is_decoded_at_a_fraction_to_nearly_the_same_crop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_picture(tmp_path / "a.jpg", 3, (800, 600), quality=95)
    image = EncodedImage(tmp_path / "a.jpg", read_image_file(tmp_path / "a.jpg"))
    decoded = []
    plain = EncodedImage.decode
    monkeypatch.setattr(EncodedImage, "decode", lambda self, factor=1: (decoded.append(factor), plain(self, factor))[1])
    fraction = scale_box(image, (24, 40, 256, 304), 16).astype(int)
    whole = scale_box(image, (24, 40, 256, 304), 65)
    assert decoded == [8, 1]
    monkeypatch.setattr("pomona.data.image_stream.JPEG_FACTORS", ())
    full = scale_box(image, (24, 40, 256, 304), 16).astype(int)
    assert abs(fraction - full).max() <= 8
    assert abs(fraction - full).mean() < 2
    assert whole.shape == (65, 65, 3)


def test_a_stream_is_a_kind_of_batches(folder: Path):
    assert isinstance(load_stream(folder).batches(4), StreamedBatches)
    assert type(load("imagefolder", root=folder, size=16).batches(4)) is Batches


ORPHANING_SCRIPT = """
import os, sys
from pomona.data import load
batches = load("imagefolder", root=sys.argv[1], size=16, stream=True, workers=3).batches(2).epoch(0)
next(batches)
print(*batches.gi_yieldfrom.gi_frame.f_locals["pool"].workers, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(not worker_pool.HAS_FORK, reason="workers are threads here")
def test_workers_end_with_a_process_that_is_killed(folder: Path):
    command = [sys.executable, "-c", ORPHANING_SCRIPT, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 3
    deadline = time.monotonic() + 20
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
