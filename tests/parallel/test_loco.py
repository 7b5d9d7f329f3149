"""Gradients of few bits: what rounding takes comes back, and training goes on as with all bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import in_workers

from xmlc.errors import ConfigError
from xmlc.parallel import LoCo, LowBitWorkers, Workers, loco_hook
from xmlc.parallel.loco import BLOCK, decoded, encoded

SIZE, NUMBERS, STEPS = 3, 5_000, 256


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_to_the_nearest_code_of_its_block(bits: int) -> None:
    values = torch.randn(2, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    values[0, :BLOCK] *= 1e-20
    values[1, BLOCK : 2 * BLOCK] = 0.0
    codes = encoded(values, bits)
    assert codes.dtype == torch.uint8 and codes.shape == (2, 3 * (BLOCK * bits // 8 + 4))
    found = decoded(codes, bits)
    largest = values.view(2, 3, BLOCK).abs().amax(2, keepdim=True)
    unit = largest / (2 ** (bits - 1) - 1)
    errors = (found - values).view(2, 3, BLOCK).abs()
    assert (errors <= 0.5001 * unit).all()
    torch.testing.assert_close(found.view(2, 3, BLOCK).abs().amax(2), largest[..., 0])
    assert len(found[0, :BLOCK].unique()) > 2 ** (bits - 1)  # both signs


def gradients(rank: int, step: int) -> Tensor:
    """Return a worker's gradient of a step: what all have in common is far below its noise."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.linspace(-1e-3, 1e-3, NUMBERS)
    return common + torch.randn(NUMBERS, generator=generator).mul(0.1)


class Weights(nn.Module):
    """Two parameters, whose gradients are what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1000))
        self.second = nn.Parameter(torch.zeros(NUMBERS - 1000))

    def forward(self, gradient: Tensor) -> Tensor:
        return (torch.cat([self.first, self.second]) * gradient).sum()


def mean_errors(rank: int, size: int, bits: Any, moving_average: float, feedback: bool) -> list[float]:
    """Return the size of the mean error after an eighth of the steps and after all."""
    weights = Weights()
    shared, state = DistributedDataParallel(weights), LoCo(bits, moving_average)
    shared.register_comm_hook(state, loco_hook)
    error, found = torch.zeros(NUMBERS), []
    for step in range(1, STEPS + 1):
        shared(gradients(rank, step)).backward()
        mean = torch.stack([gradients(each, step) for each in range(size)]).mean(0)
        error += torch.cat([weights.first.grad, weights.second.grad]) - mean  # type: ignore[list-item]
        weights.zero_grad()
        if not feedback:
            state._errors.clear()
        if step in (STEPS // 8, STEPS):
            found.append(float((error / step).norm()))
    return found


def regression(rank: int, size: int, state: LoCo | None) -> tuple[float, Tensor]:
    """Fit a small net to noise-free targets; return the loss at the end, and the weights."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 8, generator=generator)
    targets = (inputs @ torch.randn(8, 3, generator=generator)).tanh()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    shared = DistributedDataParallel(net)
    if state is not None:
        shared.register_comm_hook(state, loco_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=300)
    own = slice(rank * 60 // size, (rank + 1) * 60 // size)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.mse_loss(shared(inputs[own]), targets[own]).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        loss = float(nn.functional.mse_loss(net(inputs), targets))
    return loss, torch.cat([each.detach().flatten() for each in net.parameters()])


def after_infinity(rank: int, size: int) -> list[bool]:
    """Return whether the gradients of three steps are finite, of which the second is not on one worker."""
    weights = Weights()
    shared = DistributedDataParallel(weights)
    shared.register_comm_hook(LoCo(4), loco_hook)
    finite = []
    for step in range(3):
        gradient = gradients(rank, step)
        if step == 1 and rank == 1:
            gradient[1500] = torch.inf
        shared(gradient).backward()
        finite.append(bool(weights.second.grad.isfinite().all()))  # type: ignore[union-attr]
        weights.zero_grad()
    return finite


def collectives(rank: int) -> dict[str, int]:
    state = LoCo()
    state.mean(gradients(rank, 0), 0, ())
    return state.workers.calls


def low_bit_sums(rank: int, size: int) -> float:
    """Return how far the mean of 32 rounded sums is from the exact one, in units of the gradients' noise."""
    workers, exact = LowBitWorkers(8), Workers()
    error = torch.zeros(NUMBERS)
    for step in range(32):
        rounded, truth = gradients(rank, step), gradients(rank, step)
        workers.sum_gradients(list(rounded.split([1000, NUMBERS - 1000])))
        exact.sum_gradients([truth])
        error += rounded - truth
        assert step > 0 or not torch.equal(rounded, truth)
    assert workers.calls == {"all_to_all": 32, "all_gather": 32}
    return float((error / 32).abs().max()) / 0.1


def together(rank: int, size: int) -> dict[str, Any]:
    errors = {
        (bits, average, feedback): mean_errors(rank, size, bits, average, feedback)
        for bits, average, feedback in ((8, 0.5, True), (4, 0.0, True), (4, 0.9, True), (4, 0.5, False))
    }
    return {
        "errors": errors,
        "regression": {bits: regression(rank, size, bits and LoCo(bits, 0.9)) for bits in (None, 8, 4)},
        "infinity": after_infinity(rank, size),
        "calls": collectives(rank),
        "sums": low_bit_sums(rank, size),
    }


def test_workers_lose_nothing_for_good(tmp_path: Path) -> None:
    found = in_workers(SIZE, together, tmp_path)
    for each in found:
        assert each["calls"] == {"all_to_all": 1, "all_gather": 1}
        # A unit of 8 bits is 0.03 of the noise of these gradients, and of three workers a sum holds three.
        assert each["sums"] < 3 * 0.03
        assert each["infinity"] == [True, False, True]
        for (_, _, feedback), (early, late) in each["errors"].items():
            # As the number of steps, eight times; of errors that are forgotten as its square root.
            assert early / late > 5.5 if feedback else early / late < 4.0
        exact, _ = each["regression"][None]
        for bits, most in ((8, 1.05), (4, 1.3)):
            loss, weights = each["regression"][bits]
            assert loss < most * exact
            assert torch.equal(weights, found[0]["regression"][bits][1]), "all workers get the same bits"
        assert exact < 0.005


def test_one_worker_sends_nothing() -> None:
    state = LoCo(8, 0.0)
    sent = torch.stack([state.mean(gradients(0, 1), 0, (1,)) for _ in range(50)])
    assert state.workers.calls == {} and isinstance(state.workers, Workers)
    torch.testing.assert_close(sent.mean(0), gradients(0, 1), rtol=0.0, atol=1e-3)
    alone, gradient = LowBitWorkers(4), gradients(0, 1)
    alone.sum_gradients([gradient])
    assert torch.equal(gradient, gradients(0, 1)) and alone.calls == {}
    other = state.mean(gradients(0, 2), 0, (2,))  # other parameters: the errors are not theirs
    torch.testing.assert_close(other, LoCo(8, 0.0).mean(gradients(0, 2), 0, (2,)), rtol=0.0, atol=0.0)


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="bits must be 4 or 8, found 2"):
        LoCo(2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="moving_average must lie in \\[0, 1\\), found 1"):
        LoCo(8, 1.0)
