"""Recurrent networks over token ids: text classifiers and a language model."""

from __future__ import annotations

import torch
from torch import nn

from .layers import make_dropout
from .registry import register

State = tuple[torch.Tensor, torch.Tensor]


class LSTM(nn.Module):
    """Embedding, LSTM, dropout and a linear classifier over (batch, time) token ids.

    Token 0 is padding, which may be on either side. The classifier reads the forward state at the last token and the
    backward state at the first one. The sizes are those of IteRand's IMDB networks. The initial values are PyTorch's:
    N(0, 1) for the embedding, uniform in ±1/√hidden for the LSTM.
    """

    def __init__(
        self,
        bidirectional: bool,
        *,
        num_classes: int = 2,
        vocabulary: int = 25_002,
        embedding: int = 100,
        hidden: int = 256,
        layers: int = 1,
        dropout: float = 0.2,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding, padding_idx=0)
        self.embedding.weight.requires_grad_(not frozen)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True, bidirectional=bidirectional)
        self.dropout = make_dropout(dropout)
        self.linear = nn.Linear(hidden * (1 + bidirectional), num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.lstm(self.embedding(tokens))[0]
        # The running count of real tokens first reaches 1 at the first one, and its maximum at the last one.
        count = tokens.ne(0).cumsum(1)
        last = gather_state(states[..., : self.lstm.hidden_size], count.argmax(1))
        if self.lstm.bidirectional:
            first = gather_state(states[..., self.lstm.hidden_size :], count.clamp(max=1).argmax(1))
            last = torch.cat((last, first), 1)
        return self.linear(self.dropout(last))


def gather_state(states: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Return the state of each sample at its own position, from states of shape (batch, time, hidden)."""
    index = position[:, None, None].expand(-1, 1, states.shape[2])  # take_along_dim would fix the size of the batch
    return states.gather(1, index).squeeze(1)


class LanguageModel(nn.Module):
    """The "large" LSTM of Zaremba et al. (2014): logits (batch, time, vocabulary) for the next token.

    `model(tokens)` starts from a zero state and returns the logits. `model(tokens, state)` continues from a state,
    which `start` gives for the first call, and returns the logits and the new state. Every weight is uniform in
    ±0.04. Dropout acts between the layers, not through time.
    """

    def __init__(
        self,
        *,
        vocabulary: int = 10_000,
        hidden: int = 1500,
        layers: int = 2,
        dropout: float = 0.65,
    ) -> None:
        super().__init__()
        self.dropout = make_dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.decoder = nn.Linear(hidden, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.04, 0.04)

    def start(self, batch: int) -> State:
        """Return the zero state for a batch."""
        weight = self.decoder.weight
        zeros = weight.new_zeros(self.lstm.num_layers, batch, self.lstm.hidden_size)
        return zeros, zeros.clone()

    def forward(self, tokens: torch.Tensor, state: State | None = None) -> torch.Tensor | tuple[torch.Tensor, State]:
        out, after = self.lstm(self.dropout(self.embedding(tokens)), state)
        logits = self.decoder(self.dropout(out))
        return logits if state is None else (logits, after)


register("lstm", "Hochreiter & Schmidhuber, 1997", (256,), LSTM, False)
register("bilstm", "Graves & Schmidhuber, 2005", (256,), LSTM, True)
register("lstm_lm", "Zaremba et al., 2014", (35,), LanguageModel)
