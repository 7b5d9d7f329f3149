"""Bugs planted in the CUDA sources are caught on the emulator; without a bug, nothing is found.

Each test compiles the sources, one of them changed, with the sanitizers and runs `harness.cpp` on them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "cuda_ext"
HARNESS = Path(__file__).with_name("harness.cpp")
SOURCES = ("sparse_linear.cu", "tensor_gradients.cu", "fused_step.cu", "top_labels.cu", "redistribute.cu")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
FLAGS = ("-std=c++17", "-DXMLC_EMULATE", "-O1", "-g", "-Wno-unknown-pragmas", *SANITIZERS)


def compile_to(target: Path, source: Path, native: Path) -> Path:
    """Compile one file as C++."""
    subprocess.run(
        ["g++", *FLAGS, f"-I{native}", f"-I{native / 'include'}", "-x", "c++", "-c", source, "-o", target],
        check=True,
        capture_output=True,
    )
    return target


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the objects of the harness, the emulator and the sources as they are, each compiled once."""
    folder = tmp_path_factory.mktemp("objects")
    files = {"harness": HARNESS, "emulator": NATIVE / "emulator/emulator.cpp"}
    files |= {name: NATIVE / "cuda" / name for name in SOURCES}
    return {name: compile_to(folder / f"{name}.o", path, NATIVE) for name, path in files.items()}


