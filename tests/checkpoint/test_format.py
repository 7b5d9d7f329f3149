"""Checkpoints: what goes in comes out, damage is refused, an interrupted write never costs the old one."""

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from disk import PowerCut, failing_disk, small_files
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from xmlc.checkpoint import (
    CheckpointFolder,
    CheckpointReader,
    format,
    read_checkpoint,
    read_into,
    read_metadata,
    write_checkpoint,
)
from xmlc.errors import CheckpointError
from xmlc.files import write_atomic

METADATA: dict[str, JsonValue] = {"step": 7, "rate": 0.1, "label map": [0, 2, None], "nested": {"é": True}}
OLD = {"weight": torch.arange(6, dtype=torch.float32).reshape(2, 3), "step": torch.tensor(1)}
NEW = {"weight": torch.full((40, 30), 2.0), "bias": torch.ones(3), "step": torch.tensor(2)}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and bits(found[name]) == bits(tensor)
        for name, tensor in expected.items()
    )


def of_every_dtype() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in format.DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (5, 3, dtype.itemsize), generator=random)
        full = raw.to(torch.uint8).view(dtype).reshape(5, 3)
        tensors |= {f"{name}.full": full, f"{name}.scalar": full[0, 0], f"{name}.empty": full[:0]}
        tensors |= {f"{name}.transposed": full.T, f"{name}.strided": full[::2, 1:]}
    return tensors


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    write_checkpoint(folder, OLD, METADATA)
    return folder


