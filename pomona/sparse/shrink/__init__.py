"""Physical removal of channels, heads and neurons: a pruned network becomes a smaller dense one with the same outputs.

Attention heads and neurons of Hugging Face's transformers are found by the names of their layers, and removed where no
weight reads them or their value is a constant, which the next bias takes (transformer_layouts, unit_group). All other
networks lose channels:

Torch-Pruning's dependency graph gives the channels that are coupled: those that are added, concatenated or normalised
on their way from the layers that produce them to the layers that read them. A channel whose producers hold only
zeros has the same value for every input. One forward pass measures that value where the channel is read:

- Where it is zero, the channel is removed.
- Where it is another constant, made by a batch norm or a bias, one such channel of the group stays as the
  representative. The weights that read the other ones are added to the weights that read the representative. This is
  exact at the borders of a padded convolution too, where adding the constant to a bias would not be.
"""

from __future__ import annotations

from .removal import shrink
from .report import Change, Shrunk

__all__ = ["Change", "Shrunk", "shrink"]