def run_with(objects: dict[str, Path], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Link and run the harness."""
    subprocess.run(["g++", *FLAGS, *objects.values(), "-o", folder / "harness"], check=True)
    return subprocess.run(
        [folder / "harness", *arguments], capture_output=True, text=True, errors="replace", check=False
    )


def planted(
    objects: dict[str, Path], folder: Path, file: str, before: str, after: str, *, source: str
) -> subprocess.CompletedProcess[str]:
    """Run the harness with one place of a file of cuda/ changed, in the source that includes it."""
    native = folder / "native"
    shutil.copytree(NATIVE, native)
    path = native / "cuda" / file
    text = path.read_text()
    assert text.count(before) >= 1, f"{file} must have {before!r}"
    path.write_text(text.replace(before, after, 1))
    changed = compile_to(folder / "changed.o", native / "cuda" / source, native)
    return run_with({**objects, source: changed}, folder)


def test_the_sources_as_they_are_run_clean(objects: dict[str, Path], tmp_path: Path) -> None:
    finished = run_with(objects, tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_an_index_out_of_range_is_caught(objects: dict[str, Path], tmp_path: Path) -> None:
    finished = run_with(objects, tmp_path, "bad-index")
    assert finished.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in finished.stderr


BARRIERS = {
    "of a block": ("fused_step.cu", "  __syncthreads();\n", "", "fused_step.cu"),
    "of a warp": ("rows.cuh", "  __syncwarp();\n  return count;", "  return count;", "sparse_linear.cu"),
}


BARRIERS |= {
    "before products are read as rows": (
        "tensor_products.cuh",
        "store_product(value, sum[j], fragment_g(), fragment_g() + 8, j);\n    __syncwarp();",
        "store_product(value, sum[j], fragment_g(), fragment_g() + 8, j);",
        "sparse_linear.cu",
    ),
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_is_caught(objects: dict[str, Path], tmp_path: Path, barrier: str) -> None:
    file, before, after, source = BARRIERS[barrier]
    finished = planted(objects, tmp_path, file, before, after, source=source)
    assert finished.returncode != 0
    assert (
        "wrong result" in finished.stderr or "no number" in finished.stderr or "Sanitizer" in finished.stderr
    )


def test_too_little_shared_memory_is_caught(objects: dict[str, Path], tmp_path: Path) -> None:
    finished = planted(
        objects, tmp_path, "logits.cuh", "sizeof(LogitsShared<kRows>)", "sizeof(LogitsShared<kRows>) / 4",
        source="sparse_linear.cu",
    )  # fmt: skip
    assert finished.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in finished.stderr


def test_another_stream_than_the_caller_s_is_caught(objects: dict[str, Path], tmp_path: Path) -> None:
    finished = planted(
        objects,
        tmp_path,
        "top_labels.cu",
        "kWarp, 0, queue.stream,",
        "kWarp, 0, nullptr,",
        source="top_labels.cu",
    )
    assert finished.returncode == 1
    assert "merge_top_labels: launched on another stream than the caller's" in finished.stderr


def test_a_divergent_barrier_is_caught(objects: dict[str, Path], tmp_path: Path) -> None:
    before, after = "  __syncthreads();", "  if (threadIdx.x < kWarp) __syncthreads();"
    finished = planted(objects, tmp_path, "fused_step.cu", before, after, source="fused_step.cu")
    assert finished.returncode == 1 and "fused_loss: divergent barrier" in finished.stderr


def test_a_warp_that_takes_but_one_of_its_row_tiles_is_caught(
    objects: dict[str, Path], tmp_path: Path
) -> None:
    finished = planted(
        objects, tmp_path, "logits.cuh", "tile < own.last", "tile < own.first + 1", source="sparse_linear.cu"
    )
    assert finished.returncode == 1 and "wrong result: logit" in finished.stderr


FRAGMENTS = {
    "words of a exchanged": ("joined(a.word[0], a.word[1])", "joined(a.word[1], a.word[0])"),
    "halves of b exchanged": (
        "low_half(low(near)) * low_half(low(factor))",
        "low_half(low(near)) * high_half(low(factor))",
    ),
    "another lane of b": ("4 * (2 * t + column) + q", "4 * (t + 4 * column) + q"),
}


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_fragment_that_is_not_the_instructions_is_caught(
    objects: dict[str, Path], tmp_path: Path, fragment: str
) -> None:
    """The harness is compiled with the changed header: its own product must tell, not only the ops'."""
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    header = native / "cuda/tensor_products.cuh"
    before, after = FRAGMENTS[fragment]
    assert before in header.read_text()
    header.write_text(header.read_text().replace(before, after, 1))
    finished = run_with({**objects, "harness": compile_to(tmp_path / "harness.o", HARNESS, native)}, tmp_path)
    assert finished.returncode == 1 and "element of a product" in finished.stderr


LARGE = HARNESS.with_name("large.cpp")
NARROWED: dict[str, tuple[str, str, str]] = {
    "nowhere": ("rows.cuh", "", ""),
    "of weights": (
        "rows.cuh",
        "load_weight(layer, label + r, (label + r) * layer.fan_in + k)",
        "load_weight(layer, label + r, static_cast<std::uint32_t>((label + r) * layer.fan_in + k))",
    ),
    "of runs of weights": (
        "tensor_products.cuh",
        "weights + (label + r) * layer.fan_in",
        "weights + static_cast<std::uint32_t>((label + r) * layer.fan_in)",
    ),
    "of logits": (
        "sparse_linear.cu",
        "logits[label * batch + at[v]]",
        "logits[static_cast<std::uint32_t>(label * batch + at[v])]",
    ),
    "of the update": (
        "fused_step.cu",
        "const std::int64_t at = label * fan_in + k;",
        "const auto at = static_cast<std::uint32_t>(label * fan_in + k);",
    ),
    "of the best": ("top_labels.cu", "labels[at] = label;", "labels[at] = static_cast<std::int16_t>(label);"),
    "of scores": (
        "redistribute.cu",
        "load_weight(layer, label, label * layer.fan_in + k)",
        "load_weight(layer, label, static_cast<std::uint32_t>(label * layer.fan_in + k))",
    ),
    "of counted connections": (
        "redistribute.cu",
        "const Group group(s, at / layer.fan_in);",
        "const Group group(s, static_cast<std::uint32_t>(at) / layer.fan_in);",
    ),
    "of what is reset": (
        "redistribute.cu",
        "const std::int64_t at = label * s.a.layer.fan_in + k;",
        "const auto at = static_cast<std::uint32_t>(label * s.a.layer.fan_in + k);",
    ),
    "of regrown inputs": (
        "redistribute.cu",
        "store_index(layer, group.group * fan_in + k, input);",
        "store_index(layer, static_cast<std::uint32_t>(group.group * fan_in + k), input);",
    ),
}


@pytest.mark.parametrize("place", NARROWED)
def test_places_beyond_2_to_the_32_are_right_and_32_bits_are_caught(tmp_path: Path, place: str) -> None:
    """Memory that is only promised: layers of 2^27 labels, of which the last 64 are computed."""
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    file, before, after = NARROWED[place]
    text = (native / "cuda" / file).read_text()
    assert before in text, f"{file} must have {before!r}"
    (native / "cuda" / file).write_text(text.replace(before, after))
    sources = [LARGE, native / "cuda/tensor_gradients.cu", native / "emulator/emulator.cpp"]
    flags = [flag for flag in FLAGS if flag not in SANITIZERS]
    includes = [f"-I{native}", f"-I{native / 'include'}"]
    subprocess.run(["g++", *flags, *includes, "-x", "c++", *sources, "-o", tmp_path / "large"], check=True)
    finished = subprocess.run([tmp_path / "large"], capture_output=True, text=True, check=False)
    if place == "nowhere":
        assert finished.returncode == 0, finished.stderr
    else:
        assert finished.returncode == 1 and "wrong result" in finished.stderr