def rewrite_manifest(folder: Path, change: Any) -> None:
    """Change the manifest and give it a valid checksum again."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    document["checksum"] = "0" * 64
    text = json.dumps(document)
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))


# ---- round trip ------------------------------------------------------------------------------------------


def test_every_dtype_shape_and_layout_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = of_every_dtype()

    write_checkpoint(tmp_path / "all", tensors, METADATA)
    checkpoint = read_checkpoint(tmp_path / "all")

    assert equal(checkpoint.tensors, tensors)
    assert checkpoint.metadata == METADATA
    assert read_metadata(tmp_path / "all") == METADATA


def test_tensors_larger_than_a_chunk_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format, "CHUNK_BYTES", 16)

    write_checkpoint(tmp_path / "chunks", NEW, {})

    assert equal(read_checkpoint(tmp_path / "chunks").tensors, NEW)


def test_a_checkpoint_may_be_without_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "none", {}, METADATA)

    checkpoint = read_checkpoint(tmp_path / "none")

    assert (checkpoint.tensors, checkpoint.metadata) == ({}, METADATA)


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8")).filter(lambda name: name != "__metadata__"),
        st.integers(0, 3),
        max_size=4,
    )
)
def test_any_tensor_name_comes_back(tmp_path_factory: pytest.TempPathFactory, sizes: dict[str, int]) -> None:
    folder = tmp_path_factory.mktemp("names")
    tensors = {name: torch.ones(size) for name, size in sizes.items()}

    write_checkpoint(folder, tensors, {})

    assert equal(read_checkpoint(folder).tensors, tensors)
    if tensors:
        assert equal(safetensors.torch.load_file(folder / "tensors-0.safetensors"), tensors)


def test_the_data_file_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    write_checkpoint(tmp_path / "all", tensors, {})
    path = tmp_path / "all" / "tensors-0.safetensors"

    assert equal(safetensors.torch.load_file(path), tensors)
    with safetensors.safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors)
        assert equal({name: file.get_tensor(name) for name in tensors}, tensors)


def test_parameters_are_saved_by_value_and_without_their_gradient(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    write_checkpoint(tmp_path / "parameter", {"weight": weight}, {})
    found = read_checkpoint(tmp_path / "parameter").tensors["weight"]

    assert not found.requires_grad
    assert found.data_ptr() != weight.data_ptr()


def test_the_same_content_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, NEW, METADATA)

    for file in ("manifest.json", "tensors-0.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_checkpoint_is_replaced_and_its_old_data_removed(saved: Path) -> None:
    write_checkpoint(saved, NEW, {})

    assert equal(read_checkpoint(saved).tensors, NEW)
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "tensors-1.safetensors"]


def test_reading_into_tensors_changes_them_in_place(saved: Path) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in OLD.items()}
    tensors["weight"].requires_grad_()
    places = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    assert read_into(saved, tensors) == METADATA

    assert equal(tensors, OLD)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == places


# ---- what cannot be stored or read into ------------------------------------------------------------------


def test_a_dtype_without_a_place_in_the_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'z' must have a dtype among"):
        write_checkpoint(tmp_path / "new", {"z": torch.zeros(2, dtype=torch.complex64)}, {})

    assert not (tmp_path / "new").exists()


def test_the_name_that_safetensors_reserves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="reserved by safetensors"):
        write_checkpoint(tmp_path / "new", {"__metadata__": torch.zeros(2)}, {})


@pytest.mark.parametrize("value", [float("nan"), Path("x"), torch.zeros(1)])
def test_metadata_that_is_not_json_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError, match="the metadata must be JSON"):
        write_checkpoint(tmp_path / "new", {}, {"value": value})

    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 2)}, "tensor 'weight' must be read into contiguous torch.float32 [2, 3]"),
        ({"weight": torch.zeros(2, 3, dtype=torch.float64)}, "found torch.float64 [2, 3]"),
        ({"weight": torch.zeros(3, 2).T}, "with strides (1, 2)"),
        ({"bias": torch.zeros(1)}, "found ['bias'] missing and [] extra"),
        ({"weight": None}, "found [] missing and ['weight'] extra"),
    ],
    ids=["shape", "dtype", "layout", "not in the checkpoint", "not asked for"],
)
def test_reading_into_other_tensors_than_were_saved_is_refused(
    saved: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {name: tensor for name, tensor in {**OLD, **change}.items() if tensor is not None}

    with pytest.raises(CheckpointError) as refusal:
        read_into(saved, tensors)

    assert message in str(refusal.value)


# ---- damage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["manifest.json", "tensors-0.safetensors"])
@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_any_changed_byte_is_refused(saved: Path, file: str, flip: int) -> None:
    whole = (saved / file).read_bytes()
    into = {name: tensor.clone() for name, tensor in OLD.items()}
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] ^= flip
        (saved / file).write_bytes(content)
        with pytest.raises(CheckpointError, match=file):
            read_checkpoint(saved)
        with pytest.raises(CheckpointError, match=file):
            read_into(saved, into)


@pytest.mark.parametrize("file", ["manifest.json", "tensors-0.safetensors"])
def test_a_file_cut_anywhere_or_added_to_is_refused(saved: Path, file: str) -> None:
    content = (saved / file).read_bytes()

    for damaged in [content[:length] for length in range(len(content))] + [content + b"\0", content * 2]:
        (saved / file).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=file):
            read_checkpoint(saved)


def test_a_truncated_file_is_named_with_both_sizes(saved: Path) -> None:
    path = saved / "tensors-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size

    with pytest.raises(CheckpointError, match=f"must be {size + 1} bytes by manifest.json, found {size}"):
        read_checkpoint(saved)


def test_a_flipped_value_is_named_with_its_tensor(saved: Path) -> None:
    path = saved / "tensors-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match="tensor 'weight' must have the checksum"):
        read_checkpoint(saved)


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: must exist"):
        read_checkpoint(tmp_path)


def test_a_missing_data_file_is_refused(saved: Path) -> None:
    (saved / "tensors-0.safetensors").unlink()

    with pytest.raises(CheckpointError, match=r"tensors-0\.safetensors: must exist"):
        read_checkpoint(saved)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("\xff", "decode"),
        ("[" * 100_000, "values nested too deeply"),
    ],
)
def test_a_manifest_that_is_not_json_is_refused(saved: Path, text: str, found: str) -> None:
    (saved / "manifest.json").write_text(text, encoding="latin-1")

    with pytest.raises(CheckpointError, match=rf"manifest\.json: must be JSON, found: .*{found}"):
        read_checkpoint(saved)


@pytest.mark.parametrize("key", ["metadata", "weight", "shape"])
def test_a_manifest_with_a_key_twice_is_refused(saved: Path, key: str) -> None:
    """Which of the two holds would depend on the reader; its checksum is right: anybody can compute one."""
    path = saved / "manifest.json"
    document = json.loads(path.read_text())
    text = path.read_text().replace(f'"{key}": ', f'"{key}": 0, "{key}": ', 1)
    text = text.replace(document["checksum"], "0" * 64, 1)
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest(), 1))

    with pytest.raises(
        CheckpointError, match=rf"manifest\.json: must be JSON, found: an object with the key '{key}' t"
    ):
        read_checkpoint(saved)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "other"}', '"xmlc-checkpoint"'])
def test_a_manifest_of_something_else_is_refused(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)

    with pytest.raises(CheckpointError, match=r'must say "format": "xmlc-checkpoint", found another file'):
        read_checkpoint(saved)


def test_a_newer_version_asks_for_an_upgrade(saved: Path) -> None:
    rewrite_manifest(saved, lambda document: document.update(version=2, novelty=True))

    with pytest.raises(CheckpointError, match="version must be at most 1, found 2; upgrade xmlc"):
        read_checkpoint(saved)


@pytest.mark.parametrize("tensor", ["weight", "extra"])
def test_tensors_missing_from_or_extra_in_the_data_file_are_named(saved: Path, tensor: str) -> None:
    others = dict(OLD)
    if tensor in others:
        del others[tensor]
    else:
        others[tensor] = torch.zeros(2)
    safetensors.torch.save_file(others, saved / "tensors-0.safetensors")

    found = "['weight'] missing and [] extra" if tensor == "weight" else "[] missing and ['extra'] extra"
    with pytest.raises(CheckpointError) as refusal:
        read_checkpoint(saved)
    assert found in str(refusal.value)


def test_a_header_that_tells_other_shapes_is_refused(saved: Path) -> None:
    path = saved / "tensors-0.safetensors"
    path.write_bytes(path.read_bytes().replace(b"[2,3]", b"[3,2]"))

    with pytest.raises(CheckpointError, match="header must give the dtypes, shapes and places"):
        read_checkpoint(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../saved/tensors-0.safetensors"}, "in the same folder, found '../saved/"),
        ({"file": "/etc/passwd"}, "in the same folder, found '/etc/passwd'"),
        ({"file": "tensors-0.safetensors\n"}, "in the same folder"),
        ({"dtype": "C64"}, "dtype must be one of"),
        ({"shape": [2, 4]}, r"bytes must be 32 for F32 \[2, 4\], found 24"),
        ({"shape": [2, -3]}, "greater than or equal to 0"),
        ({"shape": 6}, "valid list"),
        ({"shape": [1] * 65}, "shape must have at most 64 sizes and fit 63 bits, found"),
        ({"shape": [2**62, 0]}, "shape must have at most 64 sizes and fit 63 bits, found"),
        ({"shape": [3, 2]}, "header must give"),
        ({"shape": [1000, 1000, 1000, 1000], "bytes": 4 * 10**12}, "must be 4000000000160 bytes"),
        ({"bytes": 8}, "bytes must be 24"),
        ({"checksum": "0" * 64}, "tensor 'weight' must have the checksum"),
        ({"surprise": 1}, "Extra inputs"),
    ],
)
def test_an_impossible_entry_is_refused_although_the_manifest_is_intact(
    saved: Path, change: dict[str, Any], message: str
) -> None:
    rewrite_manifest(saved, lambda document: document["tensors"]["weight"].update(change))

    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(saved)


def test_a_manifest_without_a_required_field_is_refused(saved: Path) -> None:
    rewrite_manifest(saved, lambda document: document.pop("tensors"))

    with pytest.raises(CheckpointError, match=r"manifest\.json: tensors: Field required"):
        read_checkpoint(saved)


@pytest.mark.parametrize("file", ["manifest.json", "tensors-0.safetensors"])
def test_a_link_in_the_place_of_a_file_is_refused(saved: Path, tmp_path: Path, file: str) -> None:
    """It could lead anywhere; an unpacked archive may hold one."""
    (saved / file).rename(tmp_path / "elsewhere")
    (saved / file).symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CheckpointError, match=rf"{file}: must be readable, found: {file} is a link"):
        read_checkpoint(saved)


@pytest.mark.parametrize("file", ["manifest.json", "tensors-0.safetensors"])
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(saved: Path, file: str) -> None:
    (saved / file).unlink()
    os.mkfifo(saved / file)

    with pytest.raises(CheckpointError, match=rf"{file}: must be readable, found: .*not a plain file"):
        read_checkpoint(saved)


def test_a_pointer_that_is_a_link_is_refused(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save("step-1", OLD, {})
    (tmp_path / "best").symlink_to("latest")

    with pytest.raises(CheckpointError, match="best: must be readable, found: best is a link"):
        checkpoints.best()


# ---- interrupted and refused writes ----------------------------------------------------------------------


def changes_to_disk(action: Any) -> int:
    with failing_disk(10**9, PowerCut(), forever=True) as done:
        action()
    return len(done)


def test_a_power_cut_at_any_point_of_replacing_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "trial", OLD, {})
    points = changes_to_disk(lambda: write_checkpoint(tmp_path / "trial", NEW, {}))
    assert points >= 10

    outcomes = []
    for point in range(points):
        folder = tmp_path / str(point)
        write_checkpoint(folder, OLD, {"which": "old"})
        with pytest.raises(PowerCut), failing_disk(point, PowerCut(), forever=True):
            write_checkpoint(folder, NEW, {"which": "new"})

        checkpoint = read_checkpoint(folder)
        assert equal(checkpoint.tensors, OLD if checkpoint.metadata["which"] == "old" else NEW)
        outcomes.append(str(checkpoint.metadata["which"]))

        write_checkpoint(folder, NEW, {})
        assert equal(read_checkpoint(folder).tensors, NEW)
        assert len(list(folder.iterdir())) == 2, "the next write removes what the interrupted one left"
    assert outcomes == sorted(outcomes, reverse=True), "one point turns old into new"
    assert set(outcomes) == {"old", "new"}


def test_a_power_cut_at_any_point_of_a_run_leaves_the_latest_and_best_checkpoint(tmp_path: Path) -> None:
    def start(root: Path) -> CheckpointFolder:
        checkpoints = CheckpointFolder(root)
        for step in (1, 2):
            checkpoints.save(f"step-{step}", OLD, {"step": step})
        checkpoints.mark_best("step-1")
        return checkpoints

    def go_on(checkpoints: CheckpointFolder) -> None:
        checkpoints.save("step-3", NEW, {"step": 3})
        checkpoints.mark_best("step-3")
        checkpoints.keep(last=1)

    trial = start(tmp_path / "trial")
    points = changes_to_disk(lambda: go_on(trial))

    for point in range(points):
        checkpoints = start(tmp_path / str(point))
        with pytest.raises(PowerCut), failing_disk(point, PowerCut(), forever=True):
            go_on(checkpoints)

        for path, steps in ((checkpoints.latest(), (2, 3)), (checkpoints.best(), (1, 3))):
            assert path is not None
            checkpoint = read_checkpoint(path)
            assert checkpoint.metadata["step"] in steps
            assert equal(checkpoint.tensors, NEW if checkpoint.metadata["step"] == 3 else OLD)

        go_on(checkpoints)
        assert sorted(path.name for path in checkpoints.root.iterdir()) == ["best", "latest", "step-3"]


def test_a_power_cut_during_the_first_save_leaves_a_folder_to_start_in(tmp_path: Path) -> None:
    points = changes_to_disk(lambda: CheckpointFolder(tmp_path / "trial").save("step-1", NEW, {}))

    for point in range(points):
        checkpoints = CheckpointFolder(tmp_path / str(point))
        with pytest.raises(PowerCut), failing_disk(point, PowerCut(), forever=True):
            checkpoints.save("step-1", NEW, {})

        latest = checkpoints.latest()
        assert latest is None or equal(read_checkpoint(latest).tensors, NEW)
        checkpoints.save("step-2", NEW, {})
        left = {path.name for path in checkpoints.root.iterdir()} - {"step-1"}
        assert left == {"latest", "step-2"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_refusal_of_the_disk_at_any_point_keeps_one_whole_checkpoint_and_no_temporaries(
    tmp_path: Path, code: int
) -> None:
    write_checkpoint(tmp_path / "trial", OLD, {})
    points = changes_to_disk(lambda: write_checkpoint(tmp_path / "trial", NEW, {}))

    for point in range(points):
        folder = tmp_path / str(point)
        write_checkpoint(folder, OLD, {})
        with failing_disk(point, OSError(code, os.strerror(code)), forever=False) as done:
            try:
                write_checkpoint(folder, NEW, {})
            except CheckpointError as error:
                assert os.strerror(code) in str(error)

        tensors = read_checkpoint(folder).tensors
        assert equal(tensors, OLD) or equal(tensors, NEW)
        if done[point] != "unlink":  # a removal that the disk refuses is left to the next write
            assert len(list(folder.iterdir())) == 2


def test_a_really_full_disk_keeps_the_old_checkpoint_and_says_so(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with (
        small_files(100_000),
        pytest.raises(CheckpointError, match=r"must be writable, found: .*free space"),
    ):
        write_checkpoint(saved, {"large": torch.zeros(100_000)}, {})

    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_failed_first_write_leaves_no_folder(tmp_path: Path) -> None:
    with (
        failing_disk(3, OSError(errno.ENOSPC, "full"), forever=False),
        pytest.raises(CheckpointError, match="must be writable"),
    ):
        write_checkpoint(tmp_path / "new", NEW, {})

    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(CheckpointError, match="must be writable"):
        write_checkpoint(tmp_path / "file", NEW, {})

    assert (tmp_path / "file").read_text() == "mine"


def test_a_write_touches_no_file_of_others(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    (saved / "tensors.safetensors").write_text("mine too")

    write_checkpoint(saved, NEW, {})

    assert (saved / "notes.txt").exists()
    assert (saved / "tensors.safetensors").exists()


def test_a_damaged_checkpoint_can_be_overwritten(saved: Path) -> None:
    (saved / "manifest.json").write_text("{")

    write_checkpoint(saved, NEW, {})

    assert equal(read_checkpoint(saved).tensors, NEW)
    assert len(list(saved.iterdir())) == 2


# ---- the checkpoints of a run ----------------------------------------------------------------------------


def test_a_new_run_has_neither_latest_nor_best(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "none")

    assert (checkpoints.latest(), checkpoints.best(), checkpoints.names()) == (None, None, [])


def test_the_latest_is_the_one_saved_last_and_the_best_the_one_marked(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    for step in (1, 2, 3):
        folder = checkpoints.save(f"step-{step:08d}", OLD, {"step": step})
    checkpoints.mark_best("step-00000002")

    assert checkpoints.latest() == folder == checkpoints.root / "step-00000003"
    assert checkpoints.best() == checkpoints.root / "step-00000002"


def test_keep_never_removes_the_latest_or_the_best(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (1, 2, 5, 3, 4):  # step-5 is left of a run resumed from step-2; the latest is step-4
        checkpoints.save(f"step-{step}", OLD, {})
    checkpoints.mark_best("step-2")

    checkpoints.keep(last=1)

    assert checkpoints.names() == ["step-2", "step-4", "step-5"]


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    """Data without a manifest beside it, and an old checkpoint, would have been."""
    for folder in (mine := tmp_path / "mine", old := tmp_path / "old"):
        write_checkpoint(folder, OLD, {})
    (mine / "manifest.json").unlink()
    checkpoints = CheckpointFolder(tmp_path / "run")
    checkpoints.create()
    (tmp_path / "run" / "mine").symlink_to(mine)
    (tmp_path / "run" / "step-0").symlink_to(old)
    for name in ("step-1", "step-2"):
        checkpoints.save(name, OLD, {})
        checkpoints.keep()
    assert checkpoints.names() == ["step-0", "step-2"]
    assert (mine / "tensors-0.safetensors").exists()
    read_checkpoint(old)


def test_saving_a_name_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save("step-1", OLD, {})

    checkpoints.save("step-1", NEW, {})

    assert equal(read_checkpoint(checkpoints.root / "step-1").tensors, NEW)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../out", ".hidden", "latest", "best", "two words"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="a checkpoint's name must be"):
        CheckpointFolder(tmp_path).save(name, OLD, {})


def test_marking_a_checkpoint_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save("step-1", OLD, {})

    with pytest.raises(CheckpointError, match="the best checkpoint must be a saved one, found 'step-2'"):
        checkpoints.mark_best("step-2")


@pytest.mark.parametrize("text", ["step-9\n", "../elsewhere", "", "\udcff"])
def test_a_pointer_to_no_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save("step-1", OLD, {})
    (tmp_path / "latest").write_text(text, encoding="utf-8", errors="surrogateescape")

    with pytest.raises(CheckpointError, match="latest: must name a checkpoint beside it"):
        checkpoints.latest()


def test_a_lost_pointer_to_the_latest_is_refused_where_it_could_be_any(tmp_path: Path) -> None:
    """It once read as "no checkpoint yet", and a resumed run threw away its work."""
    checkpoints = CheckpointFolder(tmp_path)
    only = checkpoints.save("step-1", OLD, {})
    (tmp_path / "latest").unlink()
    assert checkpoints.latest() == only

    checkpoints.save("step-2", NEW, {})
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"found no such file; write one of \['step-1', 'step-2'\]"):
        checkpoints.latest()


def test_a_failed_save_leaves_the_latest_as_it_was(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save("step-1", OLD, {})

    with failing_disk(4, OSError(errno.ENOSPC, "full"), forever=False), pytest.raises(CheckpointError):
        checkpoints.save("step-2", NEW, {})

    assert checkpoints.latest() == tmp_path / "step-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


# ---- single files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\0bytes", "text é\n", "", b""])
def test_write_atomic_writes_bytes_and_text(tmp_path: Path, data: bytes | str) -> None:
    write_atomic(tmp_path / "file", data)

    assert (tmp_path / "file").read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_power_cut_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    points = changes_to_disk(lambda: write_atomic(path, "new"))

    contents = []
    for point in range(points):
        path.write_text("old")
        with pytest.raises(PowerCut), failing_disk(point, PowerCut(), forever=True):
            write_atomic(path, "new")
        contents.append(path.read_text())
    assert set(contents) == {"old", "new"}


def test_a_refused_write_keeps_the_file_and_removes_the_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    with (
        failing_disk(1, OSError(errno.ENOSPC, "No space left on device"), forever=False),
        pytest.raises(CheckpointError, match=r"file: must be writable, found: .*No space left"),
    ):
        write_atomic(path, "new")

    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_writing_into_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be writable"):
        write_atomic(tmp_path / "none" / "file", "new")


# ---- order of writes -------------------------------------------------------------------------------------


@contextmanager
def flushes_and_renames() -> Iterator[list[str]]:
    """Record what reaches the disk and what is renamed, in order."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushing(descriptor: int) -> None:
        done.append(f"flush {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    def renaming(source: Any, target: Any) -> None:
        done.append(f"rename {Path(target).name}")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flushing)
        patch.setattr(os, "replace", renaming)
        yield done


