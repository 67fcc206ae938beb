"""https://github.com/pytorch/ao/issues/1425: in 2:4 sparse training the mask is the same in every epoch."""

from __future__ import annotations

from engine_helpers import attach_to_network, obeys_masks, train

import pomona as pm


def test_a_two_of_four_mask_is_trained_with_the_weights() -> None:
    """The user expected that sparse training would train the mask too, and found the same mask after every epoch."""
    model, optimizer, pruner = attach_to_network(pm.DPF(pattern=pm.NM(2, 4), every=4, schedule="constant"), total=40)
    for step in range(40):
        train(model, optimizer, [step])
        assert obeys_masks(model, pruner)
        assert all(bool((mask.reshape(-1, 4).sum(1) == 2).all()) for mask in pruner.masks().values())
    assert sum(entry["flips"] > 0 for entry in pruner.history[1:]) > 4  # the masks moved at most updates
