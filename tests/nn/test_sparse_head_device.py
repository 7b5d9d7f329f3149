"""The output layer over anyone's encoder, with all tensors on a pretended device."""

from __future__ import annotations

import pretended
import pytest
import torch

from xmlc.nn.sparse_head import SparseHead


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("loss", ["squared_hinge", "softmax"])
def test_a_head_learns_on_the_device_as_on_the_cpu(fused: bool, loss: str) -> None:
    def trained(device: str) -> list[torch.Tensor]:
        head = SparseHead(12, 40, fan_in=4, width=20, loss=loss, fused=fused).to(device)
        embeddings = (
            torch.randn(6, 12, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        )
        for _ in range(2):
            head(embeddings, [[0], [1, 2], [], [39], [5], [6]]).loss.backward()
        head.redistribute(0.2, None if fused else torch.optim.SGD(head.parameters(), lr=0.1))
        scores, labels = head.topk(embeddings, 3)
        state = {name: value.cpu() for name, value in head.state_dict().items()}
        head.load_state_dict(state)
        return [embeddings.grad.cpu(), scores.cpu(), labels.cpu(), *state.values()]

    with pretended.device():
        found = trained("cuda")
    for one, other in zip(found, trained("cpu"), strict=True):
        assert torch.equal(one, other)