def test_what_a_rename_commits_is_on_the_disk_before_it(tmp_path: Path) -> None:
    """Otherwise a power cut after the rename could leave names of files without content."""
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    checkpoints.save("step-1", OLD, {})
    with flushes_and_renames() as done:
        checkpoints.save("step-2", NEW, {})

    assert done == [
        "flush tensors-0.safetensors",
        "flush step-2",
        "flush .manifest.json.tmp",
        "rename manifest.json",
        "flush step-2",
        "flush checkpoints",
        "flush .latest.tmp",
        "rename latest",
        "flush checkpoints",
    ]


def test_a_removed_checkpoint_loses_its_manifest_on_the_disk_before_its_data(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for step in (1, 2):
        checkpoints.save(f"step-{step}", OLD, {})
    present = []
    fsync = os.fsync

    def flushing(descriptor: int) -> None:
        present.append(sorted(path.name for path in (checkpoints.root / "step-1").iterdir()))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", flushing)
        checkpoints.keep(last=1)

    assert present == [["tensors-0.safetensors"]]
    assert checkpoints.names() == ["step-2"]


# ---- tensor by tensor ------------------------------------------------------------------------------------


def flip_last_byte_of(folder: Path, name: str) -> None:
    """Damage one tensor, and nothing else, of a checkpoint."""
    entries = json.loads((folder / format.MANIFEST).read_text())["tensors"]
    [path] = folder.glob("tensors-*.safetensors")
    data = bytearray(path.read_bytes())
    end = len(data) - sum(entry["bytes"] for entry in entries.values())
    for other, entry in entries.items():
        end += entry["bytes"]
        if other == name:
            break
    data[end - 1] ^= 1
    path.write_bytes(bytes(data))


def test_tensors_are_read_one_by_one_in_any_order(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    write_checkpoint(tmp_path / "saved", tensors, METADATA)
    reader = CheckpointReader(tmp_path / "saved")
    assert reader.metadata == METADATA
    assert reader.shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert equal({name: reader.read(name) for name in sorted(tensors, reverse=True)}, tensors)


def test_reading_into_a_tensor_changes_its_version(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "saved", OLD, METADATA)
    into = torch.zeros(2, 3)
    version = into._version
    CheckpointReader(tmp_path / "saved").read_into("weight", into)
    assert bits(into) == bits(OLD["weight"])
    assert into._version > version


@pytest.mark.parametrize("into", [torch.zeros(3, 2), torch.zeros(2, 3).double(), torch.zeros(3, 2).T])
def test_a_tensor_that_does_not_fit_is_refused_unchanged(into: torch.Tensor, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "saved", OLD, METADATA)
    with pytest.raises(CheckpointError, match=r"'weight' must be read into contiguous torch\.float32"):
        CheckpointReader(tmp_path / "saved").read_into("weight", into)
    assert not into.any()


@pytest.mark.parametrize("damaged", ["weight", "bias", "step"])
def test_damage_shows_in_the_tensor_read_and_in_the_rest(damaged: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "saved", NEW, METADATA)
    flip_last_byte_of(tmp_path / "saved", damaged)
    reader = CheckpointReader(tmp_path / "saved")
    for name in NEW.keys() - {damaged}:
        assert bits(reader.read(name)) == bits(NEW[name])
    with pytest.raises(CheckpointError, match=f"tensor '{damaged}' must have the checksum"):
        reader.check_rest()
    with pytest.raises(CheckpointError, match=f"tensor '{damaged}' must have the checksum"):
        reader.read(damaged)


def test_what_has_been_read_is_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "saved", NEW, METADATA)
    reader = CheckpointReader(tmp_path / "saved")
    for name in NEW:
        reader.read(name)
    monkeypatch.setattr(format, "open_regular", lambda _: pytest.fail("nothing is left to verify"))
    reader.check_rest()
